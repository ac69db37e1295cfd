"""Engines and a Conductor behind https:// URLs: whose certificates are taken, and what else is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvfs.errors import ConfigError
from kvfs.http.server import Certificate
from scheduler.proxy.upstream.engines import Engines
from tests.support.certificates import certificate
from tests.support.conductors import instance, serving
from tests.support.stub_engines import proxy_stand
from tests.support.waits import until

CHAT: dict[str, Any] = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "q"}]}
PATH = "/v1/chat/completions"


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return Certificate(*certificate(tmp_path_factory.mktemp("tls")))


async def test_answers_come_from_engines_over_kept_tls_connections(signed: Certificate) -> None:
    async with proxy_stand(engine_certificate=signed, authorities=signed.certificate) as stand:
        for body in (CHAT, {**CHAT, "stream": True}, CHAT):
            answer = await stand.ask(PATH, body)
            assert answer.status == 200
            assert b"DONE" in answer.body or answer.json()["usage"]
        [engine] = stand.engines
        assert len(engine.completions) == 3
        probes = 1
        assert engine.accepted <= 1 + probes


async def test_an_engine_that_dies_is_out_and_comes_back(signed: Certificate) -> None:
    async with proxy_stand(
        "both", "both", engine_certificate=signed, authorities=signed.certificate
    ) as stand:
        stand.engines[0].die()
        for _ in range(4):
            assert (await stand.ask(PATH, CHAT)).status == 200
        await stand.restart(stand.engines[0])
        await until(lambda: not any(engine.down for engine in stand.proxy.engines))


async def test_a_certificate_that_nobody_vouches_for_is_refused(signed: Certificate) -> None:
    async with proxy_stand(engine_certificate=signed) as stand:
        answer = await stand.ask(PATH, CHAT)
        assert answer.status in (502, 503)
        assert not stand.engines[0].asked
        [engine] = stand.proxy.engines
        assert "CERTIFICATE_VERIFY_FAILED" in engine.down


async def test_a_certificate_of_another_name_is_refused(tmp_path: Path) -> None:
    other = Certificate(*certificate(tmp_path, "DNS:elsewhere.example"))
    async with proxy_stand(engine_certificate=other, authorities=other.certificate) as stand:
        assert (await stand.ask(PATH, CHAT)).status in (502, 503)
        [engine] = stand.proxy.engines
        assert "CERTIFICATE_VERIFY_FAILED" in engine.down


async def test_a_conductor_elsewhere_routes_over_tls(signed: Certificate) -> None:
    files = {"certificate": str(signed.certificate), "key": str(signed.key)}
    async with (
        serving(**files) as (service, addresses),
        proxy_stand(
            engine_certificate=signed,
            authorities=signed.certificate,
            conductor=f"https://127.0.0.1:{addresses.port}",
        ) as stand,
    ):
        service.conductor.registry.add(instance("i0", url=stand.engines[0].url))
        assert (await stand.ask(PATH, CHAT)).status == 200
        await until(lambda: service.conductor.counts["done"] == 1)
        assert stand.proxy.router.counts["by_load"] == 0


def test_a_file_that_holds_no_certificate_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "authorities.pem"
    empty.write_text("nothing")
    with pytest.raises(ConfigError, match=r"authorities .*authorities\.pem"):
        Engines((), lambda name: None, empty)
    with pytest.raises(ConfigError, match=r"authorities .*absent"):
        Engines((), lambda name: None, tmp_path / "absent")
