"""Files that repeat what has ended, away from the segments, so that no damage in one place brings anything back.

Responsibility: two files beside the segments, `endings.0` and `endings.1`, that say which objects were removed or
replaced, and from which sequence on an object's names and rewritten extents count. A TOMBSTONE and a newer META lie
next to the newest data and are damaged with it; a replay without them finds here that older records have ended.

Invariants:
- An ending is true for ever: ids are given out once, sequences rise. So any page that holds counts, of whichever epoch,
  and one that is lost costs nothing as long as the log has its record.
- One file is added to, page by page, and no page is written twice. When it is full, everything that still counts is
  written to the other one and synced before anything is added there: one of the two is complete at any instant.
- An ending counts no more once no segment holds a record between the object's first sequence and the ending's.
- What makes room for something newer is written here only once that is durable.

Concurrency: the log's writer task, of the service's trio thread; loading awaits the device before anything is written.
"""

from __future__ import annotations

import logging
import os
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Final

import trio

from kvfs import limits
from kvfs.errors import Corrupt, DeviceAway, DeviceFailed, FormatMismatch, KvfsError, NoSpace
from kvfs.formats import ENDINGS_PAGE_BYTES, EndingKind
from tiers.device.device import Device
from tiers.log.ending_pages import PER_PAGE, Ended, Ending, Page, decode_page, encode_page

_log = logging.getLogger("kvfs.nvme")

FILES: Final = ("endings.0", "endings.1")
_WORDS: Final = 4
"""Of an ending in memory: object id, first sequence, sequence, extent number and kind."""
_AT_ONCE: Final = 4_096
"""Endings that are looked at before other tasks run."""

Span = tuple[int, int]
"""(first, last) sequence of a segment's records."""


@dataclass(slots=True)
class _File:
    path: Path
    fd: int = -1
    pages: int = 0
    """That it has room for."""
    epoch: int = 0
    first_pages: int = 0
    """That its epoch began with."""
    is_complete: bool = False
    """It has all that its epoch began with."""


