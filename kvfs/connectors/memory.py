"""Samples of the weights of a model in memory.

Responsibility: `sample` digests a model's tensors in memory (names, types, shapes, and samples of the values), so that
weights are identified by the values that are computed with, wherever they came from.

A sample is compared with earlier samples, never with files: loading casts types, fuses projections, cuts shards and
repacks matrices. Engines that load equal files in the same way have equal samples.

Invariants: a sample reads from every tensor, WEIGHTS_MEMORY_LINES lines of 64 bytes in all, always at the same
places; a model of at most as many bytes is read whole. Different samples mean different weights; a change of a few
values may be missed. Concurrency: none; nobody may change the weights meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch

from kvfs._native.hash.sampler import LINE_BYTES, lines_read
from kvfs._native.hash.sampler import sample as sample_memory
from kvfs.limits import WEIGHTS_MEMORY_LINES

Named = tuple[str, torch.Tensor]


def tensors_of(model: torch.nn.Module, *, all_buffers: bool) -> Iterator[Named]:
    """Yield parameters and buffers of a model; only those buffers that are saved with it, unless `all_buffers`."""
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        kept_out = () if all_buffers else module._non_persistent_buffers_set
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and name not in kept_out and id(tensor) not in seen:
                seen.add(id(tensor))
                yield from _plain(f"{prefix}.{name}", tensor)


def _plain(name: str, tensor: torch.Tensor) -> Iterator[Named]:
    """Yield the parts of a tensor that is made of others (quantised, sharded), else the tensor."""
    if hasattr(tensor, "__tensor_flatten__"):
        for part in tensor.__tensor_flatten__()[0]:
            yield from _plain(f"{name}.{part}", getattr(tensor, part))
    else:
        yield name, tensor


def sample(tensors: Iterable[Named], budget: int = WEIGHTS_MEMORY_LINES) -> bytes:
    """Return a digest of these tensors, 32 bytes; of tensors without memory (`meta`), of type and shape alone."""
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
    """Return the tensor's values in the order of memory, as one row."""
    plain = tensor.detach()
    if plain.is_contiguous():
        return plain
    span = sum((size - 1) * stride for size, stride in zip(plain.shape, plain.stride(), strict=True)) + 1
    return plain.as_strided((span,), (1,)) if span == plain.numel() else plain.contiguous()


def _gathered(areas: Iterable[torch.Tensor], chosen: Iterable[list[int]]) -> Iterator[torch.Tensor]:
    """Yield the lines that the native sample would read, copied to the CPU from memory that only a device reads."""
    for area, lines in zip(areas, chosen, strict=True):
        if not lines:
            continue
        flat = area.reshape(-1).view(torch.uint8)
        whole = flat.numel() // LINE_BYTES
        index = torch.tensor([line for line in lines if line < whole], device=flat.device, dtype=torch.int64)
        yield flat[: whole * LINE_BYTES].view(whole, LINE_BYTES)[index].flatten().cpu()
        if lines[-1] == whole:
            yield flat[whole * LINE_BYTES :].cpu()
