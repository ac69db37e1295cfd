"""Machines that carry out what a Conductor orders of the cache groups of a model with several kinds of attention."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.scheduler.conductor.test_copies_of_groups import hot
from tests.scheduler.conductor.test_copy_orders import named, settings_of
from tests.scheduler.conductor.test_store_windows import (
    ALSO_WINDOW_3,
    FULL,
    STATE,
    WINDOW_2,
    WINDOW_3,
    hashes,
    namespace_of,
)
from tests.support.conductors import give_orders, instance, serving
from tests.support.machines import Machine, machines, payload_of
from tests.support.prefix_needs import Block
from tests.support.stores import draft_of
from tiers.remote.order_poller import OrderPoller

GROUPS = (FULL, WINDOW_2, STATE, WINDOW_3, ALSO_WINDOW_3)


def bucket_of(group: int) -> bytes:
    return f"group-{group}".encode()


def parent_of(group: int, at: int) -> bytes | None:
    full = hashes(FULL)
    return full[at] if group != FULL else full[at - 1] if at else None


def payload(group: int, at: int) -> bytes:
    return payload_of(100 * group + at, 4096)


def put(machine: Machine, blocks: list[Block]) -> None:
    for group, at in blocks:
        draft, key = draft_of(machine.store, payload(group, at)), hashes(group)[at]
        machine.store.seal_block(draft, bucket_of(group), key, parent=parent_of(group, at), uid=0)


def make_caches(*of: Machine) -> None:
    for machine in of:
        for group in GROUPS:
            machine.store.create_bucket(bucket_of(group), uid=0, gid=0, namespace=namespace_of(group))


def given() -> tuple[dict[str, Any], list[Block]]:
    """Return an order of a Conductor, and its blocks."""
    made = hot()
    made.sweep()
    [order] = made.orders(1)
    return order, made.ordered(1)


async def test_two_machines_carry_out_an_order_of_each_group(tmp_path: Path) -> None:
    """The Conductor answers over HTTP, and bytes come over TCP, from and to the caches of each group."""
    order, wanted = given()
    async with machines(tmp_path, 2) as (first, second), serving(copies=True) as (service, addresses):
        service.conductor.registry.add(instance("i1", engine_topic="", store_topic="node-1"))
        make_caches(first, second)
        put(first, wanted)
        give_orders(service.conductor, {"orders": [{**order, "peer": first.address}], "cool": []})
        poller = OrderPoller(settings_of(addresses.http), second.store, second.cluster)
        assert await poller.look()
        assert (poller.counts["orders_done"], poller.counts["ordered_blocks"]) == (1, len(wanted))
        for group, at in wanted:
            key = hashes(group)[at]
            assert second.read(key) == payload(group, at)
            block = second.store.catalog.blocks.get(key)
            assert block is not None
            assert (block.bucket, block.parent) == (bucket_of(group), parent_of(group, at))
        unknown = {"id": "other", "parts": [{**order["parts"][0], "group": 7}]}
        cooled = [{"id": order["id"], "parts": order["parts"]}, unknown]
        give_orders(service.conductor, {"orders": [], "cool": cooled})
        assert await poller.look()
        assert poller.status()["cooled_blocks"] == len(wanted)


@pytest.mark.parametrize("lacks", [0, 1])
async def test_full_attention_is_not_fetched_without_what_goes_before(tmp_path: Path, lacks: int) -> None:
    """A node with full attention alone would be taken for one that goes on from the prefix."""
    order, wanted = given()
    assert [part["group"] for part in order["parts"]][-1] == 0
    gone = next(each for each in wanted if hashes(each[0])[each[1]].hex() in order["parts"][lacks]["hashes"])
    async with machines(tmp_path, 2) as (first, second), serving(copies=True) as (service, addresses):
        service.conductor.registry.add(instance("i1", engine_topic="", store_topic="node-1"))
        make_caches(first, second)
        put(first, [each for each in wanted if each != gone])
        answer = {"orders": [{**order, "peer": first.address}], "cool": []}
        give_orders(service.conductor, answer)
        poller = OrderPoller(settings_of(addresses.http), second.store, second.cluster)
        assert await poller.look()
        assert (poller.counts["orders_done"], poller.counts["orders_failed"]) == (0, 1)
        assert {second.read(hashes(FULL)[at]) for group, at in wanted if group == FULL} == {None}


@pytest.mark.parametrize("group", [1, 1 << 31, -1])
async def test_blocks_of_a_group_that_has_no_cache_here_change_nothing(tmp_path: Path, group: int) -> None:
    async with machines(tmp_path, 2) as (first, second), serving(copies=True) as (service, addresses):
        service.conductor.registry.add(instance("i1", engine_topic="", store_topic="node-1"))
        [digest] = first.put([1])
        parts = [named([digest], "", model=model, group=group) for model in ("00" * 16, "zz", "")]
        orders = [{"id": str(n), "peer": first.address, "parts": [part]} for n, part in enumerate(parts)]
        give_orders(service.conductor, {"orders": orders})
        poller = OrderPoller(settings_of(addresses.http), second.store, second.cluster)
        assert await poller.look()
        assert (poller.counts["orders_failed"], second.read(digest)) == (3, None)


async def test_a_namespace_that_this_version_cannot_read_keeps_no_order_from_others(tmp_path: Path) -> None:
    order, wanted = given()
    async with machines(tmp_path, 2) as (first, second), serving(copies=True) as (service, addresses):
        service.conductor.registry.add(instance("i1", engine_topic="", store_topic="node-1"))
        make_caches(first, second)
        put(first, wanted)
        row = second.store.names.get_bucket(bucket_of(WINDOW_3))
        assert row is not None
        rows = [replace(row, namespace_json=b'{"version": 99}'), *second.store.names.buckets()]
        second.store.names.buckets = lambda: rows  # type: ignore[method-assign]
        answer = {"orders": [{**order, "peer": first.address}], "cool": []}
        give_orders(service.conductor, answer)
        poller = OrderPoller(settings_of(addresses.http), second.store, second.cluster)
        assert await poller.look()
        assert poller.counts["orders_done"] == 1
