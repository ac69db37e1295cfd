"""What connectors share and what is pure in them, without any engine: keys, outages, layouts, plans."""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvfs
from kvfs.client.blocks import Blocks
from kvfs.client.read_path import ServedReader
from kvfs.connectors.common import (
    Link,
    address_of,
    chain_parents,
    model_revision,
    string_keys,
    string_namespace,
    weights_revision,
)
from kvfs.errors import DeadlinePassed, InvalidRequest
from kvfs.limits import CONNECTOR_MATCH_S
from tests.support.collected import collect_at_close
from tests.support.door import need_mount
from tests.support.machines import write_secret
from tests.support.own_ports import own_port
from tests.support.service import ROOT, Service
from tests.support.small_store import checksums
from tests.support.waits import WAIT_S, eventually

torch = pytest.importorskip("torch")


# --- what is shared ----------------------------------------------------------------------------------------
def test_kvfs_imports_no_engine_and_no_connector() -> None:
    program = "import sys, kvfs; print(*sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = {
        name for name in done.stdout.split() if name.split(".")[0] in ("torch", "zmq", "msgspec", "vllm")
    }
    assert loaded | {name for name in done.stdout.split() if name.startswith("kvfs.connectors")} == set()


@given(st.lists(st.text(), max_size=8), st.text(min_size=1, max_size=8))
def test_keys_of_strings_are_digests_of_their_namespace(strings: list[str], kind: str) -> None:
    one, two = string_namespace("kind"), string_namespace("kind", {"revision": "2"})
    keys = string_keys(one, strings)
    assert all(len(key) == 16 for key in keys)
    assert len(set(keys)) == len(set(strings))
    assert not set(keys) & set(string_keys(two, strings))


def test_each_block_follows_the_one_before() -> None:
    assert chain_parents([]) == []
    assert chain_parents([b"1", b"2", b"3"]) == [None, b"1", b"2"]
    assert chain_parents([b"1", b"2"], b"0") == [b"0", b"1"]


def test_the_address_is_given_or_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVFS_ADDRESS", raising=False)
    assert address_of({"address": "/given"}) == "/given"
    assert address_of(None) == "/mnt/kvfs"
    monkeypatch.setenv("KVFS_ADDRESS", "/environment")
    assert address_of({}) == "/environment"
    with pytest.raises(InvalidRequest, match="address is 7"):
        address_of({"address": 7})


def test_weights_are_named_by_what_they_are(tmp_path: Path) -> None:
    one, copy, tuned = (tmp_path / name for name in ("one", "copy", "tuned"))
    data = os.urandom(1 << 20)
    for directory, content in ((one, data), (copy, data), (tuned, data[:-1] + bytes([data[-1] ^ 1]))):
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(content)
        (directory / "README.md").write_text(directory.name)
    assert weights_revision(one) == weights_revision(copy) != weights_revision(tuned)
    assert model_revision(str(one)) == weights_revision(one)
    assert model_revision(str(one), "given") == "given"
    (one / "model.safetensors").unlink()
    with pytest.raises(InvalidRequest, match="no weights"):
        weights_revision(one)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    need_mount()
    with Service(dram="64MiB") as running:
        yield running


@pytest.mark.mount
def test_a_link_goes_on_without_a_service_and_finds_it_again(service: Service) -> None:
    namespace = string_namespace("test")
    link, key = Link(str(service.mount), name="test", timeout_s=WAIT_S), string_keys(namespace, ["key"])
    try:
        blocks = link.open(namespace)
        assert blocks is not None
        assert link.attempt(lambda: blocks.put(key, [b"value"]), [False]) == [True]
        eventually(lambda: all(checksums(service)), "the block has its checksum")
        service.kill()
        assert (
            link.attempt(lambda: blocks.put(string_keys(namespace, ["other"]), [b"x"], timeout_s=0.2), None)
            is None
        )
        assert not link.is_up
        assert link.attempt(lambda: blocks.exists(key, timeout_s=0), [False]) == [True], (
            "in place, without a service"
        )
        service.restart()
        eventually(lambda: link.is_up, "the service is found again")
        assert blocks.put(string_keys(namespace, ["other"]), [b"x"]) == [True]
        assert link.clear(namespace) == 2
    finally:
        link.close()


