"""Machines that speak TLS: what goes over it, and who gets nothing."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

import kvfs
from kvfs import limits
from kvfs._native.remote.tls import Context
from kvfs.cli.output import time_text
from kvfs.config.settings import ClusterSettings
from kvfs.errors import ConfigError, ProtocolError
from tests.support.certificates import ClusterTls, authority, signed
from tests.support.machines import (
    SECRET,
    Machine,
    digest_of,
    machine,
    machines,
    open_descriptors,
    payload_of,
    threads,
    write_secret,
)
from tests.support.peer_services import have, peer_services, put, wait_for_peers
from tests.support.rogue_peers import READ, REQUEST, REQUEST_MAGIC, greet, receive, rogue_context
from tests.support.service import run_kvfs
from tests.support.stores import NAMESPACE
from tests.support.waits import eventually, until
from tiers.remote.connections.identity import read_identity

FILES = ("certificate", "key", "authorities")


@pytest.fixture(scope="module")
def foreign_tls(tmp_path_factory: pytest.TempPathFactory) -> ClusterTls:
    """Another cluster's."""
    folder = tmp_path_factory.mktemp("foreign-tls")
    return signed(folder, authority(folder))


@pytest.fixture(scope="module")
def expired_tls(tmp_path_factory: pytest.TempPathFactory, cluster_tls: ClusterTls) -> ClusterTls:
    return signed(tmp_path_factory.mktemp("expired-tls"), cluster_tls.authorities, days=-1)


@pytest.fixture
def wrong_tls(request: pytest.FixtureRequest) -> ClusterTls | None:
    """The fixture that a test names, or none."""
    found: ClusterTls | None = None if request.param is None else request.getfixturevalue(request.param)
    return found


async def test_blocks_are_fetched_copied_and_drained_and_nothing_stays(
    tmp_path: Path, cluster_tls: ClusterTls
) -> None:
    before = open_descriptors(), threads()
    async with machines(tmp_path, 2, cluster_tls) as (first, second):
        digests = first.put(range(1, 41), 65_536)
        assert await second.fetch(digests[:20]) == 20
        await first.cluster.copy(second.address, [first.bucket])
        found = await first.ended("copy")
        assert (found["state"], found["blocks"], found["there_blocks"]) == ("done", 40, 20)
        assert all(second.read(digest) == payload_of(n, 65_536) for n, digest in enumerate(digests, 1))
        second.put(range(101, 111))
        await second.cluster.drain()
        found = await second.ended("drain")
        assert (found["state"], found["blocks"], found["there_blocks"]) == ("done", 50, 40)
        assert all(first.read(digest_of(n)) == payload_of(n, 4096) for n in range(101, 111))
    await until(lambda: open_descriptors() <= before[0])
    await until(lambda: threads() <= before[1])


@pytest.mark.parametrize(
    ("wrong_tls", "told", "knows"),
    [
        ("foreign_tls", "its certificate: certificate signature failure", "it refuses|its certificate"),
        ("expired_tls", "its certificate: certificate has expired", "it refuses this machine: .*expired"),
        (None, "TLS: it does not speak TLS", "closed the connection within the greeting"),
    ],
    indirect=["wrong_tls"],
)
async def test_who_asks_with_a_wrong_certificate_gets_nothing(
    tmp_path: Path,
    cluster_tls: ClusterTls,
    wrong_tls: ClusterTls | None,
    told: str,
    knows: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "REMOTE_BACKOFF_S", 0.05)
    if wrong_tls is not None:  # of another authority, but it believes this one
        wrong_tls = wrong_tls._replace(authorities=cluster_tls.authorities)
    with caplog.at_level(logging.WARNING, "kvfs.remote"):
        async with machines(tmp_path, 1, cluster_tls) as [server]:
            digests = server.put([1, 2, 3])
            async with machine(tmp_path / "wrong", peers=[server.address], tls=wrong_tls) as asker:
                await until(lambda: asker.cluster.status()["failures"] >= 2)  # it is tried again
                assert await asker.fetch(digests) == 0
                await until(lambda: server.cluster.status()["refused"] >= 2)
                [peer] = asker.cluster.status()["peers"]
                assert re.search(knows, peer["trouble"]), peer["trouble"]
            status = server.cluster.status()
            assert (status["served_requests"], status["connections"]) == (0, 0)
            refused = status["refused"]
    lines = [record.getMessage() for record in caplog.records if told in record.getMessage()]
    assert len(lines) == refused
    assert all(line.startswith("127.0.0.1:") for line in lines)


