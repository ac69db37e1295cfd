"""The process of a service that is to be killed, as one sees it from outside.

Responsibility: end it at a crash point if there is one, say where its S3 door is, what it has logged, started and taken
of memory, and whether a process still runs.

Concurrency: one test's thread, while those of the load may kill the process.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from tests.support.gateway import ACCESS, REGION, SECRET
from tests.support.killed_kvfs import MODULE
from tests.support.service import Service, ServiceFailed
from tests.support.waits import WAIT_S

_LISTENING = re.compile(r"S3 +(https?)://([^:]+):(\d+)")


class KilledService(Service):
    """A service that ends at `crash_at`, a crash point and a count, if there is one."""

    crash_at = ""

    def command(self) -> list[str]:
        python, option, module, *arguments = super().command()
        return [python, option, *([MODULE, self.crash_at] if self.crash_at else [module]), *arguments]

    def end_if_killed(self) -> bool:
        """Whether it was. A thread of it may wait in the kernel for a caller of its own mount, until that is ended."""
        if is_running(self.pid):
            return False
        self.kill()
        return True

    def connect_s3(self, offset: int) -> Any:
        deadline = time.monotonic() + WAIT_S
        while (found := _LISTENING.search(self.log_since(offset))) is None:
            if self.running.poll() is not None or time.monotonic() > deadline:
                raise ServiceFailed(self.log())
            time.sleep(0.01)
        return boto3.client(
            "s3",
            endpoint_url=f"http://{found[2]}:{found[3]}",
            region_name=REGION,
            aws_access_key_id=ACCESS,
            aws_secret_access_key=SECRET,
            config=Config(
                retries={"max_attempts": 1},
                s3={"addressing_style": "path"},
                connect_timeout=WAIT_S,
                read_timeout=WAIT_S,
                request_checksum_calculation="when_required",
            ),
        )

    def log_since(self, offset: int) -> str:
        with self.log_path.open("rb") as file:
            file.seek(offset)
            return file.read().decode(errors="replace")

    def gateway_pids(self) -> list[int]:
        """Of all processes that the service has started."""
        pids: list[int] = []
        with suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{self.pid}/task").iterdir():
                pids += map(int, (task / "children").read_text().split())
        return pids

    def anonymous_bytes(self) -> int:
        with suppress(OSError):
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
        return 0


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