@pytest.mark.mount
def test_closing_a_link_ends_the_sessions_of_its_blocks(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = Link(str(service.mount), name="test", timeout_s=WAIT_S)
    opened = [link.open(string_namespace(kind)) for kind in ("test", "other")]
    buckets = {blocks.bucket for blocks in opened if blocks is not None}
    opened.clear()
    closed = collect_at_close(monkeypatch)
    link.close()
    assert len(closed) == 2
    assert set(closed) == buckets


@pytest.mark.mount
def test_a_link_says_once_where_blocks_are_kept_and_leaves_none(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    namespaces = [string_namespace("said"), string_namespace("not said")]
    link = Link(str(service.mount), name="engine", log=logging.getLogger("engine.kvfs"), timeout_s=WAIT_S)
    try:
        blocks = [link.open(namespace) for namespace in namespaces]
        link.open(namespaces[0])
        assert blocks[0] is not None
        with service.client() as client:
            store, held = client.store_id.hex()[:8], list(client.list(f"{blocks[0].bucket}/"))
    finally:
        link.close()
    [said] = caplog.records
    assert (said.name, said.levelname, held) == ("engine.kvfs", "INFO", [])
    assert said.getMessage().startswith(f"engine: the store at {service.mount} ({store}) works, ")
    assert f"namespace {namespaces[0].digest.hex()} (said), bucket {blocks[0].bucket}" in said.getMessage()


PROGRAM = """
import logging, sys
from kvfs.connectors.common import Link, string_namespace

exec(sys.argv[2])
link = Link(sys.argv[1], name="engine", timeout_s=float(sys.argv[3]))
link.open(string_namespace("said"))
link.close()
"""


@pytest.mark.mount
@pytest.mark.parametrize(
    ("set_up", "lines"),
    [
        ("", 1),
        ("logging.basicConfig(level=logging.INFO)", 1),
        ("logging.basicConfig()", 0),
        ("logging.getLogger('kvfs').addHandler(logging.NullHandler())", 0),
    ],
)
def test_a_program_that_set_up_no_logging_is_told_where_blocks_are_kept(
    service: Service, set_up: str, lines: int
) -> None:
    """Python's last resort shows warnings alone; whoever has set up logging has said what is to be shown."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(service.mount), set_up, str(WAIT_S)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert (done.returncode, done.stdout) == (0, "")
    said = done.stderr.splitlines()
    assert len(said) == lines, done.stderr
    assert all(f"engine: the store at {service.mount} (" in line and " works, " in line for line in said)


@pytest.mark.mount
def test_a_link_knows_where_its_store_publishes_events(service: Service, tmp_path: Path) -> None:
    config = tmp_path / "kvfs.toml"
    config.write_text('[events]\npublish = "tcp://127.0.0.1:1"\nreplay = "tcp://*:*"\ntopic = "node"\n')
    with Service(mode="off", arguments=["--config", str(config)]) as publishing:
        for which, topic in ((publishing, "node"), (service, None)):
            link = Link(str(which.data), name="engine", timeout_s=WAIT_S)
            assert link.published == {}
            try:
                assert link.open(string_namespace("published")) is not None
            finally:
                link.close()
            assert link.published.get("topic") == topic
            if topic:
                assert link.published["endpoint"] == "tcp://127.0.0.1:1"
                assert link.published["replay"].startswith("tcp://0.0.0.0:")


@pytest.mark.mount
def test_a_link_knows_where_other_machines_read_its_store(service: Service, tmp_path: Path) -> None:
    config, secret = tmp_path / "kvfs.toml", write_secret(tmp_path / "secret")
    address = f"127.0.0.1:{own_port()}"
    cluster = f"[cluster]\nlisten = '0.0.0.0:{address.partition(':')[2]}'\naddress = '{address}'\n"
    config.write_text(f"{cluster}secret_file = '{secret}'\n")
    with Service(mode="off", arguments=["--config", str(config)]) as served:
        for which, known in ((served, {"peer": address}), (service, {})):
            link = Link(str(which.data), name="engine", timeout_s=WAIT_S)
            try:
                assert link.open(string_namespace("read by others")) is not None
            finally:
                link.close()
            assert link.published == known


@pytest.mark.mount
def test_a_store_that_keeps_nothing_is_not_said_to_work(
    service: Service, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(Blocks, "get_into", lambda self, keys, places: [-1] * len(keys))
    link = Link(str(service.mount), name="engine", timeout_s=WAIT_S)
    try:
        assert link.open(string_namespace("lost")) is not None
    finally:
        link.close()
    [said] = caplog.records
    assert said.levelname == "WARNING"
    assert "is not read back" in said.getMessage()


def in_time(call: Callable[[], object]) -> object:
    """Call; None where the deadline passed: on a busy machine a call may."""
    try:
        return call()
    except DeadlinePassed:
        return None


@pytest.mark.mount
def test_a_user_outside_of_the_group_is_answered_in_time(service: Service) -> None:
    namespace = string_namespace("served")
    keys = string_keys(namespace, ["one", "two"])
    with kvfs.connect(service.mount) as client, client.blocks(namespace) as blocks:
        blocks.put(keys, [b"1", b"2"])
        blocks._reader = ServedReader(blocks._session)
        eventually(lambda: in_time(lambda: blocks.match(keys, timeout_s=CONNECTOR_MATCH_S)) == 2, "matched")
        eventually(
            lambda: in_time(lambda: blocks.exists(keys, timeout_s=CONNECTOR_MATCH_S)) == [True, True], "there"
        )
        assert blocks.remove(keys) == 2


@pytest.mark.mount
def test_a_link_waits_for_a_service_that_comes_later(service: Service) -> None:
    service.stop()
    namespace = string_namespace("later")
    link = Link(str(service.data), name="test", timeout_s=WAIT_S)
    try:
        assert link.open(namespace) is None
        assert not link.is_up
        service.start()
        eventually(lambda: link.blocks(namespace) is not None, "its blocks are open")
    finally:
        link.close()


# --- vLLM's layouts ----------------------------------------------------------------------------------------
BLOCKS, BLOCK_HEADS, BLOCK_TOKENS, ELEMENTS = 5, 2, 4, 3


FORMS = {"narrow": (2, 4, 1), "wide": (2, 4, 3), "narrow too": (2, 4, 1), "of other heads": (3, 4, 1)}
"""Heads, tokens and elements of layers that differ in size."""


def caches(order: tuple[int, ...], layers: int = 3) -> dict[str, Any]:
    """Layers as vLLM shows them, [blocks, heads, tokens, elements], whose memory has the axes in this order; axis 0 of
    `order` is the layer."""
    shape = (layers, BLOCKS, BLOCK_HEADS, BLOCK_TOKENS, ELEMENTS)
    torch.manual_seed(1)
    memory = torch.randn([shape[axis] for axis in order])
    whole = memory.permute([order.index(axis) for axis in range(5)])
    return {f"layer {i}": whole[i] for i in range(layers)}


@pytest.mark.parametrize("order", list(itertools.permutations(range(5))), ids=lambda o: "".join(map(str, o)))
def test_a_blocks_bytes_are_found_in_any_order_of_memory(order: tuple[int, ...]) -> None:
    """What is gathered of some blocks and scattered to others is what the tensors themselves show there."""
    from kvfs.connectors.vllm_layout import KVLayout

    source = caches(order)
    source_layout, copy = KVLayout(source, BLOCKS), {name: tensor.clone() for name, tensor in source.items()}
    gathered = source_layout.gather([3, 0])
    assert gathered.shape == (2, source_layout.block_bytes)
    assert source_layout.block_bytes == 3 * BLOCK_HEADS * BLOCK_TOKENS * ELEMENTS * 4
    places = source_layout.device_places([3, 0])
    size = places.block_bytes
    assert size == source_layout.block_bytes
    copied = places.store_plan([0x1000, 0x1000 + size], [(0x1000, 2 * size)]).copies()
    assert b"".join(ctypes.string_at(at, count) for _, at, count in copied) == gathered.numpy().tobytes()
    source_layout.scatter([1, 4], gathered)
    for name, tensor in source.items():
        assert torch.equal(tensor[1], copy[name][3])
        assert torch.equal(tensor[4], copy[name][0])
        assert torch.equal(tensor[[0, 2, 3]], copy[name][[0, 2, 3]])


@pytest.mark.mount
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (1, 0, 3, 2, 4), (2, 0, 1, 3, 4), (0, 3, 4, 1, 2)])
def test_scattered_places_and_gathered_bytes_are_the_same(service: Service, order: tuple[int, ...]) -> None:
    """The path without copies (places in the cache) and the one by staging agree on the bytes of a block."""
    from kvfs.connectors.vllm_layout import KVLayout

    namespace = string_namespace("layout", {"order": str(order)})
    keys = string_keys(namespace, ["a", "b", "c"])
    layers = caches(order)
    layout = KVLayout(layers, BLOCKS)
    with kvfs.connect(service.mount) as client, client.blocks(namespace) as blocks:
        blocks.put(keys, layout.places([4, 2, 0]))
        staged = torch.zeros((3, layout.block_bytes), dtype=torch.uint8)
        assert blocks.get_into(keys, list(staged)) == [layout.block_bytes] * 3
        assert torch.equal(staged, layout.gather([4, 2, 0]))
        for tensor in layers.values():
            tensor[1] = 0
        assert blocks.get_into(keys[:1], layout.places([1])) == [layout.block_bytes]
    for tensor in layers.values():
        assert torch.equal(tensor[1], tensor[4])


def test_small_blocks_of_a_backend_are_one_of_the_engine() -> None:
    from kvfs.connectors.vllm_layout import KVLayout

    layers = {name: tensor.reshape(BLOCKS, -1) for name, tensor in caches((0, 1, 2, 3, 4)).items()}
    rows = {name: tensor.reshape(BLOCKS * 2, 1, 4, 3) for name, tensor in layers.items()}
    whole, split = KVLayout(layers, BLOCKS), KVLayout(rows, BLOCKS)
    assert torch.equal(whole.gather([2]), split.gather([2]))
    assert whole.form != split.form


def uneven_caches(*, side_by_side: bool) -> dict[str, Any]:
    """Layers that differ in size: one behind the other, or all of a block in one piece, as vLLM's layouts have them."""
    torch.manual_seed(2)
    sizes = [math.prod(form) for form in FORMS.values()]
    memory, found, at = torch.randn(BLOCKS * sum(sizes)), {}, 0
    for (name, form), size in zip(FORMS.items(), sizes, strict=True):
        _, tokens, elements = form
        strides = (sum(sizes) if side_by_side else size, tokens * elements, elements, 1)
        found[name] = memory.as_strided((BLOCKS, *form), strides, at)
        at += size if side_by_side else size * BLOCKS
    return found


@pytest.mark.mount
@pytest.mark.parametrize("side_by_side", [False, True])
def test_a_block_of_layers_that_differ_in_size_is_their_bytes_one_after_the_other(
    service: Service, side_by_side: bool
) -> None:
    from kvfs.connectors.vllm_layout import KVLayout

    layers = uneven_caches(side_by_side=side_by_side)
    layout = KVLayout(layers, BLOCKS)
    expected = [b"".join(tensor[i].numpy().tobytes() for tensor in layers.values()) for i in (4, 2, 0)]
    assert [row.numpy().tobytes() for row in layout.gather([4, 2, 0])] == expected
    assert layout.block_bytes == len(expected[0])
    assert b"".join(piece.numpy().tobytes() for piece in layout.pieces(4, 0)) == expected[0]
    assert (layout.is_even, layout.parts) == (False, 1)
    if side_by_side:
        size = layout.block_bytes
        plan = layout.device_places([4, 2]).store_plan([0x1000, 0x1000 + size], [(0x1000, 2 * size)])
        copied = b"".join(ctypes.string_at(at, count) for _, at, count in plan.copies())
        assert copied == b"".join(expected[:2])
    namespace = string_namespace("uneven", {"side_by_side": str(side_by_side)})
    keys = string_keys(namespace, ["a", "b", "c"])
    with kvfs.connect(service.mount) as client, client.blocks(namespace) as blocks:
        blocks.put(keys, layout.places([4, 2, 0]))
        assert blocks.get_into(keys[:1], layout.places([1])) == [layout.block_bytes]
    layout.scatter([3], layout.gather([2]))
    for tensor in layers.values():
        assert torch.equal(tensor[1], tensor[4])
        assert torch.equal(tensor[3], tensor[2])


def test_the_form_of_layers_that_differ_says_the_size_and_the_order_of_each() -> None:
    from kvfs.connectors.vllm_layout import KVLayout

    layers = uneven_caches(side_by_side=False)
    forms = {
        KVLayout({name: layers[name] for name in order}, BLOCKS).form
        for order in itertools.permutations(layers)
    }
    assert len(forms) == 12, "two of the four are equal"


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({}, "no KV cache"),
        ({"a": torch.zeros(7, 2, 4, 3)}, "no row of 5 blocks"),
    ],
)
def test_caches_that_cannot_be_described_are_refused(layers: dict[str, Any], message: str) -> None:
    from kvfs.connectors.vllm_layout import KVLayout

    with pytest.raises(InvalidRequest, match=message):
        KVLayout(layers, BLOCKS)


def test_layers_that_differ_in_size_are_refused_on_a_device_where_their_blocks_are_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A device's copies go by one distance from block to block."""
    from kvfs.connectors.vllm_layout import KVLayout

    monkeypatch.setattr(KVLayout, "is_on_cpu", property(lambda self: False))
    KVLayout(uneven_caches(side_by_side=True), BLOCKS)
    with pytest.raises(InvalidRequest, match=r"\[32, 48, 96\] bytes apart are not supported"):
        KVLayout(uneven_caches(side_by_side=False), BLOCKS)


def test_layers_that_share_memory_count_once() -> None:
    from kvfs.connectors.vllm_layout import KVLayout

    [tensor] = caches((0, 1, 2, 3, 4), layers=1).values()
    layout = KVLayout({"a": tensor, "shares a": tensor}, BLOCKS)
    assert layout.names == ["a"]


def test_blocks_that_are_stored_stay_hits_for_later_versions() -> None:
    """Names, namespaces and bytes of vLLM's blocks are as `tests/golden/vllm.json` has them."""
    from tests.support import golden_vllm

    assert golden_vllm.text() == (ROOT / "tests/golden/vllm.json").read_text()
