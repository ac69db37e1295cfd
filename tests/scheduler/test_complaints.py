"""What users of other routers complain of, and the test that shows that it is not so here.

- a restart leaves stale blocks:
  test_a_publisher_that_restarts_without_replay_leaves_no_stale_block
- the same, of engines as processes:
  test_what_is_believed_agrees_with_the_truth_after_every_fault
- AllBlocksCleared is ignored:
  test_cleared_blocks_are_obeyed_and_begin_a_new_judgement
- recovery loops: manifests:
  test_a_manifest_that_never_comes_is_done_without
- recovery loops: replays:
  test_an_engine_that_lost_batches_is_asked_for_all_that_it_can_replay_and_not_for_ever
- routing by load alone, silently:
  test_without_any_events_load_decides_and_the_answer_says_so
- no publisher is noticed:
  test_a_topic_without_an_instance_is_counted_and_named
- one system prompt, one instance:
  test_one_system_prompt_at_half_of_the_traffic_is_spread_and_chats_stay_where_they_are
- a miss goes to the emptiest cache, however loaded:
  test_a_miss_goes_to_the_idle_instance_and_not_to_the_emptiest_cache
- the index grows without bound:
  test_the_index_is_bounded_and_what_has_no_room_is_a_miss
- a router that restarts has lost everything:
  test_a_conductor_that_starts_later_learns_all_by_replay_and_its_successor_too
- blocks are stranded when a client goes between the legs:
  test_a_client_that_goes_away_before_its_answer_is_cancelled_on_each_leg
- a client that is gone is noticed at the next token:
  test_a_client_that_goes_away_ends_its_work_at_once
- retries for a client that is gone:
  test_a_client_that_goes_away_ends_its_work_at_once
- reservations of dead clients stay:
  test_what_a_dead_client_reserved_ends_by_its_deadline
- an id's prefix aborts another request:
  test_ids_are_compared_whole
- a dead leg keeps the other hanging:
  test_a_dead_leg_does_not_keep_the_other_hanging
- an engine that has less than its events say is believed:
  test_an_instance_that_falls_short_three_times_of_ten_is_distrusted_until_it_agrees
- two routers over the same engines disturb each other:
  test_two_conductors_follow_the_same_engines_and_one_goes_on_alone
- pools of engines that share no blocks are mixed:
  test_a_mixed_pool_is_refused_by_the_field_that_differs
"""

from __future__ import annotations

import random
import re
from pathlib import Path

from kvfs._native.cluster.index import ClusterIndex
from scheduler.conductor.conductor import Conductor
from scheduler.conductor.feeds.feed import Feed
from scheduler.conductor.pool import Options
from scheduler.conductor.values import Routed, RouteRequest
from tests.scheduler.conductor.test_feed import message, of_store
from tests.support.conductors import COSTS, Clock, instance

NODES = ("a", "b", "c")


def three_nodes(most_blocks: int) -> tuple[Conductor, Feed]:
    clock = Clock()
    made = Conductor(ClusterIndex(most_blocks), Options(costs=COSTS), clock)
    for name in NODES:
        made.registry.add(instance(name, engine_topic="", store_topic=name))
    return made, Feed(made.registry, clock)


def prompt(seed: int, count: int) -> list[int]:
    return [random.Random(seed).randrange(30_000) for _ in range(count)]


def test_every_complaint_has_its_test() -> None:
    named = re.findall(r"^- .*:\n  (test_\w+)$", __doc__ or "", re.MULTILINE)
    folder = Path(__file__).parent
    there = {
        name
        for file in folder.rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    assert len(named) == 20
    assert set(named) <= there


def test_a_miss_goes_to_the_idle_instance_and_not_to_the_emptiest_cache() -> None:
    made, feed = three_nodes(10_000)
    for sequence in range(20):
        feed.receive(message("a", sequence, of_store(prompt(sequence, 1600))))
        feed.receive(message("b", sequence, of_store(prompt(100 + sequence, 1600))))
    for seed in range(3):
        busy = made.route(RouteRequest(model="m", tokens=prompt(200 + seed, 8000), exclude=["a", "b"]))
        assert isinstance(busy, Routed)
    for name in ("a", "b"):
        found = made.route(RouteRequest(model="m", tokens=prompt(300 + ord(name), 1600)))
        assert isinstance(found, Routed)
        assert found.decode in ("a", "b"), "c has nothing in its cache, and work to do"


def test_the_index_is_bounded_and_what_has_no_room_is_a_miss() -> None:
    made, feed = three_nodes(500)
    for sequence in range(100):
        feed.receive(message("a", sequence, of_store(prompt(sequence, 160))))
    status = made.status()
    assert status["blocks"] == 500
    assert status["counts"]["over_limit"] == 500
    found = made.route(RouteRequest(model="m", tokens=prompt(99, 160)))
    assert isinstance(found, Routed)
    assert found.cached_tokens == 0
    for sequence in range(5):  # the store has started anew, and what it had makes room as changes come
        feed.receive(message("a", sequence, of_store(prompt(1000 + sequence, 160))))
    assert made.match(RouteRequest(model="m", tokens=prompt(1004, 160))) == {"a": 160, "b": 0, "c": 0}
