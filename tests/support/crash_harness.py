"""Lives of one store, each ended by a kill and followed by damage, each checked against what was said before.

Responsibility: have `crash_child` run a life, kill it at a random instant or at a crash point, damage what a
start does not depend on (the DRAM tier, the index), and hold the next life's findings against the model.

Concurrency: one test's thread; the killed process is another's child.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from kvfs.cli.offline.fsck_command import _check
from kvfs.limits import MIB
from kvfs.system import crashpoints
from tests.support.crash_model import Model, Value
from tests.support.leftovers import FAST_VARIABLE
from tests.support.run_remains import MEMORY
from tests.support.service import ROOT
from tiers.dram import tmpfs

INDEX_FATES: Final = ("intact", "intact", "intact", "gone", "truncated", "flipped", "older")
DRAM_FATES: Final = ("intact", "intact", "gone")
CHANGES: Final = 120
"""Of each client in a life that is not killed before."""
FSCK_SHARE: Final = 0.3
"""Of the lives: each check reads everything."""


def fast_directory() -> str | None:
    """Where a store's files cost no device time: a kill, unlike a power cut, leaves what was written."""
    shared = Path(os.environ.get(FAST_VARIABLE, MEMORY))
    if shared.is_dir() and shutil.disk_usage(shared).free > 512 * MIB:
        return str(shared)
    return None


