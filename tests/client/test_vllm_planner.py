"""The scheduler's half of the vLLM connector against a plain model: every step's loads and stores, for any schedule."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfs import prefix_hashes
from kvfs.client.session import split_keys
from kvfs.connectors.vllm_scheduler import Planner, Rank, Step
from kvfs.errors import AccessDenied, DeadlinePassed, Unsupported
from kvfs.limits import (
    CONNECTOR_FETCH_S,
    CONNECTOR_FETCHES,
    CONNECTOR_HANDOVER_S,
    CONNECTOR_MATCH_S,
    CONNECTOR_RETRY_S,
)
from kvfs.namespaces import Namespace
from tests.support.stores import NAMESPACE
from tests.support.waits import WAIT_S, eventually

BLOCK = NAMESPACE.block_tokens
RANKS: list[Rank] = [(0, 0), (0, 1)]


def namespaces() -> dict[Rank, Namespace]:
    fields = {**NAMESPACE.as_mapping(), "tensor_shards": 2}
    return {rank: Namespace.from_mapping({**fields, "tensor_rank": rank[1]}) for rank in RANKS}


class AskedFetch(NamedTuple):
    keys: list[bytes]
    hint: str | None
    timeout_s: float
    future: Future[int]


class FakeBlocks:
    """The shared table: a set of keys."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.below: set[bytes] = set()
        self.trials: list[Future[int]] = []
        self.fetches: list[AskedFetch] = []

    def match(self, keys: bytes, *, timeout_s: float) -> int:
        hits = self.exists(keys, timeout_s=timeout_s)
        return hits.index(False) if False in hits else len(hits)

    def exists(self, keys: bytes, *, timeout_s: float) -> list[bool]:
        assert timeout_s <= CONNECTOR_MATCH_S, "the scheduler must not wait"
        return [key in self.keys for key in split_keys(keys)]

    def below_dram(self, keys: bytes, *, timeout_s: float) -> list[bool]:
        assert timeout_s <= CONNECTOR_MATCH_S, "the scheduler must not wait"
        return [key in self.keys & self.below for key in split_keys(keys)]

    def prefetch(self, keys: bytes, *, timeout_s: float) -> Future[int]:
        self.trials.append(Future())
        return self.trials[-1]

    def fetch(self, keys: bytes, *, hint: str | None, timeout_s: float) -> Future[int]:
        self.fetches.append(AskedFetch(list(split_keys(keys)), hint, timeout_s, Future()))
        return self.fetches[-1].future

    def bring(self, asked: AskedFetch, count: int | None = None) -> None:
        """End a fetch with its first blocks here."""
        self.keys.update(asked.keys[:count])
        asked.future.set_result(len(asked.keys[:count]))


class FakeLink:
    def __init__(self) -> None:
        self.store: FakeBlocks | None = FakeBlocks()
        self.parents: dict[bytes, bytes] = {}
        """Of blocks that are not stored behind the one before."""
        self.is_up = True

    def open(self, namespace: Namespace) -> FakeBlocks | None:
        return self.store

    def blocks(self, namespace: Namespace) -> FakeBlocks | None:
        return self.store

    def attempt(self, do: Callable[[], Any], otherwise: Any) -> Any:
        return do()


class FakeRequest:
    def __init__(self, name: str, tokens: Sequence[int], params: Any = None) -> None:
        self.request_id = name
        self.kv_transfer_params = params
        self.all_token_ids = list(tokens)
        self.num_prompt_tokens = len(tokens)
        self.lora_request = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


@pytest.fixture(autouse=True)
def _no_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "_extra", lambda self, tracked, first, last, size: [None] * (last - first))


