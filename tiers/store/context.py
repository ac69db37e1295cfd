"""What all parts of a store work on: its tiers, what is in them, who may hold how much, and who is notified.

Responsibility: the values that every part gets, and lists that doors append to, with one call for each kind of news.
Concurrency: the service's trio thread; listeners do not await.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tiers.cold.copies import ColdCopies
from tiers.dram.tier import DramTier
from tiers.eviction.quota import SpaceBook
from tiers.model.objects import BlockPlaced, Change, Name, Unpublished
from tiers.nvme.journal import Journal
from tiers.store.catalog import Catalog


@dataclass(slots=True)
class Listeners:
    """Lists doors by what they are notified of."""

    changes: list[Callable[[Change], None]] = field(default_factory=list)
    blocks: list[Callable[[BlockPlaced], None]] = field(default_factory=list)
    """Notified when a block comes to a tier or goes from one, and nothing of named objects."""
    quota: list[Callable[[bool], None]] = field(default_factory=list)
    """Notified when some uid comes to be charged for more than its quota, and when none is any more."""
    shares: list[Callable[[bool], None]] = field(default_factory=list)
    """Notified when some uid comes near to its share of the slots (`SpaceBook.is_share_near`), and when none is."""
    before_eviction: list[Callable[[], None]] = field(default_factory=list)
    """Called before victims are chosen and objects added: doors that answer hits natively report them here."""
    publishers: list[Callable[[Name], Unpublished | None]] = field(default_factory=list)
    """Asked to publish a closed draft of this name now; each returns one for which that is still to come."""

    def notify(self, change: Change) -> None:
        """Call the listeners for changes."""
        for listener in self.changes:
            listener(change)

    def report_hits(self) -> None:
        """Count natively answered reads before what comes next, not when eviction happens to ask."""
        for report in self.before_eviction:
            report()


@dataclass(frozen=True, slots=True)
class Context:
    """See the module's header."""

    catalog: Catalog
    dram: DramTier
    space: SpaceBook
    listeners: Listeners
    journal: Journal
    cold: ColdCopies
