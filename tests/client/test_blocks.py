"""The engines' client on a real service: batches of blocks in, out and mapped, and what a caller may get wrong."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import kvfs
from kvfs import errors
from kvfs.client.transport import Deadline
from tests.support.sessions import MIB, Server, fork, session_server
from tests.support.stores import NAMESPACE
from tests.support.waits import WAIT_S

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="clients with other uids need root")

KIB = 1024


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with session_server(dram_bytes=64 * MIB) as running:
        yield running


@pytest.fixture
def blocks(server: Server) -> Iterator[kvfs.Blocks]:
    with server.connect() as client, client.blocks(NAMESPACE) as opened:
        yield opened


def keys_of(count: int) -> list[bytes]:
    return [b"\1" + os.urandom(15) for _ in range(count)]


# --- round trips -----------------------------------------------------------------------------------------
def test_blocks_come_back_as_they_were_put(blocks: kvfs.Blocks) -> None:
    keys, data = keys_of(5), [os.urandom(size) for size in (0, 1, 4096, 70_001, 1 << 20)]
    assert blocks.match(keys) == 0
    assert blocks.put(keys, data, [None, *keys[:-1]]) == [True] * 5
    assert blocks.put(keys, data) == [False] * 5
    assert blocks.match(keys) == blocks.match(b"".join(keys)) == 5
    assert blocks.exists([*keys, bytes(16)]) == [True] * 5 + [False]
    into = [bytearray(len(each)) for each in data]
    assert blocks.get_into(keys, into) == [len(each) for each in data]
    assert [bytes(each) for each in into] == data
    views = blocks.get(keys)
    assert [bytes(view) for view in views if view is not None] == data


def test_a_miss_is_a_value(blocks: kvfs.Blocks) -> None:
    [known], [absent] = keys_of(1), keys_of(1)
    blocks.put([known], [b"here"])
    into = [bytearray(4), bytearray(4), bytearray(4)]
    assert blocks.get_into([absent, known, absent], into) == [-1, 4, -1]
    assert [bytes(each) for each in into] == [bytes(4), b"here", bytes(4)]
    first, second = blocks.get([absent, known])
    assert first is None
    assert second is not None
    assert bytes(second) == b"here"
    assert blocks.match([known, absent, known]) == 1
    assert blocks.match([]) == 0
    assert blocks.get_into([], []) == []
    assert blocks.remove([absent, known]) == 1
    assert blocks.exists([known]) == [False]


def test_the_first_seal_wins(server: Server, blocks: kvfs.Blocks) -> None:
    [key] = keys_of(1)
    with server.connect() as client, client.blocks(NAMESPACE) as other:
        [mine], [theirs] = blocks.reserve([key], [5]), other.reserve([key], [5])
        assert mine is not None
        assert theirs is not None
        mine.write(b"first")
        theirs.write(b"later")
        assert blocks.seal([mine]) == [True]
        assert other.seal([theirs]) == [False]
        assert other.reserve([key], [5]) == [None]
        [view] = other.get([key])
        assert view is not None
        assert bytes(view) == b"first"


def test_a_paged_tensor_is_gathered_and_scattered(blocks: kvfs.Blocks) -> None:
    """Keys and values of 16 pages in each of four layers' tensors, of a type that numpy does not know."""
    layers = [torch.randn(2, 16, 8, 32).to(torch.bfloat16) for _ in range(4)]
    page = layers[0][0, 0].numel() * 2
    whole = [layer.clone() for layer in layers]
    pages = [3, 11, 7]
    offsets = [[number * page, (16 + number) * page] for number in pages]
    keys = keys_of(3)
    assert blocks.put(keys, kvfs.Scatter(layers, offsets, page)) == [True] * 3
    for layer in layers:
        layer.zero_()
    elsewhere = [[number * page, (16 + number) * page] for number in (0, 1, 2)]
    into = kvfs.Scatter(layers, np.array(elsewhere, dtype=np.int64), page)
    assert blocks.get_into(keys, into) == [8 * page] * 3
    for before, after in zip(whole, layers, strict=True):
        assert torch.equal(after[:, :3], before[:, pages])
        assert not after[:, 3:].any()
    pieces = [[layer[kind, 15] for layer in layers for kind in (0, 1)]]
    assert blocks.get_into(keys[:1], pieces) == [8 * page]
    assert torch.equal(layers[2][1, 15], whole[2][1, 3])


