"""A service with an S3 endpoint, for tests.

Responsibility: `kvfs serve --s3` on fresh directories with two owners' credentials, and clients of it. Nothing of it is
left behind (`tests.support.service`).

Concurrency: one thread.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError

from tests.support.service import Service
from tests.support.waits import WAIT_S

ACCESS, SECRET = "KVFSTESTMAIN", "main-secret-0123456789"
OTHER_ACCESS, OTHER_SECRET = "KVFSTESTOTHER", "other-secret-0123456789"
READER_ACCESS, READER_SECRET = "KVFSTESTREADER", "reader-secret-0123456789"
REGION = "us-east-1"
_LISTENING = re.compile(r"S3 +(https?)://([^:]+):(\d+)")
_CREDENTIALS = f"""
[[s3.credentials]]
access_key = "{ACCESS}"
secret_key = "{SECRET}"
owner = "main"

[[s3.credentials]]
access_key = "{OTHER_ACCESS}"
secret_key = "{OTHER_SECRET}"
owner = "other"

[[s3.credentials]]
access_key = "{READER_ACCESS}"
secret_key = "{READER_SECRET}"
rights = {{ "readable*" = ["read", "list"] }}
"""


@dataclass
class Gateway:
    """A running endpoint."""

    service: Service
    host: str
    port: int
    secure: bool
    certificate: Path | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self.secure else 'http'}://{self.host}:{self.port}"

    def client(self, access: str = ACCESS, secret: str = SECRET, **options: Any) -> Any:
        """A boto3 client, as people make one; `options` go to botocore's Config."""
        settings = {"retries": {"max_attempts": 1}, "s3": {"addressing_style": "path"}, **options}
        return boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name=REGION,
            aws_access_key_id=access,
            aws_secret_access_key=secret,
            verify=str(self.certificate) if self.certificate else None,
            config=Config(**settings),
        )

    def starts(self) -> int:
        """How often the log says where the endpoint is."""
        return len(_LISTENING.findall(self.service.log()))

    def started_again(self, before: int = 1) -> Gateway:
        """The endpoint of the service's next process, once the log says where that is, after so many `before`."""
        end = time.monotonic() + WAIT_S
        while len(found := _LISTENING.findall(self.service.log())) <= before:
            assert time.monotonic() < end, self.service.log()
            time.sleep(0.01)
        return replace(self, port=int(found[-1][2]))

    def worker_pids(self) -> list[int]:
        """The gateway's processes."""
        assert self.service.process is not None
        pids: list[int] = []
        for task in Path(f"/proc/{self.service.process.pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread that was idle has ended since
                pids += map(int, (task / "children").read_text().split())
        return [pid for pid in pids if _is_worker(pid)]


def _is_worker(pid: int) -> bool:
    try:
        return b"gateway" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):  # it has ended since
        return False


@contextmanager
def gateway(
    *,
    mode: str = "native",
    settings: str = "",
    sections: str = "",
    certificate: tuple[Path, Path] | None = None,
    dram: str = "256MiB",
    nvme: str = "0",
    arguments: Sequence[str] = (),
    module: str = "kvfs",
    environment: Mapping[str, str] | None = None,
) -> Iterator[Gateway]:
    """`settings`: more of the section [s3], in TOML; `sections`: others; `module`: what is run."""
    service = Service(mode=mode, dram=dram, nvme=nvme, environment=environment, module=module)
    file = service.base / "kvfs.toml"
    tls = ""
    if certificate is not None:
        tls = f'certificate = "{certificate[0]}"\nkey = "{certificate[1]}"\n'
    file.write_text(f'{sections}\n[s3]\nlisten = "127.0.0.1:0"\n{tls}{settings}\n{_CREDENTIALS}')
    service.arguments = ["--config", str(file), *arguments]
    with service:
        found = _LISTENING.search(_wait_log(service))
        assert found is not None
        yield Gateway(
            service, found[2], int(found[3]), found[1] == "https", certificate[0] if certificate else None
        )


def until(what: Callable[[], bool], door: Gateway) -> None:
    """Wait for what must come."""
    end = time.monotonic() + WAIT_S
    while not what():
        assert time.monotonic() < end, door.service.log()
        time.sleep(0.01)


def _wait_log(service: Service) -> str:
    """The log, once it says where S3 is: stdout is written a moment after READY=1 at the latest."""
    end = time.monotonic() + WAIT_S
    while True:
        text = service.log_path.read_text()
        if _LISTENING.search(text):
            return text
        assert time.monotonic() < end, text
        time.sleep(0.01)


def fails(call: Callable[[], object], code: str, status: int | None = None) -> dict[str, Any]:
    with pytest.raises(ClientError) as error:
        call()
    found: dict[str, Any] = error.value.response
    assert found["Error"]["Code"] == code
    assert status in (None, found["ResponseMetadata"]["HTTPStatusCode"])
    return found


def listening_ports(door: Gateway) -> set[int]:
    """TCP ports that the workers listen on."""
    inodes = set()
    for pid in door.worker_pids():
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(FileNotFoundError):  # closed since
                name = os.readlink(link)
                if name.startswith("socket:["):
                    inodes.add(name[8:-1])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes}
