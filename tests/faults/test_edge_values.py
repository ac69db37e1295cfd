"""Values at the edge of every field, through every door: each is stored or refused, and the service starts again."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

import kvfs
from kvfs.protocol.messages import (
    Abort,
    BlockSeal,
    Control,
    DigestBatch,
    ExtentAnswer,
    NameSeal,
    Op,
    OpenNames,
    Request,
    Reserve,
    SealBlocks,
    SealNames,
)
from tests.support.door import ON_DIRECTORY, need_mount
from tests.support.seeds import SEED
from tests.support.service import Service
from tests.support.sessions import RawClient

pytestmark = [pytest.mark.mount, pytest.mark.skipif(ON_DIRECTORY, reason="only on the service")]

SECOND = 10**9
TIMES_NS = (
    -1,
    -SECOND,
    -SECOND - 1,
    -(2**31) * SECOND - 7,
    -(2**63),
    0,
    1,
    2**31 * SECOND,
    2**32 * SECOND + 5,
    2**63 - 1,
)
"""Of which the first two and the last are where arithmetic on unsigned, or on whole seconds, goes wrong."""
U16, U32, U64 = ((0, 1, 1 << bits - 1, (1 << bits) - 1) for bits in (16, 32, 64))
I64 = (-(2**63), -1, 0, 1, 2**63 - 1)
INTEGERS = (*I64, *U32, *U64, 2**64, -(2**64), 0o7777, 0o10000)


@pytest.fixture
def service() -> Iterator[Service]:
    need_mount()
    with Service(dram="32MiB", nvme="64MiB", arguments=("--slots", "4096")) as running:
        with running.client() as client:
            client.create_bucket("cache")
            client.create_bucket("durable", durable=True)
        yield running


def kill_and_start(service: Service) -> None:
    service.kill()
    service.restart()


def lose_index(service: Service) -> None:
    service.kill()
    (service.data / "index/data.mdb").unlink()
    service.restart()


@pytest.mark.parametrize("bucket", ["cache", "durable"])
def test_a_file_may_have_any_time_that_utimensat_takes(service: Service, bucket: str) -> None:
    written: dict[str, int] = {}
    for number, time_ns in enumerate(TIMES_NS):
        names = [f"{bucket}/{way}-{number}" for way in ("client", "sealed", "open", "set")]
        with service.client() as client:
            client.put(names[0], b"bytes", mtime_ns=time_ns)
            client.put(names[3], b"bytes")
            assert client.set_attributes(names[3], mtime_ns=time_ns).mtime_ns == time_ns
        (service.mount / names[1]).write_bytes(b"bytes")
        os.utime(service.mount / names[1], ns=(time_ns, time_ns))
        with (service.mount / names[2]).open("wb") as file:
            file.write(b"bytes")
            file.flush()
            os.utime(file.fileno(), ns=(time_ns, time_ns))
        written |= dict.fromkeys(names, time_ns)
    check_times(service, written)
    kill_and_start(service)
    check_times(service, written)
    assert not service.complaints()
    if bucket == "durable":
        lose_index(service)
        check_times(service, written)


def check_times(service: Service, written: dict[str, int]) -> None:
    with service.client() as client:
        for name, time_ns in written.items():
            assert client.stat(name).mtime_ns == time_ns, name
            assert client.get(name) == b"bytes"
            path = service.mount / name
            assert (path.stat().st_mtime_ns, path.read_bytes()) == (time_ns, b"bytes"), name


def test_directories_and_buckets_too(service: Service) -> None:
    with service.client() as client:
        client.make_directory("durable/made/")
        for name in ("durable/made/", "durable/"):
            for time_ns in TIMES_NS:
                assert client.set_attributes(name, mtime_ns=time_ns).mtime_ns == time_ns
            client.set_attributes(name, mtime_ns=-SECOND - 1)
            assert (service.mount / name).stat().st_mtime_ns == -SECOND - 1
    kill_and_start(service)
    for name in ("durable/made/", "durable/"):
        assert (service.mount / name).stat().st_mtime_ns == -SECOND - 1
    assert not service.complaints()


def edge_requests(rng: random.Random, slot: int, generation: int) -> list[Request]:
    """Requests of every kind, each field at an edge."""

    def some(values: tuple[int, ...]) -> int:
        return rng.choice(values)

    digest = rng.choice([bytes(16), b"\xff" * 16, bytes(15) + b"\1", b"\1" + bytes(15)])
    bucket = rng.choice([*[b"cache", b"durable"] * 8, b"", b"\xff", b"a" * 63, b"cache\0", b"."])
    key = rng.choice(
        [
            *[b"k%d" % rng.randrange(1000)] * 20,
            b"",
            b"/",
            b"k/",
            b"\xff" * 255,
            b"a" * 1024,
            b"\0",
            b"..",
            b"a//b",
        ]
    )
    slots = [(slot, generation), (some(U32), generation), (slot, some(U32)), (some(U32), some(U32))]
    where = rng.choice([*slots, slots[0], slots[0], slots[0]])
    seal = NameSeal(
        *where,
        bucket,
        key,
        mode=rng.choice([some(U32), 0o644, 0, 0o777, 0o600, 0o755, 0o1777]),
        replace=rng.random() < 0.5,
        mtime_ns=rng.choice([None, some(I64)]),
        checksum=rng.choice([None, None, some(U64)]),
        user_metadata=rng.choice([b"", b"\0", b"m" * 65536]),
        expected_id=rng.choice([None, None, None, some(U64)]),
    )
    name = [bucket.decode(errors="surrogateescape"), key.decode(errors="surrogateescape")]
    control: list[Request] = [
        Control(
            op,
            {
                **({"name": name} if op is not Op.BUCKET_CREATE else {"bucket": f"b{rng.random()}"[:9]}),
                **{field: some(INTEGERS) for field in rng.sample(fields, rng.randint(0, len(fields)))},
            },
        )
        for op, fields in (
            (Op.SET_ATTRIBUTES, ["mode", "uid", "gid", "mtime_ns", "expected_id"]),
            (Op.MKDIR, ["mode"]),
            (Op.BUCKET_CREATE, ["mode", "uid", "gid"]),
            (Op.STAT, []),
        )
    ]
    return [
        Reserve((rng.choice([0, 1, 1 << 23, *U64]),)),
        SealNames((seal,)),
        SealBlocks(
            some(U32),
            (
                BlockSeal(
                    *where, digest, rng.choice([bytes(16), b"\xff" * 16]), rng.choice([None, some(U64)])
                ),
            ),
        ),
        Abort((where,)),
        DigestBatch(rng.choice([Op.LOOKUP_BLOCK, Op.OPEN_BLOCK, Op.TOUCH, Op.MATCH]), some(U32), digest),
        OpenNames(((bucket, key),)),
        *control,
        Control(Op.LIST, {"bucket": name[0], "limit": some(INTEGERS)}),
        Control(Op.EVICT, {"bytes": some(INTEGERS)}),
        Control(Op.LARGE_READ, {field: some(INTEGERS) for field in ("offset", "size", "slot", "generation")}),
        Control(Op.LARGE_APPEND, {"slot": some(INTEGERS), "generation": some(INTEGERS)}),
    ]


@pytest.mark.seeded
def test_sessions_take_or_refuse_any_value(service: Service) -> None:
    """What a request says is stored or refused; afterwards everything is there, with the index and without."""
    rng = random.Random(SEED)
    server: Any = SimpleNamespace(socket=service.data / "kvfs.sock")
    with service.client() as client:
        client.put("durable/witness", b"bytes")
    raw = RawClient(server)
    for _ in range(60):
        slot = generation = 0
        with suppress(EOFError):
            for received in raw.ask(Reserve((8192,))):
                if isinstance(received.answer, ExtentAnswer):
                    slot, generation = received.answer.entries[0].slot, received.answer.entries[0].generation
                for descriptor in received.descriptors:
                    os.close(descriptor)
            requests = edge_requests(rng, slot, generation)
            rng.shuffle(requests)
            for request in requests:
                with suppress(kvfs.InvalidRequest):  # refused before it is sent
                    for received in raw.ask(request):
                        for descriptor in received.descriptors:
                            os.close(descriptor)
            continue
        raw.socket.close()
        raw = RawClient(server)
    raw.socket.close()
    assert service.running.poll() is None, service.log()
    with service.client() as client:
        known = {name: client.stat(name) for bucket in ("cache", "durable") for name in names(client, bucket)}
    assert len(known) > 1, "nothing was stored"
    kill_and_start(service)
    with service.client() as client:
        for name, before in known.items():
            after = client.stat(name)
            assert (after.mtime_ns, after.mode, after.uid, after.gid) == (
                before.mtime_ns,
                before.mode,
                before.uid,
                before.gid,
            )
        assert client.get("durable/witness") == b"bytes"
    lose_index(service)
    with service.client() as client:
        assert client.get("durable/witness") == b"bytes"
    assert "Traceback" not in service.log(), service.log()


def names(client: kvfs.Client, bucket: str) -> list[str]:
    return [entry.name for entry in client.list(f"{bucket}/") if not entry.is_directory]
