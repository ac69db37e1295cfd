"""The stand-in for libcuda, compiled once for a run of tests."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCES: Final = ROOT / "tests/cuda/standin"
DEVICE: Final = "GPU-abababab-abab-abab-abab-ababababab00"
"""Its first device."""
COMMAND: Final = [
    "cc",
    "-shared",
    "-fPIC",
    "-std=gnu11",
    "-O1",
    "-g",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-pthread",
]


def build_standin(folder: Path) -> Path:
    """Compile the stand-in's library into `folder`; return its path."""
    library = folder / "libcuda-standin.so"
    sources = sorted(map(str, SOURCES.glob("*.c")))
    flags = ["-fvisibility=hidden", f"-I{ROOT / 'kvfs/_native'}", "-o", str(library)]
    subprocess.run([*COMMAND, *flags, *sources], check=True)
    return library


class Standin:
    """Set the faults of this process's stand-in, and when its streams run."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._library = ctypes.CDLL(self.path)

    def set_faults(self, *faults: str) -> None:
        """Replace the faults, each `NAME:RESULT:NTH` as in standin.h; none without arguments."""
        self._library.standin_faults(",".join(faults).encode())

    def hold(self, held: bool) -> None:
        """Hold back what streams were given, until it is called with False."""
        self._library.standin_hold(int(held))

    def spins(self) -> int:
        """Return how many waits for an event have kept a processor busy."""
        return int(self._library.standin_spins())

    def contexts(self, ordinal: int = 0) -> int:
        """Return how often the device's context is retained."""
        return int(self._library.standin_retained(ordinal))

    def context_depth(self) -> int:
        """Return how many contexts are on this thread's stack."""
        return int(self._library.standin_depth())
