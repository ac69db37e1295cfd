"""The Conductor over a real socket: operations, errors, limits, clients that misbehave, publishers that fail."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from kvfs import limits
from kvfs.config.load import load
from kvfs.config.settings import ConductorSettings
from kvfs.errors import ConfigError
from kvfs.events.kv_events import CPU, AllBlocksCleared, BlockStored, Replay, first_sequence
from kvfs.events.sockets import Publisher
from kvfs.http.head import Head
from kvfs.http.http_exchange import Exchange
from kvfs.http.input_buffer import InputBuffer
from kvfs.http.transports import Buffer
from kvfs.http.transports import Gone as ClientGone
from kvfs.keys import prefix_hashes, split_keys
from kvfs.watch.hub import Hub
from kvfs.watch.panels import Snapshot
from kvfs.watch.window import Window
from scheduler.conductor.door.api import Api
from scheduler.conductor.door.conductor_metrics import ConductorCollector
from scheduler.conductor.door.mooncake import ALL_OPERATIONS
from scheduler.conductor.door.openapi import FIXED, OPEN
from scheduler.conductor.door.operations import Context
from scheduler.conductor.feeds import listener
from scheduler.conductor.feeds.discovery import InstancesFile
from scheduler.conductor.planning.planner import Role
from scheduler.conductor.sources import StreamName
from scheduler.conductor.values import Instance, RouteRequest
from tests.support.conductors import NAMESPACE, Clock, asking, conductor, instance, serving
from tests.support.held_ports import HeldPort
from tests.support.waits import until

PROMPT = list(range(1000, 1000 + 330))


def given(name: str = "a", **values: Any) -> dict[str, Any]:
    """An instance as JSON values; nobody answers at its address."""
    found: dict[str, Any] = msgspec.to_builtins(instance(name, url="http://127.0.0.1:1", **values))
    return found


# --- operations ----------------------------------------------------------------------------------------------
async def test_a_request_from_its_route_to_its_end() -> None:
    async with serving() as (service, addresses), asking(addresses) as asker:
        assert (await asker.ask("POST", "/v1/instances", given("a"))).status == 201
        assert (await asker.ask("POST", "/v1/instances", given("b"))).status == 201
        routed = await asker.ask("POST", "/v1/route", {"model": "m", "tokens": PROMPT})
        assert routed.status == 200
        id = routed.json["id"]
        assert routed.json["decode"] in ("a", "b")
        assert "degraded" in routed.json
        explained = await asker.ask("GET", f"/v1/explain/{id}")
        assert {each["instance"] for each in explained.json["prefill"]} == {"a", "b"}
        for step in ("prefilled", "prefill_failed", "first_token"):
            assert (await asker.ask("POST", f"/v1/reservations/{id}/{step}")).status == 204
        usage = {"cached_tokens": 0, "output_tokens": 7, "prefill_leg": True}
        for wrong in ({**usage, "output_tokens": 1 << 21}, {"cached_tokens": -1}):
            refused = await asker.ask("POST", f"/v1/reservations/{id}/done", wrong)
            assert (refused.status, "must be from 0 to 1048576" in refused.json["error"]["message"]) == (
                400,
                True,
            )
        assert (await asker.ask("POST", f"/v1/reservations/{id}/done", usage)).status == 204
        again = await asker.ask("POST", f"/v1/reservations/{id}/done")
        assert (again.status, again.json["error"]["code"]) == (404, "NotFound")
        assert service.conductor.status()["reservations"] == 0


async def test_instances_are_drained_relabelled_and_removed() -> None:
    async with serving() as (_, addresses), asking(addresses) as asker:
        await asker.ask("POST", "/v1/instances", given("a"))
        assert (await asker.ask("POST", "/v1/instances/a/role", {"role": "decode"})).status == 204
        assert (await asker.ask("POST", "/v1/instances/a/drain")).status == 204
        [shown] = (await asker.ask("GET", "/v1/instances")).json["instances"]
        assert (shown["role"], shown["draining"]) == ("decode", True)
        refused = await asker.ask("POST", "/v1/route", {"model": "m", "tokens": PROMPT})
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        assert refused.json["reason"] == "no instance takes work"
        assert (await asker.ask("POST", "/v1/instances/a/drain", {"draining": False})).status == 204
        assert (await asker.ask("DELETE", "/v1/instances/a")).status == 204
        assert (await asker.ask("DELETE", "/v1/instances/a")).status == 404
        gone = await asker.ask("POST", "/v1/route", {"model": "m", "tokens": PROMPT})
        assert (gone.status, gone.json["error"]["message"]) == (
            404,
            "model 'm': no instance of it is registered",
        )


async def test_a_batch_is_routed_in_order_or_not_at_all() -> None:
    async with serving() as (service, addresses), asking(addresses) as asker:
        await asker.ask("POST", "/v1/instances", given("a"))
        one = {"model": "m", "tokens": PROMPT}
        batch = await asker.ask("POST", "/v1/route_batch", {"requests": [one] * 40})
        assert [each["routed"]["decode"] for each in batch.json["answers"]] == ["a"] * 40
        wrong = await asker.ask("POST", "/v1/route_batch", {"requests": [one, {"model": "m", "length": 0}]})
        assert (wrong.status, wrong.json["error"]["message"][:20]) == (400, "requests[1]: length:")
        assert service.conductor.status()["reservations"] == 40
        many = {"requests": [{"model": "m", "length": 1}] * (limits.MAX_ROUTE_BATCH + 1)}
        assert (
            "the limit is 1024" in (await asker.ask("POST", "/v1/route_batch", many)).json["error"]["message"]
        )


async def test_what_each_instance_holds() -> None:
    async with serving() as (_, addresses), asking(addresses) as asker:
        await asker.ask("POST", "/v1/instances", given("a"))
        found = await asker.ask("POST", "/v1/match", {"model": "m", "tokens": PROMPT})
        assert found.json == {"instances": {"a": 0}}


async def test_the_openapi_document_has_every_operation_and_refers_to_nothing_that_is_missing() -> None:
    async with serving() as (_, addresses), asking(addresses) as asker:
        text = (await asker.ask("GET", "/openapi.json")).body.decode()
    document = json.loads(text)
    described = {
        (method.upper(), re.sub(r"\{\w+\}", "{}", path)): each
        for path, methods in document["paths"].items()
        for method, each in methods.items()
    }
    operations = {(each.method, each.path) for each in ALL_OPERATIONS}
    assert operations | {("GET", path) for path in FIXED} == set(described)
    for name in re.findall(r'"#/components/schemas/(\w+)"', text):
        assert name in document["components"]["schemas"]
    route = described["POST", "/v1/route"]
    assert set(route["responses"]) == {"200", "400", "401", "404", "411", "413", "429", "503"}
    schema = document["components"]["schemas"]["RouteRequest"]
    assert set(schema["properties"]) == set(RouteRequest.__struct_fields__)


@pytest.mark.parametrize("path", FIXED)
async def test_what_is_there_beside_the_operations_is_as_the_document_says(path: str) -> None:
    secret = "0123456789abcdef"
    token = f"Authorization: Bearer {secret}"
    async with serving(tokens=[secret]) as (_, addresses), asking(addresses) as asker:
        assert (await asker.ask("GET", path)).status == (200 if path in OPEN else 401)
        refused = await asker.ask("POST", path, {}, token)
        assert (refused.status, refused.headers["allow"]) == (405, "GET")
        answer = await asker.ask("GET", path, None, token)
        assert (answer.status, answer.headers["content-type"].partition(";")[0]) == (200, FIXED[path][1])


async def test_the_document_asks_for_a_token_where_one_is_needed_and_shows_limits() -> None:
    async with serving() as (_, addresses), asking(addresses) as asker:
        document = (await asker.ask("GET", "/openapi.json")).json
    assert document["security"] == []
    shown = document["components"]["schemas"]["Instance"]["properties"]["name"]
    assert (shown["minLength"], shown["maxLength"]) == (1, limits.MAX_NAME_BYTES)
    batch = document["components"]["schemas"]["RouteBatch"]["properties"]["requests"]
    assert batch["maxItems"] == limits.MAX_ROUTE_BATCH
    links = document["paths"]["/v1/route"]["post"]["responses"]["200"]["links"]
    assert links["done"]["parameters"] == {"id": "$response.body#/id"}
    token = "0123456789abcdef"
    async with serving(tokens=[token]) as (_, addresses), asking(addresses) as asker:
        document = (await asker.ask("GET", "/openapi.json", None, f"Authorization: Bearer {token}")).json
    assert document["security"] == [{"token": []}]


async def test_metrics_show_what_is_wrong() -> None:
    async with serving() as (service, addresses), asking(addresses) as asker:
        await asker.ask("POST", "/v1/instances", given("a"))
        await asker.ask("POST", "/v1/route", {"model": "m", "tokens": PROMPT})
        await asker.ask("POST", "/v1/route", {"model": "none", "tokens": PROMPT})
        service.conductor.registry.has_topic("stranger")
        text = (await asker.ask("GET", "/metrics")).body.decode()
    for line in (
        "kvfs_conductor_routed_total 1.0",
        "kvfs_conductor_degraded_total 1.0",
        'kvfs_conductor_unregistered_topic_batches_total{topic="stranger"} 1.0',
        'kvfs_conductor_stream_state{state="unknown",stream="engine-a"} 1.0',
        'kvfs_conductor_errors_total{code="NotFound"} 1.0',
        'kvfs_conductor_operation_seconds_count{operation="route"} 2.0',
    ):
        assert line in text, line


def test_every_metric_is_in_the_page() -> None:
    made = conductor(Clock(), instance("a"))
    page = (Path(__file__).parents[3] / "docs/conductor.md").read_text()
    for metric in ConductorCollector(made.status(), Counter(), Counter(), {}).collect():
        assert f"`{metric.name}{'_total' * (metric.type == 'counter')}`" in page


# --- who may ask ---------------------------------------------------------------------------------------------
async def test_without_a_token_nobody_learns_anything() -> None:
    token = "0123456789abcdef"
    async with serving(tokens=["another-token-of-16", token]) as (_, addresses), asking(addresses) as asker:
        assert (await asker.ask("GET", "/healthz")).status == 200
        for path in ("/v1/instances", "/metrics", "/openapi.json", "/nothing"):
            refused = await asker.ask("GET", path, None, "Authorization: Bearer 0123456789abcdeX")
            assert (refused.status, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert (await asker.ask("GET", "/metrics", None, f"Authorization: Bearer {token}")).status == 200


def test_an_open_door_needs_tokens(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tokens are needed"):
        ConductorSettings(listen="0.0.0.0:9200")
    with pytest.raises(ValueError, match="fewer than 16 characters"):
        ConductorSettings.model_validate({"tokens": ["secret"]})
    file = tmp_path / "kvfs.toml"
    file.write_text('[conductor]\nlisten = "0.0.0.0:9200"\ntokens = ["short-secret"]\n')
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert "short-secret" not in str(caught.value)


# --- malformed, huge and slow clients ------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("GET", "/nothing", None, 404, "/openapi.json lists them"),
        ("GET", "/v1/route", None, 405, "there is POST"),
        ("POST", "/v1/explain/x", {}, 405, "there is GET"),
        ("GET", f"/v1/explain/{'x' * 129}", None, 404, "no such path"),
        ("GET", "/v1/explain/nothing", None, 404, "'nothing'"),
        ("POST", "/v1/route", b"{", 400, "the body is not as /openapi.json says"),
        ("POST", "/v1/route", b"\xff\xfe", 400, "the body is not"),
        ("POST", "/v1/route", {"model": "m", "tokens": ["x"]}, 400, r"\$\.tokens\[0\]"),
        ("POST", "/v1/route", {"model": "m", "tokens": [1], "what": 1}, 400, "unknown field `what`"),
        ("POST", "/v1/route", {"tokens": [1]}, 400, "missing required field `model`"),
        ("POST", "/v1/route", {"model": "m", "tokens": [1 << 40]}, 400, "token 0 is 1099511627776"),
        ("POST", "/v1/instances", b"[" * 50_000, 400, "the body is not"),
        ("POST", "/v1/instances/a/role", {"role": "king"}, 400, r"king.*\$\.role"),
        ("POST", "/v1/reservations/x/done", {"cached_tokens": -1}, 404, "'x'"),
        ("POST", "/v1/route", {"model": "m", "length": 1, "ttft_slo_s": -1}, 400, "ttft_slo_s is -1"),
        ("POST", "/v1/match", {"model": "m", "length": 1, "waited_s": -1}, 400, "waited_s is -1"),
        (
            "POST",
            "/v1/match",
            {"model": "m", "length": 1, "output_tokens": 1 << 21},
            400,
            "output_tokens.* 1048576",
        ),
        ("POST", "/v1/instances", given("b", groups=[{"group": 0}]), 400, r"`kind`.*\$\.groups\[0\]"),
        (
            "POST",
            "/v1/instances",
            given("b", engine_rank=1024),
            400,
            "engine_rank is 1024: must be from 0 to 1023",
        ),
        (
            "POST",
            "/v1/instances",
            given("b", store_replay="x" * 1025),
            400,
            "store_replay: the limit is 1024",
        ),
    ],
)
async def test_a_malformed_request_is_answered_with_what_is_wrong(
    method: str, path: str, body: object, status: int, message: str
) -> None:
    async with serving() as (_, addresses), asking(addresses) as asker:
        await asker.ask("POST", "/v1/instances", given("a"))
        found = await asker.ask(method, path, body)
        assert found.status == status
        assert re.search(message, found.json["error"]["message"])
        assert (await asker.ask("GET", "/healthz")).status == 200, "the connection goes on"


async def test_what_is_no_http_is_answered_in_the_same_form() -> None:
    async with serving() as (_, addresses), await trio.open_tcp_stream("127.0.0.1", addresses.port) as stream:
        await stream.send_all(b"GARBAGE\r\n\r\n")
        answer = b"".join([data async for data in stream])
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "BadRequest"


async def test_a_body_over_its_limit_is_refused_before_it_comes() -> None:
    async with serving() as (_, addresses):
        for path, most in (
            ("/v1/instances", limits.MAX_SMALL_BODY_BYTES),
            ("/v1/route", limits.MAX_CONDUCTOR_BODY_BYTES),
        ):
            async with await trio.open_tcp_stream("127.0.0.1", addresses.port) as stream:
                head = f"POST {path} HTTP/1.1\r\nHost: c\r\nContent-Length: {most + 1}\r\n\r\n"
                await stream.send_all(head.encode())
                answer = await stream.receive_some(4096)
                assert answer.startswith(b"HTTP/1.1 413 ")
                assert f"the limit is {most}".encode() in answer


async def test_a_chunked_body_over_its_limit_is_cut_off() -> None:
    async with serving() as (service, addresses):
        async with await trio.open_tcp_stream("127.0.0.1", addresses.port) as stream:
            await stream.send_all(
                b"POST /v1/instances HTTP/1.1\r\nHost: c\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            answer = b""
            async with trio.open_nursery() as nursery:

                async def send() -> None:
                    try:
                        for _ in range(100):
                            await stream.send_all(b"4000\r\n" + b" " * 0x4000 + b"\r\n")
                    except trio.BrokenResourceError:
                        pass

                nursery.start_soon(send)
                answer = await stream.receive_some(4096)
                nursery.cancel_scope.cancel()
        assert answer.startswith(b"HTTP/1.1 413 ")
        await until(lambda: service._api._bodies_bytes == 0)


async def test_bodies_in_memory_are_bounded_and_an_announced_length_takes_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("scheduler.conductor.door.api.CONDUCTOR_BODIES_BYTES", 300_000)
    async with serving() as (service, addresses), AsyncExitStack() as stack:
        slow = []
        for _ in range(8):
            stream = await stack.enter_async_context(await trio.open_tcp_stream("127.0.0.1", addresses.port))
            await stream.send_all(b"POST /v1/route HTTP/1.1\r\nHost: c\r\nContent-Length: 9000000\r\n\r\n[")
            slow.append(stream)
        await until(lambda: service._api._bodies_bytes >= 8)
        asker = await stack.enter_async_context(asking(addresses))
        assert (await asker.ask("GET", "/v1/instances")).status == 200
        big = await asker.ask("POST", "/v1/route", b" " * 250_000)
        assert (big.status, big.json["error"]["code"]) == (503, "SlowDown")
        for stream in slow:
            await stream.aclose()
        await until(lambda: service._api._bodies_bytes == 0)


async def test_a_connection_that_ends_inside_a_body_reserves_nothing() -> None:
    async with serving() as (service, addresses), asking(addresses) as asker:
        await asker.ask("POST", "/v1/instances", given("a"))
        body = json.dumps({"model": "m", "tokens": PROMPT}).encode()
        async with await trio.open_tcp_stream("127.0.0.1", addresses.port) as stream:
            head = f"POST /v1/route HTTP/1.1\r\nHost: c\r\nContent-Length: {len(body)}\r\n\r\n"
            await stream.send_all(head.encode() + body[:-1])
        await until(lambda: service._server.open_connections == 1)
        assert service.conductor.status()["reservations"] == 0


class Transport:
    """A transport that nothing comes from."""

    peer, secure, quiet_s, answered_s = "test", False, 1.0, 0.0

    def fileno(self) -> int:
        return -1

    def wake(self) -> None: ...

    def give_up(self) -> None: ...

    def try_send(self, data: bytes) -> bool:
        return False

    async def receive_into(self, into: memoryview, timeout_s: float, *, idle: bool = False) -> int:
        return 0

    async def send(self, parts: Sequence[Buffer]) -> None: ...

    async def send_file(self, head: bytes, descriptor: int, offset: int, count: int) -> None: ...

    async def close(self, *, linger: bool) -> None: ...


class NobodyFollows:
    def follow(self, instance: Instance) -> None: ...

    def sync(self) -> None: ...

    def key_of(self, name: StreamName, hash: int) -> bytes | None:
        return None


async def never(_: Window) -> Snapshot:
    raise AssertionError("nobody watches")


async def test_what_was_reserved_for_a_client_that_is_gone_ends() -> None:
    made = conductor(Clock(), instance("a"))

    class Gone(Transport):
        async def send(self, parts: Sequence[Buffer]) -> None:
            raise ClientGone("reset")

    async def serve(body: bytes, path: str) -> None:
        transport = Gone()
        source = InputBuffer(transport)
        source.feed(body)
        head = Head("POST", path.encode(), [], len(body), False, False, True)
        with pytest.raises(ClientGone):
            await Api(Context(made, NobodyFollows()), [], Hub(never)).serve(Exchange(head, transport, source))

    one = {"model": "m", "tokens": PROMPT}
    await serve(json.dumps(one).encode(), "/v1/route")
    await serve(json.dumps({"requests": [one, one]}).encode(), "/v1/route_batch")
    assert (made.counts["routed"], made.counts["cancelled"]) == (3, 3)
    assert made.status()["reservations"] == 0


# --- publishers ----------------------------------------------------------------------------------------------
def event(prompt: list[int]) -> BlockStored:
    return BlockStored(
        block_hashes=[*split_keys(prefix_hashes(NAMESPACE, prompt))],
        parent_block_hash=None,
        token_ids=[],
        block_size=16,
        lora_id=None,
        medium=CPU,
        lora_name=None,
    )


class Store:
    """A publisher that speaks as a kvfs service does, and answers for manifests."""

    def __init__(self, endpoint: str, topic: str = "node", *, replay: Replay | None = None) -> None:
        self.blocks: list[list[int]] = []
        self.publisher = Publisher(endpoint, topic=topic, replay_endpoint="tcp://127.0.0.1:*", replay=replay)
        self.publisher.on_manifest = self.publish_all
        self.publisher.publish([AllBlocksCleared()])

    def store(self, prompt: list[int]) -> None:
        self.blocks.append(prompt)
        self.publisher.publish([event(prompt)])

    def publish_all(self) -> None:
        for prompt in self.blocks:
            self.publisher.publish([event(prompt)])
        self.publisher.manifest_published()


def prompts(count: int) -> list[list[int]]:
    return [[n * 1000 + k for k in range(16)] for n in range(1, count + 1)]


async def test_a_conductor_that_starts_later_learns_all_by_replay_and_its_successor_too() -> None:
    """Killed and started anew: nothing is kept on disk, all comes from the publishers."""
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        store: Store | None = None
        endpoint = "tcp://127.0.0.1:*"
        for attempt in range(2):
            async with serving(events=endpoint) as (service, addresses):
                endpoint = addresses.events
                if store is None:
                    store = Store(endpoint)
                    stack.enter_context(store.publisher)
                    nursery.start_soon(store.publisher.serve_replays)
                    for prompt in prompts(5):
                        store.store(prompt)
                service.add(
                    instance("a", store_topic="node", store_replay=store.publisher.replay_endpoint or "")
                )

                def held(number: int, service: Any = service) -> int:
                    found = service.conductor.match(RouteRequest(model="m", tokens=prompts(number)[-1]))
                    return int(found["a"])

                await until(lambda: held(5) == 16)
                assert [held(n) for n in range(1, 6)] == [16] * 5
                [shown] = [s for s in service.conductor.status()["streams"] if s["stream"] == "node"]
                assert shown["knowledge"] == "current"
                assert service.conductor.counts["lost_batches"] == 0, attempt
        nursery.cancel_scope.cancel()


async def test_what_no_replay_brings_comes_by_a_manifest() -> None:
    async with serving() as (service, addresses):
        store = Store(addresses.events, replay=Replay(max_batches=2))
        with store.publisher:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.publisher.serve_replays)
                for prompt in prompts(9):
                    store.store(prompt)
                service.add(
                    instance("a", store_topic="node", store_replay=store.publisher.replay_endpoint or "")
                )

                def held() -> list[int]:
                    match = service.conductor.match
                    return [match(RouteRequest(model="m", tokens=prompt))["a"] for prompt in prompts(9)]

                await until(lambda: held() == [16] * 9)
                await until(
                    lambda: (
                        "partial" not in [each["knowledge"] for each in service.conductor.status()["streams"]]
                    )
                )
                assert service.conductor.counts["lost_batches"] > 0
                nursery.cancel_scope.cancel()


async def test_a_publisher_that_restarts_without_replay_leaves_no_stale_block() -> None:
    async with serving() as (service, addresses), trio.open_nursery() as nursery:
        service.add(instance("a", store_topic="node"))

        def held(prompt: list[int]) -> bool:
            return service.conductor.match(RouteRequest(model="m", tokens=prompt))["a"] > 0

        old, new = prompts(2)
        for prompt in (old, new):
            first = first_sequence(time.time())  # else it may go on where the one before ended
            with Publisher(addresses.events, topic="node", sequence=first) as publisher:

                async def publish(publisher: Publisher = publisher, prompt: list[int] = prompt) -> None:
                    while True:
                        publisher.publish([event(prompt)])
                        await trio.sleep(0.01)

                with trio.CancelScope() as scope:
                    async with trio.open_nursery() as publishing:
                        publishing.start_soon(publish)
                        await until(lambda prompt=prompt: held(prompt))
                        scope.cancel()
        assert not held(old)
        nursery.cancel_scope.cancel()


async def test_a_dead_instance_is_passed_over_and_noticed_when_it_is_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener, "PROBE_INTERVAL_S", 0.05)
    answers = 0

    async def metrics(stream: trio.SocketStream) -> None:
        nonlocal answers
        await stream.receive_some(4096)
        body = b"process_start_time_seconds 5\nvllm:num_requests_running 3\n"
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        await stream.send_all(head.encode() + body)
        answers += 1

    with HeldPort() as port:
        async with serving(health=True) as (service, _), trio.open_nursery() as nursery:
            service.add(instance("a", url=f"http://127.0.0.1:{port.number}"))

            def shown() -> dict[str, Any]:
                return dict(service.conductor.status()["instances"][0])

            await until(lambda: not shown()["reachable"])
            [found] = await trio.open_tcp_listeners(port.number, host="127.0.0.1")
            nursery.start_soon(trio.serve_listeners, metrics, [found])
            await until(lambda: bool(shown()["reachable"]))
            assert answers > 0
            await until(lambda: shown()["active_requests"] == 3)
            nursery.cancel_scope.cancel()


# --- a file of instances -------------------------------------------------------------------------------------
class Registrar:
    def __init__(self) -> None:
        self.names: list[str] = []
        self.labels: dict[str, Role] = {}

    def add(self, instance: Instance) -> None:
        self.names.append(instance.name)

    def remove(self, name: str) -> None:
        self.names.remove(name)

    def role(self, name: str) -> Role:
        return self.labels.get(name, "both")

    def set_role(self, name: str, role: Role) -> None:
        self.labels[name] = role


def test_a_file_of_instances_is_followed_and_a_wrong_one_changes_nothing(tmp_path: Path) -> None:
    file, registrar = tmp_path / "instances.json", Registrar()
    follower = InstancesFile(file, registrar)
    follower.look()
    file.write_text(json.dumps([given("a"), given("b")]))
    follower.look()
    assert registrar.names == ["a", "b"]
    file.write_text("[{")
    follower.look()
    assert registrar.names == ["a", "b"]
    registrar.add(instance("by-hand"))
    file.write_text(json.dumps([given("b", role="decode"), given("c")]))
    follower.look()
    assert registrar.names == ["by-hand", "b", "c"]
    registrar.labels["c"] = "decode"
    file.write_text(json.dumps([given("b", role="decode"), given("c", weights="others")]))
    follower.look()
    assert registrar.role("c") == "decode", "the file says nothing new of its role"