class Clock:
    """Seconds that pass when a test says so."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def planner(
    link: FakeLink,
    *,
    store_generated: bool = True,
    fetches_any: bool = False,
    clock: Clock | None = None,
) -> Planner:
    made = Planner(
        link,  # type: ignore[arg-type]
        BLOCK,
        store_generated=store_generated,
        is_async=True,
        fetches_any=fetches_any,
        clock=clock or Clock(),
    )
    made.set_namespaces(namespaces())
    return made


def keys_of(tokens: Sequence[int]) -> dict[Rank, list[bytes]]:
    return {
        rank: list(split_keys(prefix_hashes(namespace, list(tokens))))
        for rank, namespace in namespaces().items()
    }


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1000), k=count)


def stored_blocks(plan: Any) -> list[int]:
    return [block for run in plan.stores for block in run.block_ids]


def test_a_hit_is_a_hit_on_every_rank() -> None:
    link = FakeLink()
    made, tokens = planner(link), tokens_of(5 * BLOCK + 3)
    keys = keys_of(tokens)
    assert link.store is not None
    link.store.keys = {*keys[0, 0], *keys[0, 1][:3]}
    request = FakeRequest("r", tokens)
    assert made.match(request, 0) == (3 * BLOCK, True)
    assert made.match(request, 2 * BLOCK) == (BLOCK, True)
    assert made.match(request, 3 * BLOCK) == (0, False)
    made.match(request, BLOCK)
    made.allocated(request, [[10, 11, 12, 13, 14, 15]], 2 * BLOCK)
    [load] = made.plan([]).loads
    assert load.block_ids == [11, 12]
    assert {rank: list(split_keys(k)) for rank, k in load.keys.items()} == {r: keys[r][1:3] for r in RANKS}
    assert made.plan([]).loads == []


def test_the_block_of_the_last_token_is_never_loaded() -> None:
    link = FakeLink()
    made, tokens = planner(link), tokens_of(2 * BLOCK)
    assert link.store is not None
    link.store.keys = {key for keys in keys_of(tokens).values() for key in keys}
    assert made.match(FakeRequest("r", tokens), 0) == (BLOCK, True)
    assert made.match(FakeRequest("longer", [*tokens, 1]), 0) == (2 * BLOCK, True)


def test_nothing_matches_or_is_stored_without_a_store() -> None:
    link = FakeLink()
    made, request = planner(link), FakeRequest("r", tokens_of(3 * BLOCK))
    link.store, link.is_up = None, False
    assert made.match(request, 0) == (0, False)
    assert made.plan([Step("r", 0, 3 * BLOCK, [1, 2, 3])]).stores == []
    unready = Planner(link, BLOCK, store_generated=True, is_async=True)  # type: ignore[arg-type]
    assert unready.match(request, 0) == (0, False)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_whole_known_block_is_stored_once_and_no_other(data: st.DataObject) -> None:
    """Chunks of any size, preemptions, tokens that are generated, blocks that vanish from the store."""
    link = FakeLink()
    made = planner(link)
    assert link.store is not None
    tokens = tokens_of(data.draw(st.integers(1, 6 * BLOCK)))
    request = FakeRequest("r", tokens)
    made.match(request, 0)
    computed, blocks = 0, list(range(100, 120))
    for _ in range(12):
        action = data.draw(st.sampled_from(["compute", "compute", "generate", "preempt", "vanish"]))
        if action == "generate":
            request.all_token_ids.append(data.draw(st.integers(0, 999)))
        elif action == "preempt":
            computed, blocks = 0, [block + 100 for block in blocks]
        elif action == "vanish" and link.store.keys:
            link.store.keys.discard(data.draw(st.sampled_from(sorted(link.store.keys))))
        else:
            before = computed
            # Speculation computes past what is known.
            computed = min(computed + data.draw(st.integers(1, 2 * BLOCK)), request.num_tokens + 3)
            plan = made.plan([Step("r", before, computed, blocks)])
            keys = keys_of(request.all_token_ids)
            whole = min(computed, request.num_tokens) // BLOCK
            for run in plan.stores:
                first = blocks.index(run.block_ids[0])
                assert first + len(run.block_ids) <= whole
                for rank in RANKS:
                    assert list(split_keys(run.keys[rank])) == keys[rank][first : first + len(run.block_ids)]
                    assert run.parents[rank] == (keys[rank][first - 1] if first else None)
                    link.store.keys.update(split_keys(run.keys[rank]))
            taken = stored_blocks(plan)
            assert len(taken) == len(set(taken))
            fresh = range(before // BLOCK, whole)
            assert all(keys[rank][i] in link.store.keys for rank in RANKS for i in fresh), (
                "a new block is missing"
            )
            computed = min(computed, request.num_tokens)


def test_prompts_alone_are_stored_where_that_is_asked_for() -> None:
    made = planner(FakeLink(), store_generated=False)
    request = FakeRequest("r", tokens_of(BLOCK + 1))
    made.match(request, 0)
    request.all_token_ids += tokens_of(3 * BLOCK)
    assert stored_blocks(made.plan([Step("r", 0, 4 * BLOCK, [1, 2, 3, 4])])) == [1]


def test_a_step_stores_all_its_blocks_however_many() -> None:
    """A prompt with one token to answer has no next step."""
    made = planner(FakeLink())
    prompts = {f"r{i}": tokens_of(700 * BLOCK, seed=i) for i in range(3)}
    for name, tokens in prompts.items():
        made.match(FakeRequest(name, tokens), 0)
    plan = made.plan([Step(name, 0, 700 * BLOCK, list(range(700))) for name in prompts])
    assert [len(run.block_ids) for run in plan.stores] == [700] * 3


# --- loads that fail -------------------------------------------------------------------------------------------
def loading(made: Planner, name: str, tokens: Sequence[int]) -> Any:
    """A request, and its load, if there is one."""
    request = FakeRequest(name, tokens)
    hits, _ = made.match(request, 0)
    assert hits is not None
    made.allocated(request, [list(range(10, 20))], hits)
    return request, made.plan([]).loads


def test_a_load_that_failed_is_a_miss_for_its_request() -> None:
    """Evicted, or of a store that does not answer: the engine would ask again for ever."""
    link, tokens = FakeLink(), tokens_of(5 * BLOCK + 3)
    made = planner(link)
    assert link.store is not None
    link.store.keys = {key for keys in keys_of(tokens).values() for key in keys}
    request, [load] = loading(made, "r", tokens)
    other, _ = loading(made, "s", tokens)
    made.failed({999})
    assert made.match(request, 0) == (5 * BLOCK, True), "another one's blocks"
    made.failed(set(load.block_ids[2:3]))
    assert made.match(request, 0) == (0, False)
    assert made.match(request, 2 * BLOCK) == (0, False)
    assert loading(made, "t", tokens)[1], "what is in DRAM is still read"
    assert link.store.trials == []
    made.finished(request)
    made.finished(other)
    assert loading(made, "r", tokens)[1], "another request of that name"


def test_lower_tiers_are_a_miss_for_all_until_they_work_again() -> None:
    link, tokens, clock = FakeLink(), tokens_of(5 * BLOCK + 3), Clock()
    made, keys = planner(link, clock=clock), keys_of(tokens)
    store = link.store
    assert store is not None
    store.keys = {key for each in keys.values() for key in each}
    store.below = {keys[0, 1][2], keys[0, 1][3], keys[0, 0][4]}
    request, [load] = loading(made, "r", tokens)
    assert len(load.block_ids) == 5
    made.failed(set(load.block_ids[2:]))
    [trial] = store.trials
    for name in "abc":
        assert made.match(FakeRequest(name, tokens), 0) == (2 * BLOCK, True), "what is in DRAM"
    trial.set_exception(DeadlinePassed("no answer"))
    assert made.match(FakeRequest("d", tokens), 0) == (2 * BLOCK, True)
    clock.now_s += CONNECTOR_RETRY_S
    assert made.match(FakeRequest("e", tokens), 0) == (2 * BLOCK, True)
    assert len(store.trials) == 2
    store.trials[1].set_result(1)
    assert made.match(FakeRequest("f", tokens), 0) == (5 * BLOCK, True)
    assert made.match(request, 0) == (0, False)
    # Blocks that are evicted meanwhile say nothing.
    _, [load] = loading(made, "g", tokens)
    made.failed(set(load.block_ids))
    assert len(store.trials) == 3
    store.trials[2].set_result(0)
    store.keys -= store.below
    clock.now_s += CONNECTOR_RETRY_S
    for _ in range(2):
        made.match(FakeRequest("h", tokens), 0)
    store.keys |= store.below
    assert made.match(FakeRequest("i", tokens), 0) == (5 * BLOCK, True)


# --- the hand-over from a prefill engine to a decode engine ---------------------------------------------------
def prefilled(made: Planner, tokens: Sequence[int], *, step: int | None = None) -> tuple[Any, set[bytes]]:
    """What a prefill leg answers, in steps of so many tokens, and the blocks that it stores."""
    request = FakeRequest("prefill", tokens, {"do_remote_decode": True})
    hits, _ = made.match(request, 0)
    assert hits is not None
    stored, blocks = set[bytes](), list(range(len(tokens) // BLOCK + 1))
    for before in range(hits, len(tokens), step or len(tokens)):
        after = min(before + (step or len(tokens)), len(tokens))
        stored |= stored_keys(made.plan([Step("prefill", before, after, blocks)]))
    request.all_token_ids.append(7)  # its only token
    return made.finished(request), stored


@pytest.mark.parametrize("step", [None, 5 * BLOCK + 3])
@pytest.mark.parametrize("tokens", [700 * BLOCK, 700 * BLOCK + 1, 12_500, 2 * BLOCK])
def test_a_prefill_leg_hands_over_all_blocks_that_the_decode_engine_can_load(
    tokens: int, step: int | None
) -> None:
    link, prompt = FakeLink(), tokens_of(tokens)
    assert link.store is not None
    params, stored = prefilled(planner(link), prompt, step=step)
    named, decode = keys_of(prompt)[0, 0][(tokens - 1) // BLOCK - 1], planner(link)
    digest = namespaces()[0, 0].digest.hex()
    assert params == {
        "do_remote_prefill": True,
        "kvfs": {"namespace": digest, "last_block": named.hex()},
    }
    link.store.keys |= stored
    assert prefilled(planner(link), prompt, step=step) == (params, set()), "all was there"
    assert decode.match(FakeRequest("r", prompt, params), 0) == ((tokens - 1) // BLOCK * BLOCK, True)
    assert (decode.counts["handovers"], decode.counts["late_handovers"]) == (1, 0)


def test_an_answer_names_no_block_where_some_are_not_stored() -> None:
    """The decode engine would wait for them."""
    tokens, link = tokens_of(3 * BLOCK + 1), FakeLink()
    made = planner(link)
    unnamed = {"do_remote_prefill": True}
    assert prefilled(made, tokens_of(BLOCK))[0] == unnamed, "not one block to load"
    assert made.finished(FakeRequest("ended before it began", tokens, {"do_remote_decode": True})) == unnamed
    link.is_up = False
    assert prefilled(made, tokens) == (unnamed, set())
    link.is_up = True
    made.match(request := FakeRequest("running", tokens, {"do_remote_decode": True}), 0)
    made.reset()
    assert made.finished(request) == unnamed
    assert prefilled(made, tokens)[0].keys() == {"do_remote_prefill", "kvfs"}


def test_a_decode_engine_asks_again_while_a_named_block_is_under_way() -> None:
    """Blocks are sealed one after the other, rank by rank; the engine goes on when the last one is there."""
    link, clock, tokens = FakeLink(), Clock(), tokens_of(5 * BLOCK + 3)
    assert link.store is not None
    params, _ = prefilled(planner(link), tokens)
    made, request, keys = planner(link, clock=clock), FakeRequest("r", tokens, params), keys_of(tokens)
    for block in range(5):
        for rank in RANKS:
            assert made.match(request, 0) == (None, False)
            clock.now_s += CONNECTOR_HANDOVER_S / 20
            link.store.keys.add(keys[rank][block])
    assert made.match(request, 0) == (5 * BLOCK, True)
    link.store.keys.clear()
    assert made.match(request, 0) == (0, False), "after a preemption nothing is on its way"
    assert made.counts == {**made.counts, "queries": 2, "handovers": 1, "late_handovers": 0}
    # What the engine has itself need not be there.
    assert made.match(FakeRequest("s", tokens, params), 5 * BLOCK) == (0, False)


def test_a_decode_engine_goes_on_with_what_is_there_when_the_wait_is_over() -> None:
    link, clock, tokens = FakeLink(), Clock(), tokens_of(5 * BLOCK + 3)
    assert link.store is not None
    params, _ = prefilled(planner(link), tokens)
    made, request = planner(link, clock=clock), FakeRequest("r", tokens, params)
    link.store.keys = {key for keys in keys_of(tokens).values() for key in keys[:2]}
    assert made.match(request, 0) == (None, False)
    clock.now_s += CONNECTOR_HANDOVER_S * 0.99
    assert made.match(request, 0) == (None, False)
    clock.now_s += CONNECTOR_HANDOVER_S * 0.02
    assert made.match(request, 0) == (2 * BLOCK, True)
    clock.now_s -= CONNECTOR_HANDOVER_S
    assert made.match(request, 0) == (2 * BLOCK, True), "a request waits once"
    assert made.counts["late_handovers"] == 1
    # During an outage nothing is sealed.
    link.is_up = False
    assert made.match(FakeRequest("s", tokens, params), 0) == (2 * BLOCK, True)


def test_a_hand_over_from_an_engine_that_shares_nothing_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    link, tokens = FakeLink(), tokens_of(3 * BLOCK + 3)
    other, made = planner(link), planner(link)
    other.set_namespaces(namespaces(), "memory other")
    params, _ = prefilled(other, tokens)
    for name in ("r", "s"):
        assert made.match(FakeRequest(name, tokens, params), 0) == (0, False)
    [record] = caplog.records
    assert params["kvfs"]["namespace"] in record.getMessage()


@pytest.mark.parametrize(
    "params",
    [
        None,
        "text",
        [],
        {},
        {"kvfs": None},
        {"kvfs": "00" * 16},
        {"kvfs": {}},
        {"kvfs": {"last_block": None}},
        {"kvfs": {"last_block": 3}},
        {"kvfs": {"last_block": "zz" * 16}},
        {"kvfs": {"last_block": "00" * 15}},
        {"kvfs": {"last_block": "00" * 17, "namespace": [1]}},
        {"do_remote_decode": False, "do_remote_prefill": True},
    ],
)
def test_parameters_that_say_nothing_hold_nothing_up(params: Any) -> None:
    made, tokens = planner(FakeLink()), tokens_of(3 * BLOCK)
    request = FakeRequest("r", tokens, params)
    assert made.match(request, 0) == (0, False)
    assert made.finished(request) is None
    assert made.counts["handovers"] == 0


# --- blocks of other machines ---------------------------------------------------------------------------------
SOURCE = "10.0.0.1:9400"


def hinted(params: Any = None) -> dict[str, Any]:
    """What a router says of a prompt whose blocks are on another machine."""
    params = params or {}
    return {**params, "kvfs": {**params.get("kvfs", {}), "source": SOURCE}}


def test_what_another_machine_has_is_fetched_and_then_loaded() -> None:
    """Each rank's shard, of its namespace, and only what is missing here; the scheduler asks again meanwhile."""
    link, clock, tokens = FakeLink(), Clock(), tokens_of(5 * BLOCK + 3)
    made, keys, store = planner(link, clock=clock), keys_of(tokens), link.store
    assert store is not None
    store.keys = {*keys[0, 0][:2], *keys[0, 1][:3]}
    request = FakeRequest("r", tokens, hinted())
    assert made.match(request, BLOCK) == (None, False)
    one, two = store.fetches
    assert (one.keys, two.keys) == (keys[0, 0][2:], keys[0, 1][2:])
    assert {one[1:3], two[1:3]} == {(SOURCE, CONNECTOR_FETCH_S)}
    store.bring(one)
    assert made.match(request, BLOCK) == (None, False), "the other rank's are under way"
    store.bring(two)
    assert made.match(request, BLOCK) == (4 * BLOCK, True)
    assert made.counts == {
        **made.counts,
        "fetches": 1,
        "fetched_blocks": 3,
        "failed_fetches": 0,
        "queries": 1,
    }
    store.keys.clear()
    assert made.match(request, BLOCK) == (0, False), "a request fetches once"
    assert len(store.fetches) == 2
    # Nothing is fetched without a word of a router, nor what is here.
    assert made.match(FakeRequest("s", tokens), 0) == (0, False)
    store.keys = {key for each in keys.values() for key in each}
    assert made.match(FakeRequest("t", tokens, hinted()), 0) == (5 * BLOCK, True)
    assert len(store.fetches) == 2


