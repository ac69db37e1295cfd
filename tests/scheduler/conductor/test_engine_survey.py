"""Engines that are asked what they are: what their answers say, and engines that are late, change, or say nonsense."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import pytest
import trio

from kvfs import limits
from kvfs.namespaces import Namespace
from scheduler.conductor.feeds import engine_survey
from scheduler.conductor.feeds.engine_answers import AnswerUnclear, describe
from scheduler.conductor.feeds.engine_survey import EngineSurvey
from scheduler.conductor.values import CacheGroup, Instance
from tests.support.asked_engines import (
    CACHE,
    HEAD,
    WEIGHTS,
    AskedEngine,
    answers,
    info,
    models,
    running,
    sources,
)
from tests.support.conductors import NAMESPACE, asking, serving
from tests.support.stub_engines import StubEngine, proxy_stand
from tests.support.waits import WAIT_S, until

URL = "http://10.0.0.3:8000"


def instance(**changes: Any) -> Instance:
    given = {
        "name": "10.0.0.3:8000",
        "url": URL,
        "model": "m",
        "namespace": NAMESPACE.as_mapping(),
        "weights": WEIGHTS,
        "engine_topic": "vllm-0",
        "engine_replay": "tcp://10.0.0.3:5570",
        "store_topic": "node",
        "store_replay": "tcp://10.0.0.3:5558",
        "store_peer": "10.0.0.3:9400",
    }
    return Instance(**(given | changes))


# --- what answers say ----------------------------------------------------------------------------------------
def test_an_engine_that_connects_with_a_store_below_it() -> None:
    assert describe(URL, None, answers()) == ((instance(),), ())


def test_an_engine_that_binds_is_connected_to() -> None:
    found = describe(URL, None, answers(sources=sources(endpoint="tcp://*:5557", topic="")))
    endpoint = "tcp://10.0.0.3:5557"
    assert found == ((instance(engine_topic="10.0.0.3:8000", engine_endpoint=endpoint),), ())
    v6 = describe(
        "http://[fd00::3]:8000", None, answers(sources=sources(endpoint="tcp://[::]:5557"))
    ).instances[0]
    assert (v6.engine_endpoint, v6.engine_replay) == ("tcp://[fd00::3]:5557", "tcp://[fd00::3]:5570")


def test_adapters_are_no_models_and_a_second_name_is_not_routed() -> None:
    found = describe(URL, None, answers(models=models("m", lora="m")))
    assert (found.instances[0].model, found.notes) == ("m", ())
    found = describe(URL, None, answers(models=models("m", "alias")))
    assert found.instances[0].model == "m"
    assert ["alias" in note for note in found.notes] == [True]


@pytest.mark.parametrize(
    ("owner", "engine_type"), [("sglang", "SGLang"), ("vllm", "vLLM"), ("somebody", "vLLM")]
)
def test_the_owner_of_a_model_says_what_the_engine_is(owner: str, engine_type: str) -> None:
    said = models("m").replace(b'"id"', b'"owned_by": "%s", "id"' % owner.encode())
    assert describe(URL, None, answers(models=said)).instances[0].engine_type == engine_type


ROLES = {"kv_producer": "prefill", "kv_consumer": "decode", "kv_both": "both", "None": "both"}


@pytest.mark.parametrize(("said", "role"), ROLES.items(), ids=ROLES)
def test_the_connector_says_the_role_unless_it_is_given(said: str, role: str) -> None:
    metrics = HEAD + info(role=said)
    assert describe(URL, None, answers(metrics=metrics)).instances[0].role == role
    assert describe(URL, "decode", answers(metrics=metrics)).instances[0].role == "decode"


def test_the_sample_that_counts_is_the_one_that_is_1_with_all_its_characters() -> None:
    odd = Namespace.of_one_device(
        model='a "model" \\ } 1',
        revision="1",
        dtype="bfloat16",
        layout="LKTHD",
        block_tokens=16,
        extra={"x": "\u2028"},
    )
    metrics = HEAD + info("0.0", weights="before") + info(namespace=odd.canonical.decode())
    found = describe(URL, None, answers(metrics=metrics)).instances[0]
    assert (Namespace.from_mapping(found.namespace), found.weights) == (odd, WEIGHTS)


def test_the_connector_says_which_caches_layers_have() -> None:
    said = [{"group": 0, "kind": "full_attention", "block_tokens": 16, "layers": "a", "window_tokens": None}]
    found = describe(URL, None, answers(metrics=HEAD + info(groups=json.dumps(said))))
    group = CacheGroup(group=0, kind="full_attention", block_tokens=16, layers="a")
    assert found.instances == (instance(groups=(group,)),)
    assert describe(URL, None, answers(metrics=HEAD + info(groups="[]"))).instances == (instance(),)


def test_without_kvfs_the_size_of_blocks_is_the_engines_own() -> None:
    found = describe(URL, None, answers(metrics=CACHE))
    assert found.instances[0].namespace["block_tokens"] == 32
    assert (found.instances[0].weights, found.instances[0].store_topic) == ("", "")
    assert found.instances[0].engine_topic == "vllm-0"
    assert ["connector of kvfs" in note for note in found.notes] == [True]
    unknown = describe(URL, None, answers(metrics="up 1\n", sources=None))
    assert unknown.instances[0].namespace["block_tokens"] == limits.DEFAULT_BLOCK_TOKENS
    assert unknown.instances[0].engine_topic == ""
    assert len(unknown.notes) == 3


def test_a_rank_of_its_own_is_the_only_one_behind_its_address() -> None:
    rank = answers(sources=sources(2, replay_endpoint="tcp://*:5572"), metrics=HEAD + info() + running(2))
    [one] = describe(URL, None, rank).instances
    assert (one.engine_rank, one.engine_replay) == (2, "tcp://10.0.0.3:5570")  # who asks adds the rank
    assert (one.name, one.data_parallel_rank) == ("10.0.0.3:8000", None)


RANKS = HEAD + info() + info(engine="1") + running(0, 1)


def test_each_rank_behind_one_address_is_an_instance_with_the_events_of_its_own_publisher() -> None:
    binding = {
        "0": sources(endpoint="tcp://*:5557", topic="")["0"],
        "1": sources(endpoint="tcp://*:5558", replay_endpoint="tcp://*:5571", topic="")["0"],
    }
    found = describe(URL, None, answers(sources=binding, metrics=RANKS))
    assert found == (tuple(rank_of(number) for number in (0, 1)), ())
    connecting = sources() | sources(1, endpoint="tcp://10.0.0.1:5562", replay_endpoint="tcp://*:5571")
    found = describe(URL, None, answers(sources=connecting, metrics=RANKS))
    assert found == (
        tuple(
            instance(name=f"10.0.0.3:8000@{number}", data_parallel_rank=number, engine_rank=number)
            for number in (0, 1)
        ),
        (),
    )


def rank_of(number: int, **changes: Any) -> Instance:
    """Return what is known of a rank that binds."""
    name = f"10.0.0.3:8000@{number}"
    return instance(
        **{
            "name": name,
            "data_parallel_rank": number,
            "engine_topic": name,
            "engine_endpoint": f"tcp://10.0.0.3:{5557 + number}",
            "engine_replay": f"tcp://10.0.0.3:{5570 + number}",
            **changes,
        }
    )


def test_ranks_are_those_of_the_labels_and_without_them_those_that_publish() -> None:
    quiet = {"engine_topic": "", "engine_endpoint": "", "engine_replay": ""}
    found = describe(URL, None, answers(sources=None, metrics=RANKS))
    assert found.instances == (rank_of(0, **quiet), rank_of(1, **quiet))
    assert ["publishes no KV events" in note for note in found.notes] == [True]
    found = describe(URL, None, answers(sources=sources() | sources(1), metrics="up 1\n"))
    assert [each.data_parallel_rank for each in found.instances] == [0, 1]


def test_each_rank_has_what_its_own_labels_say() -> None:
    metrics = HEAD + info() + info(engine="1", role="kv_consumer", weights="others") + running(0, 1)
    zero, one = describe(URL, None, answers(metrics=metrics)).instances
    assert (zero.role, zero.weights, one.role, one.weights) == ("both", WEIGHTS, "decode", "others")
    metrics = CACHE + CACHE.replace('engine="0"', 'engine="1"').replace('"32"', '"64"') + running(0, 1)
    zero, one = describe(URL, None, answers(metrics=metrics)).instances
    assert (zero.namespace["block_tokens"], one.namespace["block_tokens"]) == (32, 64)
    with pytest.raises(AnswerUnclear, match="has not said yet"):
        describe(URL, None, answers(metrics=HEAD + info() + running(0, 1)))


@pytest.mark.parametrize("metrics", [running(4, 5), ""], ids=["labels", "publishers"])
def test_ranks_that_a_server_knows_by_other_numbers_are_one_instance(metrics: str) -> None:
    said = answers(sources=sources(4) | sources(5), metrics=HEAD + info() + metrics)
    found = describe(URL, None, said)
    assert found.instances == (instance(engine_topic="", engine_replay=""),)
    assert "2 data-parallel ranks from 4 on" in found.notes[0]


LEFT_OUT: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "no events": ({"sources": {}}, {"engine_topic": "", "engine_replay": ""}, "publishes no KV events"),
    "events that are off": (
        {"sources": sources(enable_kv_cache_events=False)},
        {"engine_topic": "", "engine_replay": ""},
        "publishes no KV events",
    ),
    "no topic": ({"sources": sources(topic="")}, {"engine_topic": "", "engine_replay": ""}, "no topic"),
    "a file": (
        {"sources": sources(endpoint="ipc:///tmp/x")},
        {"engine_topic": "", "engine_replay": ""},
        "cannot be reached",
    ),
    "no replay": ({"sources": sources(replay_endpoint=None)}, {"engine_replay": ""}, "replays no KV events"),
    "a replay for its own machine": (
        {"sources": sources(replay_endpoint="tcp://127.0.0.1:5570")},
        {"engine_replay": ""},
        "replays no KV events",
    ),
    "a replay without a port": (
        {"sources": sources(replay_endpoint="tcp://*:x")},
        {"engine_replay": ""},
        "replays no KV events",
    ),
    "a store without events": (
        {"metrics": info(store_topic="", store_endpoint="", store_replay="")},
        {"store_topic": "", "store_replay": ""},
        "its store publishes no KV events",
    ),
    "a store that binds": (
        {"metrics": info(store_endpoint="tcp://0.0.0.0:5557")},
        {"store_topic": "", "store_replay": ""},
        "do not come here",
    ),
    "a store without replays": (
        {"metrics": info(store_replay="")},
        {"store_replay": ""},
        "its store replays no",
    ),
    "groups as a later release says them": (
        {"metrics": info(groups='[{"group": 0, "kind": "mamba", "block_tokens": 16, "new": 1}]')},
        {},
        "caches its layers have is not understood, .*`new`",
    ),
    "groups without end": ({"metrics": info(groups="[" * 100_000)}, {}, "is not understood"),
    "a store that others reach by any name": (
        {"metrics": info(store_peer="0.0.0.0:9400")},
        {"store_peer": ""},
        r"\[cluster\] address",
    ),
}


@pytest.mark.parametrize(("given", "changes", "note"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_what_cannot_be_known_is_left_out_and_named(
    given: dict[str, Any], changes: dict[str, str], note: str
) -> None:
    found = describe(URL, None, answers(**given))
    assert found.instances == (instance(**changes),)
    assert [re.search(note, each) is not None for each in found.notes] == [True], found.notes


UNCLEAR: dict[str, tuple[dict[str, Any], str]] = {
    "no JSON": ({"models": b"<html>"}, "/v1/models"),
    "other JSON": ({"models": b'{"data": 3}'}, "/v1/models"),
    "no text": ({"models": b'{"data": [{"id": "\xff"}]}'}, "/v1/models"),
    "nested": ({"models": b"[" * 100_000}, "/v1/models"),
    "no models": ({"models": b'{"data": []}'}, "names no model"),
    "adapters alone": ({"models": models(lora="m")}, "names no model"),
    "sources": ({"sources": b'{"a": {}}'}, "/kv_event_sources"),
    "a list of sources": ({"sources": b"[]"}, "/kv_event_sources"),
    "a connector that has not spoken": ({"metrics": HEAD}, "has not said yet"),
    "no namespace": ({"metrics": info(namespace="{}")}, "namespace field model is missing"),
    "blocks of nothing": ({"metrics": CACHE.replace('"32"', '"0"')}, "block_tokens"),
    "blocks of everything": ({"metrics": CACHE.replace('"32"', f'"{"9" * 5000}"')}, "block_tokens"),
}


@pytest.mark.parametrize(("given", "why"), UNCLEAR.values(), ids=UNCLEAR)
def test_nonsense_is_no_instance(given: dict[str, Any], why: str) -> None:
    with pytest.raises(AnswerUnclear, match=why):
        describe(URL, None, answers(**given))


# --- engines on sockets --------------------------------------------------------------------------------------
@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_survey, "ENGINE_RETRY_S", 0.02)
    monkeypatch.setattr(engine_survey, "ENGINE_ASK_INTERVAL_S", 0.05)
    monkeypatch.setattr(engine_survey, "ENGINE_ANSWER_S", 0.5)


def names(service: Any) -> set[str]:
    return {each.name for each in service.conductor.registry.instances()}


def name_of(engine: StubEngine) -> str:
    return f"127.0.0.1:{engine.port}"


async def test_engines_that_answer_are_there_at_the_start_and_late_ones_when_they_answer() -> None:
    here, late = AskedEngine(), AskedEngine()
    async with trio.open_nursery() as nursery:
        await nursery.start(here.run)
        async with serving(engines=[here.url], decode=[late.url], engine_token="a key") as (service, _):
            assert names(service) == {name_of(here)}
            await nursery.start(late.run)
            await until(lambda: names(service) == {name_of(here), name_of(late)})
            found = {each.url: each.role for each in service.conductor.registry.instances()}
            assert found == {here.url: "both", late.url: "decode"}
            assert here.tokens_seen == {b"Bearer a key"}
        nursery.cancel_scope.cancel()


async def test_one_that_starts_anew_with_another_model_is_registered_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvfs.conductor")
    engine = AskedEngine()
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        async with serving(engines=[engine.url]) as (service, _):
            registry = service.conductor.registry
            registry.set_role(name_of(engine), "prefill")
            engine.die()
            count = len(engine.asked)
            await nursery.start(engine.run)
            await until(lambda: len(engine.asked) > count + 6)  # the same answers change nothing
            assert registry.member(name_of(engine))[1].role == "prefill"
            engine.said = engine.said._replace(models=models("other"))
            await until(lambda: [pool.model for pool in registry.pools()] == ["other"])
            assert registry.member(name_of(engine))[1].role == "prefill"
            engine.said = engine.said._replace(metrics=info(store_topic="", role="kv_consumer"))
            await until(lambda: registry.member(name_of(engine))[1].role == "decode")
        nursery.cancel_scope.cancel()
    assert caplog.text.count("is registered anew") == 2


async def test_one_of_another_pool_is_refused_with_the_field_and_comes_in_when_it_fits(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, other = AskedEngine(), AskedEngine(metrics=info(store_topic="", weights="memory 99"))
    async with trio.open_nursery() as nursery:
        for engine in (one, other):
            await nursery.start(engine.run)
        async with serving(engines=[one.url]) as (service, _):
            survey = EngineSurvey({other.url: None}, service)
            assert [await survey.ask(other.url) for _ in range(2)] == [False, False]
            assert names(service) == {name_of(one)}
            assert caplog.text.count("weights is 'memory 99', but in the pool of 'm'") == 1
            other.said = one.said
            assert await survey.ask(other.url)
            assert names(service) == {name_of(one), name_of(other)}
        nursery.cancel_scope.cancel()


async def test_ranks_are_instances_and_those_that_differ_are_refused_with_what_differs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvfs.conductor")
    both = info(store_topic="") + info(store_topic="", engine="1")
    engine = AskedEngine(metrics=both + running(0, 1))
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        async with serving(engines=[engine.url]) as (service, _):
            ranks = {f"{name_of(engine)}@{number}" for number in (0, 1)}
            assert names(service) == ranks
            assert "is known, of 2 data-parallel ranks" in caplog.text
            registry = service.conductor.registry
            registry.set_role(f"{name_of(engine)}@1", "decode")
            engine.said = engine.said._replace(metrics=both + info(engine="2") + running(0, 1, 2))
            await until(lambda: len(names(service)) == 3)
            assert registry.member(f"{name_of(engine)}@1")[1].role == "decode"
            other = both + info(engine="2", weights="others", store_topic="") + running(0, 1, 2)
            engine.said = engine.said._replace(metrics=other)
            await until(lambda: not names(service))
            assert "weights is 'others', but in the pool of" in caplog.text
            engine.said = engine.said._replace(metrics=both + running(0, 1))
            await until(lambda: names(service) == ranks)
        nursery.cancel_scope.cancel()


HOSTILE = {
    "no HTTP": (b"\x00\x01\r\n\r\n", "/v1/models"),
    "nothing": (b"", "/v1/models"),
    "an error": (b"HTTP/1.1 500 X\r\nContent-Length: 0\r\n\r\n", "status 500"),
    "no token": (b"HTTP/1.1 401 X\r\nContent-Length: 0\r\n\r\n", "status 401"),
    "huge": (b"HTTP/1.1 200 X\r\n\r\n" + b"x" * (limits.MAX_ENGINE_ANSWER_BYTES + 1), "more than"),
    "a huge head": (b"HTTP/1.1 200 X\r\nX: " + b"y" * (1 << 20), "/v1/models"),
}


@pytest.mark.parametrize(("raw", "why"), HOSTILE.values(), ids=HOSTILE)
async def test_an_engine_that_misbehaves_keeps_nobody_out(
    raw: bytes, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = AskedEngine(), AskedEngine()
    bad.raw = raw
    async with trio.open_nursery() as nursery:
        for engine in (good, bad):
            await nursery.start(engine.run)
        async with serving(engines=[bad.url, good.url]) as (service, _):
            assert names(service) == {name_of(good)}
            assert why in caplog.text
            bad.raw = None
            await until(lambda: names(service) == {name_of(good), name_of(bad)})
        nursery.cancel_scope.cancel()


async def test_one_that_never_answers_ends_no_start(caplog: pytest.LogCaptureFixture) -> None:
    engine = AskedEngine()
    engine.silent = True
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        with trio.fail_after(WAIT_S):
            async with serving(engines=[engine.url]) as (service, _):
                assert names(service) == set()
                assert "does not say what it is in 0.5 s" in caplog.text
                engine.silent = False
                await until(lambda: names(service) == {name_of(engine)})
        nursery.cancel_scope.cancel()


async def test_a_proxy_with_that_conductor_routes_and_answers_404_for_a_model_that_no_engine_has() -> None:
    engine = AskedEngine()
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        async with (
            serving(engines=[engine.url]) as (service, _),
            proxy_stand(router=service.conductor) as stand,
        ):
            await until(lambda: name_of(engine) in {each.name for each in stand.proxy.engines})
            body = {"model": "m", "prompt": "p", "max_tokens": 3}
            assert (await stand.ask("/v1/completions", body)).status == 200
            assert len(engine.completions) == 1
            found = await stand.ask("/v1/completions", body | {"model": "none"})
            assert (found.status, found.json()["error"]["code"]) == (404, "model_not_found")
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("place", ["in the process", "elsewhere"])
async def test_a_model_that_a_late_engine_may_have_is_not_ready_and_not_found_once_all_have_answered(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "CONDUCTOR_LOOK_S", 0.05)
    here, late = AskedEngine(), AskedEngine()
    unknown = {"model": "none", "prompt": "p"}
    awaited = f"not said yet what they serve: {late.url}"
    async with trio.open_nursery() as nursery:
        await nursery.start(here.run)
        async with (
            serving(engines=[here.url, late.url]) as (service, addresses),
            asking(addresses) as asker,
            proxy_stand(
                router=service.conductor if place == "in the process" else None,
                conductor="" if place == "in the process" else addresses.http,
            ) as stand,
        ):
            await until(lambda: name_of(here) in {each.name for each in stand.proxy.engines})
            found = await asker.ask("POST", "/v1/route", {"model": "none", "length": 3})
            assert (found.status, found.json["error"]["code"]) == (503, "NotReady")
            assert (found.headers["retry-after"], awaited in found.body.decode()) == ("10", True)
            for answer in [
                await stand.ask("/v1/completions", unknown),
                await stand.ask("/v1/models/none", method="GET"),
            ]:
                assert (answer.status, answer.headers[b"retry-after"]) == (503, b"10")
                assert awaited in answer.body.decode()
            assert (await stand.ask("/v1/completions", {"model": "m", "prompt": "p"})).status == 200

            await nursery.start(late.run)
            await until(lambda: name_of(late) in {each.name for each in stand.proxy.engines})
            found = await asker.ask("POST", "/v1/route", {"model": "none", "length": 3})
            assert (found.status, found.json["error"]["code"]) == (404, "NotFound")
            for answer in [
                await stand.ask("/v1/completions", unknown),
                await stand.ask("/v1/models/none", method="GET"),
            ]:
                assert (answer.status, answer.json()["error"]["code"]) == (404, "model_not_found")
        nursery.cancel_scope.cancel()
