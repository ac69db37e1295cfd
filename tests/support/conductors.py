"""Conductors on a virtual clock and behind their door, and instances for them."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import trio

from kvfs._native.cluster.index import ClusterIndex
from kvfs.config.settings import ConductorSettings
from kvfs.events.kv_events import GPU
from kvfs.keys import prefix_hashes
from kvfs.limits import MAX_INDEXED_BLOCKS
from kvfs.namespaces import Namespace
from scheduler.conductor.conductor import Conductor
from scheduler.conductor.door.conductor_service import Addresses, ConductorService
from scheduler.conductor.feeds.engine_names import Resolve, system_addresses
from scheduler.conductor.feeds.health import HealthWatch
from scheduler.conductor.pool import Options
from scheduler.conductor.sources import Knowledge, Place, StreamName
from scheduler.conductor.values import Instance, Routed, RouteRequest
from scheduler.routing.cost import table_costs

BLOCK_TOKENS = 16
NAMESPACE = Namespace.of_one_device(
    model="m",
    revision="1",
    dtype="bfloat16",
    layout="LKTHD",
    block_tokens=BLOCK_TOKENS,
)
COSTS = table_costs("llama3-8b", "h100-sxm", devices=1)


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def instance(name: str = "a", **changes: Any) -> Instance:
    given = {
        "name": name,
        "url": f"http://{name}.test",
        "model": "m",
        "namespace": NAMESPACE.as_mapping(),
        "engine_topic": f"engine-{name}",
        **changes,
    }
    return Instance(**given)


def conductor(clock: Clock, *instances: Instance, **options: Any) -> Conductor:
    made = Conductor(ClusterIndex(MAX_INDEXED_BLOCKS), Options(**{"costs": COSTS, **options}), clock)
    for each in instances:
        made.registry.add(each)
    return made


def tokens(seed: int, count: int) -> list[int]:
    """Return a prompt that the seed decides."""
    rng = random.Random(seed)
    return [rng.randrange(30_000) for _ in range(count)]


def hears(made: Conductor, topic: str, prompt: list[int], medium: str = GPU) -> bytes:
    """Let a stream say that it holds a prompt's blocks, and return their hashes."""
    stream = made.registry.stream(StreamName(topic, 0))
    assert stream is not None
    stream.knowledge = Knowledge.CURRENT
    hashes = prefix_hashes(NAMESPACE, prompt)
    made.registry.stored(stream, Place(medium), hashes, None)
    return hashes


def routed(made: Conductor, prompt: list[int], **values: Any) -> Routed:
    """Route a prompt that no instance may refuse."""
    found = made.route(RouteRequest(model="m", tokens=prompt, **values))
    assert isinstance(found, Routed), found
    return found


def give_orders(made: Conductor, answer: dict[str, Any]) -> None:
    """Have a Conductor answer this to each store that asks for its orders."""
    copies: Any = made.copies
    copies.for_store = lambda topic: answer


def over(made: Conductor) -> None:
    """Assert that nothing is left of any request."""
    status = made.status()
    assert status["reservations"] == 0
    for each in status["instances"]:
        assert (each["requests"], each["queued"], each["queue_s"]) == (0, 0, 0.0)
        assert (each["active_requests"], each["active_tokens"]) == (0, 0)
    for pool in made.registry.pools():
        assert len(pool.planner) == 0
        loads = [pool.planner.load(slot, 0.0) for slot in range(len(pool.slots))]
        assert [(load.committed_requests, load.committed_tokens) for load in loads] == [(0, 0)] * len(loads)


def prefills_observed(made: Conductor) -> int:
    """Return how many prefills the costs were fitted to."""
    [pool] = made.registry.pools()
    return pool.fitter._prefill.observations


def steps_observed(made: Conductor) -> int:
    """Return how many steps the costs were fitted to."""
    [pool] = made.registry.pools()
    return pool.fitter._step.observations


class Answer(NamedTuple):
    """An HTTP answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Asker:
    """One connection to a Conductor."""

    def __init__(self, stream: trio.abc.Stream) -> None:
        self._stream, self._left = stream, b""

    async def ask(self, method: str, path: str, value: object = None, *headers: str) -> Answer:
        """Send a request and read its answer."""
        body = b"" if value is None else value if isinstance(value, bytes) else json.dumps(value).encode()
        lines = [f"{method} {path} HTTP/1.1", "Host: c", f"Content-Length: {len(body)}", *headers, "\r\n"]
        await self._stream.send_all("\r\n".join(lines).encode() + body)
        return await self.read()

    async def read(self) -> Answer:
        while b"\r\n\r\n" not in self._left:
            await self._more()
        head, _, self._left = self._left.partition(b"\r\n\r\n")
        first, *rest = head.decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in rest)}
        length = int(headers.get("content-length", 0))
        while len(self._left) < length:
            await self._more()
        body, self._left = self._left[:length], self._left[length:]
        return Answer(int(first.split()[1]), headers, body)

    async def _more(self) -> None:
        data = await self._stream.receive_some(1 << 16)
        assert data, "the connection ended"
        self._left += data


async def _ask_nobody(_: HealthWatch) -> None:
    await trio.sleep_forever()


@asynccontextmanager
async def serving(
    *, health: bool = False, resolve: Resolve = system_addresses, **settings: Any
) -> AsyncIterator[tuple[ConductorService, Addresses]]:
    """Run a Conductor's service on free ports. `health`: whether it asks instances, most of which are nowhere here."""
    given = {"listen": "127.0.0.1:0", "events": "tcp://127.0.0.1:*", **settings}
    with (
        nullcontext() if health else patch.object(HealthWatch, "run", _ask_nobody),
        ConductorService(ConductorSettings.model_validate(given), resolve=resolve) as service,
    ):
        async with trio.open_nursery() as nursery:
            addresses = await nursery.start(service.run)
            yield service, addresses
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def asking(addresses: Addresses) -> AsyncIterator[Asker]:
    async with await trio.open_tcp_stream("127.0.0.1", addresses.port) as stream:
        yield Asker(stream)
