"""Mooncake's indexer paths over a real socket, as its users' tools call them, with publishers that bind."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import msgspec
import pytest
import trio

from kvfs.events.kv_events import (
    CPU,
    GPU,
    Batch,
    BlockRemoved,
    BlockStored,
    Replay,
    encode_batch,
    sequence_frame,
)
from kvfs.events.sockets import Publisher
from tests.support.conductors import Asker, asking, instance, serving
from tests.support.waits import WAIT_S

TOKENS = list(range(100, 100 + 64))
BLOCK = 16


def engine_hash(tokens: list[int], end: int) -> bytes:
    """Make a hash as vLLM does with sha256: others know its last 64 bits."""
    return hashlib.sha256(repr(tokens[:end]).encode()).digest()


def low(hash: bytes) -> int:
    return int.from_bytes(hash[-8:])


def stored(tokens: list[int], medium: str | None = GPU, **changes: Any) -> BlockStored:
    ends = range(BLOCK, len(tokens) + 1, BLOCK)
    given = {
        "block_hashes": [engine_hash(tokens, end) for end in ends],
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
        **changes,
    }
    return BlockStored(**given)


def registration(publisher: Publisher, **changes: Any) -> dict[str, Any]:
    """What Mooncake's page shows, and its proxy's further field."""
    return {
        "endpoint": publisher.endpoint,
        "type": "vLLM",
        "modelname": "qwen",
        "instance_id": "vllm-prefill-node1",
        "block_size": BLOCK,
        "dp_rank": 0,
        "tenant_id": "default",
        "lora_name": "",
        "hash_profile": {"strategy": "vllm_v1", "algorithm": "sha256"},
        **changes,
    }


def publisher(host: str = "127.0.0.1", **options: Any) -> Publisher:
    return Publisher(f"tcp://{host}:*", topic="kv-events", **options)


def question(**changes: Any) -> dict[str, Any]:
    return {"model": "qwen", "block_size": BLOCK, "token_ids": TOKENS, **changes}


async def query(asker: Asker, **changes: Any) -> dict[str, Any]:
    answer = await asker.ask("POST", "/query", question(**changes))
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json["default"]
    assert answer.json["instances"] == found
    return found


async def knows(asker: Asker, instance_id: str, tokens: int, publish: Any = None) -> None:
    """Wait until a query says so; what is published before a subscriber is there is lost, so `publish` it again."""
    with trio.fail_after(WAIT_S):
        while True:
            if publish is not None:
                publish()
            if (await query(asker))[instance_id]["longest_matched"] == tokens:
                return
            await trio.sleep(0.005)


async def test_two_engines_with_one_topic_are_registered_followed_and_told_apart() -> None:
    with publisher() as one, publisher() as two:
        async with serving() as (_, addresses), asking(addresses) as asker:
            for id, each, type in (("one", one, "vLLM"), ("two", two, "sglang")):
                answer = await asker.ask("POST", "/register", registration(each, instance_id=id, type=type))
                assert answer.json == {"status": "registered successfully", "instance_id": id}
            await knows(asker, "one", 64, lambda: one.publish([stored(TOKENS)]))
            await knows(asker, "two", 32, lambda: two.publish([stored(TOKENS[:32], CPU)]))
            again = await asker.ask("POST", "/register", registration(one, instance_id="one"))
            assert again.status == 200
            found = await query(asker)
            assert found["one"] == {"longest_matched": 64, "GPU": 64, "CPU": 0, "DISK": 0, "DP": {"0": 64}}
            assert found["two"] == {"longest_matched": 32, "GPU": 0, "CPU": 32, "DISK": 0, "DP": {"0": 32}}
            assert list(await query(asker, instance_id="two")) == ["two"]
            assert (await query(asker, token_ids=TOKENS[:40]))["one"]["longest_matched"] == 32
            assert (await query(asker, lora_name="sql"))["one"]["longest_matched"] == 0
            assert (await query(asker, cache_salt="x"))["one"]["longest_matched"] == 0
            one.publish([BlockRemoved(block_hashes=[engine_hash(TOKENS, 48)], medium=GPU)])
            await knows(asker, "one", 32)
            gone = await asker.ask(
                "POST", "/unregister", {"instance_id": "one", "dp_rank": 0, "modelname": "qwen"}
            )
            assert gone.json == {
                "status": "unregistered successfully",
                "removed_instances": ["one|default|0"],
            }
            assert list(await query(asker)) == ["two"]
            assert (
                await asker.ask("POST", "/unregister", {"instance_id": "one", "dp_rank": 0})
            ).status == 404


async def test_an_engine_may_have_an_ipv6_address() -> None:
    with publisher("[::1]") as engine:
        async with serving() as (_, addresses), asking(addresses) as asker:
            assert (await asker.ask("POST", "/register", registration(engine))).status == 200
            await knows(asker, "vllm-prefill-node1", 64, lambda: engine.publish([stored(TOKENS)]))


async def test_a_query_by_the_hashes_that_the_engine_announced() -> None:
    hashes = [low(engine_hash(TOKENS, end)) for end in (16, 32, 48, 64)]
    with publisher() as one:
        async with serving() as (_, addresses), asking(addresses) as asker:
            await asker.ask("POST", "/register", registration(one))
            await knows(asker, "vllm-prefill-node1", 64, lambda: one.publish([stored(TOKENS)]))
            for names, depth in (
                ({"seq_hashes": hashes}, 64),
                ({"block_hash": hashes[:2]}, 32),
                ({"seq_hashes": [hashes[0], 5, hashes[2]]}, 16),
                ({"seq_hashes": hashes, "lora_name": "sql"}, 0),
            ):
                asked = {"model": "qwen", "block_size": BLOCK, **names}
                answer = await asker.ask("POST", "/query_by_hash", asked)
                found = answer.json["default"]["vllm-prefill-node1"]
                assert (found["longest_matched"], found["GPU"]) == (depth, depth)
            assert (
                await asker.ask("POST", "/query_by_hash", {"model": "qwen", "block_size": BLOCK})
            ).status == 400


async def test_messagepack_is_answered_with_messagepack() -> None:
    """Mooncake's proxy sends its tokens as 32 bits each."""
    packed = "Content-Type: application/msgpack"
    with publisher() as one:
        async with serving() as (_, addresses), asking(addresses) as asker:
            body = msgspec.msgpack.encode(registration(one))
            answer = await asker.ask("POST", "/register", body, packed)
            assert answer.headers["content-type"] == "application/msgpack"
            assert msgspec.msgpack.decode(answer.body)["status"] == "registered successfully"
            await knows(asker, "vllm-prefill-node1", 64, lambda: one.publish([stored(TOKENS)]))
            tokens = struct.pack(f"<{len(TOKENS)}i", *TOKENS)
            asked = msgspec.msgpack.encode(question(token_ids=tokens, tenant_id="default", lora_name=""))
            answer = await asker.ask("POST", "/query", asked, packed)
            found = msgspec.msgpack.decode(answer.body)["instances"]
            assert found["vllm-prefill-node1"]["longest_matched"] == 64
            broken = await asker.ask("POST", "/query", b"\xc1", packed)
            assert (broken.status, broken.json["error"]["code"]) == (400, "InvalidRequest")
            odd = msgspec.msgpack.encode(question(token_ids=b"123"))
            assert (await asker.ask("POST", "/query", odd, packed)).status == 400


