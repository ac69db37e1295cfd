"""Engines by a name in DNS: addresses that come, go, are many or late, with a resolver that says what a test sets."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import pytest
import trio
from trio.testing import MockClock

from kvfs.config.load import load
from kvfs.errors import ConfigError, LimitExceeded
from kvfs.limits import DNS_ABSENT_ANSWERS, DNS_INTERVAL_S, DNS_LATE_S
from scheduler.conductor.feeds import engine_names, engine_survey
from scheduler.conductor.feeds.engine_names import EngineNames, system_addresses
from scheduler.conductor.planning.planner import Role
from tests.support.asked_engines import AskedEngine
from tests.support.conductors import asking, serving
from tests.support.waits import until

NAME = "dns+http://engines.test:8000"


class Resolver:
    """A port to a resolver."""

    def __init__(self, *addresses: str) -> None:
        self.answer: Collection[str] | Exception = addresses
        self.takes_s = 0.0
        self.asked: list[tuple[str, int]] = []
        self.most = self._under_way = 0
        """The most questions at once."""

    async def __call__(self, host: str, port: int) -> Collection[str]:
        self.asked.append((host, port))
        self._under_way += 1
        self.most = max(self.most, self._under_way)
        await trio.sleep(self.takes_s)
        self._under_way -= 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class Surveyed:
    """Note who is asked."""

    def __init__(self, *others: str) -> None:
        self.urls: dict[str, Role | None] = {}
        self.others, self.most = others, 100

    def follow(self, url: str, role: Role | None) -> bool:
        if url in self.others or url in self.urls:
            return False
        if len(self.urls) >= self.most:
            raise LimitExceeded("enough")
        self.urls[url] = role
        return True

    def drop(self, url: str) -> None:
        del self.urls[url]


@asynccontextmanager
async def following(
    resolver: Resolver, survey: Surveyed, *names: str, role: Role | None = None
) -> AsyncIterator[list[str]]:
    """Resolve names, and return those that were."""
    resolved: list[str] = []
    found = EngineNames(dict.fromkeys(names or (NAME,), role), survey, resolved.append, resolver)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(found.run)
        await trio.sleep(0.001)
        yield resolved
        nursery.cancel_scope.cancel()


async def answers(count: int) -> None:
    await trio.sleep(count * DNS_INTERVAL_S)


async def test_each_address_is_an_engine_and_is_gone_after_some_answers_without_it(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    resolver, survey = Resolver("10.0.0.1", "fd00::2"), Surveyed()
    async with following(resolver, survey, role="decode") as resolved:
        one, two, three = "http://10.0.0.1:8000", "http://[fd00::2]:8000", "http://10.0.0.3:8000"
        assert survey.urls == {one: "decode", two: "decode"}
        assert (resolver.asked, resolved) == ([("engines.test", 8000)], [NAME])
        for _ in range(4):  # some of many, in turns
            resolver.answer = ["10.0.0.1"]
            await answers(DNS_ABSENT_ANSWERS - 1)
            resolver.answer = ["fd00::2"]
            await answers(DNS_ABSENT_ANSWERS - 1)
            assert set(survey.urls) == {one, two}
        resolver.answer = ["fd00::2", "10.0.0.3"]
        await answers(1)
        assert set(survey.urls) == {two, three}
        assert caplog.text.count("10.0.0.1:8000 is gone") == 1


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "does not resolve: "),
        (UnicodeError("label too long"), "label too long"),
        ((), "it has no address"),
    ],
)
async def test_what_does_not_resolve_changes_nothing_and_is_logged_once(
    answer: Exception | Collection[str],
    said: str,
    autojump_clock: MockClock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    resolver, survey = Resolver("10.0.0.1"), Surveyed()
    async with following(resolver, survey):
        for _ in range(2):
            resolver.answer = answer
            await answers(3 * DNS_ABSENT_ANSWERS)
            assert list(survey.urls) == ["http://10.0.0.1:8000"]
            resolver.answer = ["10.0.0.1"]
            await answers(1)
        assert caplog.text.count(said) == 2, "once each time"
        assert caplog.text.count("those that are known stay") == 2


async def test_a_late_answer_is_waited_for_by_one_question_and_logged(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    resolver, survey = Resolver("10.0.0.1"), Surveyed()
    resolver.takes_s = 100.0
    async with following(resolver, survey) as resolved:
        await trio.sleep(DNS_LATE_S)
        assert "does not resolve in 5 s, and is waited for" in caplog.text
        await trio.sleep(90)
        assert (survey.urls, resolved) == ({}, [])
        await trio.sleep(10)
        assert list(survey.urls) == ["http://10.0.0.1:8000"]
        await trio.sleep(1_000)
        assert resolver.most == 1


async def test_more_addresses_than_may_be_are_left_out_and_what_others_follow_stays_theirs(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    resolver, survey = Resolver("10.0.0.1", "10.0.0.2", "10.0.0.3"), Surveyed("http://10.0.0.1:8000")
    survey.most = 1
    async with following(resolver, survey):
        await answers(3)
        assert list(survey.urls) == ["http://10.0.0.2:8000"]
        assert caplog.text.count("http://10.0.0.3:8000 is left out: enough") == 1
        survey.most = 2
        await answers(1)
        assert len(survey.urls) == 2
        resolver.answer = ["10.0.0.3"]
        await answers(DNS_ABSENT_ANSWERS)
        assert list(survey.urls) == ["http://10.0.0.3:8000"]


async def test_two_names_of_one_engine_keep_it_as_long_as_one_has_it(autojump_clock: MockClock) -> None:
    resolver, survey = Resolver("10.0.0.1"), Surveyed()
    async with following(resolver, survey, NAME, "dns+http://other.test:8000"):
        await answers(2)
        assert list(survey.urls) == ["http://10.0.0.1:8000"]
        assert {host for host, _ in resolver.asked} == {"engines.test", "other.test"}


async def test_the_system_s_resolver_knows_addresses() -> None:
    assert await system_addresses("127.0.0.1", 80) == ["127.0.0.1"]
    assert await system_addresses("::1", 80) == ["::1"]
    with pytest.raises((OSError, UnicodeError)):
        await system_addresses("x" * 64 + ".test", 80)


# --- with a Conductor ----------------------------------------------------------------------------------------
async def test_a_conductor_asks_the_engines_of_a_name_and_parts_with_those_that_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_names, "DNS_INTERVAL_S", 0.02)
    monkeypatch.setattr(engine_survey, "ENGINE_RETRY_S", 0.02)
    one, two = AskedEngine(), AskedEngine()
    two.host, two.port = "127.0.0.2", one.port
    name = f"dns+http://engines.test:{one.port}"
    resolver = Resolver()
    async with trio.open_nursery() as nursery:
        for engine in (one, two):
            await nursery.start(engine.run)
        async with (
            serving(prefill=[name], resolve=resolver) as (service, addresses),
            asking(addresses) as asker,
        ):
            registry = service.conductor.registry
            unknown = await asker.ask("POST", "/v1/route", {"model": "m", "length": 3})
            assert (unknown.status, name in unknown.body.decode()) == (503, True)
            resolver.answer = [one.host, two.host]
            await until(lambda: {each.url for each in registry.instances()} == {one.url, two.url})
            assert {each.role for each in registry.instances()} == {"prefill"}
            assert not registry.awaited
            resolver.answer = [two.host]
            await until(lambda: [each.url for each in registry.instances()] == [two.url])
            asked = len(one.asked)
            count = len(resolver.asked)
            await until(lambda: len(resolver.asked) > count + 5)
            assert len(one.asked) == asked
            resolver.answer = [one.host, two.host]
            await until(lambda: len(registry.instances()) == 2)
        nursery.cancel_scope.cancel()


def test_names_are_checked_and_need_a_conductor() -> None:
    for url in ("dns+https://n:1", "dns+n:1", "dns+http://n:1/path", "dns+http://me@n:1"):
        with pytest.raises(ConfigError, match=r"or dns\+http://NAME:PORT, where each address"):
            load(None, {("conductor", "engines"): [url]})
    with pytest.raises(ConfigError, match="each engine is named once"):
        load(None, {("conductor", "engines"): [NAME], ("conductor", "decode"): [NAME.removeprefix("dns+")]})
    with pytest.raises(ConfigError, match="a Conductor resolves names, so this needs conduct"):
        load(None, {("proxy", "engines"): [NAME]})
    settings = load(None, {("proxy", "engines"): [NAME], ("proxy", "conduct"): True})
    assert settings.proxy.engines == (NAME,)
    with pytest.raises(ConfigError, match="must be http://HOST:PORT or https"):
        load(None, {("proxy", "conductor"): NAME})
