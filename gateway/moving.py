"""Bytes from one slot to another, in a worker thread: in the kernel, or through memory where a digest is taken.

Concurrency: called by worker threads; the descriptors are the caller's until it returns.
"""

from __future__ import annotations

import os
from typing import Protocol

from gateway.errors import S3Error
from kvfs import limits
from kvfs.exchange import status_error


class Digests(Protocol):
    """What is taken of the bytes on the way."""

    wanted: bool

    def update(self, data: memoryview) -> None: ...


def copy_range(
    source: int, offset: int, target: int, target_offset: int, count: int, digests: Digests | None = None
) -> None:
    """In a worker thread: `count` bytes from one slot to another. Raises NoSpace."""
    try:
        if digests is None or not digests.wanted:
            _copy_in_kernel(source, offset, target, target_offset, count)
            return
        memory = memoryview(bytearray(min(limits.RECEIVE_BYTES, count)))
        while count:
            got = os.preadv(source, [memory[:count]], offset)
            if got == 0:
                raise S3Error("InternalError")
            piece = memory[:got]
            digests.update(piece)
            while piece:
                written = os.pwrite(target, piece, target_offset)
                piece, target_offset = piece[written:], target_offset + written
            offset, count = offset + got, count - got
    except OSError as error:
        raise status_error(error.errno or 5, "copying an object") from None


def _copy_in_kernel(source: int, offset: int, target: int, target_offset: int, count: int) -> None:
    while count:
        done = os.copy_file_range(source, target, count, offset, target_offset)
        if done == 0:
            raise S3Error("InternalError")
        offset, target_offset, count = offset + done, target_offset + done, count - done
