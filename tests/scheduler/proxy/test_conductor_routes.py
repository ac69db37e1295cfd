"""The proxy with a Conductor: in its process, and in another that is slow, stalls, is killed and comes back."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import msgspec
import pytest
import trio

from kvfs import limits
from scheduler.conductor.values import RouteRequest, Usage
from scheduler.proxy.routers.fallback import RouterDown
from scheduler.proxy.routers.remote_router import RemoteRouter
from scheduler.proxy.upstream.engines import Engines
from tests.support.asked_engines import AskedEngine, info, models
from tests.support.conductors import Clock, conductor, instance, serving
from tests.support.forked import Forked
from tests.support.held_ports import HeldPort
from tests.support.service import running_kvfs
from tests.support.stub_engines import Asker, Stand, StubEngine, proxy_stand
from tests.support.waits import WAIT_S, until

CHAT = "/v1/chat/completions"
TOKEN = "a token of the test"


def chat(text: str) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": text}]}


async def register(made: Any, stand: Stand) -> None:
    for number, engine in enumerate(stand.engines):
        made.registry.add(instance(f"i{number}", url=engine.url))


async def register_legs(made: Any, stand: Stand) -> None:
    """Register each engine by its role: `prefill`, `decode`, `both`."""
    for engine in stand.engines:
        made.registry.add(instance(engine.role, url=engine.url, role=engine.role))


async def test_a_conductor_in_the_process_routes_and_its_instances_are_the_engines() -> None:
    made = conductor(Clock())
    async with proxy_stand("both", "both", router=made) as stand:
        await register(made, stand)
        await until(lambda: {engine.name for engine in stand.proxy.engines} == {"i0", "i1"})
        for text in ("one", "two", "one", "one"):
            assert (await stand.ask(CHAT, chat(text))).status == 200
        await until(lambda: made.counts["done"] == 4)
        assert made.counts["routed"] == 4
        assert stand.proxy.router.counts["by_load"] == 0
        assert (await stand.ask(CHAT, {**chat("q"), "model": "unknown"})).status == 404
        made.remove("i1")
        await until(lambda: {engine.name for engine in stand.proxy.engines} == {"i0"})


async def test_an_answer_names_the_decision_that_its_conductor_explains() -> None:
    made = conductor(Clock())
    async with proxy_stand("both", "both", router=made) as stand:
        await register(made, stand)
        for more in ({}, {"stream": True}):
            answer = await stand.ask(CHAT, {**chat("one"), **more})
            explained = made.explain(answer.headers[b"x-kvfs-route"].decode())
            assert explained["chosen"]["decode"] in {"i0", "i1"}


async def test_an_answer_that_load_alone_routed_names_no_decision() -> None:
    async with proxy_stand("both", "both") as stand:
        answer = await stand.ask(CHAT, chat("one"))
        assert (answer.status, answer.headers.get(b"x-kvfs-route")) == (200, None)


async def test_fresh_prompts_through_both_legs_leave_both_instances_trusted() -> None:
    """The prefill engine had nothing of them, which says nothing of the one that answers."""
    made = conductor(Clock())
    async with proxy_stand("prefill", "decode", router=made) as stand:
        await register_legs(made, stand)
        for n in range(3):
            prompt = [n, *range(1000)]
            assert (await stand.ask("/v1/completions", {"model": "m", "prompt": prompt})).status == 200
        await until(lambda: made.counts["done"] == 3)
        assert [len(engine.completions) for engine in stand.engines] == [3, 3]
        assert {each["shortfalls"] for each in made.status()["instances"]} == {0}


async def test_an_instance_whose_url_is_that_of_no_engine_is_excluded() -> None:
    made = conductor(Clock())
    async with proxy_stand(router=made) as stand:
        made.registry.add(instance("wrong", url=f"{stand.engines[0].url}/v1"))
        made.registry.add(instance("right", url=stand.engines[0].url))
        for n in range(4):
            prompt = [n, *range(100)]
            assert (await stand.ask("/v1/completions", {"model": "m", "prompt": prompt})).status == 200
        assert made.counts["cancelled"] > 0, "the wrong one was chosen"
        assert made.counts["routed"] == made.counts["cancelled"] + 4


@pytest.mark.parametrize("place", ["in the process", "elsewhere"])
async def test_a_conductor_hears_from_which_instances_bytes_come(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HEALTH_IDLE_S", 1e6)
    async with (
        serving(tokens=[TOKEN]) as (service, addresses),
        proxy_stand(
            *("both", "both"),
            router=service.conductor if place == "in the process" else None,
            conductor="" if place == "in the process" else addresses.http,
            conductor_token=TOKEN,
        ) as stand,
    ):
        made = service.conductor
        await register(made, stand)
        await until(lambda: not stand.proxy.engines.down())
        for engine in stand.engines:
            engine.behaviour = "trickle"
        asker = await stand.asker()
        async with asker.stream:
            await asker.send(CHAT, {**chat("q"), "stream": True})
            await asker.first_bytes()
            members = {member.instance.url: member for _, member in made.registry.members()}
            [(busy, idle)] = [
                (one, other)
                for one, other in (stand.engines, stand.engines[::-1])
                if one.completions and not other.completions
            ]
            await until(lambda: members[busy.url].was_heard)
            members[busy.url].was_heard = False
            await until(lambda: members[busy.url].was_heard)
            assert not members[idle.url].was_heard


# --- a Conductor elsewhere -----------------------------------------------------------------------------------
async def test_a_conductor_elsewhere_routes_and_hears_what_became_of_it() -> None:
    async with (
        serving(tokens=[TOKEN]) as (service, addresses),
        proxy_stand(conductor=addresses.http, conductor_token=TOKEN) as stand,
    ):
        made = service.conductor
        await register(made, stand)
        assert (await stand.ask(CHAT, chat("q"))).status == 200
        await until(lambda: made.counts["done"] == 1)
        assert made.counts["cached_tokens"] == 0
        assert (await stand.ask(CHAT, {**chat("q"), "model": "unknown"})).status == 404
        stand.engines[0].behaviour = "wrong"
        assert (await stand.ask(CHAT, chat("q"))).status == 400
        await until(lambda: made.counts["done"] == 2)
        assert stand.proxy.router.counts["by_load"] == 0


async def test_a_wrong_token_costs_the_conductor_alone() -> None:
    async with (
        serving(tokens=[TOKEN]) as (_, addresses),
        proxy_stand(conductor=addresses.http, conductor_token="another") as stand,
    ):
        assert (await stand.ask(CHAT, chat("q"))).status == 200
        assert stand.proxy.router.counts["by_load"] == 1


class SlowConductor(StubEngine):
    """Answer routes when it is let, and note what else is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []
        self.bodies: list[bytes] = []

    async def _answer(self, stream: trio.SocketStream, message: Any) -> bool:
        path = message.url.decode()
        self.noted.append(f"{message.method} {path}")
        self.bodies.append(message.body)
        if path == "/v1/route":
            await self.go.wait()
        known = (
            b'{"instances": []}'
            if path == "/v1/instances"
            else b'{"id":"r1","decode":"d","decode_url":"http://d"}'
        )
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(known)
        await stream.send_all(head + known)
        return True


