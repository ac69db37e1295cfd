"""Copies of hot prefixes: what is ordered, how an order ends, and two machines that carry one out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from pydantic import SecretStr

from kvfs.config.settings import ClusterSettings
from kvfs.errors import NotFound
from kvfs.events.kv_events import CPU
from kvfs.limits import (
    COPY_BACKOFF_S,
    COPY_ORDER_S,
    COPY_SWEEP_S,
    HEAT_PROMPTS_TICK,
    MAX_HEAT_PROMPTS,
    MAX_HOT_RUNS,
    MAX_ORDER_BLOCKS,
)
from kvfs.namespace_groups import KIND, LAYERS
from scheduler.conductor.conductor import Conductor
from scheduler.conductor.sources import Place, StreamName
from scheduler.conductor.values import Instance, Routed, RouteRequest
from scheduler.routing.replication import HALF_LIFE_S
from tests.support.conductors import (
    BLOCK_TOKENS,
    NAMESPACE,
    Clock,
    asking,
    conductor,
    give_orders,
    instance,
    serving,
)
from tests.support.machines import machines, onto_nvme
from tests.support.stores import NAMESPACE as STORED
from tests.support.waits import WAIT_S
from tiers.remote.order_poller import OrderPoller

SYSTEM = [n.to_bytes(16, "big") for n in range(1, 41)]


def node(n: int, **changes: Any) -> Instance:
    return instance(
        f"i{n}", engine_topic="", store_topic=f"node-{n}", store_peer=f"10.0.0.{n}:9400", **changes
    )


def holds(made: Conductor, n: int, hashes: list[bytes]) -> None:
    stream = made.registry.stream(StreamName(f"node-{n}", 0))
    assert stream is not None
    [model] = stream.layers
    made.registry.stored(stream, Place(CPU, model=model), b"".join(hashes), None)


def named(hashes: list[bytes], namespace: str = NAMESPACE.digest.hex(), **group: Any) -> dict[str, Any]:
    """Return blocks as an order names them: of one namespace, or of a group."""
    of = {"namespace": namespace, "model": "", "group": 0, **group}
    return {**of, "hashes": [each.hex() for each in hashes]}


def ask(made: Conductor, hashes: list[bytes], *, exclude: tuple[str, ...] = ()) -> None:
    """Route a prompt and end it."""
    length = len(hashes) * BLOCK_TOKENS + 1
    asked = RouteRequest(
        model="m", hashes=[each.hex() for each in hashes], length=length, exclude=list(exclude)
    )
    found = made.route(asked)
    assert isinstance(found, Routed)
    made.cancel(found.id)
    made.tick()


def sweep(made: Conductor, clock: Clock) -> dict[str, int]:
    clock.now_s += COPY_SWEEP_S
    made.tick()
    return dict(made.status()["copies"]["counts"])


def orders(made: Conductor, n: int) -> list[dict[str, Any]]:
    assert made.copies is not None
    return list(msgspec.to_builtins(made.copies.for_store(f"node-{n}").orders))


def cooled(made: Conductor, n: int) -> list[dict[str, Any]]:
    assert made.copies is not None
    return list(msgspec.to_builtins(made.copies.for_store(f"node-{n}").cool))


def hot(clock: Clock, count: int = 3, **changes: Any) -> Conductor:
    """Return a Conductor of nodes the first of which has a prefix that six requests wanted elsewhere."""
    made = conductor(clock, *(node(n, **changes) for n in range(count)), copies=True, fitted=False)
    made.tick()
    holds(made, 0, SYSTEM)
    for _ in range(6):
        ask(made, SYSTEM, exclude=("i0",))
    return made


def test_a_hot_prefix_is_ordered_to_a_node_without_it_until_its_events_have_it() -> None:
    clock = Clock()
    made = hot(clock)
    assert sweep(made, clock)["ordered"] == 1
    [target] = [n for n in (1, 2) if orders(made, n)]
    [order] = orders(made, target)
    assert order["peer"] == "10.0.0.0:9400"
    assert order["parts"] == [named(SYSTEM)]
    assert orders(made, 0) == []
    ask(made, SYSTEM, exclude=("i0",))
    assert sweep(made, clock)["ordered"] == 1, "one that is open is not given again"
    holds(made, target, SYSTEM[:-1])
    assert "carried_out" not in sweep(made, clock)
    holds(made, target, SYSTEM)
    counts = sweep(made, clock)
    assert (counts["carried_out"], counts["copied_blocks"], orders(made, target)) == (1, 40, [])


def test_an_order_counts_as_a_copy_of_its_node() -> None:
    clock = Clock()
    made = hot(clock)
    assert sweep(made, clock)["ordered"] == 1
    for _ in range(4):
        ask(made, SYSTEM, exclude=("i0",))
    assert sweep(made, clock)["ordered"] == 2
    assert [len(orders(made, n)) for n in range(3)] == [0, 1, 1]


def test_what_is_cold_or_used_in_place_is_not_ordered() -> None:
    clock = Clock()
    made = conductor(clock, node(0), node(1), copies=True, fitted=False)
    made.tick()
    holds(made, 0, SYSTEM)
    for _ in range(3):
        ask(made, SYSTEM, exclude=("i0",))
    for _ in range(20):
        ask(made, SYSTEM, exclude=("i1",))
    assert sweep(made, clock) == {}


@pytest.mark.parametrize(
    ("field", "ordered"),
    [({}, 1), ({"tensor_shards": 2}, 0), ({"extra": {KIND: "FullAttentionSpec", LAYERS: "0"}}, 1)],
    ids=["one key", "several shards", "several kinds of attention"],
)
def test_what_has_shards_with_keys_that_nobody_names_is_not_ordered(
    field: dict[str, Any], ordered: int
) -> None:
    clock = Clock()
    made = hot(clock, namespace={**NAMESPACE.as_mapping(), **field})
    assert sweep(made, clock).get("ordered", 0) == ordered


def test_a_node_that_lets_orders_expire_gets_none_for_a_while() -> None:
    clock = Clock()
    made = hot(clock, 2)
    sweep(made, clock)
    [first] = orders(made, 1)
    while clock.now_s < 1_000.0 + COPY_SWEEP_S + COPY_ORDER_S:
        for _ in range(6):
            ask(made, SYSTEM, exclude=("i0",))
        counts = sweep(made, clock)
    assert (counts["ordered"], counts["expired"], orders(made, 1)) == (1, 1, [])
    clock.now_s += COPY_BACKOFF_S - COPY_SWEEP_S
    ask(made, SYSTEM, exclude=("i0",))
    assert sweep(made, clock)["ordered"] == 2
    assert orders(made, 1)[0]["id"] != first["id"]


def test_long_prefixes_are_several_orders_and_what_is_kept_is_bounded() -> None:
    clock = Clock()
    made = conductor(clock, node(0), node(1), copies=True, fitted=False)
    made.tick()
    long = [n.to_bytes(16, "big") for n in range(1, 2 * MAX_ORDER_BLOCKS + 2)]
    holds(made, 0, long)
    for _ in range(6):
        ask(made, long, exclude=("i0",))
    assert sweep(made, clock)["ordered"] == 3
    assert [len(part["hashes"]) for each in orders(made, 1) for part in each["parts"]] == [
        MAX_ORDER_BLOCKS,
        MAX_ORDER_BLOCKS,
        1,
    ]
    pool = made.registry.pool("m")
    assert made.copies is not None
    for n in range(MAX_HOT_RUNS + 5):
        key = (n + 10_000).to_bytes(16, "big")
        holds(made, 0, [key])
        made.copies.routed(pool, 1, key)
        if n % HEAT_PROMPTS_TICK == 0:
            made.tick()
    for _ in range(MAX_HEAT_PROMPTS // HEAT_PROMPTS_TICK):
        made.tick()
    assert made.copies.status()["runs"] == MAX_HOT_RUNS
    for _ in range(MAX_HEAT_PROMPTS + 3):
        made.copies.routed(pool, 1, long[0])
    assert made.status()["copies"]["counts"]["prompts_passed_over"] == 3
    with pytest.raises(NotFound, match="nobody"):
        made.copies.for_store("nobody")


def copied(clock: Clock) -> tuple[Conductor, int]:
    """Return a Conductor that had a hot prefix copied, and the node that has the copy."""
    made = hot(clock)
    sweep(made, clock)
    [target] = [n for n in (1, 2) if orders(made, n)]
    holds(made, target, SYSTEM)
    assert sweep(made, clock)["carried_out"] == 1
    return made, target


def test_a_copy_that_has_cooled_is_to_go_once_and_the_block_that_was_there_stays() -> None:
    clock = Clock()
    made, target = copied(clock)
    assert cooled(made, target) == []
    clock.now_s += 3 * HALF_LIFE_S
    counts = sweep(made, clock)
    assert (counts["cooled"], counts["cooled_blocks"]) == (1, len(SYSTEM))
    [order] = cooled(made, target)
    assert order["parts"] == [named(SYSTEM)]
    assert [cooled(made, n) for n in range(3) if n != target] == [[], []]
    assert sweep(made, clock)["cooled"] == 1
    clock.now_s += COPY_ORDER_S
    assert sweep(made, clock)["cooled"] == 1
    assert cooled(made, target) == []


def test_a_copy_that_is_wanted_or_the_last_one_stays() -> None:
    clock = Clock()
    made, target = copied(clock)
    for _ in range(4):
        clock.now_s += HALF_LIFE_S / 3
        for _ in range(8):
            ask(made, SYSTEM)
        assert "cooled" not in sweep(made, clock)
    first = made.registry.stream(StreamName("node-0", 0))
    assert first is not None
    made.registry.removed(first, Place(CPU), b"".join(SYSTEM))
    clock.now_s += 10 * HALF_LIFE_S
    assert "cooled" not in sweep(made, clock)
    holds(made, 0, SYSTEM)
    assert sweep(made, clock)["cooled"] == 1
    assert len(cooled(made, target)) == 1


async def test_two_machines_carry_out_what_a_conductor_orders(tmp_path: Path) -> None:
    """The Conductor answers over HTTP, and bytes come over TCP."""
    token = "a token of the test"
    async with machines(tmp_path, 2) as (first, second), serving(copies=True, tokens=[token]) as service:
        made, digests = service[0].conductor, first.put(range(1, 21))
        for n, each in enumerate((first, second)):
            known = node(n, namespace=STORED.as_mapping())
            made.registry.add(Instance(**{**_fields(known), "store_peer": each.address}))
        made.tick()
        holds(made, 0, digests)
        for _ in range(6):
            length = len(digests) * STORED.block_tokens + 1
            asked = RouteRequest(
                model="m", hashes=[each.hex() for each in digests], length=length, exclude=["i0"]
            )
            made.route(asked)
        made.tick()
        assert made.copies is not None
        made.copies._sweep(made.now_s())
        async with asking(service[1]) as client:
            denied = await client.ask("GET", "/v1/orders/node-1")
            assert denied.status == 401
        settings = settings_of(service[1].http, conductor_token=SecretStr(token))
        poller = OrderPoller(settings, second.store, second.cluster)
        assert await poller.look()
        assert poller.status() == {
            "orders_done": 1,
            "orders_failed": 0,
            "ordered_blocks": 20,
            "cooled_blocks": 0,
            "order_answers_failed": 0,
        }
        assert [second.read(each) for each in digests] == [first.read(each) for each in digests]
        assert await poller.look()
        assert poller.counts["orders_done"] == 1, "it is not carried out again"
        holds(made, 1, digests)
        made.copies._sweep(made.now_s())
        assert made.status()["copies"]["counts"]["copied_blocks"] == 20


async def test_orders_that_are_none_and_conductors_that_do_not_answer_change_nothing(tmp_path: Path) -> None:
    async with machines(tmp_path, 2) as (first, second), serving(copies=True) as (service, addresses):
        digests = first.put(range(1, 4))
        settings = settings_of(addresses.http)
        poller = OrderPoller(settings, second.store, second.cluster)
        assert not await poller.look(), "no instance has this topic"
        service.conductor.registry.add(node(1))
        whole = named(digests, STORED.digest.hex())
        parts = [
            {**whole, "hashes": ["00"]},
            {**whole, "hashes": ["zz"]},
            named(digests, "00" * 16),
            whole,
            {**whole, "hashes": [*whole["hashes"][:2], "ff" * 16]},
        ]
        given = [{"id": str(n), "peer": first.address, "parts": [part]} for n, part in enumerate(parts)]
        given[3]["peer"] = "10.9.9.9:1"
        give_orders(service.conductor, {"orders": given})
        assert await poller.look()
        assert (poller.counts["orders_failed"], poller.counts["ordered_blocks"]) == (5, 2)
        assert (second.drafts(), second.read(digests[2])) == (0, None)

        nobody = OrderPoller(settings_of("http://127.0.0.1:1"), second.store, second.cluster)
        with trio.fail_after(WAIT_S):
            assert not await nobody.look()
        assert nobody.status()["order_answers_failed"] == 1


async def test_an_order_adds_blocks_to_a_cache_and_none_to_a_durable_bucket(tmp_path: Path) -> None:
    async with (
        onto_nvme(tmp_path, durable=True) as (first, second),
        serving(copies=True) as (service, addresses),
    ):
        digests = first.put(range(1, 4))
        poller = OrderPoller(settings_of(addresses.http), second.store, second.cluster)
        service.conductor.registry.add(node(1))
        order = {"id": "1", "peer": first.address, "parts": [named(digests, STORED.digest.hex())]}
        give_orders(service.conductor, {"orders": [order]})
        assert await poller.look()
        assert (poller.counts["orders_failed"], second.read(digests[0])) == (1, None)
        second.store.create_bucket(b"zcache", uid=0, gid=0, namespace=STORED)
        order["id"] = "2"
        assert await poller.look()
        assert (poller.counts["orders_done"], poller.counts["ordered_blocks"]) == (1, 3)


async def test_blocks_that_have_cooled_go_first_unless_they_are_used_again(tmp_path: Path) -> None:
    async with machines(tmp_path, 1) as [machine], serving(copies=True) as (service, addresses):
        old, new = machine.put(range(1, 4)), machine.put(range(11, 14))
        poller = OrderPoller(settings_of(addresses.http), machine.store, machine.cluster)
        service.conductor.registry.add(node(1))
        stored = STORED.digest.hex()
        order = {"id": "1", "parts": [named(new, stored)]}
        wrong = {"id": "2", "parts": [named(new, "00" * 16)]}
        unknown = {"id": "3", "parts": [named([b"\xff" * 16], stored)]}
        answer = {"orders": [], "cool": [order, wrong, unknown]}
        give_orders(service.conductor, answer)
        assert await poller.look()
        assert poller.status()["cooled_blocks"] == 3
        machine.store.evict(4096)
        assert [machine.read(each) is None for each in (*old, *new)] == [False] * 5 + [True]
        for digest in new[:2]:
            machine.store.touch(machine.store.lookup_block(digest).key)
        assert await poller.look()
        assert poller.status()["cooled_blocks"] == 3, "an order is carried out once"
        machine.store.evict(3 * 4096)
        assert [machine.read(each) is None for each in (*old, *new)] == [True] * 3 + [False] * 2 + [True]


def settings_of(url: str, **more: Any) -> ClusterSettings:
    """Settings of a node that asks the Conductor at `url`; its peer is the test's own."""
    return ClusterSettings(
        conductor=url, conductor_topic="node-1", peers=("127.0.0.1:1",), secret_file=Path("/unread"), **more
    )


def _fields(made: Instance) -> dict[str, Any]:
    return {name: getattr(made, name) for name in made.__struct_fields__}