def test_blocks_of_any_machine_are_fetched_where_the_engine_is_to(caplog: pytest.LogCaptureFixture) -> None:
    """A prompt that nobody has is a miss like any other, and nothing to warn of; a service without others is."""
    link, tokens = FakeLink(), tokens_of(5 * BLOCK + 3)
    made, keys, store = planner(link, fetches_any=True), keys_of(tokens), link.store
    assert store is not None
    store.keys = {*keys[0, 0][:2], *keys[0, 1][:2]}
    request = FakeRequest("r", tokens)
    assert made.match(request, 0) == (None, False)
    assert [(asked.keys, asked.hint) for asked in store.fetches] == [(keys[rank][2:], None) for rank in RANKS]
    for asked in store.fetches:
        store.bring(asked)
    assert made.match(request, 0) == (5 * BLOCK, True)
    assert made.match(FakeRequest("hinted", tokens_of(3 * BLOCK, 7), hinted()), 0) == (None, False)
    assert {asked.hint for asked in store.fetches[2:]} == {SOURCE}
    for name, outcome in (("nobody", None), ("alone", Unsupported("this service has no [cluster]"))):
        request = FakeRequest(name, tokens_of(3 * BLOCK, len(name)))
        assert made.match(request, 0) == (None, False)
        for asked in store.fetches[-2:]:
            asked.future.set_result(0) if outcome is None else asked.future.set_exception(outcome)
        assert made.match(request, 0) == (0, False)
    [record] = caplog.records
    assert "no [cluster]" in record.getMessage()
    assert made.counts == {**made.counts, "fetches": 4, "fetched_blocks": 3, "failed_fetches": 2}