async def test_ranks_of_one_instance_have_publishers_of_their_own_and_are_shown_apart() -> None:
    with publisher() as one, publisher() as two:

        def publish() -> None:
            batch = encode_batch(Batch(1.0, [stored(TOKENS)], 1))
            two._sender.send_multipart([b"kv-events", sequence_frame(two.sequence), batch])
            two.sequence += 1

        async with serving() as (_, addresses), asking(addresses) as asker:
            for rank, each in enumerate((one, two)):
                await asker.ask("POST", "/register", registration(each, instance_id="e", dp_rank=rank))
            await knows(asker, "e", 64, publish)
            assert (await query(asker))["e"]["DP"] == {"0": 0, "1": 64}


async def test_what_was_published_before_the_registration_comes_by_a_replay() -> None:
    with publisher(replay_endpoint="tcp://127.0.0.1:*", replay=Replay()) as one:
        one.publish([stored(TOKENS)])
        async with serving() as (_, addresses), asking(addresses) as asker:
            await asker.ask("POST", "/register", registration(one, replay_endpoint=one.replay_endpoint))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(one.serve_replays)
                await knows(asker, "vllm-prefill-node1", 64)
                nursery.cancel_scope.cancel()


async def test_registered_publishers_are_sent_nothing() -> None:
    with publisher() as one:
        async with serving() as (service, addresses), asking(addresses) as asker:
            await asker.ask("POST", "/register", registration(one))
            refused = await asker.ask("POST", "/v1/route", {"model": "qwen", "tokens": TOKENS})
            assert (refused.status, refused.json["reason"]) == (429, "no instance takes work")
            await asker.ask(
                "POST", "/v1/instances/vllm-prefill-node1%7Cdefault%7C0/drain", {"draining": False}
            )
            assert (await asker.ask("POST", "/v1/route", {"model": "qwen", "tokens": TOKENS})).status == 429
            assert not service._listener._probing


async def test_tenants_do_not_see_each_other_and_instances_of_the_conductor_are_seen() -> None:
    with publisher() as one:
        async with serving() as (service, addresses), asking(addresses) as asker:
            service.add(instance("a", url="http://127.0.0.1:1"))
            await asker.ask("POST", "/register", registration(one, modelname="m", tenant_id="t"))
            mine = await asker.ask("POST", "/query", question(model="m", tenant_id="t"))
            assert list(mine.json["t"]) == ["vllm-prefill-node1"]
            assert list(await query(asker, model="m")) == ["a"]
            await asker.ask("POST", "/register", registration(one, modelname="m"))
            assert list(await query(asker, model="m")) == ["a", "vllm-prefill-node1"]


