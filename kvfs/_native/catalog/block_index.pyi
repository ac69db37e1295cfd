"""The blocks of a store: their attributes by prefix hash, by object id, by bucket, and what stands behind them."""

from typing_extensions import disjoint_base

_Fields = tuple[int, int, int, int, int, bool, bytes | None]
"""Bucket's number, uid, size in bytes, sequence, time of the seal, whether it is pinned, parent."""

@disjoint_base
class BlockIndex:
    """Keeps blocks by their prefix hash of 16 bytes, in 90 bytes each. Raises InvalidRequest for a key of another
    length; a bucket's number is one that is open."""

    def __new__(cls) -> BlockIndex: ...
    def add(
        self,
        key: bytes,
        bucket: int,
        uid: int,
        size_bytes: int,
        sequence: int,
        sealed_ns: int,
        pinned: bool,
        parent: bytes | None,
    ) -> None:
        """Add a block in the place of an equal one. Raises InvalidRequest for a bucket that is not open."""

    def remove(self, key: bytes) -> _Fields | None: ...
    def get(self, key: bytes) -> _Fields | None: ...
    def sequence_of(self, key: bytes) -> int | None: ...
    def of_sequence(self, sequence: int) -> bytes | None:
        """Return the key of the block with this sequence."""

    def pin(self, key: bytes, pinned: bool) -> None: ...
    def __contains__(self, key: bytes, /) -> bool: ...
    def __len__(self) -> int: ...
    @property
    def state_bytes(self) -> int:
        """Bytes allocated now."""

    def open_bucket(self) -> int:
        """Return the number of a new bucket."""

    def close_bucket(self, bucket: int) -> None:
        """End the number of an empty bucket."""

    def bucket_blocks(self, bucket: int) -> int: ...
    def bucket_bytes(self, bucket: int) -> int: ...
    def shelf_blocks(self, bucket: int, first: int) -> int:
        """Count the blocks of a bucket whose keys begin with this byte."""

    def shelf(self, bucket: int, first: int) -> list[bytes]:
        """List the keys of a bucket that begin with this byte, in order."""

    def keys(self) -> bytearray:
        """Return all keys, one behind the other, in the order of their seals."""

    def children(self, key: bytes) -> int:
        """Count the other blocks that name this one, which need not be here itself, as their parent."""

    def descendants(self, key: bytes) -> list[bytes]:
        """List the blocks behind a key, which need not be here itself, parents first."""
