"""What the objects of a store are called."""

from typing_extensions import disjoint_base

@disjoint_base
class ObjectNames:
    """Keeps names by the digest of an object's store key, in 35 to 45 bytes and the key's own each. Another digest, as
    of a block, is not here."""

    def __new__(cls) -> ObjectNames: ...
    def get(self, digest: bytes) -> tuple[bytes, bytes] | None:
        """Return (bucket, key)."""

    def set(self, digest: bytes, bucket: bytes, key: bytes) -> None:
        """Name an object, in the place of an earlier name. Raises InvalidRequest for a key over 65,535 bytes, or a
        digest of no object."""

    def remove(self, digest: bytes) -> tuple[bytes, bytes] | None: ...
    def __contains__(self, digest: bytes, /) -> bool: ...
    def __len__(self) -> int: ...
    @property
    def state_bytes(self) -> int:
        """Bytes in use, without the allocator's own."""
