"""Names of adapters (LoRA): digests of the files that an engine loaded.

Responsibility: name each adapter by its weights and configuration, wherever they lie and whatever it is called. An
engine keeps an adapter under a number, and may load that number again at any time: in place, from another path, or
because it needed the room. `Adapters`, beside the scheduler, says what an adapter's files are now, which is what the
engine is about to load or has loaded; `LoadedAdapters`, in each worker, names what was loaded, and has the last word.

Invariants:
- A load has a name only if its files are the same before it and after their digest, by inode, size and times (that of
  the last change cannot be set back). Otherwise nobody knows what was read: nothing is kept until the next load.
- An adapter is in an epoch with one name. A worker that has loaded another refuses this epoch and those before it, in
  this step and every later one, and reports what it has: the next epoch has that name.
- What an engine's own cache keeps by an adapter's name and path is as many adapters' as were computed with under these:
  from the second one on, requests that hit it are left alone until that cache is emptied.

Concurrency: none; each half has one thread.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvfs.connectors.common import VLLM_LOG, model_directory, weights_revision
from kvfs.errors import InvalidRequest
from kvfs.limits import ADAPTER_SETTLE_S, MAX_ADAPTERS

log = logging.getLogger(VLLM_LOG)

_State = tuple[tuple[str, int, int, int, int], ...]
_Key = tuple[str, str]
"""Name and path, by which vLLM's own cache tells adapters apart."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter as the scheduler knows it in one epoch."""

    number: int
    epoch: int
    name: str
    """Empty while nobody knows what the engine has."""


class Peers(Protocol):
    """The other ranks of an engine."""

    def notify(self, what: str, /) -> None:
        """Have the other ranks know of `what`; does not wait for them."""

    def was_notified(self, what: str, /) -> bool:
        """Return whether any rank has notified the others of `what`."""


@dataclass(slots=True)
class _Known:
    key: _Key
    directory: Path | None = None
    """None while its files are not on this machine."""
    state: _State = ()
    """The state of the files when they were last looked at."""
    epoch: int = 0
    name: str = ""


class Adapters:
    """Name the adapters of an engine's requests, by its numbers."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._computed: dict[_Key, str] = {}
        """What was first computed with under a name and path since the engine's own cache was empty."""
        self._mixed: set[_Key] = set()

    def of(self, request: Any) -> Adapter:
        """Return the adapter of vLLM's LoRARequest, by its files as they are now or by what a worker has loaded."""
        number, key = int(request.lora_int_id), _key_of(request)
        known = self._known.get(number)
        if known is None:
            if len(self._known) >= MAX_ADAPTERS:
                return Adapter(number, 0, "")
            known = self._known[number] = _Known(key)
        # A hub's adapter may still be downloading: it is looked for at each request.
        directory = known.directory if known.key == key else None
        directory = directory or _directory_of(key[1])
        state = () if directory is None else _state_of(directory)
        if (known.key, known.directory, known.state) != (key, directory, state):
            known.key, known.directory, known.state = key, directory, state
            self._rename(number, "" if directory is None else _name_of(directory, state, request))
        if known.name:
            self._compute(key, known.name)
        return Adapter(number, known.epoch, known.name)

    def loaded(self, number: int, epoch: int, name: str) -> bool:
        """Take a worker's report that it computed with `name` in an epoch; return whether that epoch ends with it."""
        known = self._known.get(number)
        if known is None or known.epoch != epoch:
            return False
        if not name:
            log.warning(
                "adapter %d (%s) is not kept until it is loaded again: its files changed while it was loaded, or are "
                "not known",
                *(number, known.key[1]),
            )
        self._rename(number, name)
        self._compute(known.key, name)
        return True

    def is_mixed(self, request: Any) -> bool:
        """Return whether the engine's own cache may hold blocks of other contents of this adapter."""
        key = _key_of(request)
        return key in self._mixed or key not in self._computed

    def emptied(self) -> None:
        """Note that the engine's own cache has no blocks any more."""
        self._computed.clear()
        self._mixed.clear()

    def _rename(self, number: int, name: str) -> None:
        known = self._known[number]
        if known.name and name and name != known.name:
            log.info(
                "adapter %d (%s) is another one from now on, with blocks of its own", number, known.key[1]
            )
        known.epoch += name != known.name
        known.name = name

    def _compute(self, key: _Key, name: str) -> None:
        if key not in self._computed and len(self._computed) >= MAX_ADAPTERS:
            return
        if (self._computed.setdefault(key, name) != name or not name) and key not in self._mixed:
            self._mixed.add(key)
            log.warning(
                "adapter %r (%s) has changed where it lies: vLLM's own prefix cache may serve blocks of what it was, "
                "which are not stored; call reset_prefix_cache() after such a load",
                *key,
            )


@dataclass(slots=True)
class _Loaded:
    directory: Path | None
    state: _State
    name: str
    refused_epoch: int = -1
    """This epoch and those before it are refused."""


