"""Blocks of other machines: fetched before a request of the vLLM connector is loaded, and a miss where that fails."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvfs.errors import AccessDenied, DeadlinePassed, Unsupported
from kvfs.limits import CONNECTOR_FETCH_S, CONNECTOR_FETCHES, CONNECTOR_HANDOVER_S
from kvfs.namespaces import Namespace
from tests.support.vllm_planners import (
    BLOCK,
    RANKS,
    Clock,
    FakeBlocks,
    FakeLink,
    FakeRequest,
    keys_of,
    no_extra,
    planner,
    prefilled,
    tokens_of,
)
from tests.support.waits import WAIT_S, eventually

__all__ = ["no_extra"]

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
