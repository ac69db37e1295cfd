"""A file being written, as its node refers to it. Concurrency: the service's trio thread."""

from __future__ import annotations

from dataclasses import dataclass, field

import trio

from tiers.model.objects import Draft
from tiers.nvme.large_draft import LargeDraft


@dataclass(slots=True)
class OpenDraft:
    """A file being written: the draft, its future attributes, and how many have it open."""

    draft: Draft | LargeDraft
    mode: int
    uid: int
    gid: int
    ctime_ns: int
    """When its attributes were set; writes show in its bytes' own time of change."""
    handles: int = 0
    writers: int = 0
    torn: bool = False
    """The last writer died by a signal in the middle."""
    pinned: bool = False
    awaited: set[int] = field(default_factory=set)
    """Threads that it was made or kept for and that have not come back yet: it is not published meanwhile."""
    untouched: bool = False
    """A copy of a sealed object that nobody has opened yet: it is dropped, and the object stays, if nobody does."""
    closed: bool = False
    """Its last writer has closed it, and it waits to be published."""
    lingering: bool = False
    """Closed, but somebody can still write it (a mapping), or reads it."""
    answered: bool = False
    """A close or rename of it, or a truncation by path, was answered: the former object of its name does not return."""
    overtaken: bool = False
    """Another door has sealed an object under its name since it was closed last: that object stays."""
    failed: bool = False
    """close() failed since it could not be kept: it is dropped, unless a later close() succeeds."""
    late: bool = False
    """Whether it could not be published when it was closed, which was logged."""
    snapshot: int | None = None
    """The id of its bytes that are durable."""
    coming: int | None = None
    """The id of bytes that are being made durable in place of `snapshot`."""
    persisting: trio.Lock = field(default_factory=trio.Lock)
    """Held while bytes are made durable: one copy at a time, and the draft is neither published nor cut."""
    ended: trio.Event = field(default_factory=trio.Event)
    """Set when it is published or dropped."""

    @property
    def large(self) -> LargeDraft | None:
        """Return the draft, if it is written extent by extent and has no slot."""
        return self.draft if isinstance(self.draft, LargeDraft) else None

    @property
    def is_settled(self) -> bool:
        """Return whether anything of the draft is on the device."""
        if isinstance(self.draft, LargeDraft):
            return self.draft.persisted_bytes is not None
        return self.snapshot is not None

    @property
    def is_unused(self) -> bool:
        """Return whether nobody has it open, and no thread is expected to open it."""
        return self.handles == 0 and not self.awaited

    @property
    def snapshots(self) -> list[int]:
        """Return the ids of its bytes that the log has or will have, the older one first."""
        return [each for each in (self.snapshot, self.coming) if each is not None]
