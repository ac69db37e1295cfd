"""`kvfs.compat.mooncake` answers as Mooncake's own store does: `tests/golden/mooncake.json` is what that said."""

from __future__ import annotations

import ctypes
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs.client import Client
from kvfs.client.blocks import Blocks
from kvfs.compat.mooncake import MooncakeDistributedStore, MooncakeHostMemAllocator
from kvfs.connectors.common import string_namespace
from kvfs.errors import AccessDenied
from kvfs.namespaces import Namespace
from tests.engines.mooncake_scenario import answers
from tests.support.collected import collect_at_close
from tests.support.door import need_mount
from tests.support.service import Service

pytestmark = pytest.mark.mount

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/mooncake.json").read_text())
MIB = 1 << 20

DIFFERENT = {
    # Nothing is leased by a clock: what was just read can be removed.
    "remove of what was just read": 0,
    "remove of what was just read, by force": -704,
}


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    need_mount()
    with Service(dram="64MiB") as running:
        yield running


@pytest.fixture
def store(service: Service) -> Iterator[MooncakeDistributedStore]:
    store = MooncakeDistributedStore()
    assert store.setup("localhost", "P2PHANDSHAKE", 0, 0, "tcp", "", str(service.mount)) == 0
    yield store
    store.remove_all()
    store.close()


def test_every_answer_is_the_recorded_one(service: Service) -> None:
    setup = ("127.0.0.1", "P2PHANDSHAKE", MIB, MIB, "tcp", "", str(service.mount))
    found = answers(MooncakeDistributedStore, setup)
    expected = {**GOLDEN["answers"], **DIFFERENT}
    assert {label: found.get(label) for label in expected} == expected
    assert list(found) == list(GOLDEN["answers"])


def test_its_set_up_says_where_keys_are_kept(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    store = MooncakeDistributedStore()
    assert store.setup("localhost", "", 0, 0, "tcp", "", str(service.mount), tenant_id="said") == 0
    namespace = string_namespace("mooncake store key", {"tenant": "said"})
    with service.client() as client, client.blocks(namespace) as blocks:
        store_id, bucket = client.store_id.hex()[:8], blocks.bucket
    [said] = caplog.records
    assert said.levelname == "INFO"
    assert said.getMessage().startswith(f"mooncake: the store at {service.mount} ({store_id}) works, ")
    assert f"namespace {namespace.digest.hex()} (mooncake store key), bucket {bucket}" in said.getMessage()
    assert store.remove_all() == 0
    store.close()


def test_closing_ends_the_session_of_its_blocks(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MooncakeDistributedStore()
    assert store.setup("localhost", "", 0, 0, "tcp", "", str(service.mount), tenant_id="closing") == 0
    closed = collect_at_close(monkeypatch)
    assert store.close() == 0
    namespace = string_namespace("mooncake store key", {"tenant": "closing"})
    with service.client() as client, client.blocks(namespace) as blocks:
        assert closed == [blocks.bucket]
    assert store.close() == 0


def test_a_second_set_up_ends_the_session_of_the_first(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MooncakeDistributedStore()
    assert store.setup("localhost", "", 0, 0, "tcp", "", str(service.mount), tenant_id="first") == 0
    closed = collect_at_close(monkeypatch)
    assert store.setup("localhost", "", 0, 0, "tcp", "", str(service.mount), tenant_id="second") == 0
    first = string_namespace("mooncake store key", {"tenant": "first"})
    with service.client() as client, client.blocks(first) as blocks:
        assert closed == [blocks.bucket]
    assert store.put("key", b"of the second") == 0
    assert store.remove_all() == 1
    store.close()


def test_a_set_up_that_fails_behind_its_connection_changes_nothing(
    service: Service, store: MooncakeDistributedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("key", b"kept")
    ended: list[Client] = []
    close = Client.close

    def refuse(self: Client, namespace: Namespace) -> Blocks:
        raise AccessDenied("nobody may")

    def note_and_close(self: Client) -> None:
        ended.append(self)
        close(self)

    with monkeypatch.context() as patched:
        patched.setattr(Client, "blocks", refuse)
        patched.setattr(Client, "close", note_and_close)
        assert store.setup("localhost", "", 0, 0, "tcp", "", str(service.mount), tenant_id="other") != 0
    assert len(ended) == 1
    assert store.get("key") == b"kept"


def test_a_set_up_whose_block_does_not_come_back_says_so(
    service: Service, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Blocks, "get_into", lambda self, keys, places: [-1] * len(keys))
    store = MooncakeDistributedStore()
    assert store.setup("localhost", "", 0, 0, "tcp", "", str(service.mount)) == 0
    [said] = caplog.records
    assert said.levelname == "WARNING"
    assert "is not read back" in said.getMessage()
    store.close()


def test_a_store_that_is_not_set_up_has_no_keys() -> None:
    store = MooncakeDistributedStore()
    assert store.is_exist("key") == 0
    assert store.get("key") == b""
    assert store.put("key", b"value") == -900
    assert store.remove("key") == -704
    assert store.setup("localhost", "", 0, 0, "tcp", "", "/nowhere/kvfs.sock") != 0


def test_what_does_not_fit_is_no_space(store: MooncakeDistributedStore) -> None:
    assert store.put("too large", bytes(40 * MIB)) == -200
    assert store.put_batch(["fits", "too large"], [b"small", bytes(40 * MIB)]) == -200
    assert store.get("fits") == b"small"


def test_tenants_do_not_see_each_other(service: Service, store: MooncakeDistributedStore) -> None:
    other = MooncakeDistributedStore()
    assert other.setup("localhost", "", 0, 0, "tcp", "", str(service.mount), tenant_id="other") == 0
    store.put("key", b"mine")
    assert other.is_exist("key") == 0
    other.put("key", b"theirs")
    assert (store.get("key"), other.get("key")) == (b"mine", b"theirs")
    assert other.remove_all() == 1
    assert store.get("key") == b"mine"
    other.close()


def test_values_go_between_processes_and_outlive_a_restart(service: Service) -> None:
    first, second = MooncakeDistributedStore(), MooncakeDistributedStore()
    for each in (first, second):
        assert each.setup("localhost", "", 0, 0, "tcp", "", str(service.mount)) == 0
    assert first.put("lasting", b"value" * 1000) == 0
    service.kill()
    assert second.get("lasting") == b"value" * 1000, "in place, while no service runs"
    service.restart()
    assert second.get("lasting") == b"value" * 1000
    assert second.put("later", b"value") == 0
    assert first.get("later") == b"value"
    assert first.remove_all() == 2
    first.close()
    second.close()


def test_memory_by_address(store: MooncakeDistributedStore) -> None:
    allocator = MooncakeHostMemAllocator()
    at = allocator.alloc(4 * MIB)
    ctypes.memset(at, 7, MIB)
    keys = [f"page {i}" for i in range(3)]
    assert store.batch_put_from(keys, [at] * 3, [MIB, MIB, 5]) == [0, 0, 0]
    assert store.batch_get_into([*keys, "none"], [at + i * MIB for i in range(4)], [MIB] * 4) == [
        MIB,
        MIB,
        5,
        -704,
    ]
    assert ctypes.string_at(at + MIB, MIB) == b"\7" * MIB
    allocator.free(at)


def test_a_handle_is_bytes_with_a_size_and_an_address(store: MooncakeDistributedStore) -> None:
    store.put("key", b"value")
    handle: Any = store.get_buffer("key")
    assert (handle.size(), bytes(handle), ctypes.string_at(handle.ptr(), 5)) == (5, b"value", b"value")
