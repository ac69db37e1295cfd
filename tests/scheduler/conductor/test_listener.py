"""What is asked of whom, and when that ends: silence, manifests that never come, instances that do not answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from kvfs import limits
from kvfs._native.cluster.index import ClusterIndex
from kvfs.events.event_streams import Engine, Missing
from kvfs.events.kv_events import AllBlocksCleared
from scheduler.conductor.conductor import DEGRADED, Conductor
from scheduler.conductor.feeds import listener as module
from scheduler.conductor.feeds.feed import Feed
from scheduler.conductor.feeds.listener import Listener
from scheduler.conductor.feeds.probes import ProbeFailed, probe
from scheduler.conductor.pool import Options
from scheduler.conductor.sources import StreamName
from scheduler.conductor.values import EngineMetrics, Routed, RouteRequest, Usage
from tests.scheduler.conductor.test_feed import PROMPT, message, of_store, stored
from tests.support.conductors import BLOCK_TOKENS, COSTS, instance

NODE = Engine("node", 0)


class FakeSubscriber:
    """Answers as it is set to; notes what it was asked."""

    def __init__(self) -> None:
        self.answers = True
        self.manifests = False
        self.asked: list[tuple[float, str]] = []
        self.follower: Feed | None = None
        self.replays: dict[str, str] = {}

    async def run(self) -> None:
        await trio.sleep_forever()

    def replay_at(self, topic: str, endpoint: str) -> None:
        self.replays[topic] = endpoint

    def connect(self, topic: str, endpoint: str) -> None:
        raise AssertionError("no engine here binds")

    def listen_for(self, rank: int) -> None:
        assert rank == 0

    def disconnect(self, topic: str) -> None: ...

    async def fetch(self, missing: Missing) -> bool:
        self.asked.append((trio.current_time(), f"{missing.engine.topic} from {missing.sequence}"))
        await trio.sleep(0.1)
        assert self.follower is not None
        self.follower.replay_ended(missing.engine)
        return self.answers

    async def fetch_manifest(self, engine: Engine) -> bool:
        self.asked.append((trio.current_time(), f"{engine.topic} manifest"))
        await trio.sleep(0.1)
        return self.manifests


class Stand:
    def __init__(self) -> None:
        self.conductor = Conductor(ClusterIndex(1000), Options(costs=COSTS), trio.current_time)
        self.feed = Feed(self.conductor.registry, trio.current_time)
        self.subscriber = FakeSubscriber()
        self.subscriber.follower = self.feed
        self.listener = Listener(self.conductor.registry, self.feed, self.subscriber, trio.current_time)  # type: ignore[arg-type]
        self.metrics: dict[str, EngineMetrics | None] = {}

    async def probe(
        self, url: str, ranks: Sequence[int | None], authorities: Path | None = None
    ) -> list[EngineMetrics]:
        found = self.metrics.get(url, EngineMetrics())
        if found is None:
            raise ProbeFailed("dead")
        return [found] * len(ranks)

    def add(self, **values: Any) -> None:
        made = instance(**{"store_topic": "node", "store_replay": "tcp://x:1", **values})
        self.conductor.registry.add(made)
        self.listener.follow(made)

    def asked(self) -> list[str]:
        return [what for _, what in self.subscriber.asked]

    def knowledge(self) -> str:
        stream = self.conductor.registry.stream(StreamName("node", 0))
        assert stream is not None
        return stream.knowledge.value


@asynccontextmanager
async def listening(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stand]:
    stand = Stand()
    monkeypatch.setattr(module, "probe", stand.probe)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(stand.listener.run)
        yield stand
        nursery.cancel_scope.cancel()


async def test_a_new_publisher_is_asked_at_once_and_a_silent_one_again_and_again(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with listening(monkeypatch) as stand:
        stand.add()
        await trio.sleep(1)
        assert (stand.asked(), stand.knowledge()) == (["node from 0"], "current")
        stand.feed.receive(message("node", 0, of_store(PROMPT)))
        await trio.sleep(limits.SILENT_STREAM_S + 3)
        assert stand.asked()[1:] == ["node from 1"]
        assert stand.conductor.match(RouteRequest(model="m", tokens=PROMPT)) == {"a": 80}
        stand.subscriber.answers = False
        await trio.sleep(limits.SILENT_STREAM_S + 3)
        assert stand.conductor.match(RouteRequest(model="m", tokens=PROMPT)) == {"a": 0}
        assert stand.knowledge() == "unknown"
        await trio.sleep(10 * limits.SILENT_STREAM_S)
        assert len(stand.subscriber.asked) <= 14, "no faster than once in SILENT_STREAM_S"


async def test_a_manifest_that_never_comes_is_done_without(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """Recovery ends: it does not ask for ever, and what comes meanwhile counts."""
    async with listening(monkeypatch) as stand:
        stand.add()
        await trio.sleep(1)
        missing = stand.feed.receive(message("node", 7, of_store(PROMPT)))
        assert missing == Missing(NODE, 0)
        stand.feed.replay_ended(NODE)
        await trio.sleep(4 * limits.SILENT_STREAM_S)
        assert stand.asked().count("node manifest") == limits.MANIFEST_TRIES
        assert stand.knowledge() == "partial"
        assert stand.conductor.match(RouteRequest(model="m", tokens=PROMPT)) == {"a": 80}
        times = [at_s for at_s, what in stand.subscriber.asked if what == "node manifest"]
        assert [round(b - a) for a, b in pairwise(times)] == [1, 2, 4, 8]


async def test_an_engine_that_lost_batches_is_asked_for_all_that_it_can_replay_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    """What its replays do not reach is lost for good after some attempts: it is not asked for again and again."""
    async with listening(monkeypatch) as stand:
        stand.add(store_topic="", store_replay="", engine_replay="tcp://x:2")
        await trio.sleep(1)
        missing = stand.feed.receive(message("engine-a", 7, AllBlocksCleared()))
        assert missing == Missing(Engine("engine-a", 0), 0)
        stand.feed.replay_ended(missing.engine)
        assert stand.feed.wanted == {missing.engine}
        await trio.sleep(limits.SILENT_STREAM_S + 3)
        assert stand.asked() == ["engine-a from 0"] * 2
        for sequence in range(8, 60):
            stand.feed.receive(message("engine-a", sequence, AllBlocksCleared()))
            stand.feed.replay_ended(missing.engine)
            await trio.sleep(10)
        assert len(stand.asked()) == 1 + limits.MANIFEST_TRIES


async def test_who_sends_no_metrics_gets_requests_and_a_wake_does_not_probe(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with listening(monkeypatch) as stand:
        stand.metrics["http://a.test"] = None
        stand.add()
        probed = 0
        real = stand.probe

        async def count(
            url: str, ranks: Sequence[int | None], authorities: Path | None
        ) -> list[EngineMetrics]:
            nonlocal probed
            probed += 1
            return await real(url, ranks)

        monkeypatch.setattr(module, "probe", count)
        await trio.sleep(2.5)
        assert stand.conductor.status()["instances"][0]["reachable"] is True
        stand.conductor.unreachable("a")
        before = probed
        for _ in range(20):
            stand.listener.wake()
            await trio.sleep(0.01)
        assert probed == before
        await trio.sleep(2.5)
        assert stand.conductor.status()["instances"][0]["reachable"] is False
        stand.metrics["http://a.test"] = EngineMetrics()
        await trio.sleep(2.5)
        assert stand.conductor.status()["instances"][0]["reachable"] is True


def answer(stand: Stand, prompt: list[int], *, fails: bool = False, cached_tokens: int | None = None) -> None:
    found = stand.conductor.route(RouteRequest(model="m", tokens=prompt))
    assert isinstance(found, Routed)
    if fails:
        stand.conductor.cancel(found.id)
    else:
        stand.conductor.done(found.id, Usage(cached_tokens=cached_tokens, output_tokens=1))


def engine_stream(stand: Stand) -> str:
    [stream] = stand.conductor.status()["streams"]
    return str(stream["knowledge"])


async def test_a_publisher_that_owes_an_event_and_cannot_be_asked_is_believed_no_more_until_it_speaks(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with listening(monkeypatch) as stand:
        stand.add(store_topic="", store_replay="")
        stand.feed.receive(message("engine-a", 0, stored([1], PROMPT[:BLOCK_TOKENS])))
        request = RouteRequest(model="m", tokens=PROMPT)
        await trio.sleep(1)
        answer(stand, [7] * 100, cached_tokens=80)
        await trio.sleep(limits.MUTE_STREAM_S - 5)
        assert (stand.conductor.match(request), engine_stream(stand)) == ({"a": BLOCK_TOKENS}, "current")
        await trio.sleep(10)
        assert (stand.conductor.match(request), engine_stream(stand)) == ({"a": 0}, "mute")
        answer(stand, [8] * 100)
        await trio.sleep(limits.MUTE_STREAM_S + 5)
        assert [each.getMessage() for each in caplog.records if "engine-a" in each.getMessage()] == [
            "publisher engine-a has said nothing for 600 s of blocks that its engine made: its blocks do not count"
        ]
        found = stand.conductor.route(request)
        assert isinstance(found, Routed)
        assert found.degraded == DEGRADED
        stand.conductor.cancel(found.id)
        stand.feed.receive(message("engine-a", 1, stored([1], PROMPT[:BLOCK_TOKENS])))
        assert (stand.conductor.match(request), engine_stream(stand)) == ({"a": BLOCK_TOKENS}, "current")


@pytest.mark.parametrize(
    "why", ["idle", "announced before", "announced meanwhile", "had it all", "failed", "asked"]
)
async def test_a_quiet_publisher_that_owes_nothing_is_believed(
    why: str, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with listening(monkeypatch) as stand:
        stand.add(store_topic="", store_replay="", engine_replay="tcp://x:2" if why == "asked" else "")
        stand.feed.receive(message("engine-a", 0, stored([1], PROMPT[:BLOCK_TOKENS])))
        await trio.sleep(1)
        match why:
            case "announced before":  # of a prompt of whole blocks the last one is computed again
                answer(stand, PROMPT[:BLOCK_TOKENS])
            case "announced meanwhile":
                found = stand.conductor.route(RouteRequest(model="m", tokens=[7] * 100))
                assert isinstance(found, Routed)
                stand.feed.receive(message("engine-a", 1, stored([2], [7] * BLOCK_TOKENS)))
                stand.conductor.done(found.id)
            case "had it all":  # from before this Conductor, or before batches were lost
                answer(stand, [7] * 100, cached_tokens=96)
            case "failed" | "asked":
                answer(stand, [7] * 100, fails=why == "failed")
        await trio.sleep(2 * limits.MUTE_STREAM_S)
        assert stand.conductor.match(RouteRequest(model="m", tokens=PROMPT)) == {"a": BLOCK_TOKENS}
        assert engine_stream(stand) == "current"


async def test_a_removed_instance_s_streams_are_followed_no_more(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    async with listening(monkeypatch) as stand:
        stand.add(engine_replay="tcp://x:2")
        stand.add(name="b")
        stand.conductor.remove("a")
        stand.listener.sync()
        assert stand.subscriber.replays == {"engine-a": "", "node": "tcp://x:1"}
        stand.conductor.remove("b")
        stand.listener.sync()
        assert set(stand.subscriber.replays.values()) == {""}


# --- a look at metrics ---------------------------------------------------------------------------------------
Talk = Callable[[trio.SocketStream], Any]


async def looked_at(talk: Talk) -> EngineMetrics:
    """Probe a server that talks so."""

    async def serve(stream: trio.SocketStream) -> None:
        await stream.receive_some(4096)
        with suppress(trio.BrokenResourceError):
            await talk(stream)

    found: EngineMetrics | ProbeFailed
    async with trio.open_nursery() as nursery:
        [listener] = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, serve, [listener])
        try:
            [found] = await probe(f"http://127.0.0.1:{listener.socket.getsockname()[1]}/")
        except ProbeFailed as error:
            found = error
        nursery.cancel_scope.cancel()
    if isinstance(found, ProbeFailed):
        raise found
    return found


async def test_a_chunked_answer_is_read() -> None:
    async def talk(stream: trio.SocketStream) -> None:
        head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        await stream.send_all(head + b"1d\r\nvllm:num_requests_running 4.0\r\n0\r\n\r\n")

    assert (await looked_at(talk)).requests == 4


@pytest.mark.parametrize(
    ("sent", "fault"),
    [
        (b"HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n", "status 500"),
        (b"garbage\r\n\r\n", "HTTP"),
        (b"HTTP/1.1 101 Now\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n", "[0-9]"),
        (b"", "status 0"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n" + b"x" * (5 << 20),
            "4194304 bytes of a body",
        ),
    ],
)
async def test_a_bad_answer_is_a_failure(sent: bytes, fault: str) -> None:
    async def talk(stream: trio.SocketStream) -> None:
        await stream.send_all(sent)
        await stream.send_eof()

    with pytest.raises(ProbeFailed, match=fault):
        await looked_at(talk)


async def test_an_instance_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.conductor.feeds.probes.PROBE_WAIT_S", 0.05)

    async def talk(stream: trio.SocketStream) -> None:
        await trio.sleep_forever()

    with pytest.raises(ProbeFailed, match=r"no answer in 0\.05 s"):
        await looked_at(talk)
