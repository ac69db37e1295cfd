"""A store whose device returns errors, and one whose files are damaged: it serves what it has, and never wrong bytes.

KVFS_TEST_SEED repeats a run, KVFS_TEST_FAULTS says how many faults and damages.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from kvfs import limits
from kvfs.errors import DeviceFailed, FormatMismatch, NoSpace
from kvfs.limits import MIB
from tests.support.crash_child import waiting_tasks
from tests.support.crash_harness import fast_directory, flip_bits, used_bytes
from tests.support.crash_load import CLIENTS, Client, audit, look, make_buckets
from tests.support.crash_model import Model, Value
from tests.support.crash_power import forget
from tests.support.faulty_device import FailingDevice, Op
from tests.support.seeds import SEED
from tests.support.waits import WAIT_S
from tiers.device.threads import thread_device
from tiers.recovery.start import NvmeOptions, StoreOptions, start_store
from tiers.store.store import Store

FAULTS: Final = int(os.environ.get("KVFS_TEST_FAULTS", "30"))
STUCK_S: Final = 90.0
"""A life that takes this long hangs."""
RETRY_S: Final = 0.01
"""Between two attempts at a device: with an error that lasts, each change waits for the next one to fail."""


@pytest.fixture
def path() -> Iterator[Path]:
    base = Path(tempfile.mkdtemp(prefix="kvfs-faults-", dir=fast_directory()))
    yield base / "data"
    shutil.rmtree(base)


class Life:
    """One life of a store in this process, over a device that may fail."""

    def __init__(self, path: Path, seed: int, number: int, model: Model) -> None:
        self.path, self.seed, self.number, self.model = path, seed, number, model
        self.device = FailingDevice(thread_device())
        self.wrong: list[str] = []
        self.said: Counter[str] = Counter()
        self.history: list[str] = []
        self.found: dict[str, Value] = {}
        self.trouble: str | None = None

    def say(self, **said: Any) -> None:
        self.history.append(f"{self.number}: {self.model.under_way.get(said.get('client', -1), '')} {said}")
        self.said.update(key for key in said if key != "client")
        if "client" in said:
            self.model.hear(said)
        elif "wrong" in said:
            self.wrong.append(said["wrong"])

    def run(self, changes: int, *, judge: bool = True, heal: bool = True, clean: bool = True) -> None:
        trio.run(partial(self._live, changes, judge, heal, clean))

    async def _live(self, changes: int, judge: bool, heal: bool, clean: bool) -> None:
        store = None
        try:
            with trio.fail_after(STUCK_S):
                store = await start_store(
                    StoreOptions(
                        self.path,
                        dram_bytes=16 * MIB,
                        max_slots=512,
                        backing="directory",
                        quota_bytes=1 << 40,
                        nvme=NvmeOptions(self.device, 16 * MIB, segment_bytes=MIB),
                    )
                )
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(store.run)
                    nursery.start_soon(self._watch, store)
                    await self._serve(store, changes, judge, heal)
                    nursery.cancel_scope.cancel()
                if clean:
                    await store.finish()
                    store.close(keep=True)
                    store = None
        finally:
            if store is not None:
                forget(store)
            with trio.CancelScope(shield=True):
                await self.device.inner.aclose()

    async def _serve(self, store: Store, changes: int, judge: bool, heal: bool) -> None:
        if judge:
            make_buckets(store)
            await store.journal.settle()
            self.found = await look(store, self.say)
            self.wrong += self.model.judge(self.found, index_lives=False) + audit(store)
            self.model = self.model.restart(self.found)
        async with trio.open_nursery() as nursery:
            for number in range(CLIENTS):
                client = Client(store, number, self.seed, self.number, self.say, durable_share=0.5)
                nursery.start_soon(client.run, changes)
        self.trouble = store.usage()["tiers"][1]["trouble"]
        if heal and changes:
            self.device.heal()
            await recovers(store)

    async def _watch(self, store: Store) -> None:
        await trio.sleep(STUCK_S * 0.8)
        self.wrong += [f"stuck: {line}" for line in [str(store.usage()["tiers"][1]), *waiting_tasks()]]
        raise AssertionError("\n".join([*self.wrong, *self.history[-5:]]))

    def check(self, where: str) -> None:
        names = {word for line in self.wrong for word in line.split() if "/" in word or ":" in word}
        lines = [line for line in self.history if any(repr(name) in line for name in names)]
        assert not self.wrong, f"{where}: {self.wrong}\n" + "\n".join(lines)


async def recovers(store: Store) -> None:
    """With the device well again, everything is written in the end, and the trouble is over."""
    with trio.fail_after(WAIT_S):
        while True:
            try:
                await store.journal.settle_names()
            except (NoSpace, DeviceFailed):
                continue
            break
    assert store.usage()["tiers"][1]["trouble"] is None


# --- errors of the device --------------------------------------------------------------------------------------
@pytest.mark.seeded
@pytest.mark.parametrize(
    ("op", "lasting"),
    [("write", False), ("write", True), ("sync", False), ("sync", True), ("read", False)],
)
def test_a_failing_device_costs_no_acknowledged_object(
    path: Path, monkeypatch: pytest.MonkeyPatch, op: Op, lasting: bool
) -> None:
    monkeypatch.setattr(limits, "DEVICE_RETRY_S", RETRY_S)
    chance = random.Random(f"{SEED}/{op}/{lasting}")
    model, said, troubles = Model(), Counter[str](), 0
    dry = Life(path, SEED, 0, model)
    dry.run(60)
    dry.check("dry run")
    model = dry.model
    calls = dry.device.counts[op]
    for number in range(1, 1 + max(2, FAULTS // 6)):
        at, error = chance.randrange(1, calls + 1), chance.choice([NoSpace, DeviceFailed])
        if op == "read":
            error = DeviceFailed
        where = f"KVFS_TEST_SEED={SEED}, life {number}, {op} {at} raises {error.__name__}, lasting {lasting}"
        life = Life(path, SEED, number, model)
        life.device.fail(
            op, error, at=at, times=None if lasting else 1, landed=chance.choice([0.0, 0.5, 1.0])
        )
        try:
            life.run(40, clean=chance.random() < 0.5)
        except* (NoSpace, DeviceFailed):
            said["start or stop refused"] += 1
        life.check(where)
        said += life.said
        troubles += life.trouble is not None
        model = life.model
    after = Life(path, SEED, 1000, model)
    after.run(10)
    after.check(f"KVFS_TEST_SEED={SEED}, {op}: after all")
    print(dict(said), f"{troubles} in trouble at the end")


# --- damaged files -----------------------------------------------------------------------------------------------
def damage(path: Path, chance: random.Random) -> str:
    """One file of the store gets flipped bits, a range of zeros, or loses its end; which and how."""
    files = [file for file in path.rglob("*") if file.is_file() and file.stat().st_blocks]
    kinds = sorted({kind_of(file) for file in files})
    kind = chance.choice(kinds)
    file = chance.choice(sorted(each for each in files if kind_of(each) == kind))
    size = min(file.stat().st_size, used_bytes(file))
    how = chance.choice(["flip", "flip", "zero", "cut"])
    head = chance.random() < 0.4  # the small structures at the start and at the end of a segment
    start = 0 if head or size < 16384 else chance.choice([0, size - 8192])
    end = min(size, start + 16384) if head else size
    if how == "flip":
        flip_bits(file, chance, chance.randint(1, 16), start=start, end=max(end, start + 1))
    elif how == "zero":
        at = chance.randrange(start, max(end, start + 1))
        with file.open("r+b") as opened:
            opened.seek(at)
            opened.write(bytes(min(chance.randint(1, 20_000), size - at)))
    else:
        os.truncate(file, chance.randrange(size + 1))
    return f"{how} {file.relative_to(path)}"


def kind_of(file: Path) -> str:
    return file.suffix or file.parent.name + "/" + ("slot" if file.parent.name == "slots" else file.name)


@pytest.mark.seeded
def test_damage_is_a_miss_or_refused_and_never_wrong_bytes(path: Path) -> None:
    chance = random.Random(SEED)
    first = Life(path, SEED, 0, Model())
    first.run(60)
    first.check("before any damage")
    known, counts, original = first.model, Counter[str](), path.with_name("original")
    path.rename(original)
    for number in range(1, FAULTS + 1):
        shutil.copytree(original, path)
        if chance.random() < 0.5:
            shutil.rmtree(path / "dram")
        what = [damage(path, chance) for _ in range(chance.choice([1, 1, 3]))]
        where = f"KVFS_TEST_SEED={SEED}, damage {number}: {what}"
        life = Life(path, SEED, number, Model(values=dict(known.values)))
        refused: list[BaseException] = []
        try:
            life.run(4, judge=False, clean=False)
        except (FormatMismatch, NoSpace) as error:
            refused.append(error)
            counts["refused"] += 1
        except BaseException as error:
            raise AssertionError(where) from error
        assert not refused or any("json" in each for each in what), f"{where}: {refused}"
        life.check(where)
        counts.update(each.partition(" ")[0] for each in what)
        shutil.rmtree(path)
    shutil.rmtree(original)
    print(dict(counts))
