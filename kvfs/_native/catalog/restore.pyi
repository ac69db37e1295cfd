"""What a start enters in the store of what the NVMe tier has."""

from kvfs._native.catalog.block_index import BlockIndex
from kvfs._native.catalog.logged_names import LoggedNames
from kvfs._native.catalog.object_names import ObjectNames
from kvfs._native.catalog.records import RecordRows
from kvfs._native.shared.table import Table

def restore_rows(
    page: list[tuple[bytes, bytes]],
    rows: RecordRows,
    logged: LoggedNames,
    apart: set[int],
    table: Table,
    names: ObjectNames,
    compare: bool,
) -> list[tuple[bytes, bytes]]:
    """Enter the objects of a page of names, as (`bucket NUL key`, stored row), that `rows` has and whose names `logged`
    has; return the others. `compare`: only where row and name are those of the log. `apart`: objects to leave alone."""

def restore_blocks(rows: RecordRows, table: Table, blocks: BlockIndex, numbers: dict[int, int]) -> list[int]:
    """Enter the blocks of `rows` whose bucket's id is in `numbers`, as the index's number; return the ids of the
    others, and of those of which a later one is there."""

def unrestored(rows: RecordRows) -> list[int]:
    """List the ids of the named objects that `restore_rows` did not enter."""