def test_a_fetch_that_fails_is_a_miss_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    link, tokens = FakeLink(), tokens_of(5 * BLOCK + 3)
    made, store = planner(link), link.store
    assert store is not None
    for name in "abc":
        request = FakeRequest(name, tokens, hinted())
        assert made.match(request, 0) == (None, False)
        for asked in store.fetches[-2:]:
            if name == "c":  # it does not answer its peers
                asked.future.set_result(0)
            else:
                asked.future.set_exception(DeadlinePassed("no answer"))
        assert made.match(request, 0) == (0, False)
    [record] = caplog.records
    assert SOURCE in record.getMessage()
    assert "no answer" in record.getMessage()
    assert link.is_up, "the service here is not to blame"
    assert made.counts == {**made.counts, "fetches": 3, "fetched_blocks": 0, "failed_fetches": 3}


def test_a_fetch_that_does_not_end_holds_a_request_until_its_deadline() -> None:
    link, clock, tokens = FakeLink(), Clock(), tokens_of(5 * BLOCK + 3)
    made, keys, store = planner(link, clock=clock), keys_of(tokens), link.store
    assert store is not None
    request = FakeRequest("r", tokens, hinted())
    assert made.match(request, 0) == (None, False)
    assert all(asked.future.set_running_or_notify_cancel() for asked in store.fetches)
    store.keys = {*keys[0, 0][:2], *keys[0, 1][:2]}  # some came
    clock.now_s += CONNECTOR_FETCH_S * 0.99
    assert made.match(request, 0) == (None, False)
    clock.now_s += CONNECTOR_FETCH_S * 0.02
    assert made.match(request, 0) == (2 * BLOCK, True)
    clock.now_s -= CONNECTOR_FETCH_S
    assert made.match(request, 0) == (2 * BLOCK, True)
    # During an outage nothing comes, and nothing is begun.
    again = FakeRequest("again", tokens, hinted())
    assert made.match(again, 0) == (None, False)
    link.is_up = False
    assert made.match(again, 0) == (2 * BLOCK, True)
    before = dict(made.counts)
    assert made.match(FakeRequest("s", tokens, hinted()), 0) == (2 * BLOCK, True)
    assert made.counts == {**before, "queries": before["queries"] + 1}