@pytest.mark.parametrize("make", [bytearray, lambda n: array("B", bytes(n)), np.zeros, torch.zeros])
def test_any_writable_memory_will_do(blocks: kvfs.Blocks, make: Any) -> None:
    [key] = keys_of(1)
    data = os.urandom(64 * 8)
    blocks.put([key], [np.frombuffer(data, np.float64)])
    into = make(64 * 8)
    assert blocks.get_into([key], [into]) == [512]
    raw = into.numpy().tobytes() if isinstance(into, torch.Tensor) else memoryview(into).tobytes()
    assert raw[:512] == data


# --- views and drafts ------------------------------------------------------------------------------------
def test_a_view_is_a_lease(blocks: kvfs.Blocks) -> None:
    """Removing the block takes it from everybody but the holder, whose bytes stay."""
    [key] = keys_of(1)
    data = os.urandom(100_000)
    blocks.put([key], [data])
    [view] = blocks.get([key])
    assert view is not None
    assert blocks.remove([key]) == 1
    assert blocks.put([key], [os.urandom(100_000)]) == [True]
    numbers = np.frombuffer(memoryview(view), np.uint8)
    assert not numbers.flags.writeable
    assert numbers.tobytes() == data
    with pytest.raises(BufferError, match="1 objects"):
        view.release()
    del numbers
    view.release()
    view.release()
    with pytest.raises(BufferError, match="released"):
        memoryview(view)


def test_a_draft_is_writable_memory_until_it_is_sealed(blocks: kvfs.Blocks) -> None:
    keys = keys_of(2)
    drafts = blocks.reserve(keys, [8 * KIB, 8 * KIB])
    first, second = drafts
    assert first is not None
    assert second is not None
    numbers = np.frombuffer(memoryview(first), np.uint32)
    numbers[:] = 7
    assert blocks.exists(keys) == [False, False]
    with pytest.raises(errors.InvalidRequest, match="release them first"):
        blocks.seal(drafts)
    del numbers
    second.write(b"end", 8 * KIB - 3)
    assert blocks.seal(drafts) == [True, True]
    into = [bytearray(8 * KIB), bytearray(8 * KIB)]
    assert blocks.get_into(keys, into) == [8 * KIB] * 2
    assert bytes(into[0]) == (7).to_bytes(4, "little") * 2048
    assert bytes(into[1]) == bytes(8 * KIB - 3) + b"end"
    with pytest.raises(errors.InvalidRequest, match="closed"):
        first.write(b"late")


def test_a_seal_that_is_refused_leaves_all_drafts_as_they_are(blocks: kvfs.Blocks) -> None:
    keys = keys_of(2)
    drafts = blocks.reserve(keys, [4, 4], layers=2)
    first, second = drafts
    assert first is not None
    assert second is not None
    first.save_layer(0, b"ab")
    first.save_layer(1, b"cd")
    with pytest.raises(errors.InvalidRequest, match="not saved"):
        blocks.seal(drafts)
    assert first.is_open
    second.save_layer(0, b"ef")
    second.save_layer(1, b"gh")
    assert blocks.seal(drafts) == [True, True]
    assert [bytes(view) for view in blocks.get(keys) if view] == [b"abcd", b"efgh"]


def test_an_aborted_draft_leaves_nothing(server: Server, blocks: kvfs.Blocks) -> None:
    keys = keys_of(3)
    drafts = blocks.reserve(keys, [MIB] * 3)
    assert drafts[0] is not None
    drafts[0].write(b"never seen")
    blocks.abort(drafts)
    assert blocks.exists(keys) == [False] * 3
    with pytest.raises(errors.InvalidRequest, match="closed"):
        blocks.seal(drafts)


# --- layers ----------------------------------------------------------------------------------------------
def test_layers_go_in_one_by_one_and_are_sealed_together(blocks: kvfs.Blocks) -> None:
    [key] = keys_of(1)
    [draft] = blocks.reserve([key], [4 * KIB], layers=4)
    assert draft is not None
    rows = np.arange(512, dtype=np.uint16).reshape(4, 2, 64)
    rows = np.repeat(rows, 4, axis=2)
    for layer in (2, 0, 3):
        assert not draft.save_layer(layer, rows[layer])
    assert draft.missing_layers == [1]
    with pytest.raises(errors.InvalidRequest, match=r"layers \[1\]"):
        blocks.seal([draft])
    assert draft.save_layer(1, [rows[1, 0], rows[1, 1]])
    assert blocks.seal([draft]) == [True]
    into = np.zeros_like(rows)
    assert blocks.get_into([key], [into]) == [4 * KIB]
    assert (into == rows).all()


