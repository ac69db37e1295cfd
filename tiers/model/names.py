"""What the objects of the store are called, by the digests of their keys.

Responsibility: the name of each named object, natively: as Python objects a million would take half a gigabyte.

Invariants: an object is here exactly while it is in the index. Concurrency: the service's trio thread.
"""

from __future__ import annotations

from kvfs._native.catalog.object_names import ObjectNames
from tiers.model.objects import Name


class NameCatalog:
    """Keeps the names of all objects; a block's digest is never here."""

    def __init__(self) -> None:
        self.native = ObjectNames()

    def get(self, digest: bytes) -> Name | None:
        """Return what an object is called."""
        found = self.native.get(digest)
        return None if found is None else Name(*found)

    def __setitem__(self, digest: bytes, name: Name) -> None:
        self.native.set(digest, name.bucket, name.key)

    def remove(self, digest: bytes) -> None:
        """Remove an object, if it is here."""
        self.native.remove(digest)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self.native

    def __len__(self) -> int:
        return len(self.native)
