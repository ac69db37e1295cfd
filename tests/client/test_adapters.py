"""Adapters by what their files are: an engine that loads them at any time, and files that change at any time."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs.connectors.adapters import Adapters, LoadedAdapters
from kvfs.connectors.vllm_scheduler import Planner, Step
from kvfs.keys import split_keys
from kvfs.namespaces import Namespace
from tests.support.seeds import rounds
from tests.support.stores import NAMESPACE

BLOCK = NAMESPACE.block_tokens
RANK = (0, 0)
WHOLE = 4
"""Whole blocks of each prompt, which has one token more."""


def write_adapter(directory: Path, weights: bytes, alpha: int = 16) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_model.safetensors").write_bytes(weights)
    (directory / "adapter_config.json").write_text(json.dumps({"lora_alpha": alpha}))
    return directory


def lora(number: int, path: Path, *, name: str = "", in_place: bool = False) -> Any:
    return SimpleNamespace(
        lora_int_id=number,
        lora_name=name or f"adapter {number}",
        lora_path=str(path),
        load_inplace=in_place,
    )


class Ranks:
    """What the ranks of one engine tell each other."""

    def __init__(self) -> None:
        self.heard: set[str] = set()

    def notify(self, what: str) -> None:
        self.heard.add(what)

    def was_notified(self, what: str) -> bool:
        return what in self.heard


class Manager:
    """vLLM's loader: it reads the files, during which they may change."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[], object] = lambda: None
        self.memory: dict[int, bytes] = {}

    def _load_adapter(self, request: Any) -> bytes:
        read = (Path(request.lora_path) / "adapter_model.safetensors").read_bytes()
        self.meanwhile()
        return read

    def add(self, request: Any) -> None:
        if request.load_inplace or request.lora_int_id not in self.memory:
            self.memory[request.lora_int_id] = self._load_adapter(request)


def test_adapters_are_what_their_files_are(tmp_path: Path) -> None:
    data = os.urandom(4096)
    one = write_adapter(tmp_path / "one", data)
    copy, scaled = write_adapter(tmp_path / "copy", data), write_adapter(tmp_path / "scaled", data, alpha=32)
    adapters = Adapters()
    names = [adapters.of(lora(i, path)).name for i, path in enumerate((one, copy, scaled), 1)]
    assert names[0] == names[1] != names[2]
    assert all(names)
    assert adapters.of(lora(1, one)).name == names[0]
    assert adapters.of(lora(1, scaled)).name == names[2], "the same number, from another path"
    assert adapters.of(lora(9, tmp_path / "nowhere")).name == ""
    packed = lora(2, one)
    packed.is_3d_lora_weight = True
    assert adapters.of(packed).name not in names