async def test_the_publishers_and_the_models_that_are_known_are_listed() -> None:
    with publisher() as one, publisher(replay_endpoint="tcp://127.0.0.1:*", replay=Replay()) as two:
        async with serving() as (service, addresses), asking(addresses) as asker:
            for path, empty in (
                ("/services", {"count": 0, "services": []}),
                ("/global_view", {"context_count": 0, "contexts": []}),
            ):
                assert (await asker.ask("GET", path)).json == empty
            said = {"engine_rank": 3, "engine_type": "SGLang"}
            service.add(instance("a", url="http://127.0.0.1:1", model="org/m", **said))
            service.add(instance("b", url="http://127.0.0.1:2", model="org/m", engine_topic=""))
            for rank, each in enumerate((one, two)):
                replay = each.replay_endpoint if each is two else ""
                changes = {"instance_id": "e", "dp_rank": rank, "tenant_id": "t", "replay_endpoint": replay}
                changes["type"] = ("VLLM", "sglang")[rank]
                await asker.ask("POST", "/register", registration(each, **changes))

            found = (await asker.ask("GET", "/services")).json
            assert found["count"] == 3
            listed = [(each["InstanceID"], each["Type"]) for each in found["services"]]
            assert listed == [("a", "SGLang"), ("e", "vLLM"), ("e", "SGLang")]
            assert (
                found["services"][0] | {"Endpoint": "", "ModelName": "org/m", "DPRank": 3}
                == found["services"][0]
            )
            assert found["services"][2] == {
                "Endpoint": two.endpoint,
                "ReplayEndpoint": two.replay_endpoint,
                "Type": "SGLang",
                "ModelName": "qwen",
                "LoraName": "",
                "TenantID": "t",
                "InstanceID": "e",
                "BlockSize": BLOCK,
                "DPRank": 1,
                "CacheGroup": None,
            }

            with trio.fail_after(WAIT_S):
                while True:
                    one.publish([stored(TOKENS)])
                    found = (await asker.ask("GET", "/global_view")).json
                    if found["contexts"][1]["prefix_count"]:
                        break
                    await trio.sleep(0.005)
            assert found == {
                "context_count": 2,
                "contexts": [
                    {
                        "model_name": "org/m",
                        "lora_name": "",
                        "block_size": BLOCK,
                        "tenant_id": "default",
                        "prefix_count": 0,
                        "instances": {"a": [3], "b": [0]},
                    },
                    {
                        "model_name": "qwen",
                        "lora_name": "",
                        "block_size": BLOCK,
                        "tenant_id": "t",
                        "prefix_count": len(TOKENS) // BLOCK,
                        "instances": {"e": [0, 1]},
                    },
                ],
            }


async def test_an_instance_that_is_not_routable_may_have_any_name() -> None:
    async with serving() as (service, addresses), asking(addresses) as asker:
        for name in ("a", "b|c", "d|e|f"):
            service.add(instance(name, url="", routable=False, engine_topic=f"topic of {name}"))
        assert list(await query(asker, model="m")) == ["a", "b|c", "d|e|f"]


@pytest.mark.parametrize(
    ("path", "changes", "status", "message"),
    [
        ("/register", {"instance_id": "b", "endpoint": "http://x:1"}, 400, "is not tcp://HOST:PORT"),
        ("/register", {"instance_id": "b", "endpoint": "tcp://*:1"}, 400, "is not tcp://HOST:PORT"),
        ("/register", {"instance_id": "b", "modelname": "n", "block_size": 0}, 400, "block_tokens is 0"),
        ("/register", {"dp_rank": -1}, 400, "dp_rank is -1"),
        ("/register", {"type": "Mooncake"}, 400, "type is 'Mooncake': events are read of vLLM and SGLang"),
        ("/register", {"type": ""}, 400, "type is ''"),
        (
            "/register",
            {"dp_rank": 1, "block_size": 32},
            400,
            "block_size is 32 tokens, but 16 in the pool of 'qwen'",
        ),
        ("/register", {"type": "SGLang"}, 409, "registered with other values"),
        ("/register", {"replay_endpoint": "tcp://127.0.0.1:1"}, 409, "registered with other values"),
        ("/query", {"block_size": 32}, 400, "block_size is 32"),
        ("/query", {"model": "other"}, 404, "'other'"),
        ("/query", {"token_ids": []}, 400, "at least one"),
        ("/query", {"token_ids": [-1] * 16}, 400, "token 0 is -1"),
    ],
)
async def test_a_wrong_question_is_answered_with_what_is_wrong(
    path: str, changes: dict[str, Any], status: int, message: str
) -> None:
    with publisher() as one:
        async with serving() as (_, addresses), asking(addresses) as asker:
            await asker.ask("POST", "/register", registration(one))
            body = registration(one, **changes) if path == "/register" else question(**changes)
            answer = await asker.ask("POST", path, body)
            assert answer.status == status, answer.body
            assert message in answer.json["error"]["message"]
