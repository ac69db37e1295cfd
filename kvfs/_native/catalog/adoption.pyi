"""What a start takes over: the sealed slots of an earlier service, from its table to the new one."""

from collections.abc import Callable, Iterator
from typing import Any

from typing_extensions import disjoint_base

from kvfs._native.catalog.block_index import BlockIndex
from kvfs._native.catalog.object_names import ObjectNames
from kvfs._native.catalog.records import RecordRows
from kvfs._native.shared.table import Table

@disjoint_base
class Adoption:
    """Sorts out the slots of an earlier service, for a new table of `slots`. The calls come in the order below."""

    def __new__(cls, slots: int) -> Adoption: ...
    def list_files(self, dirfd: int) -> list[tuple[bytes, int]]:
        """Note which slots have a file; return (name, slot or -1) of whatever else is there: slots behind the last one,
        and what is no slot."""

    def read(self, fd: int) -> list[int]:
        """Read the table of an earlier service; return the slots whose headers are damaged. Raises OSError."""

    def check_files(self, dirfd: int, later_bytes: int) -> None:
        """Look which slots are whole; any number of threads at once. Those of up to `later_bytes` are looked at when
        they are hashed: by `verify`, or once the store serves. Raises what is a shortage."""

    def keep_whole(self) -> None:
        """Drop what is not whole, and of blocks with one hash all but the one that was sealed first."""

    def objects(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield (number, object id, sequence, size in bytes) of each named object that is whole."""

    @property
    def has_objects(self) -> bool:
        """Return whether any named object is whole."""

    def want_rows(
        self,
        page: list[tuple[bytes, bytes]],
        buckets: dict[bytes, bool],
        replaceable: dict[int, Any],
        names: ObjectNames,
        units: dict[bytes, int],
    ) -> None:
        """Want the named objects of these (`bucket NUL key`, stored row) that agree with their slots and are in one of
        `buckets`, and note their names. `verify` hashes those of buckets that are durable, as `buckets` says, and
        those of `replaceable`. `units`: numbers by unit, filled in."""

    def lost_rows(
        self,
        page: list[tuple[bytes, bytes]],
        names: ObjectNames,
        below: RecordRows | None,
        apart: dict[int, Any],
    ) -> list[tuple[bytes, bytes]]:
        """Return those of a page of names that may have lost their bytes: neither `below` nor what is kept has them, or
        they are not plain; and what `apart` has. To be asked once `drop_bad` was."""

    def drop_names(self, names: ObjectNames) -> None:
        """Remove the names of objects that are not kept."""

    def want_blocks(self, buckets: set[int]) -> None:
        """Want the blocks of these buckets."""

    def sort(self) -> None:
        """Order what is wanted: pinned ones first, then by last use, the latest first; a block behind its ancestors, a
        unit's files together. So any first part of it is worth keeping."""

    def fit(self, room_bytes: int) -> int:
        """Keep as many, from the first on, as fit into so many bytes; return how many do not."""

    def verify(self, dirfd: int) -> None:
        """Hash what is not verified later; any number of threads at once. Raises what is a shortage."""

    def drop_bad(self) -> list[int]:
        """Drop what does not match its checksum; return the slots."""

    def take_unkept(self) -> list[tuple[int, int]]:
        """Return (slot, uid of its last object or 0) of each file that nothing of what is kept has, once."""

    def __len__(self) -> int: ...
    @property
    def slots_used(self) -> int:
        """How many slots the old table used."""

    @property
    def size_bytes(self) -> int: ...
    @property
    def unverified(self) -> int:
        """How many are to be verified once the store serves."""

    def keeps(self, object_id: int) -> bool:
        """Return whether a named object is kept."""

    def highest_sequence(self, limit: int) -> int:
        """Return the highest sequence up to `limit` of what is kept; 0 for none."""

    def bucket_ids(self) -> set[int]:
        """Return the buckets of the blocks that are kept."""

    def fill_sealed(self, counts: memoryview) -> int:
        """Set, for each slot that is kept, 1 more than the blocks of 512 bytes that its file takes; return the bytes of
        all of them."""

    def write_headers(self, table: Table) -> None:
        """Write the headers of all slots to a new table: those kept as they were, the others free."""

    def restore(
        self,
        table: Table,
        blocks: BlockIndex,
        numbers: dict[int, int],
        names: ObjectNames,
        insert: Callable[..., None],
        now: float,
    ) -> None:
        """Enter what is kept in the table, blocks in the index and by `insert` in a policy, the least dear first.
        `numbers`: the index's, by bucket id. `names` says which unit a named object is in."""

def slot_matches(dirfd: int, slot: int, size_bytes: int, checksum: int) -> bool:
    """Hash a slot's payload; return whether it has this size and checksum, and nobody can write it. Raises what is a
    shortage."""

def verify_slots(
    table: Table, dirfd: int, first: int, most: int, most_bytes: int
) -> tuple[int, list[tuple[bytes, int, int, bool]]]:
    """Hash the payloads of unverified slots from `first` on, among the next `most` slots and until `most_bytes` are
    hashed. Return the slot to go on with, and (key, slot, generation, whether it matches) of each."""
