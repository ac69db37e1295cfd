"""One level of a path, walked in the name index: the inner loop of listings without attributes."""

from typing import Any

ENDED: int
MORE: int
LONG: int

def scan_level(
    cursor: Any, prefix: bytes, limit: int
) -> tuple[list[tuple[bytes, int, int, bool]], bytes, int]:
    """What is directly below `prefix` from the cursor's place on, of at most `limit` names looked at.

    (entries, last, why it stopped). An entry is (tail, inode number, object id, whether a longer name than it came
    next, so that its directory may be behind that); a directory's tail ends in `/`, and its object id is 0. `last` is
    the last tail looked at. Files with a directory of their name next are left out, and so is what is no path.
    """
