"""Objects that LMCache has looked up and locked: leased until they are unlocked, though the store evicts them.

Invariants: at most CONNECTOR_LOCKS are held. Concurrency: any thread; an object that is being copied when it is
unlocked is released when the copy ends.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from kvfs._native.blocks.reader import View
from kvfs.limits import CONNECTOR_LOCKS


class _Locked(NamedTuple):
    digest: bytes
    view: View


class ObjectLocks:
    """Views of objects, by LMCache's keys."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locked: dict[Hashable, list[_Locked]] = {}
        self._count = 0

    def __len__(self) -> int:
        """Return how many keys are locked."""
        return len(self._locked)

    @property
    def room(self) -> int:
        """Return how many objects can be locked beside those that are."""
        return max(CONNECTOR_LOCKS - self._count, 0)

    def lock(self, key: Hashable, digest: bytes, view: View) -> None:
        """Keep a view, which is the caller's no more."""
        with self._lock:
            self._locked.setdefault(key, []).append(_Locked(digest, view))
            self._count += 1

    def unlock(self, key: Hashable) -> None:
        """Release one view of a key; a key that is not locked is passed over."""
        with self._lock:
            locked = self._locked.get(key)
            if not locked:
                return
            view = locked.pop().view
            self._count -= 1
            if not locked:
                del self._locked[key]
        _release(view)

    def copy(self, key: Hashable, digests: Sequence[bytes], place: Any) -> bool:
        """Copy an object that is stored under one of the digests and fills its place; return whether it is locked."""
        with self._lock:
            locked = [each.view for each in self._locked.get(key, ()) if each.digest in digests]
            source = next((memoryview(view) for view in locked if len(view) == len(place)), None)
        if source is None:
            return False
        np.copyto(np.frombuffer(place, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))
        return True

    def close(self) -> None:
        """Release all."""
        with self._lock:
            views = [each.view for some in self._locked.values() for each in some]
            self._locked.clear()
            self._count = 0
        for view in views:
            _release(view)


def _release(view: View) -> None:
    with suppress(BufferError):  # being copied: released when that ends
        view.release()
