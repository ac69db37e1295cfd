"""How soon a Conductor that starts anew knows what engines hold.

Responsibility: `conductor.restart_240k`: seconds from the start of its process until its index has the blocks of
ENGINES engines, which have published them before it was there and answer for replays. Of these the time until it
answers at all, with nothing known, is printed on stderr. There is no baseline: the released routers that keep such an
index have none after a restart.

Concurrency: a thread of this process answers for the engines, while the other looks at the Conductor.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from threading import Thread
from time import perf_counter, sleep
from typing import Any, Final
from urllib.request import urlopen

import trio

from bench.conductor_http import instance, running_conductor
from bench.conductor_queries import NAMESPACE
from bench.measure import Result
from bench.ports import free_ports
from kvfs.events.kv_events import GPU, BlockStored
from kvfs.events.sockets import Publisher

ENGINES: Final = 4
BATCHES: Final = 20
"""Of each engine: prompts of BATCH_BLOCKS."""
BATCH_BLOCKS: Final = 3_000
BLOCKS: Final = ENGINES * BATCHES * BATCH_BLOCKS
STARTS: Final = 5
LOOK_S: Final = 0.02
LONGEST_S: Final = 60.0


def restart_240k(seconds: float) -> Result:
    """Start it again and again beside the same engines; however many `seconds` are given, STARTS times."""
    with ExitStack() as stack:
        [events, *replays] = free_ports(1 + ENGINES)
        publishers = [
            stack.enter_context(_engine(number, events, port)) for number, port in enumerate(replays)
        ]
        stack.enter_context(_answering(publishers))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = folder / "instances.json"
        file.write_text(json.dumps([_instance(number, port) for number, port in enumerate(replays)]))
        found = [_start(events, file) for _ in range(STARTS)]
    print(f"bench: conductor: it answers after {median(each[0] for each in found):.2f} s", file=sys.stderr)
    return Result("conductor.restart_240k", median(each[1] for each in found), "s")


def _engine(number: int, events: int, replays: int) -> Publisher:
    """Return an engine's publisher, which has published all of its blocks to nobody."""
    rng, block_tokens = random.Random(number), NAMESPACE.block_tokens
    publisher = Publisher(
        f"tcp://127.0.0.1:{events}", topic=f"engine-{number}", replay_endpoint=f"tcp://127.0.0.1:{replays}"
    )
    for batch in range(BATCHES):
        stored = BlockStored(
            block_hashes=[*range(batch * BATCH_BLOCKS, (batch + 1) * BATCH_BLOCKS)],
            parent_block_hash=None,
            token_ids=[rng.randrange(100_000) for _ in range(BATCH_BLOCKS * block_tokens)],
            block_size=block_tokens,
            lora_id=None,
            medium=GPU,
            lora_name=None,
        )
        publisher.publish([stored])
    return publisher


def _instance(number: int, replays: int) -> dict[str, Any]:
    return {
        **instance(number, "http://127.0.0.1:1"),
        "routable": False,
        "namespace": NAMESPACE.as_mapping(),
        "engine_replay": f"tcp://127.0.0.1:{replays}",
    }


@contextmanager
def _answering(publishers: list[Publisher]) -> Iterator[None]:
    """Answer for replays in a thread."""
    scope = trio.CancelScope()
    tokens: list[trio.lowlevel.TrioToken] = []

    async def serve() -> None:
        tokens.append(trio.lowlevel.current_trio_token())
        with scope:
            async with trio.open_nursery() as nursery:
                for each in publishers:
                    nursery.start_soon(each.serve_replays)

    thread = Thread(target=trio.run, args=(serve,))
    thread.start()
    try:
        yield
    finally:
        trio.from_thread.run_sync(scope.cancel, trio_token=tokens[0])
        thread.join()


def _start(events: int, instances: Path) -> tuple[float, float]:
    """Return after how many seconds a new Conductor answers, and after how many it knows all blocks."""
    began_s = perf_counter()
    with running_conductor("--instances", str(instances), events=str(events)) as (_, url):
        answers_s = perf_counter() - began_s
        while (known := _blocks(url)) < BLOCKS:
            if perf_counter() > began_s + LONGEST_S:
                raise RuntimeError(
                    f"bench: after {LONGEST_S:.0f} s the Conductor knows {known} blocks of {BLOCKS}"
                )
            sleep(LOOK_S)
        return answers_s, perf_counter() - began_s


def _blocks(url: str) -> int:
    with urlopen(f"{url}/v1/instances") as answer:
        return int(json.load(answer)["blocks"])
