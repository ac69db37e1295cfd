"""The Conductor on a virtual clock: what it decides, and what it believes of caches."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvfs import limits
from kvfs.errors import Exists, InvalidRequest, LimitExceeded, NotFound
from kvfs.events.kv_events import CPU, GPU, STORAGE
from kvfs.keys import prefix_hashes, split_keys
from scheduler.conductor.conductor import DEGRADED, WITHOUT_TOKENS, Conductor
from scheduler.conductor.sources import Knowledge, Place, StreamName
from scheduler.conductor.values import EngineMetrics, Refused, Routed, RouteRequest, Usage
from tests.support.conductors import (
    BLOCK_TOKENS,
    NAMESPACE,
    Clock,
    conductor,
    hears,
    instance,
    over,
    routed,
    tokens,
)


# --- pools ---------------------------------------------------------------------------------------------------
def test_a_mixed_pool_is_refused_by_the_field_that_differs() -> None:
    made = conductor(Clock(), instance("a"))
    other = NAMESPACE.as_mapping() | {"dtype": "float16"}
    with pytest.raises(InvalidRequest, match=r"'b': dtype is 'float16', but in the pool of 'm' 'bfloat16'"):
        made.registry.add(instance("b", namespace=other))
    with pytest.raises(InvalidRequest, match="weights"):
        made.registry.add(instance("b", weights="others"))
    made.registry.add(instance("b", namespace=other, model="m16"))
    assert {each.name for each in made.registry.instances()} == {"a", "b"}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"name": ""}, "name and model"),
        ({"name": "x" * 129}, "name 'xxx.*128 bytes"),
        ({"name": "b", "url": "ftp://x"}, "url must be http"),
        ({"name": "b", "engine_topic": "engine-a"}, "stream 'engine-a' is that of 'a'"),
        ({"name": "b", "engine_topic": "t", "store_topic": "t"}, "are the same"),
        ({"name": "b", "namespace": {"model": "m"}}, "field revision is missing"),
        ({"name": "b", "url": ""}, "url must be http"),
        ({"name": "b", "engine_endpoint": "tcp://*:1"}, "engine_endpoint 'tcp://.*' is not tcp://HOST:PORT"),
        ({"name": "b", "engine_endpoint": "tcp://::1:1"}, "is not tcp://HOST:PORT"),
        ({"name": "b", "engine_endpoint": "tcp://a:1", "engine_topic": ""}, "wants an engine_topic"),
        ({"name": "b", "engine_endpoint": "tcp://a:1", "engine_rank": 1}, "engine_rank 0"),
    ],
)
def test_a_wrong_instance_is_refused_and_changes_nothing(changes: dict[str, Any], error: str) -> None:
    made = conductor(Clock(), instance("a"))
    before = made.status()
    with pytest.raises(InvalidRequest, match=error):
        made.registry.add(instance(**changes))
    assert made.status() == before


def test_instances_are_bounded_and_registering_twice_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.conductor.registry.MAX_CONDUCTOR_INSTANCES", 2)
    made = conductor(Clock(), instance("a"), instance("b"))
    made.registry.add(instance("a"))
    with pytest.raises(Exists):
        made.registry.add(instance("a", role="decode"))
    with pytest.raises(LimitExceeded, match="2 instances"):
        made.registry.add(instance("c"))
    made.remove("a")
    made.registry.add(instance("c"))
    assert [each["name"] for each in made.status()["instances"]] == ["b", "c"]


def test_removing_an_instance_ends_its_requests_and_its_slot_is_used_again() -> None:
    made = conductor(Clock(), instance("a"), instance("b"))
    prompt = tokens(1, 640)
    hears(made, "engine-a", prompt)
    assert routed(made, prompt).decode == "a"
    made.remove("a")
    over(made)
    assert made.match(RouteRequest(model="m", tokens=prompt)) == {"b": 0}
    made.registry.add(instance("c"))
    assert made.match(RouteRequest(model="m", tokens=prompt)) == {"b": 0, "c": 0}
    with pytest.raises(NotFound, match="'a' is not registered"):
        made.registry.drain("a")


# --- decisions -----------------------------------------------------------------------------------------------
def test_a_prompt_goes_where_its_blocks_are_and_the_answer_says_so() -> None:
    made = conductor(Clock(), instance("a"), instance("b"), instance("c"))
    prompt = tokens(1, 1605)
    hashes = hears(made, "engine-b", prompt[:1600])
    found = routed(made, prompt)
    assert (found.decode, found.prefill, found.cached_tokens, found.degraded) == ("b", None, 1600, "")
    assert found.last_block == hashes[-16:].hex()
    assert [(each.first_block, each.blocks, each.action) for each in found.ranges] == [(0, 100, "use")]
    assert made.match(RouteRequest(model="m", tokens=prompt)) == {"a": 0, "b": 1600, "c": 0}


def test_the_last_token_is_computed_even_where_all_blocks_are_held() -> None:
    made = conductor(Clock(), instance("a"))
    prompt = tokens(1, 160)
    hears(made, "engine-a", prompt)
    assert routed(made, prompt).cached_tokens == 144


def test_a_system_prompt_does_not_draw_all_traffic_to_one_instance() -> None:
    """Everybody has the same long system prompt, which one instance holds; its queue has to count."""
    made = conductor(Clock(), *map(instance, "abcd"))
    system = tokens(0, 1600)
    hears(made, "engine-a", system)
    used = [routed(made, system + tokens(n, 3000)).decode for n in range(1, 41)]
    assert min(used.count(name) for name in "abcd") >= 5


def test_on_a_miss_the_least_loaded_instance_is_chosen_not_the_emptiest_cache() -> None:
    made = conductor(Clock(), instance("a"), instance("b"))
    for n in range(20):
        hears(made, "engine-b", tokens(n, 1600))
    for n in range(4):
        routed(made, tokens(100 + n, 4000), exclude=["b"])
    assert routed(made, tokens(200, 4000)).decode == "b"


def test_a_second_request_waits_for_the_blocks_that_the_first_is_making() -> None:
    clock = Clock()
    made = conductor(clock, instance("a"), instance("b"))
    prompt = tokens(1, 8000)
    first = routed(made, prompt)
    second = routed(made, prompt + tokens(2, 100))
    assert (second.decode, second.cached_tokens) == (first.decode, 8000)
    assert second.ttft_s >= first.ttft_s


def test_a_cancelled_prefill_leaves_nothing_to_wait_for() -> None:
    made = conductor(Clock(), instance("a"), instance("b"))
    prompt = tokens(1, 8000)
    made.cancel(routed(made, prompt).id)
    over(made)
    assert made.match(RouteRequest(model="m", tokens=prompt)) == {"a": 0, "b": 0}
    assert routed(made, prompt).cached_tokens == 0


def test_blocks_of_a_finished_prefill_are_believed_until_events_come_and_not_for_ever() -> None:
    clock = Clock()
    made = conductor(clock, instance("a"))
    prompt = tokens(1, 1600)
    made.first_token(routed(made, prompt).id)
    assert made.match(RouteRequest(model="m", tokens=prompt)) == {"a": 1600}
    clock.now_s += limits.EXPECTED_BLOCKS_S
    made.tick()
    assert made.match(RouteRequest(model="m", tokens=prompt)) == {"a": 0}


def test_excluded_draining_and_unreachable_instances_are_not_chosen() -> None:
    clock = Clock()
    made = conductor(clock, instance("a"), instance("b"), instance("c"))
    prompt = tokens(1, 640)
    hears(made, "engine-a", prompt)
    assert routed(made, prompt, exclude=["a", "nobody"]).decode != "a"
    made.registry.drain("a")
    made.unreachable("b")
    assert routed(made, prompt).decode == "c"
    made.registry.drain("a", draining=False)
    assert routed(made, prompt).decode == "a"
    clock.now_s += limits.UNREACHABLE_S
    made.tick()
    assert routed(made, prompt, exclude=["a", "c"]).decode == "b"
    made.unreachable("b")
    made.registry.observed("b", EngineMetrics())
    assert routed(made, prompt, exclude=["a", "c"]).decode == "b"


def test_nobody_takes_work() -> None:
    made = conductor(Clock(), instance("a"))
    made.registry.drain("a")
    found = made.route(RouteRequest(model="m", tokens=tokens(1, 100)))
    assert isinstance(found, Refused)
    assert (found.reason, found.retry_after_s) == ("no instance takes work", 0.25)
    over(made)


def test_a_request_that_would_be_late_is_refused_with_the_time_to_retry() -> None:
    made = conductor(Clock(), instance("a"))
    for n in range(8):
        routed(made, tokens(n, 20_000))
    found = made.route(RouteRequest(model="m", tokens=tokens(9, 2000), ttft_slo_s=1.0))
    assert isinstance(found, Refused)
    assert found.reason == "the first token would be late"
    assert 1.0 < found.retry_after_s <= 60
    assert made.explain(found.id)["verdict"] == "reject"


# --- roles ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", [("p", "d"), ("d", "p")])
def test_prefill_and_decode_apart_and_short_prompts_without_a_leg(order: tuple[str, str]) -> None:
    roles = {"p": "prefill", "d": "decode"}
    made = conductor(Clock(), *(instance(name, role=roles[name]) for name in order))
    long, short = routed(made, tokens(1, 20_000)), routed(made, tokens(2, 300))
    assert (long.prefill, long.prefill_url, long.decode) == ("p", "http://p.test", "d")
    assert (short.prefill, short.decode) == (None, "d")


@pytest.mark.parametrize(
    ("prefill", "decode", "peer"),
    [
        ({"store_peer": "10.0.0.1:9400"}, {"store_peer": "10.0.0.2:9400"}, "10.0.0.1:9400"),
        ({"store_peer": "10.0.0.1:9400"}, {}, "10.0.0.1:9400"),
        ({"store_peer": "10.0.0.1:9400"}, {"store_peer": "10.0.0.1:9400"}, ""),
        ({"store_peer": "10.0.0.1:9400", "store_topic": "n"}, {"store_topic": "n"}, ""),
        ({}, {"store_peer": "10.0.0.2:9400"}, ""),
        ({}, {}, ""),
    ],
)
def test_a_pair_on_two_stores_is_told_where_the_prefilled_blocks_are(
    prefill: dict[str, str], decode: dict[str, str], peer: str
) -> None:
    made = conductor(
        Clock(), instance("p", role="prefill", **prefill), instance("d", role="decode", **decode)
    )
    long, short = routed(made, tokens(1, 20_000)), routed(made, tokens(2, 300))
    assert (long.prefill, long.prefill_peer) == ("p", peer)
    assert (short.prefill, short.prefill_peer) == (None, "")


@pytest.mark.parametrize("order", [("p", "b"), ("b", "p")])
def test_short_prompts_beside_an_instance_that_does_both_get_no_leg(order: tuple[str, str]) -> None:
    roles = {"p": "prefill", "b": "both"}
    made = conductor(Clock(), *(instance(name, role=roles[name]) for name in order))
    prompt = tokens(1, 16_000)
    hears(made, "engine-p", prompt)
    long = routed(made, prompt)
    assert (long.prefill, long.decode) == ("p", "b")
    made.cancel(long.id)
    routed(made, tokens(3, 16_000), exclude=["p"])  # so that the policy's choice is the other
    short = routed(made, tokens(4, 300))
    assert (short.prefill, short.decode) == (None, "b")


def test_a_second_turn_stays_on_the_decode_instance_that_has_the_first() -> None:
    made = conductor(
        Clock(), instance("p", role="prefill"), instance("d", role="decode"), instance("e", role="decode")
    )
    prompt = tokens(1, 20_000)
    hears(made, "engine-e", prompt)
    found = routed(made, prompt + tokens(2, 200))
    assert (found.prefill, found.decode, found.cached_tokens) == (None, "e", 20_000)


def test_a_switched_role_counts_at_once_and_keeps_the_cache() -> None:
    made = conductor(Clock(), instance("a", role="prefill"), instance("b", role="decode"))
    prompt = tokens(1, 20_000)
    assert routed(made, prompt).prefill == "a"
    made.registry.set_role("a", "decode")
    made.registry.set_role("b", "prefill")
    hears(made, "engine-a", prompt)
    assert (routed(made, tokens(3, 20_000)).prefill, routed(made, prompt).decode) == ("b", "a")


# --- what is believed ----------------------------------------------------------------------------------------
def test_what_was_announced_is_expected_no_more_so_that_its_removal_counts_at_once() -> None:
    made = conductor(Clock(), instance("a"), instance("b"))
    prompt = tokens(1, 1601)
    found = routed(made, prompt)
    assert made.match(RouteRequest(model="m", tokens=prompt)) == {"a": 1600, "b": 0}
    hashes = hears(made, "engine-a", prompt)
    made.done(found.id)
    stream = made.registry.stream(StreamName("engine-a", 0))
    assert stream is not None
    made.registry.removed(stream, Place(GPU), hashes[-32:])
    assert made.match(RouteRequest(model="m", tokens=prompt)) == {"a": 1568, "b": 0}
    assert routed(made, prompt).cached_tokens == 1568


def test_cleared_blocks_are_obeyed_and_begin_a_new_judgement() -> None:
    made = conductor(Clock(), instance("a"))
    prompt = tokens(1, 16_001)
    hears(made, "engine-a", prompt)
    for _ in range(3):
        made.done(routed(made, prompt).id, Usage(cached_tokens=0))
    stream = made.registry.stream(StreamName("engine-a", 0))
    assert stream is not None
    made.registry.cleared(stream, Knowledge.CURRENT)
    assert made.match(RouteRequest(model="m", tokens=prompt)) == {"a": 0}
    assert not made.status()["instances"][0]["distrusted"]
    assert made.status()["streams"][0]["epoch"] == 1


def test_without_any_events_load_decides_and_the_answer_says_so() -> None:
    made = conductor(Clock(), instance("a"), instance("b"))
    found = routed(made, tokens(1, 1600))
    assert found.degraded == DEGRADED
    assert DEGRADED[1:] in made.explain(found.id)["words"]
    assert made.status()["counts"]["degraded"] == 1
    hears(made, "engine-a", tokens(2, 160))
    assert routed(made, tokens(3, 1600)).degraded == ""


def test_a_prompt_without_tokens_is_routed_by_load_and_the_answer_says_so() -> None:
    made = conductor(Clock(), instance("a"), instance("b"))
    hears(made, "engine-a", tokens(2, 160))
    found = made.route(RouteRequest(model="m", length=1600))
    assert isinstance(found, Routed)
    assert found.degraded == WITHOUT_TOKENS
    assert WITHOUT_TOKENS[1:] in made.explain(found.id)["words"]
    short = made.route(RouteRequest(model="m", length=5, hashes=[]))
    assert isinstance(short, Routed)
    assert short.degraded == ""
    assert [made.counts[name] for name in ("degraded", "without_tokens")] == [1, 1]


def test_a_topic_without_an_instance_is_counted_and_named() -> None:
    made = conductor(Clock(), instance("a"))
    for _ in range(3):
        assert made.registry.stream(StreamName("vllm-7", 0)) is None
    assert made.status()["unregistered"] == {"vllm-7": 3}
    made.registry.add(instance("b", engine_topic="vllm-7"))
    assert made.status()["unregistered"] == {}
    for n in range(2 * limits.MAX_UNREGISTERED_TOPICS):
        made.registry.stream(StreamName(f"other-{n}", 0))
    assert len(made.status()["unregistered"]) == limits.MAX_UNREGISTERED_TOPICS


def test_the_store_of_a_node_is_in_place_at_all_its_instances() -> None:
    made = conductor(
        Clock(),
        instance("a", store_topic="n1"),
        instance("b", store_topic="n1"),
        instance("c", store_topic="n2"),
    )
    prompt = tokens(1, 1600)
    hears(made, "n1", prompt[:800], CPU)
    hears(made, "n1", prompt, STORAGE)
    assert made.match(RouteRequest(model="m", tokens=prompt)) == {"a": 1600, "b": 1600, "c": 0}
    assert routed(made, prompt, exclude=["a"]).decode == "b"


def test_blocks_of_another_node_are_loaded_only_where_stores_send_to_each_other() -> None:
    prompt = tokens(1, 16_000)
    for transfers in (False, True):
        nodes = instance("a", store_topic="n1"), instance("b", store_topic="n2")
        made = conductor(Clock(), *nodes, transfers=transfers)
        hears(made, "n1", prompt, STORAGE)
        found = routed(made, prompt, exclude=["a"])
        assert found.decode == "b"
        assert found.cached_tokens == (15_984 if transfers else 0)
        if transfers:
            assert [(each.action, each.source) for each in found.ranges] == [
                ("load", "n1 STORAGE"),
                ("recompute", ""),
            ]


# --- questions -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"tokens": []}, "at least one"),
        ({"tokens": [1], "length": 3}, "not by both"),
        ({}, "length"),
        ({"length": 0}, "length"),
        ({"length": 31, "hashes": ["0" * 32] * 2}, "2 blocks of 16 tokens are more than 31"),
        ({"length": 64, "hashes": ["0" * 32, "x" * 32]}, "'xxxx"),
        ({"length": 64, "hashes": ["0" * 30, "0" * 34]}, "32 hexadecimal"),
        ({"length": limits.MAX_ROUTE_TOKENS + 1}, "the limit is 1048576"),
        ({"tokens": [-1] * 20}, "token 0 is -1"),
        ({"length": 9, "exclude": ["x"] * 17}, "the limit is 16"),
        ({"length": 9, "waited_s": -1.0}, "waited_s is -1"),
        ({"length": 9, "waited_s": float("nan")}, "waited_s is nan"),
    ],
)
def test_a_malformed_question_is_refused_and_reserves_nothing(values: dict[str, Any], error: str) -> None:
    made = conductor(Clock(), instance("a"))
    with pytest.raises(InvalidRequest, match=error):
        made.route(RouteRequest(model="m", **values))
    over(made)


def test_hashes_ask_as_tokens_do_and_a_model_without_a_pool_is_named() -> None:
    made = conductor(Clock(), instance("a"), instance("b"))
    prompt = tokens(1, 1600)
    hashes = [key.hex() for key in split_keys(hears(made, "engine-b", prompt))]
    asked = RouteRequest(model="m", hashes=hashes, length=1600)
    found = made.route(asked)
    assert isinstance(found, Routed)
    assert (found.decode, found.cached_tokens) == ("b", 1584)
    with pytest.raises(NotFound, match="'gpt'"):
        made.route(RouteRequest(model="gpt", length=5))


def test_weights_are_part_of_the_first_block() -> None:
    made = conductor(Clock(), instance("a", weights="w1"))
    prompt = tokens(1, 3 * BLOCK_TOKENS)
    expected = prefix_hashes(NAMESPACE, prompt, extra=[b"w1\0", None, None])
    assert made.registry._pools["m"].hashes_of(prompt) == expected


# --- explanations --------------------------------------------------------------------------------------------
def test_an_explanation_has_every_candidate_and_says_why_in_words() -> None:
    made = conductor(Clock(), *map(instance, "abc"))
    prompt = tokens(1, 1600)
    hears(made, "engine-b", prompt)
    found = made.explain(routed(made, prompt).id)
    assert found["words"].startswith("b prefills: 1584 of 1600 tokens are reused, it starts after 0.000 s")
    assert {each["instance"] for each in found["prefill"]} == {"a", "b", "c"}
    assert found["prefill"][0]["instance"] == "b"
    assert [each["score"] for each in found["prefill"]] == sorted(each["score"] for each in found["prefill"])


def test_explanations_are_the_last_thousand() -> None:
    made = conductor(Clock(), instance("a"))
    ids = [routed(made, [n]).id for n in range(limits.MAX_REMEMBERED_DECISIONS + 1)]
    with pytest.raises(NotFound):
        made.explain(ids[0])
    assert made.explain(ids[1])["tokens"] == 1


def test_two_conductors_decide_alike_but_for_requests_that_one_has_and_the_other_hears_of_from_engines() -> (
    None
):
    clock = Clock()
    both = [conductor(clock, *map(instance, "abc"), fitted=False) for _ in range(2)]
    for made in both:
        for number, name in enumerate("abcabcab"):
            hears(made, f"engine-{name}", tokens(number, 16 * BLOCK_TOKENS))

    def asked(made: Conductor, number: int) -> tuple[Routed, dict[str, Any]]:
        """Route a prompt that begins as one that is known; return the answer and why, and have it end at once."""
        found = routed(made, tokens(number % 8, (4 + number % 12) * BLOCK_TOKENS) + tokens(99 + number, 90))
        explained = made.explain(found.id)
        made.cancel(found.id)
        return msgspec.structs.replace(found, id=""), {
            key: value for key, value in explained.items() if key != "id"
        }

    for number in range(40):
        clock.now_s += 0.01
        one, other = (asked(made, number) for made in both)
        assert one == other
    kept = routed(both[0], tokens(1, 16 * BLOCK_TOKENS))
    both[0].first_token(kept.id)
    slot = "abc".index(kept.decode)
    batches = [made.registry.pools()[0].planner.load(slot, clock.now_s).active_requests for made in both]
    assert batches == [1, 0]
    for made in both:
        for name in "abc":
            made.registry.observed(name, EngineMetrics(requests=int(name == kept.decode)))
    batches = [made.registry.pools()[0].planner.load(slot, clock.now_s).active_requests for made in both]
    assert batches == [1, 1]
    both[0].done(kept.id)
    for made in both:
        made.registry.observed(kept.decode, EngineMetrics(requests=0))
        over(made)
    assert asked(both[0], 50) == asked(both[1], 50)