def test_layers_come_one_by_one_and_as_a_whole(blocks: kvfs.Blocks) -> None:
    keys, [absent] = keys_of(3), keys_of(1)
    data = [os.urandom(6 * KIB) for _ in keys]
    blocks.put(keys, data)
    tensors = [np.zeros((4, KIB), np.uint8) for _ in range(6)]
    places = [kvfs.Scatter(tensor, [row * KIB for row in (2, 0, 3, 1)], KIB) for tensor in tensors]
    loading = blocks.load_layers([*keys, absent], places)
    for layer, tensor in enumerate(tensors):
        assert loading.wait_layer(layer) == [True, True, True, False]
        for row, whole in zip((2, 0, 3), data, strict=True):
            assert tensor[row].tobytes() == whole[layer * KIB : (layer + 1) * KIB]
        assert not tensor[1].any()
    assert loading.done.result() == [6 * KIB] * 3 + [-1]
    with pytest.raises(errors.InvalidRequest, match="no 5 equal layers"):
        blocks.load_layers([*keys, absent], places[:5]).wait_layer(4)
    with pytest.raises(errors.InvalidRequest, match="layer 6 of 6"):
        loading.wait_layer(6)


# --- futures, pins, hits ---------------------------------------------------------------------------------
def test_futures_do_the_same(blocks: kvfs.Blocks) -> None:
    keys, data = keys_of(2), [b"one", b"two!"]
    assert blocks.put_async(keys, data, [None, keys[0]]).result(WAIT_S) == [True, True]
    into = [bytearray(3), bytearray(4)]
    assert blocks.get_into_async(keys, into).result(WAIT_S) == [3, 4]
    assert [bytes(each) for each in into] == data
    assert [bytes(view) for view in blocks.get_async(keys).result(WAIT_S) if view] == data
    assert blocks.prefetch([*keys, bytes(16)]).result(WAIT_S) == 2


