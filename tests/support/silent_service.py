"""`kvfs` with an NVMe drive that falls silent: `python -m tests.support.silent_service serve ...`.

Responsibility: reads of the drive have no answer while the file that VARIABLE names is there; SIGUSR1, once it is gone,
answers those that were kept. Concurrency: the service's trio thread.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Final
from unittest.mock import patch

import trio

from kvfs import limits, service
from kvfs.cli.main import main
from tests.support.faulty_device import silent_device
from tiers.device.device import Device
from tiers.device.watched import Operation

VARIABLE: Final = "KVFS_TEST_SILENT_WHILE"
MODULE: Final = "tests.support.silent_service"
PATIENCE_S: Final = 0.5


def open_silent_device(_kind: str) -> Device:
    """Open the device of a service in this process."""
    flag = Path(os.environ[VARIABLE])
    device, operations = silent_device()

    def is_silent(operation: Operation) -> bool:
        return not operation.changes and flag.exists()

    def speak() -> None:
        operations.speak()
        operations.silence(is_silent)

    operations.silence(is_silent)
    token = trio.lowlevel.current_trio_token()
    signal.signal(signal.SIGUSR1, lambda *_: token.run_sync_soon(speak))
    return device


if __name__ == "__main__":
    with (
        patch.object(limits, "NVME_READ_S", PATIENCE_S),
        patch.object(service, "open_device", open_silent_device),
    ):
        main()
