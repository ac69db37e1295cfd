"""Lives of a store, in this process, that end with the machine's power.

Responsibility: run the clients of `crash_load` over a `LossyDevice`, cut the power at a chosen change of the
device, leave on it one outcome of what was not synced, forget DRAM, make the index doubtful (another boot), and
hold the next life against the model.

Concurrency: `run` holds the thread until the power is gone.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import tempfile
from collections import Counter, deque
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from kvfs.limits import MIB
from kvfs.system import linux
from tests.support.crash_harness import fast_directory, flip_bits, used_bytes
from tests.support.crash_load import CLIENTS, Client, audit, look, make_buckets
from tests.support.crash_model import Model, Value
from tests.support.faulty_device import LossyDevice, PowerLost
from tests.support.stores import abandon_home
from tiers.device.threads import thread_device
from tiers.recovery.start import NvmeOptions, StoreOptions, start_store
from tiers.store.store import Store


class Machine:
    """One data directory on a machine that loses power again and again."""

    def __init__(self, seed: int, patch: pytest.MonkeyPatch, *, durable_share: float = 0.5) -> None:
        self.seed, self.durable_share = seed, durable_share
        self.base = Path(tempfile.mkdtemp(prefix="kvfs-power-", dir=fast_directory()))
        self.path = self.base / "data"
        self.chance = random.Random(seed)
        self.model = Model()
        self.number = 0
        self.wrong: list[str] = []
        self.history: deque[str] = deque(maxlen=4000)
        self.what = "new"
        self.counts: Counter[str] = Counter()
        patch.setattr(linux, "boot_id", lambda: f"boot {self.number}")

    def close(self) -> None:
        shutil.rmtree(self.base)

    def run(self, changes: int = 60, cut_at: int | None = None) -> None:
        """One life, the cut, and what it did; AssertionError when the life found what it must not."""
        device = LossyDevice(thread_device())
        if cut_at is not None:
            device.cut_at(cut_at)
        where = f"KVFS_TEST_SEED={self.seed}, life {self.number}, cut at {cut_at}, before: {self.what}"
        handler = _History(self)
        logging.getLogger("kvfs").addHandler(handler)
        try:
            trio.run(partial(self._live, device, changes))
        except* PowerLost:
            self.counts["cuts in a life"] += 1
        finally:
            logging.getLogger("kvfs").removeHandler(handler)
        assert not self.wrong, f"{where}: {self.wrong}\n" + "\n".join(self._history_of_wrong())
        mode = self.chance.choice(["sectors", "writes", "writes"])
        cut = device.power_cut(self.chance.randrange(1 << 30), mode)  # type: ignore[arg-type]
        index = self._damage_index()
        self.counts["sectors lost"] += cut.lost
        self.counts[mode] += 1
        self.what = f"{cut}, index {index}"
        self.number += 1

    async def _live(self, device: LossyDevice, changes: int) -> None:
        store = None
        try:
            store = await start_store(
                StoreOptions(
                    self.path,
                    dram_bytes=16 * MIB,
                    max_slots=512,
                    backing="directory",
                    quota_bytes=1 << 40,
                    nvme=NvmeOptions(device, 16 * MIB, segment_bytes=MIB),
                )
            )
            async with trio.open_nursery() as nursery:
                nursery.start_soon(store.run)
                make_buckets(store)
                await store.journal.settle()
                found = await look(store, self.say)
                self.wrong += self.model.judge(found, index_lives=False) + audit(store)
                self.model = self.model.restart(found)
                self.counts["found"] += len(found)
                async with trio.open_nursery() as clients:
                    for number in range(CLIENTS):
                        client = Client(
                            store, number, self.seed, self.number, self.say, durable_share=self.durable_share
                        )
                        clients.start_soon(client.run, changes)
                nursery.cancel_scope.cancel()
        finally:
            if store is not None:
                forget(store)
            with trio.CancelScope(shield=True):
                await device.inner.aclose()

    def say(self, **said: Any) -> None:
        self.history.append(f"{self.number}: {self.model.under_way.get(said.get('client', -1), '')} {said}")
        if "client" in said:
            self.model.hear(said)
            self.counts["acknowledged"] += "done" in said
        elif "wrong" in said:
            self.wrong.append(said["wrong"])

    def _history_of_wrong(self) -> list[str]:
        names = {word for line in self.wrong for word in line.split() if "/" in word or ":" in word}
        return [line for line in self.history if "log" in line or any(repr(name) in line for name in names)]

    def _damage_index(self) -> str:
        """Leave some of its pages: what reached the device, nobody knows."""
        shutil.rmtree(self.path / "dram", ignore_errors=True)
        data = self.path / "index/data.mdb"
        fate = self.chance.choice(["intact", "gone", "flipped", "truncated"])
        if data.exists():
            if fate == "gone":
                shutil.rmtree(self.path / "index")
            elif fate == "flipped":
                flip_bits(data, self.chance, 30, end=used_bytes(data))
            elif fate == "truncated":
                os.truncate(data, self.chance.randrange(used_bytes(data) + 1))
        return fate


class _History(logging.Handler):
    def __init__(self, machine: Machine) -> None:
        super().__init__(logging.WARNING)
        self._machine = machine

    def emit(self, record: logging.LogRecord) -> None:
        self._machine.history.append(f"{self._machine.number}: log: {record.getMessage()}")


def forget(store: Store) -> None:
    """Let go of a store as a process that is gone does: nothing is flushed or recorded."""
    store.dram.close()
    store.names.environment._env.close()
    abandon_home(store.home)


__all__ = ["Machine", "Value", "forget"]
