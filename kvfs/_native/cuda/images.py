"""The package's kernels: their images, and the thread blocks that they are written for."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Literal

CHECKSUM_THREADS: Final = 288
"""Of each block of `kvfs_xxh3`; with another number it would wait for ever."""
COPY_THREADS: Final = 512
"""Of each block of `kvfs_copy`, at most."""


def kernel_image(name: Literal["copy", "xxh3"]) -> bytes:
    """Return the PTX of kernels/NAME.cu."""
    return (Path(__file__).parent / "kernels" / f"{name}.ptx").read_bytes()