async def test_a_route_that_comes_late_is_cancelled_and_nobody_waits_for_it() -> None:
    slow = SlowConductor()
    async with trio.open_nursery() as nursery:
        await nursery.start(slow.run)
        router = RemoteRouter(slow.url, "", Engines((), lambda name: None))
        await nursery.start(router.run)
        began_s = trio.current_time()
        with pytest.raises(RouterDown):
            await router.route(RouteRequest(model="m", length=5))
        assert trio.current_time() - began_s < 10 * limits.CONDUCTOR_WAIT_S
        await until(lambda: not router.down)  # a probe was answered at once
        with trio.move_on_after(0.01):
            await router.route(RouteRequest(model="m", length=5))  # its client goes
        assert "DELETE /v1/reservations/r1" not in slow.noted
        slow.go.set()
        await until(lambda: slow.noted.count("DELETE /v1/reservations/r1") == 2)
        assert (await router.route(RouteRequest(model="m", length=5))).id == "r1"
        nursery.cancel_scope.cancel()


async def test_reports_wait_bounded_for_a_conductor_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CONDUCTOR_REPORTS", 3)
    monkeypatch.setattr(limits, "CONDUCTOR_SENDERS", 1)
    slow = SlowConductor()
    async with trio.open_nursery() as nursery:
        await nursery.start(slow.run)
        router = RemoteRouter(slow.url, "", Engines((), lambda name: None))
        slow.die()
        await nursery.start(router.run)
        assert router.down
        for _ in range(10):
            router.prefilled("r1")
        assert router.counts["dropped_reports"] >= 6
        router.done("r2", Usage(output_tokens=3))
        await nursery.start(slow.run)
        await until(lambda: slow.noted.count("POST /v1/reservations/r1/prefilled") >= 3)
        assert "POST /v1/reservations/r2/done" not in slow.noted
        nursery.cancel_scope.cancel()


