"""Detection of changed weights in a vLLM worker: its blocks are of the weights that computed them.

Responsibility: `Watch` samples the worker's model (and draft model), compares later samples with it, and notifies this
engine's other ranks of a change: what a rank computes depends on the weights of all.

vLLM gives a connector neither the model nor a notification: the model is found in the worker that registers its KV
cache.

Invariants: after a change nothing is loaded or stored until the epoch changes, even if the weights are changed back. At
the end of a step a rank knows of a change in every rank that took part: each looks before its part, and notifies at
once. Matrices that oneDNN has packed (vLLM on CPUs) cannot be read or changed in place; packing anew is detected.
Concurrency: the worker's thread.
"""

from __future__ import annotations

import logging
import operator
import sys
import time
from collections.abc import Callable
from itertools import chain
from types import FrameType
from typing import Any

import torch

from kvfs.connectors.memory import sample, tensors_of
from kvfs.errors import InvalidRequest
from kvfs.limits import WEIGHTS_DEVICE_CHECK_S

log = logging.getLogger("kvfs.connectors")

_PACKED = "cpu_linear"
"""Where vLLM keeps the function that multiplies by a packed matrix."""


class Watch:
    """Watch the weights of one worker."""

    def __init__(self, models: Callable[[], list[torch.nn.Module]], peers: Peers) -> None:
        self._models = models
        self._peers = peers
        self._held = self._read()
        self._epoch = 0
        self._on_cpu = all(
            tensor.is_cpu or tensor.is_meta
            for model in models()
            for _, tensor in tensors_of(model, all_buffers=False)
        )
        self._looked = time.monotonic()
        self.is_new = False
        """Whether this epoch has computed nothing yet."""
        self.is_right = True
        self.changes = 0
        """How often a change was found."""

    @property
    def sample(self) -> bytes:
        """Return the last sample of the weights, 32 bytes."""
        return self._held[0]

    def enter(self, epoch: int) -> None:
        """Begin an epoch, whose weights are sampled when it first computes: the engine resets, then changes them."""
        if epoch != self._epoch:
            self._epoch, self.is_new, self.is_right = epoch, True, True

    def look(self) -> bool:
        """Return whether the weights are still the epoch's; those on a device are read every WEIGHTS_DEVICE_CHECK_S."""
        now = time.monotonic()
        if self.is_new:
            self._held = self._read()
            self._looked, self.is_new = now, False
        elif self.is_right and (self._on_cpu or now - self._looked >= WEIGHTS_DEVICE_CHECK_S):
            self._looked = now
            if not self._holds():
                self._end("the weights in memory are not those that this engine's blocks are of")
                self._peers.notify(f"epoch {self._epoch}")
        return self.is_right

    def ask(self) -> bool:
        """Return whether the weights of all ranks that took part in the step are still the epoch's."""
        if self.is_right and self._peers.was_notified(f"epoch {self._epoch}"):
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

    def _holds(self) -> bool:
        (digest, packed), (now, packed_now) = self._held, self._read()
        same = len(packed) == len(packed_now)
        return now == digest and same and all(map(operator.is_, packed, packed_now))

    def _read(self) -> tuple[bytes, list[Any]]:
        """Return a sample, and the packed matrices, which nobody can read."""
        models = self._models()
        tensors = chain.from_iterable(tensors_of(model, all_buffers=False) for model in models)
        packed = [vars(module).get(_PACKED) for model in models for module in model.modules()]
        return sample(tensors), packed


class Peers:
    """Notify this engine's other ranks, over torch's own store of the group."""

    def __init__(self, engine_id: str, ranks: int) -> None:
        self._engine_id = engine_id
        self._store: Any = None
        if ranks > 1:
            self._store = torch.distributed.distributed_c10d._get_default_store()

    def notify(self, what: str) -> None:
        """Notify this engine's other ranks, over torch's own store of the group."""
        if self._store is not None:
            self._store.set(self._key(what), b"1")

    def was_notified(self, what: str) -> bool:
        """Return whether any rank has notified the others of `what`."""
        return self._store is not None and bool(self._store.check([self._key(what)]))

    def _key(self, what: str) -> str:
        return f"kvfs: other weights in {self._engine_id}, {what}"


def calling_worker() -> Any:
    """Return the worker of vLLM that is calling. Raises InvalidRequest without one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        worker: Any = frame.f_locals.get("self")
        if hasattr(worker, "get_model") and hasattr(worker, "get_draft_model"):
            return worker
        frame = frame.f_back
    raise InvalidRequest("the weights in memory cannot be found: no worker of vLLM is calling")


def models_of(worker: Any) -> list[torch.nn.Module]:
    """Return a worker's models: its own, and that of its drafts where it has one."""
    found = [worker.get_model(), worker.get_draft_model()]
    return [model for model in found if isinstance(model, torch.nn.Module)]


def adapters_of(worker: Any) -> Any:
    """Return what loads the adapters of a worker; None where it has none."""
    for each in (worker, getattr(worker, "model_runner", None)):
        manager = getattr(each, "lora_manager", None)
        if hasattr(manager, "_load_adapter"):
            return manager
    return None
