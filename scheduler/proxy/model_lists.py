"""Which models the engines serve: OpenAI's list of them all, and what is known of engines that no Conductor labels.

Responsibility: `/v1/models` as the union over the engines that answer, `/v1/models/ID`; and a look at the list of each
engine whose model nobody has said, so that requests go to one that serves theirs.

Invariants:
- Each model is listed once, as the first engine that has it shows it. A client's list is asked for with the client's
  own headers: it has what the engines show that client.
- An engine that does not answer in limits.MODEL_LIST_WAIT_S is left out. A model is unknown only where all engines
  have answered.

Concurrency: one trio thread; of each list limits.MODEL_LISTS_ASKED engines are asked at once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

import msgspec
import trio

from kvfs import limits
from kvfs.errors import NotFound
from kvfs.http.server_place import place_of
from scheduler.conductor.values import unless_awaited
from scheduler.proxy.openai_errors import Failure
from scheduler.proxy.upstream.connection import EngineFailed
from scheduler.proxy.upstream.engines import Engine, Engines

PATH = b"/v1/models"


class _Entry(msgspec.Struct):
    id: str


class _List(msgspec.Struct):
    data: list[msgspec.Raw]


class Listed(NamedTuple):
    """What engines list, and what became of asking the others."""

    models: dict[str, msgspec.Raw]
    refusals: dict[str, tuple[int, bytes]]
    silent: list[str]
    """Names of engines that did not say."""


def is_list(path: bytes) -> bool:
    """Return whether a path is that of the list of models, or of one model."""
    return path == PATH or path.startswith(PATH + b"/")


def models_in(data: bytes) -> dict[str, msgspec.Raw]:
    """Return the models of an engine's list. Raises msgspec.DecodeError."""
    entries = msgspec.json.decode(data, type=_List).data
    return {msgspec.json.decode(entry, type=_Entry).id: entry for entry in entries}


class ModelLists:
    """See the module's header."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    # --- for clients ----------------------------------------------------------------------------------------
    async def answer(self, path: bytes, headers: bytes) -> tuple[int, bytes]:
        """Return the status and the body for a client; `headers` are lines. Raises Failure, NotFound, NotReady."""
        found = await self._ask_all(headers)
        if not found.models and found.refusals:
            return next(iter(found.refusals.values()))
        if not found.models and (found.silent or not self._engines.alive()):
            raise Failure(503, f"engines failed: {_some(found.silent) or 'none answers'}", retry_after_s=1)
        if path == PATH:
            return 200, msgspec.json.encode({"object": "list", "data": list(found.models.values())})
        model = unquote_to_bytes(path[len(PATH) + 1 :]).decode(errors="replace")
        if model in found.models:
            return 200, bytes(found.models[model])
        if found.silent:
            raise Failure(503, f"engines that may have it failed: {_some(found.silent)}", retry_after_s=1)
        missing = NotFound(f"The model `{model[: limits.MAX_NAME_BYTES]}` does not exist")
        raise unless_awaited(missing, self._engines.awaited)

    async def _ask_all(self, headers: bytes) -> Listed:
        listed = Listed({}, {}, [])
        by_engine: dict[str, dict[str, msgspec.Raw]] = {}

        async def ask(engine: Engine) -> None:
            with trio.move_on_after(limits.MODEL_LIST_WAIT_S):
                try:
                    async with engine.ask("GET", PATH, headers) as answer:
                        data = await answer.read_all()
                    if answer.status == 200:
                        by_engine[engine.name] = models = models_in(data)
                        engine.models = frozenset(models) | (engine.models or frozenset())
                    elif answer.status < 500:
                        listed.refusals[engine.name] = answer.status, data
                except EngineFailed as error:
                    if not error.alive:
                        self._engines.suspect(engine, str(error))
                except msgspec.DecodeError:
                    pass

        engines = self._engines.alive()
        await _each(engines, ask)
        for engine in engines:
            for model, entry in by_engine.get(engine.name, {}).items():
                listed.models.setdefault(model, entry)
        said = {*by_engine, *listed.refusals}
        listed.silent.extend(engine.name for engine in engines if engine.name not in said)
        return listed

    # --- for the choice of engines --------------------------------------------------------------------------
    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Look again and again until cancelled; it has started after the first look, or when that takes long."""
        with trio.move_on_after(limits.HEALTH_TIMEOUT_S):
            await self._look()
        task_status.started()
        while True:
            await trio.sleep(limits.HEALTH_INTERVAL_S)
            await self._look()

    async def _look(self) -> None:
        """Ask the engines that were not asked for long, or were away since."""
        before_s = trio.current_time() - limits.MODEL_LIST_S
        due = (each for each in self._engines if not each.address.model and not each.down)
        await _each([each for each in due if each.listed_s <= before_s], self._look_at)

    async def _look_at(self, engine: Engine) -> None:
        engine.listed_s = trio.current_time()
        # Whether it answers is asked elsewhere; what it said before stands.
        with trio.move_on_after(limits.HEALTH_TIMEOUT_S), suppress(EngineFailed, msgspec.DecodeError):
            data = await self._engines.get(place_of(engine.address.url), PATH)
            engine.models = frozenset(models_in(data))


async def _each(engines: Iterable[Engine], ask: Callable[[Engine], Awaitable[None]]) -> None:
    """Ask engines, limits.MODEL_LISTS_ASKED at once."""
    limiter = trio.CapacityLimiter(limits.MODEL_LISTS_ASKED)

    async def ask_in_turn(engine: Engine) -> None:
        async with limiter:
            await ask(engine)

    async with trio.open_nursery() as nursery:
        for engine in engines:
            nursery.start_soon(ask_in_turn, engine)


def _some(names: list[str]) -> str:
    return ", ".join(names[:8])