@pytest.mark.parametrize(
    ("wrong_tls", "knows"),
    [
        ("foreign_tls", "its certificate: certificate signature failure"),
        ("expired_tls", "its certificate: certificate has expired"),
        (None, "closed the connection within the TLS handshake"),
    ],
    indirect=["wrong_tls"],
)
async def test_who_serves_with_a_wrong_certificate_is_not_read_from(
    tmp_path: Path,
    cluster_tls: ClusterTls,
    wrong_tls: ClusterTls | None,
    knows: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "kvfs.remote"):
        async with (
            machines(tmp_path, 1, wrong_tls) as [server],
            machine(tmp_path / "asker", peers=[server.address], tls=cluster_tls) as asker,
        ):
            digests = server.put([1, 2, 3])
            await until(lambda: asker.cluster.status()["failures"] >= 1)
            assert await asker.fetch(digests) == 0
            assert knows in asker.cluster.peers[0].trouble
            await until(lambda: server.cluster.status()["refused"] >= 1)
    assert any(
        f"{server.address}: " in each.getMessage() and knows in each.getMessage() for each in caplog.records
    )
    if wrong_tls is None:
        assert "it speaks TLS: [cluster] certificate, key and authorities are not set here" in caplog.text


async def test_a_stranger_without_a_certificate_is_refused(
    tmp_path: Path, cluster_tls: ClusterTls, caplog: pytest.LogCaptureFixture
) -> None:
    """In TLS 1.3 he learns so with the first bytes that he reads."""
    context = ssl.create_default_context(cafile=cluster_tls.authorities)
    context.check_hostname = False
    with caplog.at_level(logging.WARNING, "kvfs.remote"):
        async with machines(tmp_path, 1, cluster_tls) as [server]:
            refused = server.cluster.status()["refused"]
            with pytest.raises(trio.BrokenResourceError):
                async with inside(server, context) as stream:
                    await greet(stream)
            await until(lambda: server.cluster.status()["refused"] == refused + 1)
    assert "TLS: it has no certificate" in caplog.text


async def test_who_is_refused_hears_why_though_he_talks_on(
    tmp_path: Path, cluster_tls: ClusterTls, expired_tls: ClusterTls
) -> None:
    """The alert is there to be read behind what he has sent already, and nobody reads."""
    async with machines(tmp_path, 1, cluster_tls) as [server]:
        host, _, port = server.address.rpartition(":")
        async with await trio.open_tcp_stream(host, int(port)) as plain:
            session = Context(*expired_tls).session(plain.socket.fileno(), False)
            while not session.handshake():
                await trio.lowlevel.wait_readable(plain.socket)
            assert session.send(bytes(50_000))  # in the same turn of the loop
            await trio.lowlevel.wait_readable(plain.socket)
            with pytest.raises(
                ProtocolError, match="it refuses this machine: sslv3 alert certificate expired"
            ):
                session.receive(1)