async def test_a_report_says_which_leg_had_the_cached_tokens() -> None:
    slow = SlowConductor()
    async with trio.open_nursery() as nursery:
        await nursery.start(slow.run)
        router = RemoteRouter(slow.url, "", Engines((), lambda name: None))
        await nursery.start(router.run)
        router.done("r1", Usage(cached_tokens=3, prefill_leg=True))
        router.done("r1", Usage(cached_tokens=4))
        await until(lambda: slow.bodies[-1] == b'{"cached_tokens":4}')
        assert b'{"cached_tokens":3,"prefill_leg":true}' in slow.bodies
        nursery.cancel_scope.cancel()


async def test_an_engine_that_its_conductor_passes_over_is_tried() -> None:
    """The Conductor has not looked at it again; the proxy knows that it answers."""
    made = conductor(Clock())
    async with proxy_stand(router=made) as stand:
        await register(made, stand)
        made.unreachable("i0")
        assert (await stand.ask(CHAT, chat("q"))).status == 200
        assert stand.proxy.router.counts["by_load"] == 1
        made.registry.drain("i0", draining=True)
        await until(lambda: all(engine.address.draining for engine in stand.proxy.engines))
        assert (await stand.ask(CHAT, chat("q"))).status == 429


# --- real processes ------------------------------------------------------------------------------------------
@contextmanager
def process(*arguments: str, lines: int, log: Path) -> Iterator[tuple[Forked, str]]:
    """Run a command until the end; yield it and the URL that it answers at."""
    with log.open("a") as errors, running_kvfs(*arguments, errors=errors.fileno()) as (child, output):
        said = [output.readline() for _ in range(lines)]
        assert said[-1] == "ready\n", said
        yield child, said[0].split()[1]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


class Traffic:
    """Clients that ask one request after the other."""

    def __init__(self, url: str) -> None:
        self._port = int(url.removesuffix("/v1").rpartition(":")[2])
        self.statuses: list[int] = []
        self.slowest_s = 0.0

    async def run(self) -> None:
        asker = Asker(await trio.open_tcp_stream("127.0.0.1", self._port))
        async with asker.stream:
            while True:
                began_s = trio.current_time()
                self.statuses.append((await asker.ask(CHAT, chat("q"))).status)
                self.slowest_s = max(self.slowest_s, trio.current_time() - began_s)

    async def go_on(self, count: int = 20) -> None:
        """Wait for so many more answers."""
        end = len(self.statuses) + count
        await until(lambda: len(self.statuses) >= end)


def counts(url: str) -> dict[str, int]:
    with urlopen(f"{url}/v1/instances", timeout=WAIT_S) as answer:
        found: dict[str, int] = json.loads(answer.read())["counts"]
        return found


async def routes(url: str, traffic: Traffic) -> None:
    """Wait until the Conductor routes what clients ask."""
    before = (await trio.to_thread.run_sync(counts, url)).get("routed", 0)
    with trio.fail_after(WAIT_S):
        while (await trio.to_thread.run_sync(counts, url)).get("routed", 0) < before + 10:
            await traffic.go_on(5)


@contextmanager
def engine_process() -> Iterator[str]:
    """Run an engine that takes next to nothing; yield its URL."""
    with running_kvfs(module="bench.stub_engine") as (_, said):
        yield f"http://127.0.0.1:{int(said.readline())}"


