"""Samples of the weights of a model in memory.

Responsibility: `sample` digests a model's tensors in memory (names, types, shapes, and samples of the values), so that
weights are identified by the values that are computed with, wherever they came from. `Contents` finds all that a model
computes with: tensors, settings, and weights that are packed into objects of other kinds.

A sample is compared with earlier samples, never with files: loading casts types, fuses projections, cuts shards and
repacks matrices. Engines that load equal files in the same way have equal samples.

Invariants: a sample reads from every tensor, WEIGHTS_MEMORY_LINES lines of 64 bytes in all, always at the same
places; a model of at most as many bytes is read whole. Different samples mean different weights; a change of a few
values may be missed. `Contents` passes over nothing in silence: what it cannot look into is an error. Concurrency:
none; nobody may change the weights meanwhile.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Iterator, Mapping, Set
from enum import Enum
from functools import partial
from types import ModuleType
from typing import Any, Final

import torch

from kvfs._native.hash.sampler import LINE_BYTES, lines_read
from kvfs._native.hash.sampler import sample as sample_memory
from kvfs.errors import InvalidRequest
from kvfs.limits import WEIGHTS_MEMORY_LINES

Named = tuple[str, torch.Tensor]
_PLAIN: Final = (
    *(bool, int, float, complex, str, bytes, type(None), Enum, range, slice),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_NOT_COMPUTED_WITH: Final = frozenset(
    (
        *("_parameters", "_buffers", "_modules"),  # listed by themselves
        *("_name_or_path", "name_or_path", "_commit_hash"),  # where a model lies
        *("generation_config", "warnings_issued"),
    )
)
_unpacked: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, tuple[torch.ScriptObject, bytes]]]
_unpacked = weakref.WeakKeyDictionary()
"""By module and attribute: packed weights, and the digest of what is in them."""


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
    elif tensor.is_quantized:
        yield f"{name} {tensor.qscheme()}", tensor.int_repr()
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            scale = tensor.q_scale(), tensor.q_zero_point()
            yield f"{name}.scale", torch.tensor(scale, dtype=torch.float64)
        else:
            yield f"{name}.scales {tensor.q_per_channel_axis()}", tensor.q_per_channel_scales()
            yield f"{name}.zero_points", tensor.q_per_channel_zero_points()
    else:
        yield name, tensor if tensor.layout == torch.strided else tensor.to_dense()


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


class Contents:
    """What a model computes with, wherever its modules keep it: tensors to be sampled, and a description of the rest.

    What nobody can look into is refused. Functions are known by their names, bound methods by their objects as well.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Read all modules of a model. Raises InvalidRequest that names the module."""
        self.tensors: list[Named] = []
        self.description: list[str] = []
        self._seen: dict[int, tuple[str, object]] = {}
        """By id: where each was met first, and itself, so that nothing else takes its id meanwhile."""
        self._module("", model)

    def digest(self) -> bytes:
        """Return a digest of samples of the tensors and of the description, 32 bytes."""
        digest = hashlib.sha256(sample(self.tensors))
        digest.update("\0".join(self.description).encode("utf-8", "surrogateescape"))
        return digest.digest()

    def _is_known(self, where: str, value: object) -> bool:
        """Note where a value was met; one that was met before counts as that one, by where it was first."""
        if (known := self._seen.get(id(value))) is not None:
            self.description.append(f"{where} is {known[0]}")
            return True
        self._seen[id(value)] = where, value
        return False

    def _module(self, where: str, module: torch.nn.Module) -> None:
        if self._is_known(where, module):
            return
        self.description.append(f"{where}: {_kind(module)}")
        for key, value in vars(module).items():
            if key not in _NOT_COMPUTED_WITH:
                self._add(module, f"{where}.{key}", value)
        for kept in (module._parameters, module._buffers, module._modules):
            for key, value in kept.items():
                self._add(module, f"{where}.{key}" if where else key, value)

    def _add(self, module: torch.nn.Module, where: str, value: Any) -> None:
        if isinstance(value, _PLAIN):
            self.description.append(f"{where}={value!r}")
        elif isinstance(value, torch.Tensor):
            self._tensor(module, where, value)
        elif isinstance(value, torch.ScriptObject):
            self.description.append(f"{where}={_packed(module, where, value).hex()}")
        elif isinstance(value, torch.nn.Module):
            self._module(where, value)
        elif isinstance(value, Mapping):
            self.description.append(f"{where}: {len(value)}")
            for key, each in value.items():
                self._add(module, f"{where}[{key!r}]", each)
        elif isinstance(value, Set):
            for number, each in enumerate(sorted(value, key=repr)):
                self._add(module, f"{where}{{{number}}}", each)
        elif isinstance(value, list | tuple):
            self.description.append(f"{where}: {len(value)}")
            for number, each in enumerate(value):
                self._add(module, f"{where}[{number}]", each)
        else:
            self._object(module, where, value)

    def _tensor(self, module: torch.nn.Module, where: str, tensor: torch.Tensor) -> None:
        if self._is_known(where, tensor):
            return
        self.tensors.extend(_plain(where, tensor))
        if hasattr(tensor, "__tensor_flatten__"):
            self._add(module, f"{where} is", tensor.__tensor_flatten__()[1])
        for key, value in vars(tensor).items():  # scales beside packed values
            self._add(module, f"{where}.{key}", value)

    def _object(self, module: torch.nn.Module, where: str, value: Any) -> None:
        if isinstance(value, partial):
            parts: dict[str, Any] = {"func": value.func, "args": value.args, "keywords": value.keywords}
        elif hasattr(value, "__qualname__"):  # a function, a method, a class
            self.description.append(f"{where}={getattr(value, '__module__', None)}.{value.__qualname__}")
            bound = getattr(value, "__self__", None)
            if bound is not None and not isinstance(bound, type | ModuleType):  # which functions in C have
                self._add(module, f"{where} of", bound)
            return
        elif hasattr(value, "__dict__"):
            parts = vars(value)
        else:
            raise InvalidRequest(
                f"module {where.rpartition('.')[0]!r} ({_kind(module)}) computes with {where!r}, a {_kind(value)} that "
                "cannot be looked into: its cache would not be told from that of other weights"
            )
        if self._is_known(where, value):
            return
        self.description.append(f"{where}: {_kind(value)}")
        for key, each in parts.items():
            if key not in _NOT_COMPUTED_WITH:
                self._add(module, f"{where}.{key}", each)


def _packed(module: torch.nn.Module, where: str, value: torch.ScriptObject) -> bytes:
    """Return a digest of packed weights, which nothing changes in place: they are unpacked once."""
    held = _unpacked.setdefault(module, {})
    name = where.rpartition(".")[2]
    if name not in held or held[name][0] is not value:
        try:
            state = value.__getstate__()
        except (AttributeError, RuntimeError) as error:
            raise InvalidRequest(
                f"module {where.rpartition('.')[0]!r} ({_kind(module)}) computes with {where!r}, a script object that "
                f"cannot be unpacked: {error}"
            ) from None
        contents = Contents(torch.nn.Module())
        contents._add(module, "state", state)
        held[name] = value, contents.digest()
    return held[name][1]


def _kind(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"
