"""A start: the parts of a store, with the names and the objects in DRAM of an earlier service.

Responsibility: choose the surviving slots that the names and buckets of the index still want, and build from both what
the store keeps in memory. `tiers.recovery.opened_index` decides whether the index is believed, `tiers.dram.recovery`
which slots are whole.

Invariants:
- An object is there again with exactly the bytes, name and attributes that it had, or it is a miss: what was
  removed or never sealed does not come back, since a removal takes the row (of a block: the slot's header)
  away first.
- Afterwards no name row is without bytes, and no unit (`paths.unit_prefix`) without one of its files.

Concurrency: before the store serves anybody.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass

from kvfs import paths
from kvfs._native.catalog.adoption import Adoption
from kvfs._native.catalog.object_names import ObjectNames
from kvfs.config.sizes import format_size
from kvfs.errors import Corrupt
from kvfs.index.environment import MAX_OBJECT_ID
from kvfs.index.names import NameIndex, NameRow
from kvfs.index.rows import DIRECTORY, RETIRED, ROW_ONLY, BucketRow, peek_row
from tiers.cold.bucket import ColdOptions
from tiers.cold.copies import ColdCopies
from tiers.cold.tier import ColdTier
from tiers.data_dir import Home
from tiers.dram.tier import DramTier
from tiers.eviction.policy import EvictionPolicy
from tiers.log.bucket_files import BucketFiles
from tiers.model.objects import Name
from tiers.model.tier import object_digest
from tiers.nvme.journal import Journal
from tiers.nvme.stored import StoredObjects
from tiers.nvme.tier import NvmeTier
from tiers.nvme.write_behind import NvmeJournal
from tiers.recovery.cold_copies import ColdRecovery
from tiers.recovery.index_check import IndexWalk
from tiers.recovery.index_rebuild import (
    Replaced,
    Survivor,
    adopt_nameless,
    adopt_orphans,
    known_buckets,
    name_survivors,
    rebuild_index,
    restore_copies,
    settle_snapshots,
    skip_ids,
)
from tiers.recovery.index_salvage import add_logged
from tiers.recovery.log_replay import Replayed
from tiers.recovery.opened_index import IndexState, close_unstarted, open_index
from tiers.store.store import Parts

log = logging.getLogger("kvfs.store")


@dataclass(frozen=True, slots=True)
class Lower:
    """Holds the NVMe tier, and what a replay of its log found."""

    nvme: NvmeTier
    found: Replayed


@dataclass(frozen=True, slots=True)
class Recovery:
    """Reports what a start found, and how long each of its phases took, in seconds."""

    was_clean: bool
    taken_over_objects: int
    """From DRAM."""
    taken_over_bytes: int
    dropped_names: int
    """Without bytes."""
    rebuilt_names: int | None
    """From the log; None where the name index was believed, or there is no log."""
    log_objects: int
    log_segments: int
    log_records: int
    log_s: float
    index_s: float
    adoption_s: float
    verify_s: float


class Startup:
    """Opens the index of `home`; then `choose` is for `DramTier.open`, and `build` makes the parts of the store.

    With a lower tier, what an index lacks that is not believed comes from its log.
    """

    def __init__(
        self,
        home: Home,
        lower: Lower | None = None,
        *,
        cold: ColdOptions | None = None,
        believe: bool = True,
        walk: IndexWalk | None = None,
    ) -> None:
        """Open the index. `walk` is of `walking`, begun before the log was read. Raises FormatMismatch for an index of
        a newer version, Corrupt: then again, without `believe`. Any other method may raise Corrupt too: not all of a
        damaged index shows at once."""
        began = time.monotonic()
        self._home = home
        self._lower = lower
        self._killed = not home.clean
        self._is_first = not home.index.exists() and (lower is None or not lower.found.records)
        self.names, state = open_index(home, believe, walk, self._logged_buckets)
        self._is_believed, self._is_salvaged = state is IndexState.WHOLE, state is IndexState.SALVAGED
        try:
            self._rebuilt = None if lower is None else self._agree_with_log(lower)
            self._cold = None if cold is None else ColdRecovery(self.names, cold)
            self._buckets = {row.bucket_id: row for row in self.names.buckets()}
        except BaseException:
            self.abort()
            raise
        self._cold_names: dict[int, Name] = {}
        self._object_names = ObjectNames()
        """What survivors are called."""
        self._index_s = time.monotonic() - began
        self._began = time.monotonic()

    def _agree_with_log(self, lower: Lower) -> int | None:
        """Hold the index against the log; return how many names came from it, None where the index is believed."""
        nvme, found, rebuilt = lower.nvme, lower.found, None
        if self._is_believed:
            settle_snapshots(self.names, found)
        elif self._is_salvaged:
            rebuilt = add_logged(self.names, found.names.items())
        else:
            rebuilt = rebuild_index(self.names, found, BucketFiles(self._home.path).load())
        adopt_orphans(self.names, nvme, found)
        adopt_nameless(self.names, nvme, found, killed=self._killed)
        skip_ids(self.names, found)
        return rebuilt

    @property
    def below(self) -> tuple[int, int]:
        """Return (objects, capacity in bytes) of the lower tiers, for the size of the table."""
        lower, cold = self._lower, self._cold
        objects, capacity_bytes = (
            (0, 0) if lower is None else (len(lower.nvme.objects), lower.nvme.capacity_bytes)
        )
        if cold is not None:
            return objects + len(cold), capacity_bytes + cold.options.capacity_bytes
        return objects, capacity_bytes

    def abort(self) -> None:
        """Undo a start that has failed: close the index, with the data directory as clean as before."""
        close_unstarted(self._home, self.names, is_believed=self._is_believed)

    def choose(self, adoption: Adoption) -> None:
        """Want those that have a name or a bucket."""
        if self._lower is not None and self._rebuilt is not None:
            objects = {object_id: Survivor(*each) for each in adoption.objects() for object_id in each[1:2]}
            name_survivors(self.names, self._lower.found, objects, replace=not self._is_salvaged)
        buckets = {row.name: row.class_ == "durable" for row in self._buckets.values()}
        units, replaceable = dict[bytes, int](), {} if self._lower is None else self._lower.found.sealed_as

        def want(page: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
            adoption.want_rows(page, buckets, replaceable, self._object_names, units)
            return []

        if adoption.has_objects:
            for _ in self.names.encoded_rows(want):
                pass
        bound = {each for each, row in self._buckets.items() if row.namespace is not None}
        adoption.want_blocks(bound)

    def _logged_buckets(self) -> list[BucketRow]:
        if self._lower is None:
            return []
        return known_buckets(self._lower.found, BucketFiles(self._home.path).load())

    def build(
        self, dram: DramTier, *, quota_bytes: int, policy: EvictionPolicy[bytes]
    ) -> tuple[Parts, Recovery]:
        """Build the parts of the store, with what its tiers have; rows whose objects have no bytes go."""
        lower, recovered = self._lower, self._cold
        journal, cold = Journal(), ColdCopies()
        if lower is not None:
            journal = NvmeJournal(lower.nvme, self.names, dram, self._home.path)
        if recovered is not None:
            cold = recovered.make_tier(self.names, dram, journal, self._home.store_id)
        parts = Parts(self.names, dram, journal, cold, quota_bytes=quota_bytes, policy=policy)
        adopted = dram.take_adoption()
        replaced = None if lower is None else Replaced(self.names, lower.nvme, lower.found)
        dropped, lost = self._prune(adopted, replaced)
        adopted.drop_names(self._object_names)
        parts.catalog.name_of.native = self._object_names
        parts.residency.restore(adopted, {each: row.name for each, row in self._buckets.items()})
        parts.verifier.left = adopted.unverified
        self.names.skip_ids(adopted.highest_sequence(MAX_OBJECT_ID))
        if lower is not None and isinstance(journal, NvmeJournal):
            assert replaced is not None
            replaced.put()
            restore_copies(parts, journal, lower.found, compare=self._killed or not self._is_believed)
        self._log_losses(lost)
        if recovered is not None and isinstance(cold, ColdTier):
            recovered.restore(cold, parts, self._cold_names)
        for bucket, unit in {(name.bucket, unit) for name in lost if (unit := paths.unit_prefix(name.key))}:
            _drop_unit(parts, Name(bucket, unit))
        recovery = self._recovery(adopted, dropped, dram.verify_s)
        if not self._is_first:
            self._report(recovery)
        return parts, recovery

    def _prune(self, adopted: Adoption, replaced: Replaced | None) -> tuple[int, list[Name]]:
        """Drop the rows whose objects have no bytes, neither here nor below; return how many, and their names."""
        below = StoredObjects() if self._lower is None else self._lower.nvme.objects
        lost: list[Name] = []

        def keep(bucket: bytes, key: bytes, data: bytes | None) -> bool:
            if data is None:  # the walk found it whole
                raise Corrupt(f"name index: the row of {Name(bucket, key)} is damaged")
            object_id, flags = peek_row(data)
            name = Name(bucket, key)
            if flags & ROW_ONLY and not flags & RETIRED:
                return self.names.get_bucket(bucket) is not None
            if flags & RETIRED:
                lost.append(name)
                return False
            if self._cold is not None and object_id in self._cold.objects and not self._is_durable(bucket):
                self._cold_names[object_id] = name
                return True
            is_there = adopted.keeps(object_id) and self._object_names.get(object_digest(object_id)) == (
                bucket,
                key,
            )
            if object_id in below or is_there:
                return True
            if replaced is not None and replaced.has_other(name, object_id):
                return True
            lost.append(name)
            return False

        names, cold = self._object_names, {} if self._cold is None else self._cold.objects
        return self.names.prune(keep, lambda page: adopted.lost_rows(page, names, below.rows, cold)), lost

    def _is_durable(self, bucket: bytes) -> bool:
        row = self.names.get_bucket(bucket)
        return row is not None and row.class_ == "durable"

    def _log_losses(self, lost: list[Name]) -> None:
        for name in lost:
            if self._is_durable(name.bucket) and self.names.get(name.bucket, name.key) is None:
                why = "it is damaged" if not self._killed else "it is damaged, or was never answered for"
                log.error("%s of a durable bucket is lost: %s", name, why)

    def _recovery(self, adopted: Adoption, dropped: int, verify_s: float) -> Recovery:
        lower = self._lower
        return Recovery(
            was_clean=not self._killed,
            taken_over_objects=len(adopted),
            taken_over_bytes=adopted.size_bytes,
            dropped_names=dropped,
            rebuilt_names=self._rebuilt,
            log_objects=0 if lower is None else len(lower.nvme.objects),
            log_segments=0 if lower is None else lower.found.segments,
            log_records=0 if lower is None else lower.found.records,
            log_s=0.0 if lower is None else lower.found.seconds,
            index_s=self._index_s,
            adoption_s=time.monotonic() - self._began - verify_s,
            verify_s=verify_s,
        )

    def _report(self, recovery: Recovery) -> None:
        log.info(
            "taken over: %d objects, %s; %d names without bytes dropped; index %.3f s, adoption %.3f s, "
            "verify %.3f s (%.2f GB/s)",
            recovery.taken_over_objects,
            format_size(recovery.taken_over_bytes),
            recovery.dropped_names,
            recovery.index_s,
            recovery.adoption_s,
            recovery.verify_s,
            recovery.taken_over_bytes / max(recovery.verify_s, 1e-9) / 1e9,
        )
        if self._lower is not None:
            rebuilt = recovery.rebuilt_names
            log.info(
                "read back: %d objects in %d segments, %d records; %s. log %.3f s",
                recovery.log_objects,
                recovery.log_segments,
                recovery.log_records,
                "names from the index" if rebuilt is None else f"{rebuilt} names rebuilt",
                recovery.log_s,
            )


def _drop_unit(parts: Parts, unit: Name) -> None:
    """Remove what is left of a cache's unit that lost a file, and its marker: the directory alone would read as a
    hit."""
    names = parts.catalog.names
    row = names.get_bucket(unit.bucket)
    if row is None or row.class_ == "durable":
        return
    for name, found in list(_under(names, unit)):
        if not found.flags & DIRECTORY:
            parts.name_ops.remove(name)
    parts.residency.drop_empty_unit(Name(unit.bucket, unit.key + b"-"))


def _under(names: NameIndex, unit: Name) -> Iterable[tuple[Name, NameRow]]:
    """List the files directly in a unit."""
    after = b""
    while True:
        page = names.list(unit.bucket, prefix=unit.key, after=after, delimiter=b"/")
        for entry in page.entries:
            if entry.row is not None:
                yield Name(unit.bucket, entry.name), entry.row
        if not page.truncated:
            return
        after = page.entries[-1].name