async def test_a_conductor_that_is_killed_in_mid_traffic_and_comes_back(
    tmp_path: Path, stack: ExitStack
) -> None:
    """No request fails meanwhile, and the log says once that it is away, and that it is back."""
    async with trio.open_nursery() as nursery:
        engines = [stack.enter_context(engine_process()) for _ in range(2)]
        file, log = tmp_path / "instances.json", tmp_path / "proxy.log"
        file.write_bytes(msgspec.json.encode([instance(f"i{n}", url=each) for n, each in enumerate(engines)]))
        given = ("conductor", "run", "--events", "tcp://127.0.0.1:*", "--instances", str(file))
        with process(*given, "--listen", "127.0.0.1:0", lines=3, log=tmp_path / "conductor.log") as (
            first,
            url,
        ):
            proxy = ("proxy", "--listen", "127.0.0.1:0", "--conductor", url)
            with process(*proxy, lines=2, log=log) as (_, address):
                traffic = Traffic(address)
                for _ in range(4):
                    nursery.start_soon(traffic.run)
                await routes(url, traffic)
                first.send_signal(signal.SIGSTOP)
                await traffic.go_on()
                assert traffic.slowest_s < 5.0, "nobody waits until it goes on"
                first.send_signal(signal.SIGCONT)
                await routes(url, traffic)
                first.kill()
                first.wait()
                await traffic.go_on()
                where = url.removeprefix("http://")
                with process(*given, "--listen", where, lines=3, log=tmp_path / "conductor.log"):
                    await routes(url, traffic)
                assert set(traffic.statuses) == {200}
                nursery.cancel_scope.cancel()
    said = [line.partition("WARNING ")[2] for line in log.read_text().splitlines()]
    assert [("is away" in line, "answers" in line) for line in said] == [
        (False, True),
        (True, False),
        (False, True),
    ]


async def test_a_proxy_with_instances_routes_by_a_conductor_in_its_process(
    tmp_path: Path, stack: ExitStack
) -> None:
    async with trio.open_nursery() as nursery:
        engine = stack.enter_context(engine_process())
        file = tmp_path / "instances.json"
        file.write_bytes(msgspec.json.encode([instance("i0", url=engine)]))
        config = tmp_path / "kvfs.toml"
        config.write_text(
            f'[conductor]\nlisten = "127.0.0.1:0"\ninstances = "{file}"\nevents = "tcp://127.0.0.1:*"\n'
        )
        given = ("proxy", "--listen", "127.0.0.1:0", "--config", str(config))
        with process(*given, lines=2, log=tmp_path / "proxy.log") as (child, address):
            traffic = Traffic(address)
            nursery.start_soon(traffic.run)
            await traffic.go_on()
            assert set(traffic.statuses) == {200}
            nursery.cancel_scope.cancel()
            child.send_signal(signal.SIGTERM)
            assert child.wait(WAIT_S) == 0
    assert len((tmp_path / "proxy.log").read_text()) < 4096


async def test_a_file_alone_starts_a_proxy_that_routes_by_what_its_engines_say(tmp_path: Path) -> None:
    """There is no flag but `--config`; the Conductor's own door has the engines as they said that they are."""
    one = AskedEngine()
    other = AskedEngine(models=models("n"), metrics=info(store_topic="", role="kv_consumer"))
    config = tmp_path / "kvfs.toml"

    def got(asked: str | Request) -> tuple[Any, str | None]:
        with urlopen(asked, timeout=WAIT_S) as answer:
            return json.load(answer), answer.headers["X-KVFS-Route"]

    def use(door: str) -> None:
        with process("proxy", "--config", str(config), lines=2, log=tmp_path / "proxy.log") as (_, url):
            known, _ = got(f"{door}/v1/instances")
            assert {(each["url"], each["model"], each["role"]) for each in known["instances"]} == {
                (one.url, "m", "both"),
                (other.url, "n", "decode"),
            }
            for model, engine in (("m", one), ("n", other), ("n", other)):
                body = json.dumps({**chat("q"), "model": model}).encode()
                _, route = got(Request(f"{url}/chat/completions", body))
                explained, _ = got(f"{door}/v1/explain/{route}")
                assert explained["chosen"]["decode"] == engine.url.removeprefix("http://")

    async with trio.open_nursery() as nursery:
        for engine in (one, other):
            await nursery.start(engine.run)
        with HeldPort() as port:
            config.write_text(
                f'[proxy]\nlisten = "127.0.0.1:0"\nconduct = true\nengines = ["{one.url}", "{other.url}"]\n'
                f'[conductor]\nlisten = "127.0.0.1:{port.number}"\nevents = "tcp://127.0.0.1:*"\n'
            )
            await trio.to_thread.run_sync(use, f"http://127.0.0.1:{port.number}")
        nursery.cancel_scope.cancel()
    assert [len(engine.completions) for engine in (one, other)] == [1, 2]
