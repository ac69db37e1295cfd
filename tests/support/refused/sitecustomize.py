"""A kernel that takes no file for passthrough: Python loads this first where PYTHONPATH leads here.

The mount's probe is given a device, which the kernel refuses as a backing file.
"""

from __future__ import annotations

import os

import mounts.mount
from kvfs._native.fuse.loop import FuseLoop


class Refused(FuseLoop):
    def probe(self, fd: int) -> bool:
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        try:
            return super().probe(null)
        finally:
            os.close(null)


vars(mounts.mount)["FuseLoop"] = Refused
