"""The stand-in for NVML: compiled once for a run of tests, and what it says of who is on a device."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.support.cuda_standin import COMMAND, DEVICE, ROOT

SOURCE: Final = ROOT / "tests/hbm/standin/nvml.c"
LISTS: Final = "nvmlDeviceGetComputeRunningProcesses_v3"


def build_nvml(folder: Path) -> Path:
    """Compile the stand-in's library into `folder`; return its path."""
    library = folder / "libnvml-standin.so"
    subprocess.run([*COMMAND, "-fvisibility=hidden", "-o", str(library), str(SOURCE)], check=True)
    return library


class NvmlStandin:
    """Say who is on the devices, in this process and in those that have `environment`."""

    def __init__(self, library: Path, state: Path) -> None:
        self.path = str(library)
        self._state = state
        self.environment = {"KVFS_LIBNVML": self.path, "KVFS_STANDIN_NVML": str(state)}
        self.say()

    def say(
        self,
        *pids: int,
        shared: Sequence[int] = (),
        device: str = DEVICE,
        results: dict[str, int] | None = None,
        wait: Path | None = None,
    ) -> None:
        """Replace what it says: these processes, and by MPS these; results of functions, 0 for others; wait at this
        FIFO."""
        lines = [f"process {device} {pid}" for pid in pids]
        lines += [f"shared {device} {pid}" for pid in shared]
        lines += [f"result {function} {number}" for function, number in (results or {}).items()]
        lines += [f"wait {wait}"] if wait is not None else []
        new = self._state.with_suffix(".new")
        new.write_text("".join(f"{line}\n" for line in lines))
        os.rename(new, self._state)

    @property
    def initialised(self) -> int:
        """How often it is initialised in this process."""
        return int(ctypes.CDLL(self.path).standin_initialised())
