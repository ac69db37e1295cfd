"""Tensors in a GPU's memory as the places of blocks.

Responsibility: find where tensors of whatever library lie; refuse what is not on a device, or not in one piece.
Concurrency: pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvfs._native.blocks.pieces import Scatter
from kvfs._native.cuda.copies import DevicePlaces
from kvfs.errors import InvalidRequest

Tensor = Any
"""A contiguous tensor of PyTorch, or anything with `__cuda_array_interface__`."""
DeviceMemory = Sequence[Tensor] | Scatter
"""A tensor for each block, all of one size; or a `Scatter` over tensors whose rows of offsets are alike: equal
distances from the first to each other one."""

_NOWHERE = 1 << 62
"""An address that nothing has: plans say whether places are good before there is anything to copy."""


def places_of(buffers: DeviceMemory, *, writable: bool) -> DevicePlaces:
    """Describe tensors as the places of blocks. Raises InvalidRequest naming what cannot be described, lies outside of
    its tensor, or is to be written twice."""
    places = _scattered(buffers, writable) if isinstance(buffers, Scatter) else _whole(buffers, writable)
    if len(places):
        size_bytes = len(places) * places.block_bytes
        planned = places.load_plan if writable else places.store_plan
        planned(range(_NOWHERE, _NOWHERE + size_bytes, places.block_bytes), [(_NOWHERE, size_bytes)])
    return places


def _whole(tensors: Sequence[Tensor], writable: bool) -> DevicePlaces:
    extents = [_extent(tensor, writable) for tensor in tensors]
    sizes = {size_bytes for _, size_bytes in extents}
    if len(sizes) > 1:
        raise InvalidRequest(f"tensors of {sorted(sizes)} bytes: blocks in a GPU's memory have one size")
    if not all(sizes):
        raise InvalidRequest("a tensor of 0 bytes")
    return DevicePlaces([start for start, _ in extents], [0], max(sizes, default=0), _regions(extents))


def _scattered(scatter: Scatter, writable: bool) -> DevicePlaces:
    extents = [_extent(base, writable) for base in scatter.bases]
    rows = [[row] if isinstance(row, int) else list(row) for row in _listed(scatter.offsets)]
    steps = [offset - rows[0][0] for offset in rows[0]] if rows else []
    for number, row in enumerate(rows):
        if [offset - row[0] for offset in row] != steps or min(row, default=-1) < 0:
            raise InvalidRequest(
                f"offsets {row} of block {number}, {rows[0]} of the first: in a GPU's memory the pieces of each block "
                "lie at the same distances from its first"
            )
    pieces = [start + step for start, _ in extents for step in steps]
    return DevicePlaces([row[0] for row in rows], pieces, scatter.piece_bytes, _regions(extents))


def _listed(offsets: Any) -> Any:
    """Return the numbers of an array as lists, a sequence as it is."""
    return offsets.tolist() if hasattr(offsets, "tolist") else offsets


def _extent(tensor: Tensor, writable: bool) -> tuple[int, int]:
    """Return where a tensor lies in the device's memory, and its bytes."""
    # PyTorch's: the interface has no names for bfloat16 and the types of 8 bits.
    if hasattr(tensor, "data_ptr"):
        if tensor.device.type != "cuda":
            raise InvalidRequest(f"a tensor on {tensor.device}: not in a GPU's memory")
        if not tensor.is_contiguous():
            raise InvalidRequest(f"a tensor of strides {tuple(tensor.stride())} is not contiguous")
        return tensor.data_ptr(), tensor.numel() * tensor.element_size()
    described = getattr(tensor, "__cuda_array_interface__", None)
    if described is None:
        raise InvalidRequest(f"{type(tensor).__name__} is no tensor in a GPU's memory")
    (address, is_read_only), shape = described["data"], described["shape"]
    item_bytes = int(described["typestr"][2:])
    if is_read_only and writable:
        raise InvalidRequest("a tensor that is read-only")
    strides = described.get("strides")
    whole = [item_bytes * math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    if strides is not None and list(strides) != whole:
        raise InvalidRequest(f"a tensor of strides {tuple(strides)} is not contiguous")
    return address, item_bytes * math.prod(shape)


def _regions(extents: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the memory of tensors, what several have in common once. Neighbours stay apart: they may be two mappings,
    which no copy spans."""
    regions: list[tuple[int, int]] = []
    for start, size_bytes in sorted({extent for extent in extents if extent[1]}):
        if regions and start < sum(regions[-1]):
            begin = regions[-1][0]
            regions[-1] = (begin, max(sum(regions[-1]), start + size_bytes) - begin)
        else:
            regions.append((start, size_bytes))
    return regions
