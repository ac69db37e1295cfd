"""Copies of bytes from one slot to another: in the kernel, or through memory where a digest is taken or they lie beside
DRAM.

Concurrency: called by worker threads; the descriptors are the caller's until it returns.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from gateway.protocol.checksums import Digester
from gateway.protocol.errors import S3Error
from kvfs import limits
from kvfs.errors import status_error


def copy_range(
    source: int, offset: int, target: int, target_offset: int, count: int, digesters: Sequence[Digester] = ()
) -> None:
    """Copy `count` bytes from one slot to another, and feed them to `digesters`. Raises NoSpace."""
    try:
        # From a copy beside DRAM (`tiers.dram.read_around`), which is another filesystem's, the kernel copies nothing.
        if digesters or os.fstat(source).st_dev != os.fstat(target).st_dev:
            _copy_through_memory(source, offset, target, target_offset, count, digesters)
        else:
            _copy_in_kernel(source, offset, target, target_offset, count)
    except OSError as error:
        raise status_error(error.errno or 5, "copying an object") from None


def _copy_through_memory(
    source: int, offset: int, target: int, target_offset: int, count: int, digesters: Sequence[Digester]
) -> None:
    memory = memoryview(bytearray(min(limits.RECEIVE_BYTES, count)))
    while count:
        got = os.preadv(source, [memory[:count]], offset)
        if got == 0:
            raise S3Error("InternalError")
        piece = memory[:got]
        for digester in digesters:
            digester.update(piece)
        while piece:
            written = os.pwrite(target, piece, target_offset)
            piece, target_offset = piece[written:], target_offset + written
        offset, count = offset + got, count - got


def _copy_in_kernel(source: int, offset: int, target: int, target_offset: int, count: int) -> None:
    while count:
        done = os.copy_file_range(source, target, count, offset, target_offset)
        if done == 0:
            raise S3Error("InternalError")
        offset, target_offset, count = offset + done, target_offset + done, count - done