class LoadedAdapters:
    """Name the adapters that one worker has loaded, and compare them with those that the scheduler takes them for."""

    def __init__(self, manager: Any, peers: Peers, directory_of: Callable[[str], str]) -> None:
        """Follow the loads of vLLM's `manager` from now on; None: it has no adapters. `directory_of` is vLLM's own."""
        self._peers, self._directory_of = peers, directory_of
        self._loaded: dict[int, _Loaded] = {}
        self.reports: dict[int, tuple[int, str]] = {}
        """Of the step under way, by number: the epoch that ends, and what was loaded."""
        self.refused: set[str] = set()
        """Requests of this step with another adapter than their keys have."""
        self._adapters: Mapping[str, Adapter] = {}
        """Of the step's requests."""
        self._uncomputed: dict[str, tuple[Adapter, Sequence[int]]] = {}
        """Blocks that were loaded for requests which have not computed on them yet."""
        if manager is not None:
            self._load = manager._load_adapter
            manager._load_adapter = self._load_and_name

    def enter(self, adapters: Mapping[str, Adapter]) -> set[int]:
        """Begin a step that computes with adapters, by request, which the engine has loaded for it.

        Returns the blocks that were loaded for these requests, where they are another adapter's.
        """
        self.reports, self._adapters = {}, adapters
        failed = set[int]()
        for request_id, adapter in adapters.items():
            loaded = self._uncomputed.pop(request_id, None)
            if loaded is not None and not self._has(loaded[0]):
                failed.update(loaded[1])
            if not self._has(adapter):
                held = self._loaded.setdefault(adapter.number, _Loaded(None, (), ""))
                held.refused_epoch = max(held.refused_epoch, adapter.epoch)
                self._peers.notify(_refusal(adapter))
                if held.name != adapter.name:
                    self.reports[adapter.number] = adapter.epoch, held.name
        while len(self._loaded) > MAX_ADAPTERS:
            del self._loaded[next(iter(self._loaded))]
        self.refused = {each for each, adapter in adapters.items() if not self._is_right(adapter)}
        return failed

    def loading(self, request_id: str, adapter: Adapter, block_ids: Sequence[int]) -> None:
        """Note that blocks are loaded for a request, before the engine may have loaded its adapter."""
        self._uncomputed[request_id] = adapter, block_ids

    def ended(self, request_ids: Iterable[str]) -> None:
        """Forget requests that compute no more."""
        for request_id in request_ids:
            self._uncomputed.pop(request_id, None)

    def ask(self, request_ids: Iterable[str]) -> bool:
        """Return whether no other rank refuses the adapter of one of this step's requests."""
        used = {self._adapters[each] for each in request_ids if each in self._adapters}
        return not any(self._peers.was_notified(_refusal(each)) for each in used if self._is_right(each))

    def _has(self, adapter: Adapter) -> bool:
        """Return whether what is loaded now has this adapter's name."""
        held = self._loaded.get(adapter.number)
        return held is not None and bool(held.name) and held.name == adapter.name

    def _is_right(self, adapter: Adapter) -> bool:
        """Return whether an adapter is what it was taken for, in this step and all of its epoch."""
        return self._has(adapter) and adapter.epoch > self._loaded[adapter.number].refused_epoch

    def _load_and_name(self, request: Any) -> Any:
        """Load an adapter, and name what was loaded."""
        try:
            directory = Path(self._directory_of(str(request.lora_path)))
        except Exception:  # whatever it is, the load itself raises it as well
            return self._load(request)
        before = _settled_state_of(directory)
        found = self._load(request)
        number = int(request.lora_int_id)
        held = self._loaded.pop(number, None)
        if held is not None and held.name and (held.directory, held.state) == (directory, before):
            name = held.name if before == _state_of(directory) else ""
        else:
            name = _name_of(directory, before, request)
        self._loaded[number] = _Loaded(directory, before, name, -1 if held is None else held.refused_epoch)
        return found


def _refusal(adapter: Adapter) -> str:
    return f"adapter {adapter.number}, epoch {adapter.epoch}"


def _key_of(request: Any) -> _Key:
    return str(request.lora_name), str(request.lora_path)


def _directory_of(path: str) -> Path | None:
    try:
        return model_directory(os.path.expanduser(path))
    except InvalidRequest:
        return None


def _name_of(directory: Path, state: _State, request: Any) -> str:
    """Return the name of the files in a directory; empty if they were not in `state` all the time."""
    try:
        name = weights_revision(directory, (".json",))
    except (InvalidRequest, OSError):
        return ""
    layout = " 3d" if getattr(request, "is_3d_lora_weight", False) else ""
    return name + layout if state and state == _state_of(directory) else ""


def _settled_state_of(directory: Path) -> _State:
    """Return the state of files once a further change of them has another time: their clock ticks in milliseconds."""
    state = _state_of(directory)
    if any(abs(time.time_ns() - changed_ns) < 1e9 * ADAPTER_SETTLE_S for *_, changed_ns in state):
        time.sleep(ADAPTER_SETTLE_S)
        state = _state_of(directory)
    return state


def _state_of(directory: Path) -> _State:
    """Return names, inodes, sizes and times of a directory's files; empty for a missing directory."""
    try:
        with os.scandir(directory) as entries:
            found = [(entry.name, entry.stat()) for entry in entries if entry.is_file()]
    except OSError:
        return ()
    return tuple(sorted((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in found))