def test_nothing_is_fetched_for_a_request_whose_load_failed() -> None:
    link, tokens = FakeLink(), tokens_of(2 * BLOCK + 3)
    made, store = planner(link), link.store
    assert store is not None
    store.keys = {key for keys in keys_of(tokens).values() for key in keys}
    request = FakeRequest("r", tokens, hinted())
    assert made.match(request, 0) == (2 * BLOCK, True)
    made.allocated(request, [[10, 11]], 2 * BLOCK)
    made.failed({11})
    assert made.match(request, 0) == (0, False)
    assert store.fetches == []


def test_an_engine_fetches_for_so_many_requests_at_once() -> None:
    """Those that ended count until their fetches are over, which the service goes on with."""
    link, tokens = FakeLink(), tokens_of(2 * BLOCK + 3)
    made, store = planner(link), link.store
    assert store is not None
    requests = [FakeRequest(f"r{i}", tokens, hinted()) for i in range(CONNECTOR_FETCHES + 1)]
    for request in requests[:-1]:
        assert made.match(request, 0) == (None, False)
    assert made.match(requests[-1], 0) == (0, False)
    first = store.fetches[:2]
    for asked in first:
        assert asked.future.set_running_or_notify_cancel()
    made.finished(requests[0])
    assert made.match(FakeRequest("s", tokens, hinted()), 0) == (0, False), "two threads are still at it"
    for asked in first:
        asked.future.set_result(0)
    assert made.match(FakeRequest("t", tokens, hinted()), 0) == (None, False)
    made.finished(requests[1])
    assert all(asked.future.cancelled() for asked in store.fetches[2:4])
    assert made.match(FakeRequest("u", tokens, hinted()), 0) == (None, False), "what had not begun makes room"


