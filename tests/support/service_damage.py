"""What a service of the crash tests loses between two lives, and what fsck says of it.

Responsibility: lose DRAM or the index, damage one place of a segment or rows of the index, and remember what the next
start may miss: exactly what fsck says is lost, unless it says that more may be. Where nothing was damaged, fsck finds
nothing to repair.

Concurrency: one test's thread, while the service does not run.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

from kvfs.cli.offline.fsck_command import _check
from kvfs.keys import block_name
from kvfs.limits import MIB
from kvfs.system import linux
from tests.support.damage import damage_rows
from tests.support.service_journal import Journal
from tests.support.service_load import BLOCK_SALTS, CACHE, LARGE
from tests.support.service_places import Place, Tally
from tiers.dram import tmpfs


class Damage:
    """Damage to what a service left, and what follows from it."""

    def __init__(
        self, place: Place, data: Path, chance: random.Random, journal: Journal, tally: Tally
    ) -> None:
        self.place, self.data, self.chance = place, data, chance
        self.journal, self.tally = journal, tally
        self.is_damaged = False
        self.said_lost: set[str] = set()
        """What fsck said that the next start misses, as it says it."""
        self.may_have_lost_more = False

    def is_said_lost(self, name: str) -> bool:
        """Whether the next start must miss a name of the journal."""
        return _as_fsck_says(name) in self.said_lost

    def may_be_lost(self, name: str) -> bool:
        return self.may_have_lost_more or self.is_said_lost(name)

    def judged(self) -> None:
        """A start has shown what is lost."""
        self.said_lost, self.may_have_lost_more = set(), False

    def harm(self, settled: float, where: str) -> str:
        """DRAM or index lost, a segment or rows of the index damaged; what fsck says is what a start misses.

        What ended before `settled` is on the device. Returns what was done, in words that follow others.
        """
        done = ""
        # A start that was killed early has not made the index again that was lost before it; and none looks for damage.
        is_whole = (self.data / "index").exists() and not self.is_damaged
        if self.place.nvme != "0" and self.chance.random() < 0.4 and is_whole:
            self._check_clean(where)
        if self.chance.random() < 0.2 and not self.place.held:
            self._lose_dram()
            done += ", DRAM lost"
        if self.chance.random() < 0.15 and self.place.nvme != "0":
            shutil.rmtree(self.data / "index", ignore_errors=True)
            done += ", index lost"
            self._may_come_back(settled)
        if self.place.damage:
            if self.chance.random() < 0.7:
                done += f", {self._damage_segment()}"
                self.is_damaged = True
            if self.chance.random() < 0.3 and (self.data / "index/data.mdb").exists():
                done += f", {damage_rows(self.data / 'index', self.chance)}"
                self._may_come_back(settled)
            found = self._fsck()
            self.said_lost |= set(found["lost"])
            self.may_have_lost_more |= found["may_have_lost_more"]
        return done

    def _may_come_back(self, settled: float) -> None:
        """The index no longer says what a cache has ended, and the device may not know yet."""
        self.journal.index_lost(settled, [f"{CACHE}/", f"{LARGE}/"])

    def _lose_dram(self) -> None:
        while tmpfs.is_mounted(self.data / "dram"):
            linux.unmount(self.data / "dram", linux.MNT_DETACH)
        shutil.rmtree(self.data / "dram", ignore_errors=True)

    def _damage_segment(self) -> str:
        """One place of one segment that is in use."""
        files = [file for file in sorted((self.data / "nvme").glob("*.seg")) if file.stat().st_blocks > 64]
        if not files:
            return "nothing to damage"
        file = self.chance.choice(files)
        how, at = self.chance.choice(["cut", "zero", "flip"]), self.chance.randrange(8192, MIB - 8192)
        with file.open("r+b") as opened:
            if how == "cut":
                opened.truncate(at // 512 * 512)
            elif how == "zero":
                opened.seek(at)
                opened.write(bytes(min(self.chance.choice([512, 20_000, 300_000]), MIB - at)))
            else:
                opened.seek(at)
                byte = opened.read(1)
                opened.seek(at)
                opened.write(bytes([byte[0] ^ 1 << self.chance.randrange(8)]))
        return f"{how} {file.name} at {at}"

    def _fsck(self) -> dict[str, Any]:
        self.tally.checks += 1
        return _check(self.data, self.data / "nvme", repair=False)

    def _check_clean(self, where: str) -> None:
        """A kill leaves nothing to repair, but a last write of a segment, or a slot's header, that is torn."""
        found = self._fsck()
        wrong = [each for each in found["problems"] if each["cost"] == "durable" or not _is_torn(each)]
        assert not wrong, f"{where}: fsck says {wrong}"


def _is_torn(problem: dict[str, Any]) -> bool:
    return " at " in problem["where"] or "was being written" in problem["what"]


def _as_fsck_says(name: str) -> str:
    """A name of the journal as `kvfs fsck` has it."""
    bucket, colon, digest = name.partition(":")
    if colon and bucket in BLOCK_SALTS:
        return f"{bucket}/{block_name(bytes.fromhex(digest)).decode()}"
    return name.removesuffix("#pin")
