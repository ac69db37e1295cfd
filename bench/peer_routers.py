"""`kvfs proxy` with a Conductor in its process beside released routers: `python -m bench.peer_routers`.

Responsibility: have all routers that can be had do the same work in turns, in front of the same two engines that take
next to nothing (`bench.stub_engine`), and print medians. One that cannot be installed, or does not serve, is named with
the reason, and left out.

CPU is that of a router's process, all its threads, as the kernel counts it. Times to the first token are those of one
client at a time, less those of both legs without a router. kvfs's router goes by tokens, which it asks an engine for
where a prompt is new; the others go by text.

Concurrency: one router works at a time, for the threads of `bench.proxy`; the others are idle.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Final

from rich.console import Console
from rich.table import Table

from bench.proxy import CONNECTIONS, LAST_CHUNK, STREAMS, Asker, body, child, cpu_per_ask, rate, request
from bench.router_processes import RELEASES, Pair, Running, get, install, open_kvfs, open_release

TURNS: Final = 5
SECONDS: Final = 5.0
WARM_UP_S: Final = 0.5
STREAM_TOKENS: Final = 64
FIGURES: Final = {
    "known": "CPU of a request, its prompt known, us",
    "new": "CPU of a request, its prompt new, us",
    "token": f"CPU of a token, streams of {STREAM_TOKENS}, prompts new, us",
    "ttft": "TTFT added, prompt of 1,000 tokens, new, ms",
    "prefills": "prefill legs of a request",
}
KVFS: Final = "kvfs proxy"

Taken = dict[str, float]
"""By figure."""


@dataclass(frozen=True, slots=True)
class Client:
    """Asks, with a prompt that was not there before wherever one is to be new."""

    numbers: count[int]

    def new(self, tokens: int, *, stream: bool) -> bytes:
        prompt = body(tokens, stream=stream).replace(b"some", b"%06d" % next(self.numbers), 1)
        return request(prompt)

    def known(self, asker: Asker) -> None:
        asker.ask(request(body(8, stream=False)), b"}")

    def whole(self, asker: Asker) -> None:
        asker.ask(self.new(8, stream=False), b"}")

    def stream(self, asker: Asker) -> None:
        asker.ask(self.new(STREAM_TOKENS, stream=True), LAST_CHUNK)

    def first_token_ms(self, first: Callable[[], object], asker: Asker) -> float:
        """Time what a client does until the first token of a stream of two: `first`, then the stream."""
        data = self.new(2, stream=True)
        begin = perf_counter()
        first()
        asker.first_token(data)
        found_ms = 1000 * (perf_counter() - begin)
        asker.rest()
        return found_ms


def measure(home: Path | None, seconds: float, turns: int = TURNS) -> dict[str, Taken]:
    """Return medians by router, kvfs first. `home`: the environment of the releases; None: kvfs alone."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvfs-bench-")))
        engines = Pair(*(stack.enter_context(child("bench.stub_engine"))[1] for _ in range(2)))
        client = Client(count())
        routers = {KVFS: _warm(client, stack.enter_context(open_kvfs(engines, folder)))}
        if home is not None:
            routers |= _open_releases(client, stack, home, engines, folder)
        taken: dict[str, list[Taken]] = {name: [] for name in routers}
        for turn in range(turns):
            for name in list(routers)[:: 1 if turn % 2 else -1]:
                taken[name].append(_turn(client, routers[name], engines, seconds / turns))
            print(f"bench: turn {turn + 1} of {turns} done", file=sys.stderr)
        return {name: _medians(found) for name, found in taken.items()}


def _warm(client: Client, router: Running) -> Running:
    for ask in (client.known, client.stream):
        rate(ask, router.port, CONNECTIONS, WARM_UP_S)
    return router


def _open_releases(
    client: Client, stack: ExitStack, home: Path, engines: Pair, folder: Path
) -> dict[str, Running]:
    reasons, found = install(home), {}
    for name, version in RELEASES.items():
        try:
            if name in reasons:
                raise RuntimeError(reasons[name])
            running = _warm(client, stack.enter_context(open_release(name, home, engines, folder)))
        except (RuntimeError, ConnectionError) as error:
            print(f"bench: {name} {version} is left out: {error}", file=sys.stderr)
        else:
            found[f"{name} {version}"] = running
    return found


def _turn(client: Client, router: Running, engines: Pair, seconds: float) -> Taken:
    """Measure all figures of a router, each for `seconds`."""
    pid, port = router
    prefills, decodes = served(engines)
    taken = {
        "known": cpu_per_ask(pid, client.known, port, CONNECTIONS, seconds),
        "new": cpu_per_ask(pid, client.whole, port, CONNECTIONS, seconds),
        "token": cpu_per_ask(pid, client.stream, port, STREAMS, seconds) / STREAM_TOKENS,
    }
    after = served(engines)
    # What a client gets is a decode leg.
    taken["prefills"] = (after.prefill - prefills) / (after.decode - decodes)
    taken["ttft"] = _ttft_ms(client, port, engines, seconds)
    return taken


def served(engines: Pair) -> Pair:
    """Return how many completions each engine has served."""
    return Pair(*(int(get(port, "/served")[1]) for port in engines))


def _ttft_ms(client: Client, port: int, engines: Pair, seconds: float) -> float:
    """Ask a router, and the engines without one, in turns; return what the router adds."""
    with ExitStack() as stack:
        router, prefill, decode = (Asker(each) for each in (port, *engines))
        for asker in (router, prefill, decode):
            stack.callback(asker.close)
        routed: list[float] = []
        alone: list[float] = []
        deadline = perf_counter() + seconds
        while not routed or perf_counter() < deadline:
            routed.append(client.first_token_ms(lambda: None, router))
            alone.append(client.first_token_ms(partial(client.whole, prefill), decode))
        return median(routed) - median(alone)


def _medians(turns: list[Taken]) -> Taken:
    return {name: median(turn[name] for turn in turns) for name in FIGURES}


def table_of(found: Mapping[str, Taken]) -> Table:
    """Return a row for each figure, and a column for each router."""
    table = Table(
        "figure", *found, caption="medians of turns; CPU of the router's process, without the engines"
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for figure, title in FIGURES.items():
        table.add_row(title, *(f"{taken[figure]:.2f}" for taken in found.values()))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peer_routers", description=__doc__.partition("\n")[0]
    )
    parser.add_argument(
        "--environment",
        type=Path,
        metavar="FOLDER",
        help="where releases are, or will be; default: for this run alone",
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="per figure and router (default: %(default)s)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvfs-bench-routers-") as folder:
        found = measure(options.environment or Path(folder), options.seconds)
    Console(width=max(Console().width, 120)).print(table_of(found))


if __name__ == "__main__":
    main()
