"""Blocks to and from a caller's tensors in a GPU's memory.

Responsibility: `DeviceBlocks`: load blocks into tensors, from the device's pool where the service has one, and store
them from there.

Invariants:
- Nothing is written before what the caller's stream was given when the call was made has ended. What is stored is what
  that has written.
- A block counts as loaded once all its bytes are at its places; one of another size is a miss, and leaves them as they
  are.

Concurrency: any thread; stores take turns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Self

from kvfs._native.blocks.pieces import Scatter, join_keys
from kvfs._native.blocks.reader import MISS
from kvfs._native.cuda.copies import DevicePlaces
from kvfs._native.cuda.driver import Context, Device, open_driver
from kvfs.client.blocks import Blocks, Keys
from kvfs.client.device_pool import DevicePool, Earlier
from kvfs.client.transport import Deadline
from kvfs.connectors.device.copies import copies_in
from kvfs.connectors.device.pooled import PoolCounts
from kvfs.connectors.device.stores import Outgoing
from kvfs.connectors.device.tensors import DeviceMemory, places_of
from kvfs.errors import DeadlinePassed, DeviceMissing, InvalidRequest
from kvfs.keys import split_keys
from kvfs.limits import CLIENT_TIMEOUT_S, CONNECTOR_STAGING_BUFFERS, CONNECTOR_STAGING_BYTES
from kvfs.protocol.messages import DIGEST_BYTES


def default_stream() -> int:
    """Return the handle of the device's default stream, which is PyTorch's where nothing else was chosen."""
    return 0


class DeviceBlocks:
    """Read and write the blocks of one namespace, in one device's memory."""

    def __init__(
        self,
        blocks: Blocks,
        block_bytes: int,
        *,
        device: int | str = 0,
        compute_stream: Callable[[], int] = default_stream,
    ) -> None:
        """Take the primary context of a device (as the driver counts them, or a UUID) and register memory for blocks of
        up to `block_bytes`. `compute_stream` returns the driver's handle of the stream that the calling thread computes
        on (`torch.cuda.current_stream().cuda_stream`). Raises DeviceMissing, and what `kvfs.errors.from_cuda` does."""
        self._blocks, self._block_bytes, self._driver = blocks, block_bytes, open_driver()
        self._context = _device_of(self._driver.devices(), device).retain_context()
        try:
            self._copies = copies_in(self._context, block_bytes, compute_stream)
        except BaseException:
            self._context.release()
            raise
        self._pooled = self._copies.loads.pooled(self._attach)
        self._storing = threading.Lock()
        self._is_closed = False

    def _attach(self, context: Context, timeout_s: float, earlier: Earlier | None) -> DevicePool | None:
        return self._blocks.device_pool(self._driver, context, timeout_s=timeout_s, earlier=earlier)

    @property
    def counts(self) -> PoolCounts:
        """Return the counts of blocks that came from the device's pool, or were added to it."""
        return self._pooled.counts

    def close(self) -> None:
        """Give the memory back, once what is under way has ended; the blocks stay open. Closing twice is harmless."""
        with self._storing:
            if self._is_closed:
                return
            self._is_closed = True
            self._copies.loads.close()
            self._copies.stores.close()
            self._context.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get_into(
        self, keys: Keys, buffers: DeviceMemory, *, timeout_s: float = CLIENT_TIMEOUT_S
    ) -> list[int]:
        """Copy each block into its places; return the bytes of each, -1 for a miss. Raises InvalidRequest."""
        return self.get_into_async(keys, buffers, timeout_s=timeout_s).result()

    def get_into_async(
        self, keys: Keys, buffers: DeviceMemory, *, timeout_s: float = CLIENT_TIMEOUT_S
    ) -> Future[list[int]]:
        """Copy blocks as `get_into` does, behind what the stream has now, by another thread. Raises InvalidRequest,
        LimitExceeded."""
        joined = join_keys(keys)
        if not joined:
            return _done([])
        places = self._places(joined, buffers, writable=True)

        def read(some: bytes, staging: Scatter, left_s: float) -> list[int]:
            sizes = self._blocks.get_into(some, staging, timeout_s=left_s)
            return [size if size == places.block_bytes else MISS for size in sizes]

        return self._copies.loads.submit(read, joined, places, timeout_s=timeout_s, pooled=self._pooled)

    def put(
        self,
        keys: Keys,
        buffers: DeviceMemory,
        parents: Sequence[bytes | None] | None = None,
        *,
        timeout_s: float = CLIENT_TIMEOUT_S,
    ) -> list[bool]:
        """Store blocks as `Blocks.put` does, as they are behind what the stream has now. Raises as it does."""
        joined, deadline = join_keys(keys), Deadline.after(timeout_s)
        if not joined:
            return []
        places = self._places(joined, buffers, writable=False)
        each, count = split_keys(joined), len(places)
        if parents is not None and len(parents) != count:
            raise InvalidRequest(f"{count} keys and {len(parents)} parents")
        at_once = max(CONNECTOR_STAGING_BUFFERS * CONNECTOR_STAGING_BYTES // places.block_bytes, 1)
        stored: list[bool] = []
        if not self._storing.acquire(timeout=deadline.left_s):
            raise DeadlinePassed(f"other threads store blocks for {deadline.limit_s:g} s")
        try:
            for at in range(0, count, at_once):
                some = slice(at, min(at + at_once, count))
                outgoing = self._copies.stores.copy(places.choose(range(some.start, some.stop)))
                before = None if parents is None else parents[some]
                stored += self._put_copied(each[some], outgoing, before, deadline)
        finally:
            self._storing.release()
        return stored

    def _put_copied(
        self,
        keys: list[bytes],
        outgoing: Outgoing,
        parents: Sequence[bytes | None] | None,
        deadline: Deadline,
    ) -> list[bool]:
        copied = outgoing.wait()
        try:
            return self._blocks.put(keys, copied, parents, timeout_s=deadline.left_s)
        finally:
            outgoing.give_back()

    def _places(self, joined: bytes, buffers: DeviceMemory, *, writable: bool) -> DevicePlaces:
        places = places_of(buffers, writable=writable)
        count = len(joined) // DIGEST_BYTES
        if len(places) != count:
            raise InvalidRequest(f"{count} keys and places for {len(places)} blocks")
        if places.block_bytes > self._block_bytes:
            raise InvalidRequest(
                f"blocks of {places.block_bytes} bytes: this object was made for {self._block_bytes}"
            )
        return places


def _device_of(devices: Sequence[Device], wanted: int | str) -> Device:
    for device in devices:
        if wanted in (device.ordinal, device.uuid):
            return device
    raise DeviceMissing(f"the CUDA driver knows no device {wanted}; it has {len(devices)}")


def _done(result: list[int]) -> Future[list[int]]:
    future: Future[list[int]] = Future()
    future.set_result(result)
    return future
