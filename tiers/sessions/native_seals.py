"""Blocks that sealing threads made visible without the event loop, and the accounting that follows.

Responsibility: the seal channels of sessions (docs/sessions.md), and bringing catalogue, policy, tier and journal
up to what the threads did (`kvfs._native.seal.sealer`). A store without sessions has
`tiers.store.catalog.Seals`.

Invariants:
- A lookup of a block catches up first, so that every door finds a block that was answered as sealed.
- Between looking whether a block is there and putting it into the table the event loop holds the threads
  (`settled`): of two seals of one block the first wins, whoever served them.
- A draft is a thread's or the event loop's: `reclaim` takes it back before anything is done to it here.
- A channel's rights were checked when it was opened; it ends when anything about its bucket changes.

Concurrency: the service's trio thread; the sealing threads never run Python.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import trio

from kvfs import limits
from kvfs._native.seal.sealer import THERE, UNINDEXED, Sealed, Sealer
from kvfs.errors import Unsupported
from kvfs.rights import Caller
from tiers.model.objects import Bucket, Change, Draft
from tiers.store.catalog import Seals
from tiers.store.store import Store

log = logging.getLogger("kvfs.sessions")

_GATHER_S = 0.001
"""The event loop waits for more seals: a burst then costs it one wake, and the writer no core."""


class ChannelSession(Protocol):
    """Has what a seal channel needs of its session."""

    caller: Caller
    channel: int | None
    drafts: dict[tuple[int, int], Draft]


class NativeSeals(Seals):
    """Runs the sealing threads of one store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._sealer: Sealer | None = None
        self._channels: dict[int, tuple[ChannelSession, Bucket]] = {}
        self._holding = False
        if store.dram.backing == "tmpfs":  # in a directory a seal adds up what drafts have written
            self._sealer = store.dram.make_sealer()
            self._give_ids(self._sealer)
            store.catalog.native_seals = self
            store.listeners.append(self._on_change)

    async def run(self) -> None:
        """Catch up with the threads, until cancelled."""
        if self._sealer is None:
            return
        while True:
            await trio.lowlevel.wait_readable(self._sealer.fileno())
            await trio.sleep(_GATHER_S)
            self._absorb_some(self._sealer)

    def close(self) -> None:
        """End every channel, and its thread."""
        if self._sealer is not None:
            for channel in list(self._channels):
                self._end(channel)
            self._store.catalog.native_seals = Seals()
            self._store.listeners.remove(self._on_change)
            self._sealer.close()
            self._sealer = None

    def open(self, session: ChannelSession, bucket: Bucket) -> int:
        """Open a channel; return the client's end of it for `bucket`, in the place of the session's earlier one.

        Raises Unsupported for a durable bucket, whose seals wait for the device, and without a private tmpfs.
        """
        if self._sealer is None or bucket.durable:
            raise Unsupported(f"bucket {bucket.name.decode()}: its seals go through the event loop")
        if session.channel is not None:
            self._end(session.channel)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            channel = self._sealer.open(ours.fileno(), session.caller.uid, bucket.bucket_id)
        except BaseException:
            theirs.close()
            ours.close()
            raise
        ours.detach()
        self._channels[channel] = session, bucket
        session.channel = channel
        for slot, generation in session.drafts:
            self._sealer.grant(slot, generation, channel)
        return theirs.detach()

    def grant(self, session: ChannelSession, draft: Draft) -> None:
        """Allow a session's thread to seal a new draft, if it has a channel."""
        if self._sealer is not None and session.channel is not None:
            self._sealer.grant(draft.extent.slot, draft.extent.generation, session.channel)

    def reclaim(self, slot: int) -> None:
        """Take the draft in this slot back from its thread; enter it, if the thread has sealed it."""
        if self._sealer is not None and slot < self._store.table.slots:
            self._sealer.revoke(slot)
            self.catch_up()

    def end(self, session: ChannelSession) -> None:
        """End the channel of a session that ends, and enter what was sealed in it."""
        if session.channel is not None:
            self._end(session.channel)

    def end_channels(self, bucket: bytes) -> None:
        for channel in [c for c, (_, where) in self._channels.items() if where.name == bucket]:
            self._end(channel)

    def _end(self, channel: int) -> None:
        assert self._sealer is not None
        self._sealer.close_channel(channel)
        self.catch_up()
        session, _ = self._channels.pop(channel)
        session.channel = None
        for slot, _ in session.drafts:
            self._sealer.revoke(slot)

    def _on_change(self, change: Change) -> None:
        if change.key is None and change.name is not None and not change.name.key and self._channels:
            self.end_channels(change.name.bucket)

    def catch_up(self) -> None:
        if self._sealer is not None and not self._holding:
            while self._sealer.pending:
                self._absorb_some(self._sealer)

    @contextmanager
    def settled(self) -> Iterator[None]:
        sealer = self._sealer
        if sealer is None or self._holding:
            yield
            return
        while True:
            self.catch_up()
            with sealer:
                if sealer.pending:
                    continue
                self._holding = True
                try:
                    yield
                finally:
                    self._holding = False
                return

    def _absorb_some(self, sealer: Sealer) -> None:
        for sealed in sealer.take():
            try:
                self._absorb(sealed)
            except Exception:
                log.exception("slot %d was sealed, and the accounting does not follow", sealed.slot)
        if sealer.ids_left < limits.SEALER_IDS // 2:
            self._give_ids(sealer)

    def _absorb(self, sealed: Sealed) -> None:
        session, bucket = self._channels[sealed.channel]
        draft = session.drafts.pop((sealed.slot, sealed.generation))
        if sealed.outcome == THERE:
            self._store.replace_cold_block(draft, sealed, bucket)
        elif sealed.outcome == UNINDEXED:
            self._store.drop_unindexed(draft, sealed)
        else:
            self._store.sealed_natively(draft, sealed, bucket)

    def _give_ids(self, sealer: Sealer) -> None:
        sealer.give_ids(self._store.names.next_ids(limits.SEALER_IDS), limits.SEALER_IDS)
