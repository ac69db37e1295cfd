"""Engines and a Conductor behind https:// URLs: whose certificates are taken, and what else is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trio

from kvfs.cli.proxy_command import conductor_settings
from kvfs.config.load import load
from kvfs.errors import ConfigError
from kvfs.http.server import Certificate
from scheduler.conductor.feeds import health, listener
from scheduler.proxy.upstream.engines import Engines
from tests.support.asked_engines import AskedEngine, info
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
    files: dict[str, Any] = {"certificate": str(signed.certificate), "key": str(signed.key)}
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


async def test_a_conductor_asks_https_engines_whose_certificates_it_trusts(
    signed: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "HEALTH_ASK_INTERVAL_S", 0.05)
    monkeypatch.setattr(listener, "PROBE_INTERVAL_S", 0.05)
    engine = AskedEngine(metrics=info(store_topic="") + "vllm:num_requests_running 3\n")
    engine.certificate = signed
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        trusting = serving(health=True, engines=[engine.url], authorities=str(signed.certificate))
        async with trusting as (service, _):
            [found] = service.conductor.status()["instances"]
            assert found["url"] == engine.url
            await until(lambda: engine.health_asked > 3)
            await until(lambda: service.conductor.status()["instances"][0]["active_requests"] == 3)
            assert service.conductor.counts["unreachable"] == 0
        nursery.cancel_scope.cancel()


async def test_a_conductor_says_why_it_does_not_trust_an_engine(
    signed: Certificate, caplog: pytest.LogCaptureFixture
) -> None:
    engine = AskedEngine()
    engine.certificate = signed
    async with trio.open_nursery() as nursery:
        await nursery.start(engine.run)
        async with serving(health=True, engines=[engine.url]) as (service, _):
            assert service.conductor.registry.awaited == {engine.url}
            assert f"engine {engine.url}: /v1/models: SSLCertVerificationError: " in caplog.text
            service.add(instance("i0", url=engine.url))
            await until(lambda: bool(service.conductor.status()["instances"][0]["down"]))
            assert "CERTIFICATE_VERIFY_FAILED" in service.conductor.status()["instances"][0]["down"]
        nursery.cancel_scope.cancel()


def test_a_proxy_s_conductor_trusts_whom_the_proxy_does(tmp_path: Path) -> None:
    given = {("proxy", "engines"): ["https://h:1"], ("proxy", "conduct"): True}
    own, proxys = tmp_path / "own.pem", tmp_path / "proxy.pem"
    settings = load(None, given | {("proxy", "authorities"): str(proxys)})
    assert conductor_settings(settings).authorities == proxys
    both = given | {("proxy", "authorities"): str(proxys), ("conductor", "authorities"): str(own)}
    assert conductor_settings(load(None, both)).authorities == own


async def test_a_conductor_names_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"authorities .*absent\.pem"):
        async with serving(authorities=str(tmp_path / "absent.pem")):
            pass


def test_a_file_that_holds_no_certificate_is_named(tmp_path: Path) -> None:
    empty = tmp_path / "authorities.pem"
    empty.write_text("nothing")
    with pytest.raises(ConfigError, match=r"authorities .*authorities\.pem"):
        Engines((), lambda name: None, empty)
    with pytest.raises(ConfigError, match=r"authorities .*absent"):
        Engines((), lambda name: None, tmp_path / "absent")