def test_a_put_that_waits_for_its_thread_has_its_deadline_from_the_call_on(
    blocks: kvfs.Blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    left: list[float] = []
    monkeypatch.setattr(blocks, "put", lambda *_, timeout_s: left.append(timeout_s))
    blocks.put_async(keys_of(1), [b"x"], timeout_s=WAIT_S).result(WAIT_S)
    assert left[0] < WAIT_S


def test_pins_and_hits_reach_the_service(server: Server, blocks: kvfs.Blocks) -> None:
    keys = keys_of(2)
    blocks.put(keys, [b"a", b"b"])
    blocks.report_hits()
    assert blocks.pin([*keys, bytes(15) + b"\1"]) == 2
    with server.connect() as client:
        name = f"{blocks.bucket}/kv/{keys[0].hex()[:2]}/{keys[0].hex()}"
        before = client.stat(name)
        assert before.pinned
        blocks.get_into([keys[0]] * 3, [bytearray(1) for _ in range(3)])
        assert blocks.report_hits() == 3
        assert client.stat(name).hits == before.hits + 3
        assert blocks.unpin(keys) == 2
        assert not client.stat(name).pinned


# --- rights, and other namespaces ------------------------------------------------------------------------
def test_who_may_not_open_slots_is_served_them(server: Server) -> None:
    """A uid outside of the service's group, on a bucket that is everybody's."""
    keys, data = keys_of(3), [os.urandom(size) for size in (0, 10, 300_000)]
    others = NAMESPACE.as_mapping() | {"salt": "others"}
    with server.connect() as client, client.blocks(others) as own:
        bucket = own.bucket
        client.set_attributes(bucket, mode=0o777)
        own.put(keys[:2], data[:2])

    def use(client: kvfs.Client) -> Any:
        with client.blocks(others) as blocks:
            put = blocks.put(keys, data)
            into = [bytearray(len(each)) for each in data]
            results = blocks.get_into([*keys, bytes(16)], [*into, bytearray(1)])
            views = [None if view is None else bytes(view) for view in blocks.get([*keys, bytes(16)])]
            return client.may_open, put, blocks.match([*keys, keys[0], bytes(16)]), results, into, views

    may_open, put, matched, results, into, views = server.run(use, uid=1001)
    assert not may_open
    assert put == [False, False, True]
    assert matched == 4
    assert results == [0, 10, 300_000, -1]
    assert [bytes(each) for each in into] == data
    assert views == [*data, None]


def test_each_shard_has_its_bucket(server: Server) -> None:
    two = NAMESPACE.as_mapping() | {"tensor_shards": 2}
    with server.connect() as client, client.blocks(two, 0) as left, client.blocks(two, 1) as right:
        assert left.bucket != right.bucket
        digest = kvfs.Namespace.from_mapping(two | {"tensor_rank": 1}).digest
        with client.blocks(digest) as found:
            assert found.bucket == right.bucket
        with pytest.raises(errors.InvalidRequest, match="a digest"):
            client.blocks(digest, 1)
        with pytest.raises(errors.BucketNotFound):
            client.blocks(os.urandom(16))


def test_a_forked_child_makes_its_own(server: Server, blocks: kvfs.Blocks) -> None:
    def use(_: Any) -> Any:
        blocks.match(keys_of(1))

    with pytest.raises(errors.SessionClosed, match="forked child"):
        fork(use).result()
    assert blocks.match(keys_of(1)) == 0


# --- wrong arguments -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda b, k: b.match([b"short"]), "key 0: a prefix hash is 16 bytes"),
        (lambda b, k: b.match(b"x" * 17), "no multiple of 16"),
        (lambda b, k: b.get_into([k], []), "1 keys need a list of 1"),
        (lambda b, k: b.get_into([k], [b"read-only"]), "read-only|writable"),
        (lambda b, k: b.get_into([k], ["text"]), "no buffer"),
        (lambda b, k: b.get_into([k], [bytearray(3)]), "longer than the 3 bytes"),
        (lambda b, k: b.get_into([k], [np.zeros((4, 4))[:, 1]]), "contiguous"),
        (lambda b, k: b.get_into([k], [torch.zeros(4, 4).t()]), "not contiguous"),
        (lambda b, k: b.get_into([k], kvfs.Scatter(bytearray(9), [5], 5)), "lie outside"),
        (lambda b, k: b.get_into([k], kvfs.Scatter(bytearray(9), [-1], 5)), "lie outside"),
        (lambda b, k: b.get_into([k], kvfs.Scatter(bytearray(9), [1, 2], 5)), "1 keys need as many rows"),
        (lambda b, k: b.get_into([k], kvfs.Scatter(bytearray(9), [[1, 2], [3]], 5)), "same number"),
        (lambda b, k: b.get_into([k], kvfs.Scatter(bytearray(9), np.zeros(1, np.int32), 5)), "64-bit"),
        (lambda b, k: kvfs.Scatter(bytearray(9), [1], 0), "at least 1"),
        (lambda b, k: b.put([k], [b"x"], [b"short"]), "a parent is"),
        (lambda b, k: b.put([k], [b"x"], []), "1 keys and 0 parents"),
        (lambda b, k: b.put([k, bytes(16)], [b"x", b"y"]), f"{'00' * 16}: .* keys of named objects"),
        (lambda b, k: b.seal(b.reserve([bytes(8) + k[:8]], [0])), "keys of named objects"),
        (lambda b, k: b.reserve([k], [1, 2]), "1 keys and 2 sizes"),
        (lambda b, k: b.reserve([k], [10], layers=3), "no 3 equal layers"),
        (lambda b, k: b.reserve([k[::-1]], [4])[0].write(b"12345"), "5 bytes at 0 of a draft of 4"),
        (lambda b, k: b.reserve([k[::-1]], [4], layers=2)[0].save_layer(2, b"12"), "layer 2 of"),
        (lambda b, k: b.reserve([k[::-1]], [4], layers=2)[0].save_layer(1, b"123"), "where a layer has 2"),
        (lambda b, k: b.load_layers([k], []), "at least one layer"),
    ],
)
def test_a_wrong_argument_is_named(blocks: kvfs.Blocks, call: Any, match: str) -> None:
    [key] = keys_of(1)
    blocks.put([key], [b"four"])
    with pytest.raises(errors.InvalidRequest, match=match):
        call(blocks, key)


def test_closed_blocks_say_so(server: Server) -> None:
    with server.connect() as client:
        blocks = client.blocks(NAMESPACE)
        blocks.close()
        blocks.close()
        with pytest.raises(errors.InvalidRequest, match="closed"):
            blocks.put(keys_of(1), [b"x"])
        with pytest.raises(errors.InvalidRequest, match="closed"):
            blocks.put_async(keys_of(1), [b"x"])


def test_a_put_waits_for_others_until_its_own_deadline_only(blocks: kvfs.Blocks) -> None:
    """Theirs may be much later: a put in a service that hangs."""
    first, second = keys_of(2)
    blocks.put([first], [b"x" * 100])
    grants = blocks._session.grants
    assert grants is not None
    with grants.held(Deadline.after(60.0)), pytest.raises(errors.DeadlinePassed):
        blocks.put([second], [b"y" * 100], timeout_s=0.2)
    assert blocks.put([second], [b"y" * 100]) == [True]
