"""Requests to data-parallel ranks behind one address: the header that chooses, and ranks that fail together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import trio

from kvfs import limits
from scheduler.conductor.conductor import Conductor
from tests.support.conductors import Clock, conductor, hears, instance, serving, tokens
from tests.support.stub_engines import Stand, StubEngine, proxy_stand, send
from tests.support.waits import WAIT_S, until

PROMPT = tokens(1, 1605)
BODY = {"model": "m", "prompt": PROMPT, "max_tokens": 3}
RANK = b"x-data-parallel-rank"
CLIENTS_OWN = {"X-Data-Parallel-Rank": "7"}


def register_ranks(made: Conductor, engine: StubEngine, roles: Sequence[str] = ("both", "both")) -> None:
    for rank, role in enumerate(roles):
        name = f"127.0.0.1:{engine.port}@{rank}"
        topic = f"rank-{rank}-{engine.port}"
        made.registry.add(
            instance(name, url=engine.url, role=role, data_parallel_rank=rank, engine_topic=topic)
        )


def ranks_asked(engine: StubEngine) -> list[bytes | None]:
    return [each.headers.get(RANK) for each in engine.completions]


async def followed(stand: Stand, count: int) -> None:
    """Wait until the proxy's engines are the instances, and no other."""
    await until(lambda: [bool(each.address.name) for each in stand.proxy.engines] == [True] * count)


async def test_a_request_says_which_rank_it_is_for_and_a_client_does_not_choose() -> None:
    made = conductor(Clock())
    async with proxy_stand(router=made) as stand:
        [engine] = stand.engines
        register_ranks(made, engine)
        await followed(stand, 2)
        hears(made, f"rank-1-{engine.port}", PROMPT[:1600])
        assert (await stand.ask("/v1/completions", BODY, headers=CLIENTS_OWN)).status == 200
        assert ranks_asked(engine) == [b"1"]


async def test_each_leg_says_its_own_rank() -> None:
    made = conductor(Clock())
    async with proxy_stand(router=made) as stand:
        register_ranks(made, stand.engines[0], ("decode", "prefill"))
        await followed(stand, 2)
        assert (await stand.ask("/v1/completions", BODY)).status == 200
        assert ranks_asked(stand.engines[0]) == [b"1", b"0"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_an_engine_without_ranks_hears_of_none(path: str) -> None:
    async with proxy_stand() as stand:
        answer = await stand.ask(path, {"prompt": "p", "max_tokens": 3}, headers=CLIENTS_OWN)
        assert answer.status == 200
        assert [RANK in each.headers for each in stand.engines[0].asked] == [False]


async def test_a_conductor_elsewhere_names_the_rank_and_load_knows_it_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "CONDUCTOR_WAIT_S", WAIT_S)  # else a busy machine has load decide
    monkeypatch.setattr(limits, "CONDUCTOR_LOOK_S", 0.05)
    async with serving() as (service, addresses), proxy_stand(conductor=addresses.http) as stand:
        made, [engine] = service.conductor, stand.engines
        register_ranks(made, engine)
        hears(made, f"rank-1-{engine.port}", PROMPT[:1600])
        assert (await stand.ask("/v1/completions", BODY)).status == 200
        assert ranks_asked(engine) == [b"1"], "as its answer says"
        await followed(stand, 2)
        service.stop()
        await until(lambda: stand.proxy.remote is not None and bool(stand.proxy.remote.down))
        for _ in range(2):
            assert (await stand.ask("/v1/completions", BODY)).status == 200
        assert stand.proxy.router.counts["by_load"] == 2
        assert set(ranks_asked(engine)[1:]) == {b"0", b"1"}