class Forge:
    """The process that forks stores."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.crash_child", str(theirs.fileno())],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                pass_fds=[theirs.fileno()],
            )

    def fork(self, task: dict[str, Any]) -> tuple[int, int]:
        """(process id, read end of the pipe) of a child that does the task."""
        mine, theirs = os.pipe()
        socket.send_fds(self._channel, [json.dumps(task).encode()], [theirs])
        os.close(theirs)
        return int(self._channel.recv(32)), mine

    def status(self) -> int:
        """How the child ended."""
        return int(self._channel.recv(32))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()
        self._process.wait()


@dataclass(slots=True)
class Tally:
    """What a run came to."""

    lives: int = 0
    kills: int = 0
    checks: int = 0
    """Lives after which the stored data was checked."""
    acknowledged: int = 0
    found: int = 0
    reached: Counter[str] = field(default_factory=Counter)
    """Crash point -> lives that got there."""
    killed_at: Counter[str] = field(default_factory=Counter)
    fates: Counter[str] = field(default_factory=Counter)
    activity: Counter[str] = field(default_factory=Counter)
    """Of the lives that were not killed: what their stores did."""

    def __str__(self) -> str:
        never = sorted(crashpoints.POINTS - self.reached.keys())
        return (
            f"{self.lives} lives, {self.kills} kills, {self.checks} checks, {self.acknowledged} changes acknowledged, "
            f"{self.found} things found again\nfates: {dict(self.fates)}\nactivity: {dict(self.activity)}\n"
            f"killed at: {dict(self.killed_at)}\nreached: {dict(self.reached)}\nnever reached: {never}"
        )


@dataclass
class Life:
    """What one child said."""

    found: dict[str, Value] | None = None
    wrong: list[str] = field(default_factory=list)
    log: deque[str] = field(default_factory=lambda: deque(maxlen=12))
    ended: bool = False
    emptied: list[Any] | None = None
    lines: int = 0


class Harness:
    """Lives of one store in one directory."""

    def __init__(
        self, forge: Forge, seed: int, tally: Tally, *, backing: str = "directory", cold: bool = False
    ) -> None:
        self.forge, self.seed, self.tally, self.backing = forge, seed, tally, backing
        self.base = Path(tempfile.mkdtemp(prefix="kvfs-crash-", dir=fast_directory()))
        self.path = self.base / "data"
        self.chance = random.Random(seed)
        self.model = Model()
        self.number = 0
        self.index_lives = True
        self.cold = cold
        """Whether its lives have a cold tier, over a directory that outlives them."""
        self.fate = "new"
        self._history: list[str] = []
        """Every change, for the message of a failure."""

    def close(self) -> None:
        while tmpfs.is_mounted(self.path / "dram"):
            tmpfs.unmount(self.path / "dram")
        shutil.rmtree(self.base)

    def live(
        self, *, crash_at: str | None = None, kill_after: int | None = None, empty: bool = False
    ) -> Life:
        """One life, checked; then damage."""
        task = {
            "path": str(self.path),
            "seed": self.seed,
            "life": self.number,
            "changes": 0 if empty else CHANGES,
            "crash_at": crash_at,
            "dram_bytes": 16 * MIB,
            "nvme_bytes": 16 * MIB,
            "backing": self.backing,
            "cold": str(self.base / "cold") if self.cold else "",
            "empty": empty,
        }
        where = f"KVFS_TEST_SEED={self.seed}, life {self.number}, before it {self.fate}, crash at {crash_at}"
        pid, pipe = self.forge.fork(task)
        life = Life()
        for said in self._lines(pid, pipe, kill_after, life):
            self._hear(said, life, where)
        status = self.forge.status()
        assert status in (0, -signal.SIGKILL), f"{where}: exit {status}:\n" + "\n".join(life.wrong)
        assert not life.wrong, f"{where}: {life.wrong}\n" + "\n".join(
            [*life.log, *self._history_of(life.wrong)]
        )
        if life.found is not None and self.chance.random() < FSCK_SHARE:  # else earlier damage may be there
            self.check_clean(where)
        self.tally.lives += 1
        self.tally.kills += status == -signal.SIGKILL
        if status and crash_at and kill_after is None:
            self.tally.killed_at[crash_at.partition(":")[0]] += 1
        self.number += 1
        return life

    def _history_of(self, wrong: list[str]) -> list[str]:
        names = {word for line in wrong for word in line.split() if "/" in word or ":" in word}
        return [line for line in self._history if any(repr(name) in line for name in names)]

    def _lines(self, pid: int, pipe: int, kill_after: int | None, life: Life) -> Iterator[dict[str, Any]]:
        watch = os.pidfd_open(pid)
        try:
            with os.fdopen(pipe, "rb") as lines:
                for line in lines:
                    if not line.endswith(b"\n"):
                        return
                    life.lines += 1
                    if life.lines == kill_after:
                        with suppress(ProcessLookupError):  # it has ended, and this line is late
                            signal.pidfd_send_signal(watch, signal.SIGKILL)
                    try:
                        yield json.loads(line)
                    except json.JSONDecodeError:  # the watchdog's traceback
                        life.wrong.append(line.decode().rstrip())
        finally:
            os.close(watch)

    def _hear(self, said: dict[str, Any], life: Life, where: str) -> None:
        if "client" in said:
            self._history.append(f"{self.number}: {self.model.under_way.get(said['client'], '')} {said}")
            self.model.hear(said)
            self.tally.acknowledged += "done" in said
        elif "found" in said:
            found: dict[str, Value] = {name: tuple(value) for name, value in said["found"].items()}
            wrong = self.model.judge(found, index_lives=self.index_lives)
            life.wrong += wrong + said["wrong_books"]
            life.found = found
            self.index_lives = True
            self.model = self.model.restart(found)
            self.tally.found += len(found)
        elif "reached" in said:
            self.tally.reached[said["reached"]] += 1
        elif "usage" in said:
            life.wrong += said["wrong_books"]
            self._count(said["usage"])
        elif "emptied" in said:
            life.emptied = said["emptied"]
        elif "end" in said:
            life.ended = True
        elif "wrong" in said or "error" in said:
            life.wrong.append(said.get("wrong") or said["error"])
        else:
            life.log.append(str(said)[:300])
            if "does not match its checksum" in str(said):
                self.tally.activity["damaged slots"] += 1

    def _count(self, usage: dict[str, Any]) -> None:
        for key in ("demotions", "promotions", "evictions"):
            self.tally.activity[key] += usage[key]
        for key in ("segments_reclaimed", "objects_evicted", "corrupt", "syncs"):
            self.tally.activity[key] += usage["tiers"][1][key]
        for tier in usage["tiers"][2:]:
            for key in ("uploads", "fetches", "adopted", "deleted", "evicted", "lost"):
                self.tally.activity[f"cold {key}"] += tier[key]

    def check_clean(self, where: str) -> None:
        """A kill leaves nothing to repair: what is stored agrees and is all referred to. At most the last write of a
        segment, or the header of a slot, is torn, and then it is of nothing that was acknowledged."""
        found = _check(self.path, self.path / "nvme", repair=False)
        self.tally.checks += 1
        torn = [each for each in found["problems"] if each["cost"] != "durable" and _is_torn(each)]
        wrong = [each for each in found["problems"] if each not in torn]
        assert not wrong, f"{where}: {wrong}"
        assert len({each["where"].partition(" at ")[0] for each in torn}) <= 1, f"{where}: {torn}"

    # --- damage ------------------------------------------------------------------------------------------------
    def damage(self) -> None:
        """What happens to DRAM and index between two lives."""
        dram, index = self.chance.choice(DRAM_FATES), self.chance.choice(INDEX_FATES)
        if dram == "gone":
            self._lose_dram()
        if index != "intact" and not self._damage_index(index):
            index = "intact"
        self.index_lives = self.index_lives and index == "intact"
        if index != "intact" and self.cold:
            self.model.forget_removals()
        self.fate = f"DRAM {dram}, index {index}"
        self.tally.fates[self.fate] += 1
        if self.chance.random() < 0.2 and (self.path / "index").exists():
            shutil.rmtree(self.base / "older", ignore_errors=True)
            shutil.copytree(self.path / "index", self.base / "older")

    def _lose_dram(self) -> None:
        while tmpfs.is_mounted(self.path / "dram"):
            tmpfs.unmount(self.path / "dram")
        shutil.rmtree(self.path / "dram", ignore_errors=True)

    def _damage_index(self, fate: str) -> bool:
        index, data = self.path / "index", self.path / "index" / "data.mdb"
        if not data.exists() or (fate == "older" and not (self.base / "older").exists()):
            return False
        if fate == "gone":
            shutil.rmtree(index)
        elif fate == "older":
            shutil.rmtree(index)
            shutil.copytree(self.base / "older", index)
        elif fate == "truncated":
            os.truncate(data, self.chance.randrange(used_bytes(data) + 1))
        else:
            flip_bits(data, self.chance, self.chance.randint(1, 30), end=used_bytes(data))
        return True


def _is_torn(problem: dict[str, Any]) -> bool:
    return " at " in problem["where"] or "was being written" in problem["what"]


def used_bytes(path: Path) -> int:
    """Up to where a sparse file holds anything."""
    return path.stat().st_blocks * 512


def flip_bits(
    path: Path, chance: random.Random, count: int, *, start: int = 0, end: int | None = None
) -> None:
    with path.open("r+b") as file:
        for _ in range(count):
            at = chance.randrange(start, path.stat().st_size if end is None else end)
            file.seek(at)
            byte = file.read(1)
            if byte:
                file.seek(at)
                file.write(bytes([byte[0] ^ 1 << chance.randrange(8)]))
