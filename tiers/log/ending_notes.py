"""Endings that the log's records mean, noted for the files beside the segments (`tiers.log.endings`).

Responsibility: when an ending is noted: one that makes room for something newer once that is durable, a cache's also
where no record can be written.

Invariants:
- A deletion is repeated once; a record that was written and may not count notes nothing.
- What reclaim has evicted may be written again before its segment is freed: only the records before that have ended.

Concurrency: the log's writer task, of the service's trio thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from kvfs.errors import DeviceFailed, NoSpace
from kvfs.formats import RecordHeader
from tiers.log.ending_pages import Ending
from tiers.log.endings import Endings
from tiers.log.entries import Barrier, Deletion, Entry, Record

_log = logging.getLogger("kvfs.nvme")


class EndingNotes:
    """See the module's header."""

    def __init__(self, endings: Endings, written_again_at: Callable[[int], int | None]) -> None:
        """Note into `endings`. `written_again_at`: returns the first sequence of an evicted object's next writing, None
        where there is none."""
        self.evicted: dict[int, list[Ending]] = {}
        """Number of a segment that is not freed yet -> what reclaim has evicted there, each with the sequence up to
        which that is noted. Kept by the tier."""
        self._written_again_at = written_again_at
        self._endings = endings
        self._replaced: list[Ending] = []
        """What records written since the last sync replace: ended once they are durable."""

    def note_replaced(self, record: Record, header: RecordHeader) -> None:
        """Note that a record was written that replaces another; not yet durable."""
        assert record.ends is not None
        first, number = record.first_sequence, header.extent_number
        self._replaced.append(Ending(record.object_id, first, header.sequence, record.ends, number))

    def drop_replaced(self) -> None:
        """Drop what was noted since the last sync: those records will be written again."""
        self._replaced.clear()

    def repeat(self, deletion: Deletion, sequence: int) -> None:
        """Note a deletion for the files beside the segments, once."""
        if not deletion.is_repeated:
            deletion.is_repeated = True
            self._endings.note(Ending(deletion.object_id, deletion.first_sequence, sequence))

    def note_durable(self, queued: Iterable[Entry], next_sequence: int) -> None:
        """Note what the records that are durable now replace, and the deletions that waited for them."""
        for ending in self._replaced:
            self._endings.note(ending)
        self._replaced.clear()
        for entry in queued:
            if isinstance(entry, Deletion):
                self.repeat(entry, next_sequence)
            elif not isinstance(entry, Barrier):
                return

    async def write_unlogged(self, queued: Iterable[Entry], next_sequence: int) -> None:
        """Write the endings of records that cannot be written: a cache's change is answered without its record."""
        try:
            while unlogged := [*_final_endings(queued, next_sequence), *self._evicted_endings(next_sequence)]:
                for ending in unlogged:
                    self._endings.note(ending)
                await self._endings.write()
                await self._endings.sync()
                self._keep_written_again()
        except (NoSpace, DeviceFailed) as error:
            _log.error("what has ended cannot be written beside the segments either: %s", error)

    def _evicted_endings(self, next_sequence: int) -> Iterator[Ending]:
        """Yield the endings of what reclaim has evicted so far, and which are not noted yet."""
        for each in chain.from_iterable(self.evicted.values()):
            again = self._written_again_at(each.object_id)
            ending = each._replace(sequence=next_sequence if again is None else again)
            if ending.sequence > each.sequence:
                yield ending

    def _keep_written_again(self) -> None:
        """Drop what is noted; but what is written again may still be refused, and ends then once more."""
        for number, evicted in self.evicted.items():
            written_again = [(each, self._written_again_at(each.object_id)) for each in evicted]
            self.evicted[number] = [
                each._replace(sequence=again) for each, again in written_again if again is not None
            ]


def _final_endings(entries: Iterable[Entry], sequence: int) -> Iterator[Ending]:
    """Yield what has ended by entries that are not written, each once; none of them will have a lower `sequence`."""
    for entry in entries:
        if isinstance(entry, Barrier) or not entry.is_final:
            continue
        if isinstance(entry, Deletion):
            if not entry.is_repeated:
                entry.is_repeated = True
                yield Ending(entry.object_id, entry.first_sequence, sequence)
        elif entry.ends is not None:
            entry.is_final = False
            yield Ending(entry.object_id, entry.first_sequence, sequence, entry.ends)
