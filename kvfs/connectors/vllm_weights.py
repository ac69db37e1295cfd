"""Whether a vLLM worker's weights are still those that its blocks are of.

Responsibility: `Watch` samples the worker's model (and draft model), holds the sample against later ones, and says to
this engine's other ranks when the weights are others: what a rank computes depends on the weights of all.

vLLM hands a connector no model and no word of a change: the model is found in the worker that registers its KV cache.

Invariants: once the weights were others, nothing is right until the epoch changes, though they may be changed back. A
rank that finishes a step has heard of every rank that took part in it: each looks before its part, and says at once.
What oneDNN has packed (vLLM on CPUs) nobody can read or change in place: whether it is packed anew is seen.
Concurrency: the worker's thread.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import chain
from types import FrameType
from typing import Any

import torch

from kvfs.connectors.memory import Guard, sample, tensors_of
from kvfs.errors import InvalidRequest
from kvfs.limits import WEIGHTS_DEVICE_CHECK_S

log = logging.getLogger("kvfs.connectors")

_PACKED = "cpu_linear"
"""Where vLLM keeps the function that multiplies by a packed matrix."""


class Watch:
    """See the module's header."""

    def __init__(self, models: Callable[[], list[torch.nn.Module]], peers: Peers) -> None:
        self._models = models
        self._peers = peers
        self._guard = Guard(self._read)
        self._epoch = 0
        self._on_cpu = all(
            tensor.is_cpu or tensor.is_meta
            for model in models()
            for _, tensor in tensors_of(model, all_buffers=False)
        )
        self._looked = time.monotonic()
        self.is_right = True
        self.changes = 0
        """How often the weights were found to be others."""

    @property
    def sample(self) -> bytes:
        return self._guard.sample

    def enter(self, epoch: int) -> None:
        """The weights of a new epoch are what they are now."""
        if epoch == self._epoch:
            return
        self._epoch = epoch
        self._guard.renew()
        self._looked = time.monotonic()
        self.is_right = True

    def look(self) -> bool:
        """Whether the weights are still those of the epoch; on a device as of WEIGHTS_DEVICE_CHECK_S ago at most."""
        now = time.monotonic()
        if self.is_right and (self._on_cpu or now - self._looked >= WEIGHTS_DEVICE_CHECK_S):
            self._looked = now
            if not self._guard.holds():
                self._end("the weights in memory are not those that this engine's blocks are of")
                self._peers.tell(self._epoch)
        return self.is_right

    def ask(self) -> bool:
        """The same of all ranks that took part in the step."""
        if self.is_right and self._peers.were_told(self._epoch):
            self._end("another rank's weights in memory are not those that this engine's blocks are of")
        return self.is_right

    def _end(self, why: str) -> None:
        self.is_right = False
        self.changes += 1
        log.error(
            "%s: nothing is loaded or stored until reset_prefix_cache(reset_connector=True), which is to be called "
            "after each change",
            why,
        )

    def _read(self) -> tuple[bytes, list[Any]]:
        models = self._models()
        tensors = chain.from_iterable(tensors_of(model, all_buffers=False) for model in models)
        packed = [vars(module).get(_PACKED) for model in models for module in model.modules()]
        return sample(tensors), packed


class Peers:
    """This engine's ranks, by the store in which they met."""

    def __init__(self, engine_id: str, ranks: int) -> None:
        self._engine_id = engine_id
        self._store: Any = None
        if ranks > 1:
            self._store = torch.distributed.distributed_c10d._get_default_store()

    def tell(self, epoch: int) -> None:
        if self._store is not None:
            self._store.set(self._key(epoch), b"1")

    def were_told(self, epoch: int) -> bool:
        return self._store is not None and bool(self._store.check([self._key(epoch)]))

    def _key(self, epoch: int) -> str:
        return f"kvfs: other weights in {self._engine_id}, epoch {epoch}"


def models_of_caller() -> Callable[[], list[torch.nn.Module]]:
    """The models of the worker that is calling. Raises InvalidRequest where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        worker: Any = frame.f_locals.get("self")
        if hasattr(worker, "get_model") and hasattr(worker, "get_draft_model"):
            return partial(_models_of, worker)
        frame = frame.f_back
    raise InvalidRequest("the weights in memory cannot be found: no worker of vLLM is calling")


def _models_of(worker: Any) -> list[torch.nn.Module]:
    found = [worker.get_model(), worker.get_draft_model()]
    return [model for model in found if isinstance(model, torch.nn.Module)]
