"""Instances of engines that are asked what they are.

Responsibility: ask each engine again and again, and register, change and remove its instances accordingly: one for
each of its data-parallel ranks.

Invariants: an engine that does not answer stays as it is, and is asked on; one that answers otherwise than before is
registered anew. One that is refused, such as one that does not share its pool's blocks, keeps nobody out, and is asked
on, too. A label that an instance was given stands until its engine says another role than before. Each trouble is
logged once. Answers have limits of size and time.

Concurrency: a trio task for each engine.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import trio

from kvfs.errors import KvfsError, LimitExceeded
from kvfs.http.bounded_get import GetFailed, get
from kvfs.limits import (
    ENGINE_ANSWER_S,
    ENGINE_ASK_INTERVAL_S,
    ENGINE_RETRY_S,
    MAX_CONDUCTOR_INSTANCES,
    MAX_ENGINE_ANSWER_BYTES,
    MAX_METRICS_BYTES,
)
from scheduler.conductor.feeds.discovery import Registrar
from scheduler.conductor.feeds.engine_answers import Answers, AnswerUnclear, Described, describe
from scheduler.conductor.planning.planner import Role
from scheduler.conductor.values import Instance

log = logging.getLogger("kvfs.conductor")


class Surveyed(Registrar, Protocol):
    """A Conductor of engines that are asked."""

    def awaits(self, url: str) -> None:
        """Note that an engine is asked what it is, and has not said it yet."""
        ...

    def answered(self, url: str) -> None:
        """Note that an engine has said what it is, or is asked no more."""
        ...


class EngineSurvey:
    """Keep a Conductor's instances as engines say."""

    def __init__(
        self,
        engines: Mapping[str, Role | None],
        registrar: Surveyed,
        token: str = "",
        authorities: Path | None = None,
    ) -> None:
        """`engines`: by URL, their roles; None: what they say. `token`: their `--api-key`. `authorities`: a PEM file of
        who may sign their certificates; None: whom the system trusts."""
        self._authorities = authorities
        self._engines, self._registrar = dict(engines), registrar
        self._asking: dict[str, trio.CancelScope] = {}
        self._nursery: trio.Nursery | None = None
        self._headers = [f"Authorization: Bearer {token}"] if token else []
        self._mine: dict[str, tuple[Instance, ...]] = {}
        self._troubles: dict[str, str] = {}

    def follow(self, url: str, role: Role | None) -> bool:
        """Ask an engine from here on; return False where it is asked already. REQUIRES `run`. Raises LimitExceeded."""
        if url in self._engines:
            return False
        if len(self._engines) >= MAX_CONDUCTOR_INSTANCES:
            raise LimitExceeded(f"{MAX_CONDUCTOR_INSTANCES} engines are asked, which is the limit")
        assert self._nursery is not None
        self._engines[url] = role
        self._registrar.awaits(url)
        self._nursery.start_soon(self._follow, url)
        return True

    def drop(self, url: str) -> None:
        """Ask an engine no more, and remove its instances."""
        del self._engines[url]
        self._troubles.pop(url, None)
        scope = self._asking.pop(url, None)
        if scope is not None:
            scope.cancel()
        for each in self._mine.pop(url, ()):
            self._remove(each)
        self._registrar.answered(url)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Ask until cancelled; it has started once each engine was asked."""
        async with trio.open_nursery() as self._nursery:
            nursery = self._nursery
            async with trio.open_nursery() as first:
                for url in tuple(self._engines):
                    first.start_soon(nursery.start, self._follow, url)
            task_status.started()
            await trio.sleep_forever()  # others may be followed

    async def _follow(self, url: str, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        pause_s = ENGINE_RETRY_S
        is_first = True
        with trio.CancelScope() as self._asking[url]:
            while url in self._engines:
                if await self.ask(url):
                    pause_s = ENGINE_ASK_INTERVAL_S
                if is_first:
                    task_status.started()
                    is_first = False
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, ENGINE_ASK_INTERVAL_S)

    async def ask(self, url: str) -> bool:
        """Ask an engine once; return whether its instance is as it says."""
        try:
            with trio.fail_after(ENGINE_ANSWER_S):
                described = describe(url, self._engines[url], await self._answers(url))
            self._registrar.answered(url)
            self._apply(url, described)
        except trio.TooSlowError:
            self._log(url, f"it does not say what it is in {ENGINE_ANSWER_S:g} s")
        except (GetFailed, AnswerUnclear, KvfsError) as error:
            self._log(url, str(error))
        else:
            self._troubles.pop(url, None)
            return True
        return False

    async def _answers(self, url: str) -> Answers:
        """Raises GetFailed."""
        models = await self._get(url, "/v1/models")
        try:
            sources = await self._get(url, "/kv_event_sources")
        except GetFailed as error:
            if error.status is None:
                raise
            sources = None
        metrics = await self._get(url, "/metrics", MAX_METRICS_BYTES)
        return Answers(models, sources, metrics.decode(errors="replace"))

    async def _get(self, url: str, path: str, most_bytes: int = MAX_ENGINE_ANSWER_BYTES) -> bytes:
        try:
            return await get(url + path, most_bytes, self._headers, self._authorities)
        except GetFailed as error:
            failed = GetFailed(f"{path}: {error}")
            failed.status = error.status
            raise failed from None

    def _apply(self, url: str, described: Described) -> None:
        """Register an engine's instances, all or none, in place of those before, if these differ. Raises KvfsError."""
        instances, before = described.instances, self._mine.get(url, ())
        if instances == before:
            return
        self._mine.pop(url, None)
        labels = {(each.name, each.role): self._remove(each) for each in before}
        added: list[Instance] = []
        try:
            for each in instances:
                self._registrar.add(each)
                added.append(each)
        except KvfsError:
            for each in added:
                self._remove(each)
            raise
        self._mine[url] = instances
        for each in instances:
            label = labels.get((each.name, each.role))
            if label is not None and label != each.role:
                self._registrar.set_role(each.name, label)
        _log_registered(described, is_new=not before)

    def _remove(self, instance: Instance) -> Role | None:
        """Remove an instance, and return its label; None where somebody else has removed it."""
        try:
            label = self._registrar.role(instance.name)
            self._registrar.remove(instance.name)
        except KvfsError as error:
            log.info("%s", error)
            return None
        return label

    def _log(self, url: str, trouble: str) -> None:
        if self._troubles.get(url) != trouble:
            self._troubles[url] = trouble
            log.warning("engine %s: %s; it is asked again", url, trouble)


def _log_registered(described: Described, *, is_new: bool) -> None:
    instance, ranks = described.instances[0], len(described.instances)
    topics = (topic for each in described.instances for topic in (each.engine_topic, each.store_topic))
    log.info(
        "engine %s %s%s: model %s in blocks of %d tokens, role %s, events of %s",
        instance.url,
        "is known" if is_new else "is registered anew, it answers otherwise than before",
        f", of {ranks} data-parallel ranks" if ranks > 1 else "",
        instance.model,
        instance.namespace["block_tokens"],
        instance.role,
        " and ".join(dict.fromkeys(filter(None, topics))) or "nobody",
    )
    for note in described.notes:
        log.warning("engine %s: %s", instance.url, note)
