"""What a gateway worker is started with, apart from the worker, so that the service need not load the gateway.

Responsibility: the settings, from a configuration and to the worker's pipe.
"""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from kvfs.config.credentials import Credential
from kvfs.config.settings import S3Settings
from kvfs.config.url_settings import host_and_port
from kvfs.errors import ConfigError


class WorkerSettings(BaseModel):
    """All settings of a worker; see `kvfs.config.settings.S3Settings`."""

    model_config = ConfigDict(frozen=True)

    socket: Path
    """Path of the service's sessions."""
    host: str
    port: int
    processes: int = 1
    """Workers in all, which listen on the same port."""
    admin_host: str | None = None
    admin_port: int = 0
    certificate: Path | None = None
    key: Path | None = None
    region: str = "us-east-1"
    domains: tuple[str, ...] = ()
    default_bucket: str | None = None
    opaque_etags: tuple[str, ...] = ()
    large_buckets: tuple[str, ...] = ()
    upload_expiry_s: float
    connections: int
    config: Path | None = None
    """The file of which SIGHUP reads the credentials again."""
    log_level: str = "info"
    credentials: tuple[Credential, ...] = ()

    def to_json(self) -> str:
        """Encode the settings with the secrets: for the worker's pipe alone."""
        values = self.model_dump(mode="json", exclude={"credentials"})
        values["credentials"] = [
            {**each.model_dump(mode="json"), "secret_key": each.secret} for each in self.credentials
        ]
        return json.dumps(values)


def worker_settings(s3: S3Settings, socket: Path, log_level: str, file: Path | None) -> WorkerSettings:
    """Make workers' settings of a configuration, read from `file`. Raises ConfigError without credentials."""
    if s3.listen is None:
        raise ConfigError("[s3] listen is missing: where the endpoint answers, as HOST:PORT")
    if not s3.credentials:
        raise ConfigError("[s3] has no credentials, and nobody is served without: `kvfs credentials add`")
    host, port = host_and_port(s3.listen)
    admin_host, admin_port = (None, 0) if s3.admin is None else host_and_port(s3.admin)
    return WorkerSettings(
        socket=socket,
        host=host,
        port=port,
        admin_host=admin_host,
        admin_port=admin_port,
        log_level=log_level,
        config=file,
        **s3.model_dump(include=_SAME),
        credentials=s3.credentials,
    )


_SAME = {
    "certificate",
    "key",
    "region",
    "domains",
    "default_bucket",
    "opaque_etags",
    "large_buckets",
    "upload_expiry_s",
    "connections",
}
"""Settings that a worker has under the same name."""
