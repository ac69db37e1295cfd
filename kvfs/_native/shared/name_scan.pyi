"""One level of a path, walked in the name index: the inner loop of listings without attributes."""

from typing import Any

ENDED: int
MORE: int
LONG: int

def scan_level(
    cursor: Any, prefix: bytes, limit: int
) -> tuple[list[tuple[bytes, int, int, bool, bool]], bytes, int]:
    """Return the names directly below `prefix` from the cursor's place on, of at most `limit` names looked at.

    The result is (entries, last, why it stopped). An entry is (tail, inode number, object id, whether a longer name
    came next, so that a directory of the same name may follow that, whether it is a symbolic link); a directory's tail
    ends in `/`, and its object id is 0. `last` is the last tail looked at. Files followed by a directory of their name,
    and keys that are no path, are left out.
    """
