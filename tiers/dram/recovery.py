"""Takes over DRAM slots that outlived their process, and drops the others.

Responsibility: find the slots of an old table whose bytes are whole and cannot be changed, verify the checksums of
some, unlink the rest. The caller, who has the names, chooses which objects are still wanted. The table is read and
sorted natively (`kvfs._native.catalog.adoption`).

Invariants:
- A slot is taken over only if its header matches its own checksum, says sealed, and has the payload's checksum.
- Its bytes are read only if its file has the size that the header says, no writable descriptor or mapping of it lives
  (a killed service's writers may still write through FUSE passthrough), and the payload matches. Of small blocks and
  small objects of caches that is looked at while the store serves: they are unverified in the new table until then
  (`tiers.dram.verification`). In a durable bucket, and where a file was made durable before its seal, what does not
  match may have an earlier object to give its name to, which is decided before the store serves.
- The old table is only read: no writer of it is left that an odd sequence number could be waited for. Its
  slots' generations go on from where they were, so (slot, generation) never names two things.
- A start that runs short of memory or descriptors fails, and drops nothing that it could not check.
- What is taken over fits into the capacity, beside what holders keep of the rest.

Concurrency: called while a tier opens; files are looked at and payloads hashed by a thread per processor, without the
GIL.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from kvfs import limits
from kvfs._native.catalog.adoption import Adoption
from kvfs._native.shared import slots as native
from kvfs._native.shared.table import Table
from kvfs.config.sizes import format_size
from kvfs.errors import KvfsError, NotFound, is_shortage
from tiers.dram.accounting import Held
from tiers.dram.survivors import Choose, Recovered

_MOST_REPORTED = 20

log = logging.getLogger("kvfs.dram")


def take_over(
    root: Path, store_id: bytes, *, slots: int, capacity_bytes: int, table_bytes: int, choose: Choose | None
) -> Recovered:
    """Sort out the slots under `root`. `table_bytes` is what the new table takes of `capacity_bytes`, 0 in a
    directory, whose table is not counted. Without `choose` nothing is taken over, and no table is looked at.

    REQUIRES the lock of `root`. Afterwards `slots/` holds the survivors' files, and zombies'.
    """
    old = _OldSlots(root, slots)
    try:
        if choose is not None:
            old.read_table(root / "table", store_id)
            old.keep_whole(min(limits.VERIFY_LATER_BYTES, capacity_bytes // limits.OBJECT_SHARE_OF_DRAM))
            choose(old.recovered.adoption)
        old.recovered.adoption.sort()
        old.drop_unkept()
        old.fit(capacity_bytes, table_bytes)
        old.verify()
        old.drop_unkept()
    except BaseException:
        old.recovered.close()
        raise
    finally:
        old.close()
    return old.recovered


class _OldSlots:
    """Sorts out the slot files of one root, for one start."""

    def __init__(self, root: Path, slots: int) -> None:
        self._adoption = Adoption(slots)
        self.recovered = Recovered(self._adoption)
        self._slots = slots
        self._root = root
        self._slotfd = os.open(root / "slots", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._behind: list[int] = []
        """Slots behind the last one of the new table."""
        for name, slot in self._adoption.list_files(self._slotfd):
            if slot < 0:
                os.unlink(name, dir_fd=self._slotfd)
            else:
                self._behind.append(slot)

    def close(self) -> None:
        os.close(self._slotfd)

    def read_table(self, path: Path, store_id: bytes) -> None:
        """Read every sealed slot of a table of this format and store."""
        try:
            Table.attach(path, store_id).close()
            with path.open("rb", buffering=0) as file:
                for slot in self._adoption.read(file.fileno()):
                    log.warning("slot %d: its header was being written, or is damaged", slot)
        except NotFound:
            pass
        except (KvfsError, OSError) as error:
            if is_shortage(error):
                raise
            log.warning("nothing is taken over: %s", error)

    def keep_whole(self, later_bytes: int) -> None:
        """Keep what has its file, and if that is over `later_bytes`, also the right size and no writer."""
        self._in_threads(partial(self._adoption.check_files, later_bytes=later_bytes))
        self._adoption.keep_whole()

    def _in_threads(self, work: Callable[[int], None]) -> None:
        threads = os.cpu_count() or 1
        with ThreadPoolExecutor(threads, "kvfs-verify") as pool:
            list(pool.map(work, [self._slotfd] * threads))

    def drop_unkept(self) -> None:
        """Unlink every file that nothing of what is kept has."""
        for slot, uid in [*self._adoption.take_unkept(), *((slot, 0) for slot in self._behind)]:
            self._drop(slot, uid)
        self._behind.clear()

    def _drop(self, slot: int, uid: int) -> None:
        if len(self.recovered.held) >= limits.MAX_HELD_SLOTS:
            self._make_zombie(slot, uid)
            return
        try:
            fd, physical_bytes = native.detach(self._slotfd, slot)
        except (KvfsError, OSError):  # out of descriptors
            self._make_zombie(slot, uid)
            return
        if _fd_is_held(fd):
            self.recovered.held.append(Held(fd, physical_bytes, uid))
        else:
            os.close(fd)

    def _make_zombie(self, slot: int, uid: int) -> None:
        """Keep the file for the tier's sweep; one behind the last slot is unlinked, whoever holds it."""
        name = native.slot_name(slot)
        if slot < self._slots:
            self.recovered.zombies[slot] = (uid, os.stat(name, dir_fd=self._slotfd).st_blocks * 512)
        else:
            os.unlink(name, dir_fd=self._slotfd)

    def fit(self, capacity_bytes: int, table_bytes: int) -> None:
        """Keep as many, from the dearest on, as fit beside the new table and what holders keep."""
        held = sum(each.physical_bytes for each in self.recovered.held)
        held += sum(physical_bytes for _, physical_bytes in self.recovered.zombies.values())
        count = len(self._adoption)
        dropped = self._adoption.fit(capacity_bytes - table_bytes - held)
        if dropped:
            log.warning(
                "%s: %d of %d objects of the last service do not fit into %s any more",
                self._root,
                dropped,
                count,
                format_size(capacity_bytes),
            )

    def verify(self) -> None:
        """Hash what is not verified later, and keep what matches the header's checksum."""
        began = time.monotonic()
        if len(self._adoption) > self._adoption.unverified:
            self._in_threads(self._adoption.verify)
        self.recovered.verify_s = time.monotonic() - began
        self._report(self._adoption.drop_bad())

    def _report(self, bad: list[int]) -> None:
        for slot in sorted(bad)[:_MOST_REPORTED]:
            log.error("%s: slot %d does not match its checksum: its object is lost", self._root, slot)
        if len(bad) > _MOST_REPORTED:
            log.error("%s: so do %d more slots", self._root, len(bad) - _MOST_REPORTED)


def _fd_is_held(fd: int) -> bool:
    try:
        return native.fd_is_held(fd)
    except (KvfsError, OSError):  # without leases that is not known
        return False