def test_files_that_change_are_another_adapter(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    directory, adapters = write_adapter(tmp_path / "one", b"1" * 4096), Adapters()
    first = adapters.of(lora(1, directory))
    assert not adapters.is_mixed(lora(1, directory))
    write_adapter(directory, b"2" * 4096)
    second = adapters.of(lora(1, directory))
    assert second.name not in ("", first.name)
    assert second.epoch > first.epoch
    assert adapters.is_mixed(lora(1, directory)), "vLLM's own cache has blocks of both under one name"
    assert len(caplog.records) == 2
    adapters.emptied()
    adapters.of(lora(1, directory))
    assert not adapters.is_mixed(lora(1, directory))
    shutil.rmtree(directory)
    assert adapters.of(lora(1, directory)).name == ""


def test_a_load_is_named_by_what_it_read(tmp_path: Path) -> None:
    """In place, from another path; files that change before, while and after they are read."""
    directory, manager = write_adapter(tmp_path / "one", b"1" * 4096), Manager()
    other = write_adapter(tmp_path / "other", b"2" * 4096)
    loaded, adapters = LoadedAdapters(manager, Ranks(), str), Adapters()

    def is_refused(request: Any) -> bool:
        loaded.enter({"r": adapters.of(request)})
        for number, (epoch, name) in loaded.reports.items():
            adapters.loaded(number, epoch, name)
        return "r" in loaded.refused

    assert is_refused(lora(1, directory)), "not loaded, as far as anybody knows"
    manager.add(lora(1, directory))
    assert not [is_refused(lora(1, directory)) for _ in range(2)][-1]
    name = adapters.of(lora(1, directory)).name
    manager.add(lora(1, other, in_place=True))
    assert not is_refused(lora(1, other))
    write_adapter(other, b"3" * 4096)
    assert is_refused(lora(1, other)), "the engine has the files as they were"
    assert not is_refused(lora(1, other))
    manager.add(lora(1, other, in_place=True))
    assert is_refused(lora(1, other)), "the scheduler is told"
    assert not is_refused(lora(1, other))
    assert adapters.of(lora(1, other)).name not in ("", name)
    manager.meanwhile = lambda: write_adapter(other, b"4" * 4096)
    manager.add(lora(1, other, in_place=True))
    manager.meanwhile = lambda: None
    assert all(is_refused(lora(1, other)) for _ in range(3)), "nobody knows what was read"
    manager.add(lora(1, directory, in_place=True))
    assert not [is_refused(lora(1, directory)) for _ in range(2)][-1]
    assert adapters.of(lora(1, directory)).name == name


def test_what_one_rank_refuses_no_rank_stores(tmp_path: Path) -> None:
    directory, ranks = write_adapter(tmp_path / "one", b"1" * 4096), Ranks()
    managers = [Manager(), Manager()]
    one, two = (LoadedAdapters(manager, ranks, str) for manager in managers)
    managers[0].add(lora(1, directory))
    adapter = Adapters().of(lora(1, directory))
    write_adapter(directory, b"2" * 4096)
    managers[1].add(lora(1, directory))
    one.enter({"r": adapter})
    assert one.refused == set()
    assert one.ask(["r", "of no adapter"])
    two.enter({"r": adapter})
    assert two.refused == {"r"}
    assert not one.ask(["r"])
    assert one.ask(["of no adapter"])


# --- an engine, whatever happens -------------------------------------------------------------------------------
class Table:
    """The store's table: the contents of adapters that each block was computed with."""

    def __init__(self) -> None:
        self.truth: dict[bytes, frozenset[bytes]] = {}

    def match(self, keys: bytes, *, timeout_s: float) -> int:
        hits = self.exists(keys, timeout_s=timeout_s)
        return hits.index(False) if False in hits else len(hits)

    def exists(self, keys: bytes, *, timeout_s: float) -> list[bool]:
        return [key in self.truth for key in split_keys(keys)]


class FakeLink:
    is_up = True

    def __init__(self, table: Table) -> None:
        self._table = table

    def open(self, namespace: Namespace) -> Table:
        return self._table

    blocks = open

    def attempt(self, do: Callable[[], Any], otherwise: Any) -> Any:
        return do()


class Request:
    kv_transfer_params = None

    def __init__(self, name: str, adapter: Any) -> None:
        self.request_id, self.lora_request = name, adapter
        self.all_token_ids = list(range(WHOLE * BLOCK + 1))
        self.num_tokens = self.num_prompt_tokens = len(self.all_token_ids)
        self.blocks = 0
        self.by: list[frozenset[bytes]] = []
        """The adapters that each block was computed with: its own and those before it."""


class Engine:
    """vLLM as far as adapters go: its loader, its own cache by name and path, and its steps."""

    def __init__(self, table: Table) -> None:
        self.table, self.manager = table, Manager()
        self.loaded = LoadedAdapters(self.manager, Ranks(), str)
        self.planner = Planner(FakeLink(table), BLOCK, store_generated=True, is_async=True)  # type: ignore[arg-type]
        self.planner.set_namespaces({RANK: NAMESPACE})
        self.own: dict[tuple[str, str, int], frozenset[bytes]] = {}
        self.hits = 0

    def _keys_of(self, request: Request) -> list[tuple[str, str, int]]:
        adapter = request.lora_request
        return [(adapter.lora_name, adapter.lora_path, block) for block in range(WHOLE)]

    def begin(self, request: Request) -> None:
        own = [self.own.get(key) for key in self._keys_of(request)]
        request.by = [each for each in itertools.takewhile(lambda each: each is not None, own) if each]
        had = len(request.by)
        tokens, _ = self.planner.match(request, had * BLOCK)
        assert tokens is not None
        self.planner.allocated(request, [list(range(WHOLE + 1))], tokens)
        for run in self.planner.plan([]).loads:
            assert run.adapter is not None
            self.loaded.loading(request.request_id, run.adapter, run.block_ids)
            request.by += [self.table.truth[key] for key in split_keys(run.keys[RANK])]
            self.hits += len(run.block_ids)
        request.blocks = len(request.by)
        self.own.update(zip(self._keys_of(request), request.by, strict=False))
        self.loaded.enter({})

    def step(self, request: Request, blocks: int) -> None:
        """A step of one request: chunks of its prompt, and then its last token."""
        try:
            self.manager.add(request.lora_request)
        except OSError:
            return
        after = min(request.blocks + blocks, WHOLE)
        steps = [Step(request.request_id, request.blocks * BLOCK, after * BLOCK, list(range(WHOLE + 1)))]
        plan = self.planner.plan(steps)
        failed = self.loaded.enter(plan.adapters)
        now = self.manager.memory[request.lora_request.lora_int_id]
        if failed:
            request.blocks = min(failed)
            del request.by[request.blocks :]
            after = request.blocks
        for _ in range(request.blocks, after):
            request.by.append(frozenset((*(request.by[-1] if request.by else ()), now)))
        request.blocks = after
        self.own.update(zip(self._keys_of(request), request.by, strict=False))
        for run in plan.stores:
            if request.request_id not in self.loaded.refused:
                for key, block in zip(split_keys(run.keys[RANK]), run.block_ids, strict=True):
                    assert len(request.by[block]) == 1, "a block of two adapters is stored"
                    assert self.table.truth.setdefault(key, request.by[block]) == request.by[block]
        for number, (epoch, name) in self.loaded.reports.items():
            self.planner.end_adapter(number, epoch, name)

    def empty(self) -> None:
        self.own.clear()
        self.planner.emptied()


@pytest.fixture(autouse=True)
def _extra_keys_of_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An adapter's name and path, as in vLLM's own hashes."""

    def extra_keys(request: Any, start: int, end: int, index: int) -> tuple[Any, int]:
        adapter = request.lora_request
        return (None if adapter is None else (("lora", adapter.lora_name, adapter.lora_path),)), index

    utils = ModuleType("vllm.v1.core.kv_cache_utils")
    utils.generate_block_hash_extra_keys = extra_keys  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        for name in ("vllm", "vllm.v1", "vllm.v1.core"):
            patch.setitem(sys.modules, name, ModuleType(name))
        patch.setitem(sys.modules, utils.__name__, utils)
        yield


def run_whole(engine: Engine, name: str, adapter: Any) -> int:
    """Run a request; return the blocks that came from the store."""
    request, before = Request(name, adapter), engine.hits
    engine.begin(request)
    while request.blocks < WHOLE:
        engine.step(request, WHOLE)
    engine.step(request, 1)
    engine.planner.finished(request)
    return engine.hits - before


def test_equal_adapters_share_blocks_whatever_they_are_called(tmp_path: Path) -> None:
    table = Table()
    one, copy = (write_adapter(tmp_path / each, b"1" * 4096) for each in ("one", "copy"))
    other = write_adapter(tmp_path / "other", b"2" * 4096)
    assert run_whole(Engine(table), "r", lora(1, one, name="sql")) == 0
    assert len(table.truth) == WHOLE
    second = Engine(table)
    assert run_whole(second, "r", lora(7, copy, name="sql, copied")) == WHOLE
    assert run_whole(second, "s", lora(8, other, name="sql")) == 0
    assert len(table.truth) == 2 * WHOLE


def test_an_adapter_that_is_loaded_again_in_place_has_blocks_of_its_own(tmp_path: Path) -> None:
    """What a server does whose adapter a training loop replaces."""
    table = Table()
    engine, latest = Engine(table), tmp_path / "latest"
    assert run_whole(engine, "first", lora(1, write_adapter(tmp_path / "a", b"1" * 4096))) == 0
    for turn in range(2, 7):
        write_adapter(latest, b"%d" % turn * 4096)
        engine.manager.add(lora(1, latest, in_place=True))
        engine.empty()
        for again in (0, WHOLE):
            assert run_whole(engine, f"{turn} {again}", lora(1, latest)) == again
            engine.empty()
        assert len(table.truth) == turn * WHOLE
    assert run_whole(Engine(table), "r", lora(3, latest)) == WHOLE


def test_blocks_that_were_loaded_ahead_of_another_adapter_are_computed(tmp_path: Path) -> None:
    """vLLM loads an adapter when it computes with it, after the blocks."""
    table, path = Table(), write_adapter(tmp_path / "a", b"1" * 4096)
    run_whole(Engine(table), "r", lora(1, path))
    engine, request = Engine(table), Request("s", lora(1, path))
    engine.begin(request)
    assert request.by == [frozenset([b"1" * 4096])] * WHOLE
    write_adapter(path, b"2" * 4096)
    for _ in range(2):
        engine.step(request, WHOLE)
    assert request.by == [frozenset([b"2" * 4096])] * WHOLE
    assert len(table.truth) == WHOLE, "a request of two adapters is not stored"
    engine.planner.finished(request)
    engine.empty()
    assert run_whole(engine, "t", lora(1, path)) == 0
    assert len(table.truth) == 2 * WHOLE


def test_blocks_on_those_that_vllm_kept_of_another_adapter_are_left_alone(tmp_path: Path) -> None:
    table, path = Table(), write_adapter(tmp_path / "a", b"1" * 4096)
    engine = Engine(table)
    run_whole(engine, "r", lora(1, path))
    for key in [key for key in engine.own if key[2] >= WHOLE // 2]:
        del engine.own[key]
    write_adapter(path, b"2" * 4096)
    engine.manager.add(lora(1, path, in_place=True))
    assert run_whole(engine, "s", lora(1, path)) == 0
    assert len(table.truth) == WHOLE
    engine.empty()
    assert run_whole(engine, "t", lora(1, path)) == 0
    assert len(table.truth) == 2 * WHOLE


@settings(max_examples=rounds(25, 50), deadline=None)
@given(st.data())
def test_a_block_is_of_the_adapter_that_its_key_names(data: st.DataObject) -> None:
    """Two engines whose adapters are written, loaded, evicted and replaced at any time, with requests under way."""
    with tempfile.TemporaryDirectory() as directory:
        table = Table()
        engines, paths = [Engine(table), Engine(table)], [Path(directory, each) for each in "ab"]
        contents = itertools.cycle(bytes([each]) * 512 for each in (1, 2, 3))
        for path in paths:
            write_adapter(path, next(contents))

        def write() -> None:
            write_adapter(data.draw(st.sampled_from(paths)), next(contents))

        def adapter(*, in_place: bool = False) -> Any:
            number, path = data.draw(st.integers(1, 2)), data.draw(st.sampled_from(paths))
            return lora(number, path, in_place=in_place)

        running: list[tuple[Engine, Request]] = []
        names = itertools.count()
        for _ in range(20):
            engine = data.draw(st.sampled_from(engines))
            action = data.draw(
                st.sampled_from(
                    ["begin", "begin", "go on", "go on", "write", "load", "torn", "evict", "empty"]
                )
            )
            if action == "begin":
                request = Request(f"r{next(names)}", adapter(in_place=data.draw(st.booleans())))
                engine.begin(request)
                running.append((engine, request))
            elif action == "go on" and running:
                owner, request = data.draw(st.sampled_from(running))
                owner.step(request, data.draw(st.integers(1, 3)))
                if request.blocks == WHOLE and data.draw(st.booleans()):
                    owner.planner.finished(request)
                    owner.loaded.ended([request.request_id])
                    running.remove((owner, request))
            elif action == "write":
                write()
            elif action in ("load", "torn"):
                engine.manager.meanwhile = write if action == "torn" else lambda: None
                engine.manager.add(adapter(in_place=True))
                engine.manager.meanwhile = lambda: None
            elif action == "evict":
                engine.manager.memory.clear()
            elif action == "empty" and not any(owner is engine for owner, _ in running):
                engine.empty()