def test_blocks_that_are_being_stored_on_another_machine_are_fetched_once_more() -> None:
    link, clock, tokens = FakeLink(), Clock(), tokens_of(5 * BLOCK + 3)
    params, _ = prefilled(planner(FakeLink()), tokens)
    made, store = planner(link, clock=clock), link.store
    assert store is not None
    request = FakeRequest("r", tokens, hinted(params))
    assert made.match(request, 0) == (None, False)
    for asked in store.fetches:
        store.bring(asked, 3)
    assert made.match(request, 0) == (None, False)
    assert len(store.fetches) == 2, "they are given the time that they take"
    clock.now_s += CONNECTOR_HANDOVER_S
    assert made.match(request, 0) == (None, False)
    assert [len(asked.keys) for asked in store.fetches[2:]] == [2, 2]
    for asked in store.fetches[2:]:
        store.bring(asked)
    assert made.match(request, 0) == (5 * BLOCK, True)
    assert made.counts == {**made.counts, "fetches": 2, "fetched_blocks": 5, "late_handovers": 0}
    # Once more, not twice.
    store.keys.clear()
    request = FakeRequest("s", tokens, hinted(params))
    for _ in range(2):
        assert made.match(request, 0) == (None, False)
        for asked in store.fetches[-2:]:
            asked.future.set_result(0)
        clock.now_s += CONNECTOR_HANDOVER_S
    assert made.match(request, 0) == (0, False)
    assert len(store.fetches) == 8
    # What failed is not tried again.
    request = FakeRequest("t", tokens, hinted(params))
    assert made.match(request, 0) == (None, False)
    for asked in store.fetches[-2:]:
        asked.future.set_exception(DeadlinePassed("no answer"))
    assert made.match(request, 0) == (None, False)
    clock.now_s += CONNECTOR_HANDOVER_S
    assert made.match(request, 0) == (0, False)
    assert len(store.fetches) == 10
    assert made.counts["late_handovers"] == 2


