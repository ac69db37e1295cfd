"""Locations as bytes: what is sent to the directory's scripts, and what they answer.

Responsibility: the place of a block (two bytes choose one of 65,536 hashes, the next eight are a field there), changes,
parts of a manifest, and the holders in an answer. docs/formats.md has the keys.

Invariants: a place is 80 bits of a prefix hash: two blocks with the same place cost a request that the holder refuses,
never wrong bytes. An answer is checked before it counts. Concurrency: pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvfs.errors import ProtocolError

PLACE_BYTES: Final = 10
BUCKETS: Final = 1 << 16
NUMBER_BYTES: Final = 2


def place_of(digest: bytes) -> bytes:
    """Return where the directory keeps the holders of a block."""
    return digest[:PLACE_BYTES]


def bucket_of(digest: bytes) -> int:
    """Return which of the hashes has the place."""
    return digest[0] << 8 | digest[1]


def encode_places(digests: Iterable[bytes]) -> bytes:
    """Return the argument of a lookup and of a manifest's part."""
    return b"".join(map(place_of, digests))


def encode_changes(changes: Iterable[tuple[bytes, bool]]) -> bytes:
    """Return the argument of a change: each place, and whether this machine holds the block."""
    return b"".join(place_of(digest) + (b"+" if held else b"-") for digest, held in changes)


def decode_holders(answer: object, count: int) -> list[tuple[int, ...]]:
    """Return the numbers of each block's holders. Raises ProtocolError."""
    if not isinstance(answer, list) or len(answer) != count:
        raise ProtocolError(f"the directory's answer is none for {count} blocks")
    try:
        numbers = {each: _numbers(each) for each in set(answer)}
    except TypeError:
        raise ProtocolError("the directory answered something else than holders") from None
    return [numbers[each] for each in answer]


def _numbers(holders: object) -> tuple[int, ...]:
    if not isinstance(holders, bytes) or len(holders) % NUMBER_BYTES:
        raise ProtocolError("the directory's answer ends within the holders of a block")
    return tuple(holders[at] << 8 | holders[at + 1] for at in range(0, len(holders), NUMBER_BYTES))