async def test_a_machine_with_a_certificate_still_has_to_know_the_secret(
    tmp_path: Path, cluster_tls: ClusterTls, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kvfs.remote"):
        async with machines(tmp_path, 1, cluster_tls) as [server]:
            refused = server.cluster.status()["refused"]
            async with inside(server, rogue_context(ssl.Purpose.SERVER_AUTH, cluster_tls)) as stream:
                assert await greet(stream, b"another secret of 32 bytes, or so") == b""
            await until(lambda: server.cluster.status()["refused"] == refused + 1)
    assert "it does not know the cluster's secret" in caplog.text


@asynccontextmanager
async def inside(
    server: Machine, context: ssl.SSLContext
) -> AsyncIterator[trio.SSLStream[trio.SocketStream]]:
    """Connect to a machine by Python's ssl."""
    host, _, port = server.address.rpartition(":")
    async with await trio.open_tcp_stream(host, int(port)) as plain:
        yield trio.SSLStream(plain, context, https_compatible=True)


@pytest.mark.parametrize(
    ("said", "ends"),
    [
        (b"\x17\x03\x03\x00\x40" + bytes(64), "cut off: it broke the protocol"),
        (b"GET / HTTP/1.1\r\n", "cut off: it broke the protocol"),
        (b"\x17\x03\x03\x00\x40" + bytes(20), ""),
        (b"\x17", ""),
    ],
    ids=["a record that is none", "no record", "half a record", "a byte"],
)
async def test_garbage_and_half_records_after_the_greeting_end_the_connection(
    tmp_path: Path, cluster_tls: ClusterTls, said: bytes, ends: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = open_descriptors(), threads()
    with caplog.at_level(logging.INFO, "kvfs.remote"):
        async with machines(tmp_path, 1, cluster_tls) as [server]:
            async with inside(server, rogue_context(ssl.Purpose.SERVER_AUTH, cluster_tls)) as stream:
                assert len(await greet(stream)) == 48
                await stream.transport_stream.send_all(said)
                await stream.transport_stream.send_eof()
                await receive(stream.transport_stream, 1 << 16)
            await until(lambda: server.cluster.status()["connections"] == 0)
            assert server.cluster.status()["served_requests"] == 0
    assert ends in caplog.text
    assert open_descriptors() <= before[0]
    await until(lambda: threads() <= before[1])


async def test_a_request_in_a_record_for_each_byte_is_one(tmp_path: Path, cluster_tls: ClusterTls) -> None:
    async with machines(tmp_path, 1, cluster_tls) as [server]:
        [digest] = server.put([1], 100_000)
        head = REQUEST.pack(REQUEST_MAGIC, READ, 0, 1, 60_000, 5, server.bucket.namespace or b"")
        async with inside(server, rogue_context(ssl.Purpose.SERVER_AUTH, cluster_tls)) as stream:
            await greet(stream)
            for byte in head + digest + (1 << 20).to_bytes(8, "little"):
                await stream.send_all(bytes([byte]))
            assert (await receive(stream, 64 + 100_000))[64:] == payload_of(1, 100_000)


async def test_requests_in_one_record_are_answered_one_after_the_other(
    tmp_path: Path, cluster_tls: ClusterTls
) -> None:
    async with machines(tmp_path, 1, cluster_tls) as [server]:
        [digest] = server.put([1], 100)
        head = REQUEST.pack(REQUEST_MAGIC, READ, 0, 1, 60_000, 5, server.bucket.namespace or b"")
        async with inside(server, rogue_context(ssl.Purpose.SERVER_AUTH, cluster_tls)) as stream:
            await greet(stream)
            await stream.send_all((head + digest + (100).to_bytes(8, "little")) * 3)
            assert (await receive(stream, 3 * 164))[-100:] == payload_of(1, 100)


def replace(used: ClusterTls, by: ClusterTls) -> None:
    for file, source in zip(used, by, strict=True):
        shutil.copy(source, file)


@pytest.fixture
def used_tls(tmp_path: Path, cluster_tls: ClusterTls) -> ClusterTls:
    """Files that may be replaced; the cluster's, to begin with."""
    (tmp_path / "used").mkdir()
    used = ClusterTls(*(tmp_path / "used" / name for name in FILES))
    replace(used, cluster_tls)
    return used


async def test_files_that_are_read_again_count_for_connections_made_then(
    tmp_path: Path, cluster_tls: ClusterTls, foreign_tls: ClusterTls, used_tls: ClusterTls
) -> None:
    async with machines(tmp_path, 2, used_tls) as (server, linked):
        digests = server.put([1, 2])
        assert await linked.fetch(digests[:1]) == 1
        replace(used_tls, foreign_tls)
        server.cluster.renew_certificates()
        async with machine(tmp_path / "new", peers=[server.address], tls=foreign_tls) as new:
            await until(lambda: new.cluster.status()["peers_up"] == 1)
            assert await new.fetch(digests) == 2
        async with machine(tmp_path / "old", peers=[server.address], tls=cluster_tls) as old:
            await until(lambda: old.cluster.status()["failures"] >= 1)
            assert await old.fetch(digests) == 0
        assert await linked.fetch(digests) == 2, "over the connection that it has"


async def test_files_that_cannot_be_used_change_nothing(
    tmp_path: Path,
    cluster_tls: ClusterTls,
    foreign_tls: ClusterTls,
    used_tls: ClusterTls,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with machines(tmp_path, 1, used_tls) as [server]:
        digests = server.put([1, 2, 3])
        shutil.copy(foreign_tls.key, used_tls.key)
        server.cluster.renew_certificates()
        used_tls.authorities.unlink()
        server.cluster.renew_certificates()
        said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
        stay = r"certificates of \[cluster\] stay as they were: \[cluster\]"
        assert re.match(rf"{stay} key = '{used_tls.key}': .*mismatch", said[0])
        assert re.match(rf"{stay} authorities = '{used_tls.authorities}': No such file", said[1])
        assert len(said) == 2
        async with machine(tmp_path / "asker", peers=[server.address], tls=cluster_tls) as asker:
            await until(lambda: asker.cluster.status()["peers_up"] == 1)
            assert await asker.fetch(digests) == 3


def test_a_service_reads_its_certificates_again_at_sighup(
    tmp_path: Path, cluster_tls: ClusterTls, used_tls: ClusterTls
) -> None:
    def ends_s() -> int:
        return int(client.status()["cluster"]["certificate_ends_s"])

    longer = signed(tmp_path, cluster_tls.authorities, days=100)  # not 2
    with peer_services(tmp_path, 1, tls=used_tls) as [service], kvfs.connect(service.data) as client:
        before_s = ends_s()
        replace(used_tls, longer)
        os.kill(service.pid, signal.SIGHUP)
        eventually(lambda: ends_s() - before_s > 90 * 86_400, "it has the new certificate")
        shown = run_kvfs("cluster", "status", "--at", str(service.data))
        assert f"certificate until {time_text(ends_s() * 10**9)}" in shown.stdout


def test_services_read_each_others_blocks(tmp_path: Path, cluster_tls: ClusterTls) -> None:
    with peer_services(tmp_path, 2, tls=cluster_tls) as (first, second):
        with kvfs.connect(first.data) as client, client.blocks(NAMESPACE) as blocks:
            digests = put(blocks, 8, 1 << 20)
        with kvfs.connect(second.data) as client, client.blocks(NAMESPACE) as blocks:
            wait_for_peers(client, 1)
            assert blocks.fetch(digests).result() == 8
        assert have(second, digests, NAMESPACE, 1 << 20)


def test_the_files_are_checked_before_anything_runs(tmp_path: Path, cluster_tls: ClusterTls) -> None:
    secret = write_secret(tmp_path / "secret", SECRET)

    def read(**files: Path) -> None:
        settings = ClusterSettings(secret_file=secret, **{**cluster_tls._asdict(), **files})
        assert read_identity(settings, bytes(16)).certificates is not None

    read()
    for name in FILES:
        with pytest.raises(ConfigError, match=rf"\[cluster\] {name} = '{tmp_path}/none': No such file"):
            read(**{name: tmp_path / "none"})
        some = {each: path for each, path in cluster_tls._asdict().items() if each != name}
        with pytest.raises(ValueError, match="certificate, key and authorities are given together"):
            ClusterSettings(secret_file=secret, **some)
    open_key = tmp_path / "open.key"
    open_key.write_bytes(cluster_tls.key.read_bytes())
    open_key.chmod(0o640)
    with pytest.raises(ConfigError, match=r"open.key': others may read it \(mode 0640\): chmod 600"):
        read(key=open_key)
    assert read_identity(ClusterSettings(secret_file=secret), bytes(16)).certificates is None
