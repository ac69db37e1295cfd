"""A start beside clients that live on and hold all of DRAM: it serves, and goes on when they let go."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from kvfs.errors import NoSpace, QuotaExceeded
from kvfs.protocol.messages import Reserve
from tests.support.door import ON_DIRECTORY, need_mount
from tests.support.service import Service
from tests.support.sessions import RawClient
from tests.support.waits import eventually

pytestmark = [pytest.mark.mount, pytest.mark.skipif(ON_DIRECTORY, reason="only on the service")]
MIB = 1 << 20


@pytest.fixture
def service() -> Iterator[Service]:
    need_mount()
    with Service(dram="32MiB", arguments=("--slots", "4096")) as running:
        with running.client() as client:
            client.create_bucket("b")
            client.put("b/kept", b"bytes")
        yield running


def fill_drafts(service: Service, held: ExitStack) -> None:
    """Write into drafts of a session until the tier's filesystem is full; they stay open."""
    server: Any = SimpleNamespace(socket=service.data / "kvfs.sock")
    raw = held.enter_context(RawClient(server))
    for received in raw.ask(Reserve((0,) * 8)):
        for descriptor in received.descriptors:
            held.callback(os.close, descriptor)
            with suppress(OSError):
                for _ in range(7 * 256):
                    os.write(descriptor, bytes(4096))


@pytest.mark.parametrize("starts", [1, 3])
def test_a_start_succeeds_while_all_of_dram_is_held(service: Service, starts: int) -> None:
    with ExitStack() as held:
        fill_drafts(service, held)
        for _ in range(starts):
            service.kill()
            service.restart()
        with service.client() as client:
            with suppress(NoSpace, QuotaExceeded):
                client.put("b/more", bytes(MIB))
            assert client.status()["tiers"][0]["used_bytes"] > 24 * MIB
    with service.client() as client:
        eventually(lambda: client.status()["tiers"][0]["used_bytes"] < 8 * MIB, "what was held is free")
        for number in range(60):
            client.put(f"b/{number}", bytes(MIB))
        assert client.get("b/59") == bytes(MIB)
        assert client.status()["tiers"][0]["used_bytes"] <= 32 * MIB
    found = os.statvfs(service.data / "dram")
    assert found.f_blocks * found.f_frsize == 32 * MIB
    assert "Traceback" not in service.log(), service.log()