def test_the_other_ranks_namespaces_are_opened_aside() -> None:
    """Opening connects: the scheduler goes on meanwhile, and without where that fails."""
    link, tokens, gate, clock = LateLink(), tokens_of(2 * BLOCK + 3), threading.Event(), Clock()
    made, store = planner(link), link.store
    assert store is not None
    link.gate = gate
    request = FakeRequest("r", tokens, hinted())
    assert made.match(request, 0) == (None, False)
    assert made.match(request, 0) == (None, False)
    assert len(store.fetches) == 1, "the first rank's is open"
    gate.set()
    eventually(
        lambda: made.match(request, 0) == (None, False) and len(store.fetches) == 2, "the other rank's"
    )
    for asked in store.fetches:
        store.bring(asked)
    assert made.match(request, 0) == (2 * BLOCK, True)
    # Nor does a request that an epoch ended keep the place of others.
    waiting = LateLink()
    made, waiting.gate = planner(waiting, clock=clock), threading.Event()
    for i in range(CONNECTOR_FETCHES):
        assert made.match(FakeRequest(f"w{i}", tokens, hinted()), 0) == (None, False)
    made.reset()
    assert made.match(FakeRequest("late", tokens, hinted()), 0) == (0, False)
    assert waiting.store is not None
    for asked in waiting.store.fetches:
        asked.future.set_result(0)
    clock.now_s += CONNECTOR_FETCH_S
    assert made.match(FakeRequest("later", tokens, hinted()), 0) == (None, False)
    waiting.gate.set()
    failing = LateLink()
    made, request = planner(failing), FakeRequest("s", tokens, hinted())
    failing.error = AccessDenied("no")
    made.match(request, 0)
    assert failing.store is not None
    failing.store.bring(failing.store.fetches[0])
    eventually(lambda: made.match(request, 0) == (0, False), "it goes on without")
    assert failing.failures == [failing.error]