class Endings:
    """Keeps the two files of one directory of segments."""

    def __init__(
        self, device: Device, directory: Path, store_id: bytes, spans: Callable[[], list[Span]]
    ) -> None:
        """Prepare for a directory. An ending before or after all `spans` of segments in use is dropped."""
        self._device = device
        self._store_id = store_id
        self._files = [_File(directory / name) for name in FILES]
        self._active: _File | None = None
        """What is added to; None until everything has been written once."""
        self._next_page = 0
        self._size_bytes = limits.MIN_ENDINGS_BYTES
        self._kept = array("Q")
        self._pending: list[Ending] = []
        self.is_dirty = False
        """Whether anything was written that is not synced."""
        self._is_refused = False
        """No room for a file, and that was said."""
        self._is_full = False
        """More has ended than half of a file holds, and that was said."""
        self.durable_sequence = 0
        """Every record up to this one is durable; each page repeats it. Set by the log."""
        self.faults: dict[str, list[str]] = {}
        """File name -> what is wrong with it, after `load`."""
        self._spans = spans

    @property
    def has_pending(self) -> bool:
        """Return whether endings were noted that are not written yet."""
        return bool(self._pending)

    def size_for(self, capacity_bytes: int) -> None:
        """Make files of the size that a tier of this capacity needs, from the next one on."""
        wanted = capacity_bytes // limits.ENDINGS_SHARE_OF_NVME
        size = min(max(wanted, limits.MIN_ENDINGS_BYTES), limits.MAX_ENDINGS_BYTES)
        self._size_bytes = size // ENDINGS_PAGE_BYTES * ENDINGS_PAGE_BYTES

    async def load(self) -> Ended:
        """Read both files, whichever is the newer; pages that do not match their checksums are passed over.
        Raises DeviceAway."""
        ended = Ended()
        for file in self._files:
            if file.path.exists():
                try:
                    await self._read(file, ended)
                except DeviceAway:
                    raise
                except KvfsError as error:
                    self._fault(file, f"cannot be read ({error})")
        return ended

    def _fault(self, file: _File, what: str) -> None:
        self.faults.setdefault(file.path.name, []).append(what)

    async def _read(self, file: _File, ended: Ended) -> None:
        size = file.path.stat().st_size
        file.pages = size // ENDINGS_PAGE_BYTES
        if size % ENDINGS_PAGE_BYTES or not size:
            self._fault(file, f"has {size} bytes, which are no whole pages")
        file.fd = self._device.open_file(file.path)
        numbers: set[int] = set()
        async with self._device.buffer() as view:
            per_read = len(view) // ENDINGS_PAGE_BYTES
            for first in range(0, file.pages, per_read):
                part = view[: min(per_read, file.pages - first) * ENDINGS_PAGE_BYTES]
                await self._device.read(file.fd, first * ENDINGS_PAGE_BYTES, part)
                for number in range(first, first + len(part) // ENDINGS_PAGE_BYTES):
                    at = (number - first) * ENDINGS_PAGE_BYTES
                    page = self._page(file, number, part[at : at + ENDINGS_PAGE_BYTES])
                    if page is None:
                        continue
                    ended.mark(page, number)
                    for ending in page.endings:
                        if ended.add(ending):
                            self._keep(ending)
                    if page.epoch > file.epoch:
                        file.epoch, file.first_pages = page.epoch, page.first_pages
                        numbers.clear()
                    if page.epoch == file.epoch:
                        numbers.add(number)
        file.is_complete = file.epoch > 0 and numbers.issuperset(range(file.first_pages))

    def _page(self, file: _File, number: int, data: memoryview) -> Page | None:
        try:
            return decode_page(data, self._store_id)
        except (Corrupt, FormatMismatch) as error:
            self._fault(file, f"page {number}: {error}")
            return None

    def close_files(self) -> None:
        """Close both files. Closing twice is harmless."""
        for file in self._files:
            if file.fd >= 0:
                self._device.close_file(file.fd)
                file.fd = -1

    def note(self, ending: Ending) -> None:
        """Queue an ending for the next `write`."""
        self._pending.append(ending)

    async def begin(self, more: Sequence[Ending] = ()) -> None:
        """Write everything that counts, `more` besides, into one complete file, durably. Raises NoSpace, DeviceFailed:
        then the next `write` tries again."""
        self._active = None
        self._pending.extend(more)
        await self._change_file()
        for file in self._files:  # the room for what comes is taken now
            if file is not self._active:
                await self._prepare(file)
        self.faults.clear()

    async def write(self) -> None:
        """Write what was noted. Raises NoSpace, DeviceFailed: then it is still to be written."""
        while self._pending:
            if (
                self._active is None
                or self._next_page >= self._active.pages
                or self._is_changing(self._active)
            ):
                await self._change_file()
                return
            page = self._pending[:PER_PAGE]
            await self._add_page(self._active, page)
            for ending in page:
                self._keep(ending)
            del self._pending[: len(page)]

    async def finish(self) -> None:
        """Write, at a clean stop, up to which record the log was durable. Raises NoSpace, DeviceFailed."""
        active = self._active
        if active is not None and self._next_page < active.pages and not self._is_changing(active):
            await self._add_page(active, [])
        await self.sync()

    def _is_changing(self, file: _File) -> bool:
        """Return whether a late write may still change the file: then it is as it may be, and none of it is written
        again."""
        return file.fd >= 0 and self._device.is_changing(file.fd)

    async def _add_page(self, file: _File, endings: Sequence[Ending]) -> None:
        await self._put(file, self._next_page, endings)
        self.is_dirty = True
        self._next_page += 1

    async def sync(self) -> None:
        """Make what was written durable. Raises NoSpace, DeviceFailed."""
        if self.is_dirty and self._active is not None:
            await self._device.sync(self._active.fd)
            self.is_dirty = False

    def _keep(self, ending: Ending) -> None:
        id_, first, sequence, kind, number = ending
        self._kept.extend((id_, first, sequence, number << 8 | kind))

    async def _change_file(self) -> None:
        """Write all that counts to the older file, and go on there."""
        complete = [file for file in self._files if file.is_complete]
        newest = max(complete, key=lambda file: file.epoch, default=None)
        target = next(file for file in self._files if file is not newest)
        for ending in self._pending:
            self._keep(ending)
        noted, self._pending = self._pending, []
        try:
            if not await self._has_room(target):
                return
            await self._drop_old(target.pages // 2 * PER_PAGE)
            endings = list(self._all())
            pages = [endings[at : at + PER_PAGE] for at in range(0, len(endings), PER_PAGE)] or [[]]
            target.is_complete = False
            target.epoch, target.first_pages = 1 + max(file.epoch for file in self._files), len(pages)
            for number, page in enumerate(pages):
                await self._put(target, number, page)
            await self._device.sync(target.fd)
        except BaseException:
            self._pending = noted + self._pending  # kept twice does no harm
            raise
        target.is_complete = True
        self._active, self._next_page, self.is_dirty = target, len(pages), False

    async def _has_room(self, file: _File) -> bool:
        """Make a file; return False where there is no room. The log goes on: it has all that the file repeats."""
        try:
            await self._prepare(file)
        except NoSpace as error:
            if not self._is_refused:
                _log.error("what has ended is not repeated beside the segments: %s", error)
            self._is_refused = True
            return False
        self._is_refused = False
        return True

    async def _prepare(self, file: _File) -> None:
        """Make a file of the right size, or clear a faulty one. One that is too small grows where there is room; one
        that a late write may still change is replaced."""
        is_changing = self._is_changing(file)
        if file.fd >= 0 and not is_changing and file.pages * ENDINGS_PAGE_BYTES < self._size_bytes:
            await self._grow(file)
        if file.fd >= 0 and not is_changing and 0 < file.pages * ENDINGS_PAGE_BYTES <= self._size_bytes:
            if file.path.name in self.faults:
                await self._clear(file)
            return
        if file.fd >= 0:
            self._device.close_file(file.fd)
            file.fd = -1
        file.path.unlink(missing_ok=True)
        file.fd = await self._device.create_file(file.path, self._size_bytes)
        file.pages = self._size_bytes // ENDINGS_PAGE_BYTES

    async def _grow(self, file: _File) -> None:
        """Give a file the size that this tier needs; without room for that it is used as it is."""
        try:
            await self._device.allocate(file.path, self._size_bytes)
        except DeviceAway:
            raise
        except (NoSpace, DeviceFailed) as error:
            _log.info("%s stays at %d pages: %s", file.path, file.pages, error)
            with suppress(OSError):  # what was allocated of it before the failure
                os.truncate(file.path, file.pages * ENDINGS_PAGE_BYTES)
        else:
            file.pages = self._size_bytes // ENDINGS_PAGE_BYTES

    async def _clear(self, file: _File) -> None:
        """Write zeros over all of a file, so that its room stays reserved."""
        file.is_complete = False
        async with self._device.buffer() as view:
            for first in range(0, file.pages, len(view) // ENDINGS_PAGE_BYTES):
                part = view[: (file.pages - first) * ENDINGS_PAGE_BYTES]
                part[:] = bytes(len(part))
                await self._device.write(file.fd, first * ENDINGS_PAGE_BYTES, part)
        await self._device.sync(file.fd)

    async def _put(self, file: _File, number: int, endings: Sequence[Ending]) -> None:
        data = encode_page(
            self._store_id, file.epoch, number, file.first_pages, self.durable_sequence, endings
        )
        async with self._device.buffer() as view:
            view[: len(data)] = data
            await self._device.write(file.fd, number * ENDINGS_PAGE_BYTES, view[: len(data)])

    def _all(self) -> Iterator[Ending]:
        kept = self._kept
        for at in range(0, len(kept), _WORDS):
            id_, first, sequence, what = kept[at : at + _WORDS]
            yield Ending(id_, first, sequence, EndingKind(what & 0xFF), what >> 8)

    async def _drop_old(self, most: int) -> None:
        """Keep the endings that count, and of these the newest where they are more than `most`."""
        spans = sorted(self._spans())
        firsts = [first for first, _ in spans]
        lasts = list(accumulate((last for _, last in spans), max))
        kept = array("Q")
        for number, at in enumerate(range(0, len(self._kept), _WORDS)):
            entry = self._kept[at : at + _WORDS]
            older = bisect_left(firsts, entry[2])  # segments that begin before the ending
            if older and lasts[older - 1] >= entry[1]:
                kept.extend(entry)
            if number % _AT_ONCE == _AT_ONCE - 1:
                await trio.lowlevel.checkpoint()
        excess = len(kept) // _WORDS - most
        if excess > 0 and not self._is_full:
            _log.warning(
                "the endings files have room for %d endings, and %d more are in the log alone: until their segments "
                "are reclaimed, a damaged segment and a lost index at once can bring back what was removed",
                most,
                excess,
            )
        self._is_full = excess > 0
        self._kept = kept[max(excess, 0) * _WORDS :]
