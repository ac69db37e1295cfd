"""What this machine proves to others, from the files of `[cluster]`.

Invariants: a file that others may read is refused. Nothing of a file but its faults is part of a message. What was read
stays until all of it could be read again.
Concurrency: the service's trio thread, which waits for the disk: three small files.
"""

from __future__ import annotations

import importlib
import logging
import stat
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from kvfs import limits
from kvfs.config.settings import ClusterSettings
from kvfs.errors import ConfigError
from tiers.remote.connections.connection import TlsContext

log = logging.getLogger("kvfs.remote")

_TLS: Final = "kvfs._native.remote.tls"
"""Loaded where there is a certificate: only then is libssl needed."""


class Certificates:
    """The certificate that this machine shows, and whom it believes."""

    def __init__(self, certificate: Path, key: Path, authorities: Path) -> None:
        """Read the files. Raises ConfigError."""
        self._files = certificate, key, authorities
        self.context = _read_context(*self._files)

    def renew(self) -> None:
        """Read the files again, for connections made from then on; log what cannot be used."""
        try:
            self.context = _read_context(*self._files)
        except ConfigError as error:
            log.error("certificates of [cluster] stay as they were: %s", error)
        else:
            ends = datetime.fromtimestamp(self.context.ends_s, UTC)
            log.info(
                "certificates of [cluster] are read again: this machine's counts until %s", ends.isoformat()
            )


@dataclass(frozen=True, slots=True)
class Identity:
    """Says what this machine proves, and as whom."""

    store_id: bytes
    secret: bytes
    certificates: Certificates | None = None
    """None: connections are plain."""
    unseen: set[bytes] = field(default_factory=set, compare=False)
    """Nonces of the greetings that this machine makes now and its own door has not seen."""


def read_identity(settings: ClusterSettings, store_id: bytes) -> Identity:
    """Return what the machine with a store proves. Raises ConfigError for files that are not as they should be."""
    assert settings.secret_file is not None
    secret, certificates = read_secret(settings.secret_file), None
    if settings.certificate is not None and settings.key is not None and settings.authorities is not None:
        certificates = Certificates(settings.certificate, settings.key, settings.authorities)
    return Identity(store_id, secret, certificates)


def read_secret(path: Path) -> bytes:
    """Return the cluster's secret. Raises ConfigError for a file that others may read, or of a wrong length."""
    secret = _read_private("secret_file", path, limits.MAX_CLUSTER_SECRET_BYTES + 1).strip()
    if not limits.MIN_CLUSTER_SECRET_BYTES <= len(secret) <= limits.MAX_CLUSTER_SECRET_BYTES:
        least, most = limits.MIN_CLUSTER_SECRET_BYTES, limits.MAX_CLUSTER_SECRET_BYTES
        raise ConfigError(
            f"[cluster] secret_file = '{path}': {len(secret)} bytes: {least} to {most} are wanted"
        )
    return secret


def _read_context(certificate: Path, key: Path, authorities: Path) -> TlsContext:
    """Return the context of TLS sessions. Raises ConfigError."""
    _read_private("key", key, 1)
    for name, path in (("certificate", certificate), ("authorities", authorities)):
        _read(name, path, 1)
    context: TlsContext = importlib.import_module(_TLS).Context(certificate, key, authorities)
    return context


def _read_private(name: str, path: Path, most: int) -> bytes:
    """Return the first bytes of a file that its owner alone may read. Raises ConfigError."""
    data, mode = _read(name, path, most)
    if mode & 0o077:
        raise ConfigError(f"[cluster] {name} = '{path}': others may read it (mode {mode:04o}): chmod 600")
    return data


def _read(name: str, path: Path, most: int) -> tuple[bytes, int]:
    """Return the first bytes of a file, and its mode. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            return file.read(most), stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise ConfigError(f"[cluster] {name} = '{path}': {error.strerror}") from None
