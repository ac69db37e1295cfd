"""Blocks that arrive layer by layer, so that compute on the first overlaps the copy of the rest.

Invariants: a block is leased from before its first layer until its last one is copied: it is a hit in all layers,
or in none. Layers arrive in order. Concurrency: one thread copies, any may wait.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future

from kvfs import limits
from kvfs._native.blocks.pieces import Pieces
from kvfs._native.blocks.reader import MISS, View
from kvfs.client.transport import Deadline
from kvfs.errors import DeadlinePassed, InvalidRequest


class Loading:
    """A load under way."""

    done: Future[list[int]]
    """The bytes of each whole block, -1 for a miss."""

    def __init__(self, layers: list[Pieces]) -> None:
        if not layers:
            raise InvalidRequest("a block has at least one layer")
        self._layers = layers
        self._changed = threading.Condition()
        self._copied = 0
        self._hits: list[bool] = []

    def load(self, views: list[View | None]) -> list[int]:
        """Copy all layers out of `views`, and release the views."""
        held = [view for view in views if view is not None]
        try:
            sizes = {len(view) for view in held}
            if len(sizes) > 1 or any(size % len(self._layers) for size in sizes):
                raise InvalidRequest(
                    f"blocks of {sorted(sizes)} bytes have no {len(self._layers)} equal layers"
                )
            layer_bytes = max(sizes, default=0) // len(self._layers)
            self._hits = [view is not None for view in views]
            for number, pieces in enumerate(self._layers):
                View.copy(views, number * layer_bytes, layer_bytes, pieces)
                with self._changed:
                    self._copied = number + 1
                    self._changed.notify_all()
            return [MISS if view is None else len(view) for view in views]
        finally:
            for view in held:
                view.release()

    def wait_layer(self, layer: int, *, timeout_s: float | None = None) -> list[bool]:
        """Wait until a layer of every block is copied; return which blocks are hits.

        Raises DeadlinePassed, and what the load raised.
        """
        if not 0 <= layer < len(self._layers):
            raise InvalidRequest(f"layer {layer} of {len(self._layers)}")
        self.done.add_done_callback(self._wake)
        deadline = Deadline.after(limits.CLIENT_TIMEOUT_S if timeout_s is None else timeout_s)
        with self._changed:
            while self._copied <= layer:
                if self.done.done():
                    self.done.result()
                if not self._changed.wait(deadline.left_s) and deadline.left_s <= 0:
                    raise DeadlinePassed(f"layer {layer} did not come within {deadline.limit_s:g} s")
            return list(self._hits)

    def _wake(self, _: object) -> None:
        with self._changed:
            self._changed.notify_all()
