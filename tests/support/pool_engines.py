"""A process that uses a service's pool of GPU memory as an engine's connector does: on the stand-in, or on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import kvfs
from kvfs._native.cuda.driver import open_driver
from kvfs._native.hash.hashing import xxh3_64
from kvfs.client.device_pool import DevicePool, Earlier, PoolBlock, PoolDraft
from kvfs.errors import SessionClosed
from tests.support.stores import NAMESPACE
from tests.support.waits import WAIT_S

BLOCK_BYTES = 64 << 10


def payload(key: bytes, size_bytes: int = BLOCK_BYTES) -> bytes:
    return key * (size_bytes // len(key))


class PoolEngine:
    """Blocks of one namespace, and a place in their pool on the first device."""

    def __init__(self, address: Path, library: str = "") -> None:
        self.client = kvfs.connect(address, timeout_s=WAIT_S)
        self.blocks = self.client.blocks(NAMESPACE)
        driver = open_driver(library or None)
        self.context = driver.devices()[0].retain_context()
        self._stream = self.context.stream()
        self.pool = self.attach()

    def attach(self, earlier: DevicePool | None = None) -> DevicePool:
        """Take another place in the pool, which takes an earlier one over."""
        found = self.blocks.device_pool(
            open_driver(),
            self.context,
            earlier=None if earlier is None else Earlier(earlier, self.checksums),
        )
        assert found is not None
        return found

    def checksums(self, ranges: Sequence[tuple[int, int]]) -> list[int]:
        """Compute checksums of what is in the device's memory now."""
        return [xxh3_64(self._bytes(address, size_bytes)) for address, size_bytes in ranges]

    def put(self, keys: Sequence[bytes], size_bytes: int = BLOCK_BYTES) -> None:
        assert all(self.blocks.put(list(keys), [payload(key, size_bytes) for key in keys]))

    def lease(self, keys: Sequence[bytes]) -> list[PoolBlock | None]:
        return self.pool.lease(b"".join(keys), timeout_s=WAIT_S)

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Return which blocks are in the pool with the bytes that they are to have."""
        found = self.lease(keys)
        there = [each is not None and self.read(each) == payload(each.key, each.size_bytes) for each in found]
        assert there == [each is not None for each in found]
        self.pool.release(each for each in found if each is not None)
        return there

    def read(self, block: PoolBlock) -> bytes:
        data = self._bytes(block.address, block.size_bytes)
        assert xxh3_64(data) == block.checksum
        return data

    def _bytes(self, address: int, size_bytes: int) -> bytes:
        into = (ctypes.c_char * size_bytes)()
        self._stream.copy(ctypes.addressof(into), address, size_bytes)
        self._stream.synchronize()
        return into.raw

    def reserve(self, keys: Sequence[bytes]) -> list[PoolDraft | None]:
        """Ask twice for blocks, and reserve."""
        for _ in range(2):
            self.pool.release(each for each in self.lease(keys) if each is not None)
        return self.pool.reserve(b"".join(keys), timeout_s=WAIT_S)

    def write(self, draft: PoolDraft, data: bytes) -> None:
        self.write_at(draft.address, data)

    def write_at(self, address: int, data: bytes) -> None:
        held = ctypes.create_string_buffer(data, len(data))
        self._stream.copy(address, ctypes.addressof(held), len(data))
        self._stream.synchronize()

    def damage(self, address: int) -> None:
        """Change a byte."""
        [byte] = self._bytes(address, 1)
        self.write_at(address, bytes([byte ^ 1]))

    def promote(self, keys: Sequence[bytes]) -> list[bool]:
        """Reserve, copy and seal blocks of the store."""
        drafts = [draft for draft in self.reserve(keys) if draft is not None]
        for draft in drafts:
            self.write(draft, payload(draft.key, draft.size_bytes))
        checksums = [xxh3_64(payload(draft.key, draft.size_bytes)) for draft in drafts]
        return self.pool.seal(drafts, checksums, timeout_s=WAIT_S)

    def close(self) -> None:
        with suppress(SessionClosed):
            self.pool.close(timeout_s=WAIT_S)
        self.client.close()
        self._stream.destroy()
        self.context.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
