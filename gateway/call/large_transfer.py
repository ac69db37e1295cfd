"""Objects larger than DRAM takes: sent and received in pieces, through one draft that carries them.

Responsibility: a session of its own for each transfer (the service waits for its device while it serves one, and all
other requests share a session), the draft that is its window, and the loop over the pieces.

Invariants: memory per transfer is one window of limits.MAX_LARGE_PIECE_BYTES, in the tier. The object that is read is
leased by the session, whatever becomes of its name; an object that was not sealed is dropped with the session.

Concurrency: one task per transfer.
"""

from __future__ import annotations

import base64
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import trio

from gateway.backend.backend import Backend
from gateway.backend.body_budget import Arriving, Draft
from gateway.backend.copy_range import copy_range
from gateway.backend.drafts import Seal
from gateway.backend.lookup import ObjectLookup, lookup_of_values
from gateway.backend.session import Session
from gateway.protocol.checksums import Digester
from kvfs import limits
from kvfs.errors import Corrupt, KvfsError, NotFound
from kvfs.http.http_exchange import Exchange, Headers, write_all
from kvfs.http.transports import Gone
from kvfs.protocol.messages import Abort, Op

_PIECE = limits.MAX_LARGE_PIECE_BYTES


@dataclass(slots=True)
class Transfer:
    """A session and its window."""

    session: Session
    backend: Backend
    owner: str
    """The owner of the request."""
    body: Arriving | None = None
    """The body that comes through the window; None where no client sends one."""
    given: Draft | None = None
    closed: bool = False

    @property
    def window(self) -> Draft:
        """Return the draft that carries the pieces; there has to be one."""
        assert self.given is not None, "the transfer has no window yet"
        return self.given

    async def take_window(self) -> None:
        """Reserve the window. Raises as `Drafts.reserve`."""
        if self.given is None:
            self.given = await self.backend.drafts.reserve_in(
                self.session, self.owner, _PIECE, self.body, whole=True
            )

    async def open(self, bucket: str, key: str) -> ObjectLookup:
        """Lease an object for reading. Raises NotFound, InvalidRequest where a slot holds the object by now."""
        found = lookup_of_values(await self.session.control(Op.LARGE_OPEN, name=[bucket, key]))
        if found is None:
            raise NotFound(f"{bucket}/{key} is a directory")
        return found

    async def read(self, offset: int, size_bytes: int) -> int:
        """Read from an offset into the window, and return how much, at least a byte. Raises Corrupt, DeviceFailed."""
        found = await self.session.control(
            Op.LARGE_READ,
            offset=offset,
            size=min(_PIECE, size_bytes),
            slot=self.window.slot,
            generation=self.window.generation,
        )
        if not found["size_bytes"]:
            raise Corrupt("the object is shorter than its name says")
        return int(found["size_bytes"])

    async def append(self) -> None:
        """Add what the window holds to the object, and empty the window."""
        await self.session.control(Op.LARGE_APPEND, slot=self.window.slot, generation=self.window.generation)
        os.ftruncate(self.window.descriptor, 0)

    async def seal(self, seal: Seal) -> int:
        """Seal the object, and return its id. Raises Exists, NotFound as the seal's condition says."""
        arguments: dict[str, Any] = {} if seal.expected_id is None else {"expected_id": seal.expected_id}
        if seal.mtime_ns is not None:
            arguments["mtime_ns"] = seal.mtime_ns
        if seal.needs is not None:
            arguments["needs"] = seal.needs
        made = await self.session.control(
            Op.LARGE_SEAL,
            name=[seal.bucket, seal.key],
            replace=seal.replace,
            user_metadata=base64.b64encode(seal.user_metadata).decode(),
            **arguments,
        )
        return int(made["object_id"])

    async def end(self) -> None:
        """Abort the window and close the session; the service takes one that only closes for one that died."""
        if self.given is not None:
            self.given.close()
            with trio.CancelScope(shield=True), suppress(KvfsError):
                await self.session.results(Abort(((self.given.slot, self.given.generation),)))
        self.close()

    def close(self) -> None:
        """Close the session; twice is harmless."""
        if self.given is not None:
            self.given.close()
        if not self.closed:
            self.closed = True
            self.session.close()
            self.backend.drafts.budget.end_transfer(self.owner)


