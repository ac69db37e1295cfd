"""Drafts: granted, promised more, aborted.

Responsibility: the quota and the share of the slots of each uid, and room for what a draft is promised. Seals are
`tiers.store.sealing`'s.

Invariants: nothing is granted past a uid's quota or share; a draft is charged until it is closed, once.
Concurrency: the service's trio thread; nothing here awaits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvfs.errors import NoSpace
from tiers.model.objects import Draft
from tiers.model.tier import Extent
from tiers.store.context import Context
from tiers.store.residency import Residency

T = TypeVar("T")


class Drafts:
    """See the module's header."""

    def __init__(self, context: Context, room: Residency) -> None:
        self._dram, self._space, self._listeners = context.dram, context.space, context.listeners
        self._room = room
        self._is_share_near = False

    def reserve(self, size_bytes: int = 0, *, uid: int, kept_bytes: int = 0, insists: bool = True) -> Draft:
        """Grant an empty draft, evicting for its room; with `kept_bytes` as `DramTier.reserve` does.

        Who does not insist gets none for a moment after everything was found in use. Raises NoSpace, ObjectTooLarge,
        QuotaExceeded.
        """
        if size_bytes <= self._dram.largest_object_bytes:  # else `reserve` below says that it is too large
            self._space.check_quota(uid, held_bytes=self._dram.charged_bytes(uid), more_bytes=size_bytes)
        self._space.check_drafts(uid)
        try:
            extent = self._dram.reserve(size_bytes, kept_bytes=kept_bytes)
        except NoSpace:
            if not insists and self._room.is_stuck:
                raise
            extent = self._with_room(size_bytes, lambda: self._dram.reserve(size_bytes))
        self._space.opened(uid, size_bytes)
        self._watch_shares()
        return Draft(extent, uid, size_bytes)

    def prepare(self) -> Extent:
        """Make an empty extent for a draft that is granted later, without eviction. Raises NoSpace."""
        return self._dram.reserve(0)

    def grant(self, extent: Extent, *, uid: int) -> Draft:
        """Make a prepared extent a draft of `uid`, whose quota and share of the slots the caller has checked."""
        self._space.opened(uid, 0)
        self._watch_shares()
        return Draft(extent, uid, 0)

    def promise(self, draft: Draft, size_bytes: int) -> None:
        """Promise a draft so many bytes in all, evicting for what it lacks; fewer than it has change nothing. Raises
        NoSpace, ObjectTooLarge, QuotaExceeded, Superseded."""
        more_bytes = size_bytes - draft.size_hint_bytes
        if more_bytes <= 0:
            return
        if size_bytes <= self._dram.largest_object_bytes:
            held_bytes = self._dram.charged_bytes(draft.uid)
            self._space.check_quota(draft.uid, held_bytes=held_bytes, more_bytes=more_bytes)
        try:
            self._dram.promise(draft.extent, size_bytes)
        except NoSpace:
            self._with_room(more_bytes, lambda: self._dram.promise(draft.extent, size_bytes))
        self._space.promised(draft.uid, more_bytes)
        draft.size_hint_bytes = size_bytes

    def _with_room(self, size_bytes: int, ask: Callable[[], T]) -> T:
        """Make room for so many bytes; return what `ask` then returns. Raises NoSpace."""
        self._room.make_room(size_bytes)
        try:
            return ask()
        except NoSpace:  # what is free was promised to open drafts, or it is slots that are short
            self._room.make_slots(size_bytes)
            return ask()

    def open(self, draft: Draft) -> int:
        """Open a draft for writing; the caller closes the descriptor. Raises Superseded."""
        return self._dram.open_draft(draft.extent)

    def abort(self, draft: Draft) -> None:
        """End a draft without an object; twice is harmless."""
        if draft.open:
            self.close(draft, None)
            self._dram.abort(draft.extent, charge_uid=draft.uid)
            self._room.watch_quota()

    def close(self, draft: Draft, sealed_bytes: int | None) -> None:
        """Stop counting a draft; `sealed_bytes` is the size of the object that it became, None without one."""
        if draft.open:
            draft.open = False
            self._space.closed(draft.uid, draft.size_hint_bytes, sealed_bytes)
            self._watch_shares()

    def _watch_shares(self) -> None:
        near = self._space.is_share_near
        if near != self._is_share_near:
            self._is_share_near = near
            for listener in self._listeners.shares:
                listener(near)