async def test_what_fails_one_rank_suspects_the_others_behind_its_address() -> None:
    """A retry goes to another address, not to the next rank of an engine that is gone."""
    made = conductor(Clock())
    async with proxy_stand("both", "both", router=made) as stand:
        gone, other = stand.engines
        register_ranks(made, gone, ("both",) * 4)
        made.registry.add(instance("other", url=other.url))
        await followed(stand, 5)
        hears(made, f"rank-2-{gone.port}", PROMPT[:1600])
        gone.die()
        assert (await stand.ask("/v1/completions", BODY)).status == 200
        assert len(other.completions) == 1
        assert stand.proxy.legs.counts.events["failed_legs"] == 1
        assert {each.name: bool(each.down) for each in stand.proxy.engines} == {
            "other": False,
            **{f"127.0.0.1:{gone.port}@{rank}": True for rank in range(4)},
        }
        reachable: dict[str, Any] = {each["name"]: each["reachable"] for each in made.status()["instances"]}
        assert [name for name, is_reachable in reachable.items() if is_reachable] == ["other"]
        await stand.restart(gone)
        await until(lambda: not any(each.down for each in stand.proxy.engines))


async def test_mooncake_s_decode_leg_is_told_the_engine_of_the_rank_that_prefills() -> None:
    async def serve(stream: trio.SocketStream) -> None:
        """Answer as the bootstrap server of both ranks."""
        await stream.receive_some(4096)
        await send(stream, 200, b'{"0": {"engine_id": "zero"}, "1": {"engine_id": "one"}}')

    async with (
        proxy_stand("prefill", "decode", hand_over="mooncake") as stand,
        trio.open_nursery() as nursery,
    ):
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        place = f"127.0.0.1:{listener.socket.getsockname()[1]}"
        prefill = next(each for each in stand.proxy.engines if each.address.role == "prefill")
        prefill.bootstrap = place
        prefill.become(prefill.address._replace(rank=1))
        body = {"prompt": PROMPT, "max_tokens": 3}
        assert (await stand.ask("/v1/completions", body)).status == 200
        [decode] = stand.engines[1].completions
        assert decode.body["kv_transfer_params"]["remote_engine_id"] == "one"
        nursery.cancel_scope.cancel()


RANKS = 4


@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT, PROMPT[:900], PROMPT[:100]]], ids=["one", "several"])
@pytest.mark.parametrize("rank", range(RANKS))
async def test_sglang_s_room_is_one_of_the_rank_that_the_prefill_leg_is_for(
    prompt: list[Any], rank: int
) -> None:
    """Else the engine fails the request: it derives the rank from the room, and the header says another one."""
    made = conductor(Clock())
    async with proxy_stand("prefill", "decode", hand_over="sglang", router=made) as stand:
        prefill, decode = stand.engines
        decode.behaviour, decode.prefiller = "joined", prefill
        register_ranks(made, prefill, ["prefill"] * RANKS)
        made.registry.add(instance("d", url=decode.url, role="decode"))
        await followed(stand, RANKS + 1)
        others = {f"127.0.0.1:{prefill.port}@{each}" for each in range(RANKS) if each != rank}
        for name in others:
            made.registry.drain(name)
        assert (await stand.ask("/v1/completions", {**BODY, "prompt": prompt})).status == 200
        assert ranks_asked(prefill) == [str(rank).encode()]
        assert ranks_asked(decode) == [None]
        for engine in stand.engines:
            [body] = [each.body for each in engine.completions]
            rooms = body["bootstrap_room"]
            rooms = rooms if isinstance(rooms, list) else [rooms]
            assert [room % RANKS for room in rooms] == [rank] * (1 if prompt is PROMPT else 3)
            assert body["disagg_prefill_dp_rank"] == rank


async def test_sglang_s_room_alone_chooses_among_ranks_that_nobody_knows() -> None:
    async with proxy_stand("prefill", "decode", hand_over="sglang") as stand:
        prefill, decode = stand.engines
        decode.behaviour, decode.prefiller = "joined", prefill
        for _ in range(16):
            assert (await stand.ask("/v1/completions", BODY)).status == 200
        bodies = [[each.body for each in engine.completions] for engine in stand.engines]
        assert bodies[0] == bodies[1]
        assert len({body["bootstrap_room"] % RANKS for body in bodies[0]}) > 1
        assert not any("disagg_prefill_dp_rank" in body for body in bodies[0])
