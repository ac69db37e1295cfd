"""Conductors and engines as processes, requests through their doors, and what each engine really holds.

Responsibility: `Fleet` starts, kills, stops and restarts them on ports that stay its own; `ask` is one request as a
proxy does it; `disagreements` compares an index with the engines. Concurrency: one trio thread; processes of their own.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
import trio

from kvfs.keys import prefix_hashes, split_keys
from tests.support import quick_conductor
from tests.support.conductors import BLOCK_TOKENS, NAMESPACE, Answer, Asker, instance
from tests.support.forked import Forked
from tests.support.held_ports import HeldPort
from tests.support.processes import task_state
from tests.support.service import running_kvfs
from tests.support.waits import WAIT_S, eventually


def keys_of(prompt: list[int]) -> list[str]:
    return [key.hex() for key in split_keys(prefix_hashes(NAMESPACE, prompt))]


def depth(keys: list[str], held: set[str]) -> int:
    """Count how many keys are held, from the first on without a gap."""
    return next((n for n, key in enumerate(keys) if key not in held), len(keys))


@dataclass
class Process:
    """A module that says `ready`, and can be killed, stopped and started anew."""

    module: str
    arguments: list[str]
    running: Forked | None = None
    _said: IO[str] | None = None
    _stack: ExitStack = field(default_factory=ExitStack)

    def start(self) -> None:
        run = running_kvfs(*self.arguments, module=self.module)
        self.running, self._said = self._stack.enter_context(run)

    async def ready(self) -> None:
        assert self._said is not None
        while (line := await trio.to_thread.run_sync(self._said.readline)) != "ready\n":
            assert line, f"{self.module} {self.arguments[:2]} ended without being ready"

    def stop(self) -> None:
        assert self.running is not None
        self.running.send_signal(signal.SIGSTOP)
        task = Path(f"/proc/{self.running.pid}")
        eventually(lambda: task_state(task) == "T", "it has stopped")

    def go_on(self) -> None:
        assert self.running is not None
        self.running.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._stack.close()
        self.running = self._said = None


@dataclass
class FleetEngine:
    """`told`: keys of all that it may have announced since it started, each with the requests that it is of. A replay
    begins with the first batch, so that what was removed since may be believed for a moment."""

    name: str
    port: int
    replays: bool
    process: Process
    told: dict[str, set[int]] = field(default_factory=dict)
    is_new: bool = False
    """Whether it was started anew since its index was last compared."""

    async def restart(self, after_s: float = 0.0) -> None:
        """Kill it and start it anew, on the same ports, with nothing."""
        self.process.kill()
        await trio.sleep(after_s)
        self.process.start()
        await self.process.ready()
        self.is_new = True

    def tell(self, keys: list[str], request: int) -> None:
        for key in keys:
            self.told.setdefault(key, set()).add(request)

    def check(self, keys: list[str], request: int) -> None:
        """Raises AssertionError for a block that no other request can have brought here."""
        wrong = [key for key in keys if not self.told.get(key, set()) - {request}]
        assert not wrong, f"{self.name}: {len(wrong)} of {len(keys)} cached blocks were never announced"


class Costs(NamedTuple):
    """A model on devices, as the table of costs has them."""

    model: str
    device: str
    devices: int

    @property
    def settings(self) -> str:
        """Return them as keys of `[conductor]`."""
        return f'cost_model = "{self.model}"\ncost_device = "{self.device}"\ncost_devices = {self.devices}\n'


class Prefilled(NamedTuple):
    """Where a request was, and how much of its prompt was there."""

    engine: str
    cached_tokens: int


class Fleet:
    """See the module's header. Use it as a context manager.

    `costs`: how long a prefill takes, as the Conductor predicts it; None: engines take no time.
    """

    def __init__(
        self,
        folder: Path,
        *,
        engines: int = 4,
        conductors: int = 1,
        capacity: int = 60,
        quick: bool = True,
        costs: Costs | None = None,
    ) -> None:
        self._stack = ExitStack()
        self.counts: Counter[str] = Counter()
        events = [f"tcp://127.0.0.1:{self._port()}" for _ in range(conductors)]
        self.engines = [self._engine(n, capacity, costs, events) for n in range(engines)]
        file = folder / "instances.json"
        file.write_bytes(msgspec.json.encode([self._instance(each) for each in self.engines]))
        self.ports = [self._port() for _ in range(conductors)]
        self.conductors = []
        for n, (port, endpoint) in enumerate(zip(self.ports, events, strict=True)):
            config = folder / f"kvfs-{n}.toml"
            config.write_text(
                f'[conductor]\nlisten = "127.0.0.1:{port}"\nevents = "{endpoint}"\ninstances = "{file}"\n'
                f'policy = "default"\nadmission = "none"\nfitted = false\n{costs.settings if costs else ""}'
            )
            module = quick_conductor.MODULE if quick else "kvfs"
            self.conductors.append(Process(module, ["conductor", "run", "--config", str(config)]))
        self._requests = self._fallback = 0
        self._routing: dict[int, list[str]] = {}
        """Keys of the requests that may be at any engine, for all that is known here: they are expected there."""

    def _port(self) -> int:
        return self._stack.enter_context(HeldPort()).number

    def _engine(self, n: int, capacity: int, costs: Costs | None, events: list[str]) -> FleetEngine:
        port, replays = self._port(), n % 2 == 0
        replay = f"tcp://127.0.0.1:{self._port()}" if replays else ""
        made = [
            str(port),
            f"engine-e{n}",
            str(capacity),
            replay,
            " ".join(map(str, costs or ())),
            *events,
        ]
        return FleetEngine(f"e{n}", port, replays, Process("tests.support.engine_process", made))

    def _instance(self, engine: FleetEngine) -> Any:
        return instance(
            engine.name, url=f"http://127.0.0.1:{engine.port}", engine_replay=engine.process.arguments[3]
        )

    @property
    def processes(self) -> list[Process]:
        return [*self.conductors, *(each.process for each in self.engines)]

    async def start(self) -> None:
        for each in self.processes:
            each.start()
        for each in self.processes:
            await each.ready()

    async def found_up(self, conductor: int = 0) -> None:
        """Wait until a Conductor finds all engines up: it may have looked before they listened."""
        with trio.fail_after(WAIT_S):
            while True:
                status = (await self.call(self.ports[conductor], "GET", "/v1/instances")).json
                if all(each["reachable"] for each in status["instances"]):
                    return
                await trio.sleep(0.05)

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        for each in self.processes:
            each.kill()
        self._stack.close()

    # --- requests -----------------------------------------------------------------------------------------
    async def call(self, port: int, method: str, path: str, value: object = None) -> Answer:
        """One request over a connection of its own. Raises OSError, or AssertionError where it ends too early."""
        async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
            return await Asker(stream).ask(method, path, value)

    async def fault(self, engine: FleetEngine, **faults: object) -> None:
        assert (await self.call(engine.port, "POST", "/fault", faults)).status == 200

    async def ask(self, prompt: list[int], conductor: int = 0) -> Prefilled | None:
        """Route a prompt, send it, and report; without a Conductor, or an engine that it finds up, by turns. Every
        failure is counted; None where all engines failed."""
        port, tried = self.ports[conductor], list[str]()
        keys = keys_of(prompt)
        self._requests += 1
        number = self._requests
        while len(tried) < len(self.engines):
            id, engine, cached = "", None, 0
            self._routing[number] = keys
            try:
                body = {"model": "m", "tokens": prompt, "exclude": tried}
                found = await self._attempt(port, "POST", "/v1/route", body)
                assert found.status in (200, 404, 429), found
                if found.status == 200:
                    id = found.json["id"]
                    engine = next(each for each in self.engines if each.name == found.json["decode"])
                    cached = found.json.get("cached_tokens", 0) // BLOCK_TOKENS
                    self.counts["routed"] += 1
                else:  # where others have the processors, all engines may answer late
                    self.counts["nobody up"] += 1
            except (OSError, trio.TooSlowError, ConnectionError):
                self.counts["unanswered"] += 1
                for each in self.engines:  # it may have been chosen, and the answer lost
                    each.tell(keys, number)
            del self._routing[number]
            if engine is None:
                self._fallback += 1
                engine = self.engines[self._fallback % len(self.engines)]
            engine.tell(keys, number)
            sent = await self._send(engine, prompt, port, id)
            elsewhere = {key for other, keys in self._routing.items() if other != number for key in keys}
            engine.check([key for key in keys[:cached] if key not in elsewhere], number)
            if sent is not None:
                self.counts[engine.name] += 1
                return sent
            tried.append(engine.name)
        self.counts["failed"] += 1
        return None

    async def _send(self, engine: FleetEngine, prompt: list[int], port: int, id: str) -> Prefilled | None:
        try:
            answer = await self._attempt(engine.port, "POST", "/v1/completions", {"prompt": prompt})
        except (OSError, trio.TooSlowError, ConnectionError):
            self.counts["engine failed"] += 1
            await self._report(port, "POST", f"/v1/instances/{engine.name}/unreachable")
            if id:
                await self._report(port, "DELETE", f"/v1/reservations/{id}")
            return None
        cached_tokens = answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]
        if id:
            value = {"cached_tokens": cached_tokens, "output_tokens": 1}
            await self._report(port, "POST", f"/v1/reservations/{id}/done", value)
        return Prefilled(engine.name, cached_tokens)

    async def _attempt(self, port: int, method: str, path: str, value: object = None) -> Answer:
        try:
            with trio.fail_after(WAIT_S):
                return await self.call(port, method, path, value)
        except (AssertionError, trio.BrokenResourceError) as error:
            raise ConnectionError(str(error)) from None

    async def _report(self, port: int, method: str, path: str, value: object = None) -> None:
        try:
            answer = await self._attempt(port, method, path, value)
            assert answer.status in (204, 404), answer
        except (OSError, trio.TooSlowError, ConnectionError):
            self.counts["reports lost"] += 1

    # --- the truth ----------------------------------------------------------------------------------------
    async def held(self) -> dict[str, set[str]]:
        return {each.name: set((await self.call(each.port, "GET", "/holds")).json) for each in self.engines}

    async def disagreements(self, prompts: list[list[int]], conductor: int = 0) -> list[str]:
        """Compare an index with what the engines hold: nothing stale, and with replays nothing missing."""
        held, found = await self.held(), []
        for prompt in prompts:
            keys = keys_of(prompt)
            answer = await self.call(
                self.ports[conductor], "POST", "/v1/match", {"model": "m", "tokens": prompt}
            )
            for engine in self.engines:
                there = depth(keys, held[engine.name])
                known = answer.json["instances"][engine.name] // BLOCK_TOKENS
                if known > there or (engine.replays and known < there):
                    found.append(f"{engine.name} has {there} of {len(keys)} blocks, the index {known}")
        return found

    async def settled(self, prompts: list[list[int]], conductor: int = 0) -> float:
        """Wait until index and engines agree; return after how long. Raises AssertionError after WAIT_S."""
        began_s, found = trio.current_time(), ["nobody was asked"]
        while found:
            try:
                found = await self.disagreements(prompts, conductor)
            except (OSError, KeyError, AssertionError) as error:
                found = [repr(error)]
            took_s = trio.current_time() - began_s
            assert took_s < WAIT_S, found[:5]
            await trio.sleep(0.05)
        status = (await self.call(self.ports[conductor], "GET", "/v1/instances")).json
        for each in self.engines:
            if each.is_new:
                each.told, each.is_new = {key: {0} for key in (await self.held())[each.name]}, False
        assert status["reservations"] == 0, json.dumps(status)
        return took_s
