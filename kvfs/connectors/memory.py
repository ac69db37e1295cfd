"""What weights are in memory: samples of a model's tensors, and whether they are still what they were.

Responsibility: `sample` digests what a model has in memory (names, types, shapes, and samples of the values), so that
weights are known by what is computed with, wherever they came from. `Guard` holds one sample as what the weights are,
and says when they are others.

The sample is compared with earlier samples, and never with files: types are cast, projections fused, shards cut and
matrices repacked on the way. Engines that load equal files in the same way have equal samples.

Invariants: every tensor is looked at, WEIGHTS_MEMORY_LINES places of 64 bytes in all, each at a place that is always
the same; a model of at most as many bytes is read whole. What differs in a sample differs in truth; a change of a few
values may be missed. Concurrency: none; called where nobody changes the weights meanwhile.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from kvfs._native.sampler import LINE_BYTES, lines_read
from kvfs._native.sampler import sample as sample_memory
from kvfs.limits import WEIGHTS_MEMORY_LINES

log = logging.getLogger("kvfs.connectors")

Named = tuple[str, torch.Tensor]


def tensors_of(model: torch.nn.Module, *, all_buffers: bool) -> Iterator[Named]:
    """Parameters and buffers of a model; only those buffers that are saved with it, unless `all_buffers`."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        kept_out = () if all_buffers else module._non_persistent_buffers_set
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in kept_out and id(tensor) not in seen:
                seen.add(id(tensor))
                yield from _plain(f"{prefix}.{name}", tensor)


def _plain(name: str, tensor: torch.Tensor) -> Iterator[Named]:
    """A tensor that is made of others (quantised, sharded) as these."""
    if hasattr(tensor, "__tensor_flatten__"):
        for part in tensor.__tensor_flatten__()[0]:
            yield from _plain(f"{name}.{part}", getattr(tensor, part))
    else:
        yield name, tensor


def sample(tensors: Iterable[Named], budget: int = WEIGHTS_MEMORY_LINES) -> bytes:
    """32 bytes that say what these tensors are. Of those that are nowhere (`meta`) type and shape alone."""
    named = list(tensors)
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0{tensor.is_meta}\0".encode())
    areas = [_area(tensor) for _, tensor in named if not tensor.is_meta]
    sizes = [area.nbytes for area in areas]
    if all(area.is_cpu for area in areas):
        digest.update(sample_memory([area.data_ptr() for area in areas], sizes, budget))
    else:
        lines = torch.cat(list(_gathered(areas, lines_read(sizes, budget))))
        digest.update(sample_memory([lines.data_ptr()], [lines.nbytes], lines.nbytes))
    return digest.digest()


def _area(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's values in the order of memory, as one row."""
    plain = tensor.detach()
    if plain.is_contiguous():
        return plain
    span = sum((size - 1) * stride for size, stride in zip(plain.shape, plain.stride(), strict=True)) + 1
    return plain.as_strided((span,), (1,)) if span == plain.numel() else plain.contiguous()


def _gathered(areas: Iterable[torch.Tensor], chosen: Iterable[list[int]]) -> Iterator[torch.Tensor]:
    """Lines of memory that only its device reads, on the CPU: the bytes that the native sample would read."""
    for area, lines in zip(areas, chosen, strict=True):
        if not lines:
            continue
        flat = area.reshape(-1).view(torch.uint8)
        whole = flat.numel() // LINE_BYTES
        index = torch.tensor([line for line in lines if line < whole], device=flat.device, dtype=torch.int64)
        yield flat[: whole * LINE_BYTES].view(whole, LINE_BYTES)[index].flatten().cpu()
        if lines[-1] == whole:
            yield flat[whole * LINE_BYTES :].cpu()


class Guard:
    """One worker's word for what its weights are."""

    def __init__(self, read: Callable[[], tuple[bytes, list[Any]]]) -> None:
        """`read` gives a sample, and objects that stand for weights that nobody can read: the same or others."""
        self._read = read
        self._held = read()

    @property
    def sample(self) -> bytes:
        return self._held[0]

    def renew(self) -> None:
        """From now on the weights are what they are now."""
        self._held = self._read()

    def holds(self) -> bool:
        """Whether the weights are still what they were."""
        digest, hidden = self._held
        now, hidden_now = self._read()
        return (
            now == digest
            and len(hidden) == len(hidden_now)
            and all(one is two for one, two in zip(hidden, hidden_now, strict=True))
        )
