"""The place of a block's bytes in vLLM's paged KV cache, and their namespace.

Responsibility: describe the tensors that vLLM registers as flat memory with offsets, so that a block is copied straight
between them and the store, and everything about them that decides a block's bytes.

A stored block is its layers one after the other, in the order of the cache group; a layer is the bytes of that block
in the layer's tensor, in the order of memory. vLLM gives each layer as [rows, heads, tokens, elements], with the
strides of its backend; a block has one row, or several where the backend's blocks are smaller. Recurrent layers' state
is the bytes of all its tensors, without what vLLM pads it by. Layers of a group may differ in size.

Invariants: tensors that cannot be described are refused (InvalidRequest). Two engines have one namespace only if the
same tokens give the same bytes. Concurrency: immutable.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from kvfs._native.blocks.pieces import Scatter
from kvfs._native.cuda.copies import DevicePlaces
from kvfs.connectors.common import architecture_of, config_digest, model_revision
from kvfs.connectors.vllm_rules.cache_groups import spec_of
from kvfs.errors import InvalidRequest
from kvfs.namespace_groups import BACKEND, CACHE
from kvfs.namespaces import Namespace

FORMAT = "1"
"""The format of a stored block; another order of bytes gets another one, and so another namespace."""
_COMPRESSED = ("MLAAttentionSpec", "MambaSpec")
"""Kinds of cache whose blocks have neither heads nor keys and values."""
_DTYPES = {
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.float32: "float32",
    torch.uint8: "int8",
    torch.int8: "int8",
    torch.float8_e4m3fn: "float8_e4m3",
    torch.float8_e5m2: "float8_e5m2",
}


@dataclass(frozen=True)
class Paged:
    """One layer's cache as flat memory. A block's bytes are pieces of `run_bytes`, at block times `block_stride_bytes`
    plus each of `run_offsets`."""

    memory: torch.Tensor
    """uint8, one axis: from block 0 to the end of the allocation, on the cache's device."""
    num_blocks: int
    block_stride_bytes: int
    run_offsets: tuple[int, ...]
    run_bytes: int
    form: str
    """Shape and order of the axes of a block, for the namespace."""

    @property
    def shape(self) -> tuple[int, tuple[int, ...], int]:
        """Return what layers have in common: bytes from block to block, offsets of runs, bytes of a run."""
        return self.block_stride_bytes, self.run_offsets, self.run_bytes

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block in this layer."""
        return len(self.run_offsets) * self.run_bytes

    def pieces(self, block_id: int) -> list[torch.Tensor]:
        """Return the memory of a block."""
        at = block_id * self.block_stride_bytes
        return [self.memory[at + run : at + run + self.run_bytes] for run in self.run_offsets]

    def rows(self, run_offset: int) -> torch.Tensor:
        """Return a run of all blocks: [blocks, run_bytes]."""
        return self.memory.as_strided(
            (self.num_blocks, self.run_bytes),
            (self.block_stride_bytes, 1),
            self.memory.storage_offset() + run_offset,
        )


def paged(tensor: torch.Tensor, num_blocks: int) -> Paged:
    """View a tensor as rows of blocks. Raises InvalidRequest for a tensor that is no row of blocks."""
    if not num_blocks or tensor.dim() < 2 or tensor.shape[0] % num_blocks:
        raise InvalidRequest(f"KV cache of shape {tuple(tensor.shape)} is no row of {num_blocks} blocks")
    rows, item = tensor.shape[0] // num_blocks, tensor.element_size()
    inner = [
        (size, stride * item) for size, stride in zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
    ]
    run = item
    outer: list[tuple[int, int]] = []
    for size, stride in sorted(inner, key=lambda axis: axis[1]):
        if size == 1:
            continue
        if stride == run and not outer:
            run *= size
        else:
            outer.append((size, stride))
    outer.append((rows, tensor.stride(0) * item))
    steps = [[i * stride for i in range(size)] for size, stride in reversed(outer)]
    offsets = tuple(sum(each) for each in itertools.product(*steps))
    order = sorted(range(len(inner)), key=lambda axis: -inner[axis][1])
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return Paged(
        memory=memory[tensor.storage_offset() * item :],
        num_blocks=num_blocks,
        block_stride_bytes=rows * tensor.stride(0) * item,
        run_offsets=offsets,
        run_bytes=run,
        form=f"{rows}x{'x'.join(str(size) for size in tensor.shape[1:])} order {''.join(map(str, order))}",
    )


class KVLayout:
    """Describe all layers of an engine's cache."""

    def __init__(self, layers: Mapping[str, torch.Tensor], num_blocks: int) -> None:
        """Take `layers` in the order of a block; those that share their memory count once. Raises InvalidRequest."""
        self.names: list[str] = []
        self.layers: list[Paged] = []
        seen: set[int] = set()
        for name, tensor in layers.items():
            place = paged(tensor, num_blocks)
            if place.memory.data_ptr() not in seen:
                seen.add(place.memory.data_ptr())
                self.names.append(name)
                self.layers.append(place)
        if not self.layers:
            raise InvalidRequest("the engine has no KV cache")
        first = self.layers[0]
        self.is_even = all((place.form, place.shape) == (first.form, first.shape) for place in self.layers)
        """Whether all layers have the same size and form, so that blocks are copied layer by layer."""
        self.device = first.memory.device
        strides = {place.block_stride_bytes for place in self.layers}
        if not self.is_on_cpu and len(strides) > 1:
            raise InvalidRequest(
                f"layers whose blocks are {sorted(strides)} bytes apart are not supported in one KV cache on a device"
            )
        self.block_bytes = sum(place.block_bytes for place in self.layers)
        self.form = (
            f"{len(self.layers)} layers of {first.form}" if self.is_even else _form_of_each(self.layers)
        )

    @property
    def is_on_cpu(self) -> bool:
        """Return whether the cache is in the processor's memory."""
        return self.device.type == "cpu"

    @property
    def parts(self) -> int:
        """Return into how many equal parts of consecutive layers a block is divided."""
        return len(self.layers) if self.is_even else 1

    def places(
        self, block_ids: Sequence[int], layer: int | None = None
    ) -> Scatter | list[list[torch.Tensor]]:
        """Return the places of blocks, or of one layer of them, in memory on the CPU."""
        layers = self.layers if layer is None else [self.layers[layer]]
        if not self.is_even:
            return [[piece for place in layers for piece in place.pieces(block)] for block in block_ids]
        offsets = self._offsets(block_ids).numpy()
        return Scatter([place.memory for place in layers], offsets, layers[0].run_bytes)

    def pieces(self, block_id: int, part: int) -> list[torch.Tensor]:
        """Return the memory of one part of a block."""
        layers = [self.layers[part]] if self.is_even else self.layers
        return [piece for place in layers for piece in place.pieces(block_id)]

    def device_places(self, block_ids: Sequence[int]) -> DevicePlaces:
        """Return the places of blocks in memory on a device."""
        starts = [block_id * self.layers[0].block_stride_bytes for block_id in block_ids]
        piece = math.gcd(*(place.run_bytes for place in self.layers))
        runs = [
            place.memory.data_ptr() + offset + at
            for place in self.layers
            for offset in place.run_offsets
            for at in range(0, place.run_bytes, piece)
        ]
        storages = [place.memory.untyped_storage() for place in self.layers]
        regions = sorted({(storage.data_ptr(), storage.nbytes()) for storage in storages})
        return DevicePlaces(starts, runs, piece, regions)

    def _offsets(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Return where each run of blocks begins in each layer: int64 [blocks, runs], bytes."""
        first = self.layers[0]
        blocks = torch.tensor(block_ids, dtype=torch.int64) * first.block_stride_bytes
        return blocks[:, None] + torch.tensor(first.run_offsets, dtype=torch.int64)

    def gather(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Copy blocks of a cache on a device to the CPU: uint8, [blocks, block_bytes]."""
        index = torch.tensor(block_ids, device=self.device)
        runs = [place.rows(offset)[index] for place in self.layers for offset in place.run_offsets]
        return torch.cat(runs, dim=1).cpu()

    def scatter(self, block_ids: Sequence[int], blocks: torch.Tensor) -> None:
        """Write rows of `gather`'s form into a cache on a device."""
        index, end = torch.tensor(block_ids, device=self.device), 0
        for place in self.layers:
            begin, end = end, end + place.block_bytes
            part = blocks[:, begin:end].to(self.device)
            # Run by run, since bytes with several outer strides are no view of a tensor.
            for run, offset in enumerate(place.run_offsets):
                rows = place.rows(offset)
                rows[index] = part[:, run * place.run_bytes : (run + 1) * place.run_bytes]


def _form_of_each(layers: Sequence[Paged]) -> str:
    """Return the form of a block whose layers differ, for the namespace."""
    forms = [f"{form} of {size} bytes" for form, size in ((each.form, each.block_bytes) for each in layers)]
    return ", ".join(f"{len(list(same))} layers of {form}" for form, same in itertools.groupby(forms))


@dataclass(frozen=True, slots=True)
class Shard:
    """A worker's part of the blocks of one cache group."""

    namespace: Namespace
    layout: KVLayout


def check_parallel(parallel: Any) -> None:
    """Check vLLM's ParallelConfig. Raises InvalidRequest for context parallelism, whose ranks have parts of a block."""
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise InvalidRequest(f"{name} = {getattr(parallel, name)}: context parallelism is not supported")


def namespace_of(
    vllm_config: Any,
    spec: Any,
    layout: KVLayout,
    dtype: torch.dtype,
    extra: Mapping[str, str],
) -> Namespace:
    """Return this worker's namespace for the blocks of a cache group; `extra` is what sets these apart from other
    groups'. Raises InvalidRequest for a cache that cannot be described."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    if dtype not in _DTYPES:
        raise InvalidRequest(f"KV cache of {dtype} is not supported")
    tensor_shards = parallel.tensor_parallel_size
    decides = {
        "engine": "vllm",
        "format": FORMAT,
        CACHE: layout.form,
        "cache_dtype": str(vllm_config.cache_config.cache_dtype),
        BACKEND: _backend_of(vllm_config, layout.names[0]),
        "quantization": str(model.quantization),
        "model_dtype": str(model.dtype),
        "config": config_digest(model.hf_config),
        **extra,
    }
    return Namespace(
        model=architecture_of(model.hf_config),
        revision=model_revision(
            model.model,
            vllm_config.kv_transfer_config.kv_connector_extra_config.get("revision"),
            model.revision,
        ),
        dtype=_DTYPES[dtype],
        layout="LTC" if type(spec).__name__ in _COMPRESSED else "LHTKD",
        block_tokens=spec.block_size,
        tensor_shards=tensor_shards,
        tensor_rank=parallel.rank % tensor_shards,
        pipeline_shards=parallel.pipeline_parallel_size,
        pipeline_rank=parallel.rank // tensor_shards % parallel.pipeline_parallel_size,
        lora="",
        salt="",
        hash="sha256",
        extra=decides,
    )


def shard_of(
    vllm_config: Any,
    kv_cache_config: Any,
    group: Any,
    kv_caches: Mapping[str, torch.Tensor],
    extra: Mapping[str, str] = MappingProxyType({}),
) -> Shard:
    """Return this worker's part of a cache group, of the layers that it has. Raises InvalidRequest."""
    named = {name: kv_caches[name] for name in group.layer_names if name in kv_caches}
    layout = KVLayout(named, kv_cache_config.num_blocks)
    dtype = next(iter(named.values())).dtype
    return Shard(namespace_of(vllm_config, spec_of(group), layout, dtype, extra), layout)


def _backend_of(vllm_config: Any, layer_name: str) -> str:
    """Return the attention backend, and on CPUs the instruction set, which decides how it packs a block."""
    layer = vllm_config.compilation_config.static_forward_context.get(layer_name)
    backend = getattr(layer, "attn_backend", None)
    name = backend.get_name() if backend is not None else type(layer).__name__
    return f"{name} {getattr(layer, 'isa', '-')}"