class LateLink(FakeLink):
    """Opens a namespace after the first one when its gate is open, or fails to."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: set[bytes] = set()
        self.gate: threading.Event | None = None
        self.error: Exception | None = None
        self.failures: list[BaseException] = []

    def open(self, namespace: Namespace) -> FakeBlocks | None:
        if self.error is not None:
            raise self.error
        if self.gate is not None:
            assert self.gate.wait(WAIT_S)
        self.opened.add(namespace.digest)
        return self.store

    def blocks(self, namespace: Namespace) -> FakeBlocks | None:
        return self.store if namespace.digest in self.opened else None

    def failed(self, error: BaseException) -> bool:
        self.failures.append(error)
        return False


@pytest.mark.parametrize("source", [None, "", 7, ["10.0.0.1:9400"], "h" * 301])
def test_a_source_that_cannot_be_one_is_none(source: Any) -> None:
    made, tokens = planner(FakeLink()), tokens_of(3 * BLOCK)
    assert made.match(FakeRequest("r", tokens, {"kvfs": {"source": source}}), 0) == (0, False)
    assert made.counts["fetches"] == 0


# --- weights ---------------------------------------------------------------------------------------------
def stored_keys(plan: Any) -> set[bytes]:
    return {key for run in plan.stores for keys in run.keys.values() for key in split_keys(keys)}


def whole_prompt(made: Planner, name: str, tokens: Sequence[int]) -> Any:
    """The plan of a step that computes a prompt."""
    made.match(FakeRequest(name, tokens), 0)
    blocks = len(tokens) // BLOCK
    return made.plan([Step(name, 0, len(tokens), list(range(blocks)))])


def test_engines_share_blocks_exactly_if_their_weights_in_memory_are_equal() -> None:
    link, tokens = FakeLink(), tokens_of(4 * BLOCK + 1)
    one, same, other = (planner(link) for _ in range(3))
    for made, weights in ((one, "memory a"), (same, "memory a"), (other, "memory b")):
        made.set_namespaces(namespaces(), weights)
    assert link.store is not None
    link.store.keys |= stored_keys(whole_prompt(one, "r", tokens))
    assert same.match(FakeRequest("r", tokens), 0) == (4 * BLOCK, True)
    assert other.match(FakeRequest("r", tokens), 0) == (0, False)
    assert not stored_keys(whole_prompt(other, "r", tokens)) & link.store.keys


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_blocks_of_one_epoch_are_never_those_of_another(data: st.DataObject) -> None:
    """Engines that reset at any time, with requests under way: what a key finds is of the weights it is stored for.

    The model: each engine's weights are a number, each request has the numbers of the weights that computed it.
    """
    link = FakeLink()
    assert link.store is not None
    weights, truth = [0, 0], dict[bytes, set[int]]()
    engines = [planner(link), planner(link)]
    for made in engines:
        made.set_namespaces(namespaces(), "memory")
    prompts = [tokens_of(5 * BLOCK + 1, seed) for seed in range(2)]
    running: list[tuple[int, str, int, set[int]]] = []
    names = itertools.count()
    for _ in range(16):
        engine = data.draw(st.integers(0, 1))
        made, action = engines[engine], data.draw(st.sampled_from(["begin", "go on", "reset"]))
        if action == "reset":
            weights[engine] = next(names) + 1
            made.reset()
        elif action == "begin":
            request = FakeRequest(f"r{next(names)}", data.draw(st.sampled_from(prompts)))
            hits, _ = made.match(request, 0)
            assert hits is not None
            made.allocated(request, [list(range(6))], hits)
            taken = {
                key for run in made.plan([]).loads for keys in run.keys.values() for key in split_keys(keys)
            }
            assert all(truth[key] == {weights[engine]} for key in taken), "blocks of other weights"
            running.append((engine, request.request_id, hits, {weights[engine]} if hits else set()))
        elif running:
            engine, name, computed, by = running.pop(data.draw(st.integers(0, len(running) - 1)))
            after = computed + data.draw(st.integers(1, 3 * BLOCK))
            by.add(weights[engine])
            for key in stored_keys(engines[engine].plan([Step(name, computed, after, list(range(6)))])):
                truth.setdefault(key, set(by))
                assert by == truth[key] == {weights[engine]}, "a block of other weights is stored"
                link.store.keys.add(key)
            running.append((engine, name, min(after, 5 * BLOCK + 1), by))


def test_nothing_is_matched_or_stored_from_a_workers_word_to_the_next_epoch() -> None:
    link, tokens = FakeLink(), tokens_of(3 * BLOCK + 1)
    made = planner(link)
    assert link.store is not None
    link.store.keys |= stored_keys(whole_prompt(made, "r", tokens))
    made.match(FakeRequest("running", tokens_of(3 * BLOCK, seed=1)), 0)
    made.end_epoch(0)
    assert made.match(FakeRequest("s", tokens), 0) == (0, False)
    assert made.plan([Step("running", 0, 3 * BLOCK, [1, 2, 3])]).stores == []
    made.reset()
    assert made.plan([Step("running", 0, 3 * BLOCK, [1, 2, 3])]).stores == [], "begun before"
    made.end_epoch(0)  # late, of a step before the reset
    plan = whole_prompt(made, "t", tokens)
    assert len(stored_blocks(plan)) == 3
    assert plan.epoch == 1


def test_requests_on_blocks_that_the_engine_kept_over_a_reset_are_left_alone() -> None:
    link, tokens = FakeLink(), tokens_of(4 * BLOCK + 1)
    made = planner(link)
    made.reset(has_old_blocks=True)
    request = FakeRequest("r", tokens)
    assert made.match(request, 2 * BLOCK) == (0, False)
    assert made.plan([Step("r", 2 * BLOCK, 4 * BLOCK, [1, 2, 3, 4])]).stores == []
    assert len(stored_blocks(whole_prompt(made, "computed whole", tokens))) == 4
    made.reset()
    made.match(request, 2 * BLOCK)
    assert stored_blocks(made.plan([Step("r", 2 * BLOCK, 4 * BLOCK, [1, 2, 3, 4])])) == [1, 2, 3, 4]


def test_requests_of_an_adapter_that_may_be_any_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "_extra", lambda self, tracked, first, last, size: None)
    made = planner(FakeLink())
    assert made.match(FakeRequest("r", tokens_of(3 * BLOCK)), 0) == (0, False)
    assert whole_prompt(made, "r", tokens_of(3 * BLOCK)).stores == []


def test_a_request_that_ended_is_stored_no_more() -> None:
    made, request = planner(FakeLink()), FakeRequest("r", tokens_of(2 * BLOCK))
    made.match(request, 0)
    assert made.finished(request) is None
    assert made.plan([Step("r", 0, 2 * BLOCK, [1, 2])]).stores == []
    assert made.counts["stored_blocks"] == 0
