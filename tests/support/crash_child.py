"""A process that forks stores to be killed: `python -m tests.support.crash_child SOCKET_FD`.

It imports everything once; each request on the socket (JSON, and the write end of a pipe) is answered by a fork
that opens the store, says what it found, and changes it at random until it is killed or done. On the pipe every
line is one JSON object: what clients say (`crash_model`), `reached` for a crash point, `found` for all that a
start found, `log`, `wrong`, `error`, and `end` when it was not killed.

Concurrency: the forking process has one thread and no store.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import random
import socket
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import trio

from kvfs.limits import MIB
from kvfs.system import crashpoints
from tests.support.cold import FolderBucket, options
from tests.support.crash_load import CLIENTS, Client, audit, look, make_buckets
from tests.support.processes import end_with
from tiers.cold.tier import ColdTier
from tiers.device.device import open_device
from tiers.model.objects import Name
from tiers.nvme.write_behind import NvmeJournal
from tiers.recovery.start import NvmeOptions, StoreOptions, start_store
from tiers.store.store import Store

WATCHDOG_S: Final = float(os.environ.get("KVFS_TEST_WATCHDOG_S", "90"))
"""A child that is alive after this long is stuck."""


class Speaker:
    """Writes lines to the pipe; what a kill cuts off is not counted by the other side."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __call__(self, **values: Any) -> None:
        data = json.dumps(values).encode() + b"\n"
        while data:
            data = data[os.write(self._descriptor, data) :]


class LogHandler(logging.Handler):
    def __init__(self, say: Speaker) -> None:
        super().__init__(logging.WARNING)
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say(log=f"{record.levelname} {record.name}: {record.getMessage()}")


def count_points(say: Speaker, crash_at: str | None) -> None:
    """Have each crash point say that it was reached, the first time, and kill at the one that was asked for."""
    kill = crashpoints._killer(crash_at) if crash_at else crashpoints._ignore
    seen: Counter[str] = Counter()

    def reach(name: str) -> None:
        assert name in crashpoints.POINTS, f"{name} is not in crashpoints.POINTS"
        if not seen[name]:
            say(reached=name)
        seen[name] += 1
        kill(name)

    vars(crashpoints)["reach"] = reach


async def live(task: dict[str, Any], say: Speaker) -> None:
    """One life of a store."""
    chance = random.Random(f"{task['seed']}/{task['life']}")
    device = open_device("auto")
    store = await start_store(
        StoreOptions(
            Path(task["path"]),
            dram_bytes=task["dram_bytes"],
            max_slots=512,
            backing=task["backing"],
            quota_bytes=1 << 40,
            cold=options(FolderBucket(Path(task["cold"]))) if task["cold"] else None,
            nvme=NvmeOptions(device, task["nvme_bytes"], segment_bytes=MIB),
        )
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(store.run)
        await reachable(store)
        nursery.start_soon(watch, store, say)
        make_buckets(store)
        await store.journal.settle()
        say(found=await look(store, say), wrong_books=audit(store))
        async with trio.open_nursery() as clients:
            for number in range(CLIENTS):
                client = Client(store, number, task["seed"], task["life"], say)
                clients.start_soon(client.run, task["changes"])
        if task.get("empty"):
            await empty(store, say)
        say(usage=store.usage(), wrong_books=audit(store))
        nursery.cancel_scope.cancel()
    if chance.random() < 0.7:
        await store.finish()
        store.close(keep=chance.random() < 0.7)
    say(end=True)


async def reachable(store: Store) -> None:
    """Wait until the cold tier, if there is one, can be read; it may still be comparing."""
    while isinstance(store.cold, ColdTier) and not store.cold.is_up:  # noqa: ASYNC110 it tells nobody
        await trio.sleep(0.001)


async def watch(store: Store, say: Speaker) -> None:
    """Say what every task waits for, when it has become too late."""
    await trio.sleep(WATCHDOG_S * 0.9)
    journal = store.journal
    assert isinstance(journal, NvmeJournal)
    state = [
        f"segment {s.number}: life {s.sequence}, {s.state.name}, kept {s.kept_bytes}, live {s.live_bytes}, "
        f"end {s.end}, first {s.first_sequence}"
        for s in journal.nvme.pool.segments
    ]
    say(error="\n".join([str(store.usage()["tiers"][1]), *state]))
    say(error="\n".join(["stuck:", *waiting_tasks()]))
    os._exit(1)


def waiting_tasks() -> list[str]:
    """What every task waits for."""
    return [f"{task.name}: {' < '.join(frames_of(task))}" for task in every_task()]


def every_task() -> Iterator[trio.lowlevel.Task]:
    tasks = [trio.lowlevel.current_root_task()]
    while tasks:
        task = tasks.pop()
        if task is not None:
            yield task
            tasks += [child for nursery in task.child_nurseries for child in nursery.child_tasks]


def frames_of(task: trio.lowlevel.Task) -> list[str]:
    """Innermost first."""
    frames = [f"{frame.f_code.co_name}:{line}" for frame, line in task.iter_await_frames()]
    return frames[::-1][:12]


async def empty(store: Store, say: Speaker) -> None:
    """Remove all that there is, and say what of it is still counted once reclaim went through every segment.

    Without its index a store learns of blocks in the cold bucket as it goes through the listing: all of it, first.
    """
    while isinstance(store.cold, ColdTier) and not store.cold.index.is_complete:  # noqa: ASYNC110 it notifies nobody
        await trio.sleep(0.001)
    for bucket in store.buckets():
        while entries := store.list(bucket.name).entries:
            for key, _ in reversed(entries):
                remove(store, bucket.name, key)
    await store.journal.settle()
    say(emptied=[store.usage(), await reclaimed(store)])


def remove(store: Store, bucket: bytes, key: bytes) -> None:
    if key.endswith(b"/"):
        store.remove_directory(Name(bucket, key))
    else:
        store.remove(Name(bucket, key))


async def reclaimed(store: Store) -> dict[str, int]:
    journal = store.journal
    assert isinstance(journal, NvmeJournal)
    return {"live_bytes": journal.nvme.pool.live_bytes, "objects": len(journal.nvme.objects)}


def child(task: dict[str, Any], descriptor: int, parent: int) -> None:
    """What a fork does; it does not return."""
    end_with(parent)
    say = Speaker(descriptor)
    faulthandler.dump_traceback_later(WATCHDOG_S, exit=True, file=descriptor)
    status = 1
    try:
        logging.basicConfig(handlers=[LogHandler(say)], level=logging.WARNING, force=True)
        count_points(say, task.get("crash_at"))
        trio.run(partial(live, task, say))
        status = 0
    except BaseException:
        say(error=traceback.format_exc())
    finally:
        os._exit(status)


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    while True:
        request, descriptors, _, _ = socket.recv_fds(channel, 1 << 16, 1)
        if not request:
            return
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            channel.close()
            child(json.loads(request), descriptors[0], parent)
        os.close(descriptors[0])
        channel.send(str(pid).encode())
        _, status = os.waitpid(pid, 0)
        channel.send(str(os.waitstatus_to_exitcode(status)).encode())


if __name__ == "__main__":
    main()