async def _enter(backend: Backend, owner: str, body: Arriving | None = None) -> Transfer:
    """Begin a transfer without a window, in the order of its owner's requests."""

    async def ask() -> Transfer:
        backend.drafts.budget.begin_transfer(owner)
        try:
            return Transfer(await backend.sessions.extra_session(), backend, owner, body)
        except BaseException:
            backend.drafts.budget.end_transfer(owner)
            raise

    return await backend.drafts.queue.reserve(ask, owner)


async def begin(backend: Backend, owner: str, body: Arriving | None = None) -> Transfer:
    """Begin a transfer; the caller closes it. Raises SessionClosed, NoSpace; S3Error SlowDown."""
    transfer = await _enter(backend, owner, body)
    try:
        await transfer.take_window()
    except BaseException:
        transfer.close()
        raise
    return transfer


@asynccontextmanager
async def writing(
    backend: Backend, owner: str, bucket: str, body: Arriving | None = None
) -> AsyncIterator[Transfer]:
    """Write a large object, out of a client's `body`. Raises ObjectTooLarge where the bucket takes none."""
    transfer = await begin(backend, owner, body)
    try:
        await transfer.session.control(Op.LARGE_CREATE, bucket=bucket)
        yield transfer
        await transfer.end()
    finally:
        transfer.close()


@asynccontextmanager
async def reading(
    backend: Backend, owner: str, bucket: str, key: str
) -> AsyncIterator[tuple[Transfer, ObjectLookup]]:
    """Lease an object that no slot holds, without a window so far. Raises as `Transfer.open`."""
    transfer = await _enter(backend, owner)
    try:
        yield transfer, await transfer.open(bucket, key)
        await transfer.end()
    finally:
        transfer.close()


@asynccontextmanager
async def readers(backend: Backend, owner: str) -> AsyncIterator[Transfer]:
    """Begin a transfer with a window that objects are read through, one after the other."""
    transfer = await begin(backend, owner)
    try:
        yield transfer
        await transfer.end()
    finally:
        transfer.close()


class WindowSink:
    """Implements `Sink` (`gateway.call.sinks`) for a body that becomes a large object."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer
        self._at = 0
        self.digesters: list[Digester] = []
        """Digests that a worker thread takes of each window."""

    @property
    def full(self) -> bool:
        return self._at + limits.RECEIVE_BYTES > _PIECE

    def write(self, piece: memoryview) -> None:
        write_all(self._transfer.window.descriptor, piece, self._at)
        self._at += len(piece)

    def read(self, offset: int, into: memoryview) -> int:
        return os.preadv(self._transfer.window.descriptor, [into], offset)

    async def settle(self) -> None:
        """Append what the window holds to the object."""
        if self._at:
            if self.digesters:
                await trio.to_thread.run_sync(self._digest)
            await self._transfer.append()
            self._at = 0

    def _digest(self) -> None:
        memory = memoryview(bytearray(limits.RECEIVE_BYTES))
        at = 0
        while count := self.read(at, memory):
            for digester in self.digesters:
                digester.update(memory[:count])
            at += count


async def append_slot(
    transfer: Transfer, descriptor: int, offset: int, size_bytes: int, digesters: Sequence[Digester] = ()
) -> None:
    """Add a range of an open slot, a window at a time."""
    for at in range(offset, offset + size_bytes, _PIECE):
        count = min(_PIECE, offset + size_bytes - at)
        await trio.to_thread.run_sync(
            copy_range, descriptor, at, transfer.window.descriptor, 0, count, digesters
        )
        await transfer.append()


@dataclass(slots=True)
class LargeAnswer:
    """A range of a large object; the sender closes it."""

    status: int
    headers: Headers
    transfer: Transfer
    offset: int
    size_bytes: int

    async def send(self, exchange: Exchange, headers: Headers) -> None:
        """Send the pieces. Raises Gone where the object turns out to be damaged: the answer has begun."""
        head = exchange.begin(self.status, headers, self.size_bytes)
        at, end = self.offset, self.offset + self.size_bytes
        window = self.transfer.window
        while at < end:
            try:
                count = await self.transfer.read(at, end - at)
            except KvfsError as error:
                raise Gone(str(error)) from None
            await exchange.send_piece(head, window.descriptor, count)
            head, at = b"", at + count
        await self.transfer.end()

    def close(self) -> None:
        """End the transfer and its session."""
        self.transfer.close()
