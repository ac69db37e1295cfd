"""Lives of one real service, each ended in the middle of its work, each judged through all doors by the next.

Responsibility: run `kvfs serve` in one of several places (DRAM only, a small or a full NVMe tier, memory that others
hold, a full filesystem, one place damaged between lives), have `service_load` change it from several threads, end it
(SIGKILL within milliseconds of an answer or in a rename, at a crash point, a clean stop), and hold what `service_look`
finds after the next start against the journal. What is bounded while it runs is watched: memory, log lines, exit codes.
The process is `killed_service`'s, what it runs short of is `service_shortage`'s, what is lost between two lives
`service_damage`'s.

Concurrency: one test's thread, and the workers' threads while `load` runs.
"""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from kvfs.client import Client, connect
from kvfs.errors import KvfsError
from kvfs.limits import MIB
from kvfs.system import crashpoints, linux
from tests.support.crash_harness import fast_directory
from tests.support.gateway import ACCESS, SECRET
from tests.support.killed_service import KilledService, is_running
from tests.support.processes import Helper
from tests.support.processor_waits import Waits
from tests.support.service import ServiceFailed
from tests.support.service_calls import Trigger
from tests.support.service_damage import Damage
from tests.support.service_journal import EMPTY, Contents, Journal
from tests.support.service_load import (
    BLOCKS,
    CACHE,
    DURABLE,
    DURABLE_BLOCKS,
    LARGE,
    LARGE_DURABLE,
    PROMISED,
    Worker,
)
from tests.support.service_look import Look, look
from tests.support.service_places import PLACES, Place, Tally
from tests.support.service_shortage import Shortage
from tests.support.waits import WAIT_S

WORKERS: Final = 3
CHANGES: Final = 70
"""Of each worker in a life."""
MS_RDONLY: Final = 1
"""mount(2)."""
STUCK_S: Final = 60.0
"""Workers that are not done after this long hang."""
MAX_ANONYMOUS_BYTES: Final = 300 * MIB
MAX_LOG_LINES: Final = 300
"""In a life, which makes a few hundred changes."""
SETTLED_S: Final = 4.0
"""After this long what a cache ended is on the device, beside waits for a processor: it says one second, and a disk is
slow at times."""
ORPHAN_WAIT_S: Final = 20.0
"""How soon gateway processes end after their service."""
_WRITER: Final = """
import contextlib, os, sys
with contextlib.suppress(OSError):  # without room, too, it dies by a signal: else it would close a file that it made
    fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(fd, os.urandom(50_000))
print("written", flush=True)
sys.stdin.readline()
"""


class Harness:
    """Lives of one service."""

    def __init__(self, place: Place, seed: int, tally: Tally | None = None) -> None:
        self.place, self.seed, self.tally = place, seed, tally or Tally()
        self.chance = random.Random(f"{seed}/{place.name}")
        self.journal, self.contents = Journal(), Contents()
        self.base = Path(tempfile.mkdtemp(prefix="kvfs-lives-", dir=fast_directory()))
        self.fate = "new"
        self.started = self.settled = time.monotonic()
        """What ended before `settled` is on the device."""
        self.kept_s = 0.0
        """How long threads of the service were kept waiting for a processor in this life."""
        self.service = KilledService(mode=place.mode, dram=place.dram, nvme=place.nvme, base=self.base)
        self.shortage = Shortage(place, self.service, self.chance, self.journal, self.contents)
        self.damage = Damage(place, self.service.data, self.chance, self.journal, self.tally)
        file = self.base / "kvfs.toml"
        file.write_text(self._configuration())
        self.service.arguments = ["--config", str(file), "--slots", "4096"]
        self.buckets = [CACHE, BLOCKS]
        if place.nvme != "0":
            self.buckets += [DURABLE, DURABLE, DURABLE_BLOCKS, LARGE, LARGE_DURABLE]
        self.s3: Any = None
        self.children: list[int] = []
        # What comes to the mount point after a stop must not be taken for an answer of the mount.
        linux.mount("kvfs-test", self.service.mount, "tmpfs", MS_RDONLY, "size=4096")
        if place.full_disk:
            linux.mount("kvfs-test", self.service.data, "tmpfs", 0, f"size={48 * MIB}")

    def _configuration(self) -> str:
        lines = []
        if self.place.nvme != "0":
            lines += ["[nvme]", 'segment = "1MiB"']
        if self.place.s3:
            lines += ["[s3]", 'listen = "127.0.0.1:0"', "workers = 1"]
            lines += ["[[s3.credentials]]", f'access_key = "{ACCESS}"', f'secret_key = "{SECRET}"']
        return "\n".join(lines)

    def close(self) -> None:
        self.shortage.close()
        with suppress(ProcessLookupError):
            if self.service.process is not None:
                os.killpg(self.service.pid, signal.SIGKILL)
        self.service.close()

    @property
    def where(self) -> str:
        return f"KVFS_TEST_SEED={self.seed} place {self.place.name}, life {self.journal.life}, before: {self.fate}"

    # --- one life ----------------------------------------------------------------------------------------------
    def live(self) -> None:
        """Start, judge, work, end. AssertionError says what was wrong."""
        end = self._choose_end()
        offset = self.service.log_path.stat().st_size if self.service.log_path.exists() else 0
        if self.start(end):
            self.judge()
            self.work(end)
        self.finish(end, offset)

    def look_once_more(self) -> None:
        """One more start, to judge the last life, and a clean stop."""
        assert self.start("stop")
        self.judge()
        self.service.stop()

    def _choose_end(self) -> str:
        if self.journal.life == 0:
            return "answer"
        weighted = {"answer": 3, "close": 5, "rename": 2, "point": 4, "stop": 2}
        if self.place.renames:
            weighted = {"answer": 2, "rename": 6, "point": 8, "stop": 1}
        [end] = self.chance.choices([*weighted], [*weighted.values()])
        if end == "point":
            points = sorted(
                point
                for point in crashpoints.POINTS
                if not point.startswith("cold.") and (self.place.nvme != "0" or point.startswith("store."))
            )
            if self.place.renames and self.chance.random() < 0.7:
                points = ["store.after_rename"]
            point = self.chance.choice(points)
            return f"{point}:{1 if point.startswith('start.') else self.chance.randint(1, 20)}"
        return end

    def start(self, end: str) -> bool:
        """Whether it runs; it does not where a crash point of the start was chosen."""
        self.service.crash_at = end if ":" in end else ""
        offset = self.service.log_path.stat().st_size if self.service.log_path.exists() else 0
        try:
            self.service.start()
            if self.place.s3:
                self.s3 = self.service.connect_s3(offset)
            self.started = time.monotonic()
        except ServiceFailed as error:
            if ":" in end and self.service.running.poll() == -signal.SIGKILL:
                return False
            raise AssertionError(f"{self.where}: the service does not start: {str(error)[-4000:]}") from None
        return True

    def judge(self) -> None:
        """What the start shows. A crash point may end the service meanwhile: then the next life judges."""
        try:
            with connect(self.service.mount) as client:
                shown = self._look(client)
                self.make_buckets(client)
                self.shortage.fill(client)
        except (OSError, KvfsError) as error:
            with suppress(subprocess.TimeoutExpired):
                self.service.running.wait(2)
            if self.service.crash_at and self.service.running.poll() == -signal.SIGKILL:
                return
            raise AssertionError(
                f"{self.where}: {type(error).__name__}: {error}\n{self.service.log()[-3000:]}"
            ) from error
        self.contents.keep({value for name in self.journal.names() for value in self.journal.possible(name)})
        wrong = shown.wrong + self.shortage.wrong()
        assert not wrong, f"{self.where}: " + "\n".join(wrong) + self.service.log()[-3000:]

    def _look(self, client: Client) -> Look:
        there = {bucket.name for bucket in client.buckets()}
        made = [bucket for bucket in dict.fromkeys(self.buckets) if bucket in there]
        names = self.journal.names()
        damaged = {n for n in names if self.damage.may_be_lost(n)}
        shown = look(self.service.mount, made, client, self.s3, names, damaged, self.chance)
        verdict = self.journal.judge(shown.found, PROMISED)
        for name in verdict.lost:
            if self.damage.may_be_lost(name):
                self.journal.give_up(name)
            else:
                shown.wrong.append(
                    f"{name} is lost, and was not said to be\n    {self.journal.explain(name)}"
                )
        for name in shown.found:
            if self.damage.is_said_lost(name):
                shown.wrong.append(
                    f"{name} is there, and was said to be lost\n    {self.journal.explain(name)}"
                )
        self.damage.judged()
        shown.wrong += verdict.wrong
        self.journal.observed(shown.found)
        self.tally.right += verdict.right
        self.tally.missing += verdict.missing
        return shown

    def make_buckets(self, client: Client) -> None:
        """Those that are missing."""
        there = {bucket.name for bucket in client.buckets()}
        options: dict[str, dict[str, bool]] = {
            DURABLE: {"durable": True},
            DURABLE_BLOCKS: {"durable": True},
            LARGE: {"large": True},
            LARGE_DURABLE: {"large": True, "durable": True},
        }
        for bucket in dict.fromkeys(self.buckets):
            if bucket not in there and bucket != BLOCKS:
                client.create_bucket(bucket, **options.get(bucket, {}))

    # --- the work ----------------------------------------------------------------------------------------------
    def work(self, end: str) -> None:
        """Workers change things until the service is ended, or by themselves."""
        if self.service.running.poll() is not None:
            return
        self.children = self.service.gateway_pids()
        trigger = self._trigger(end)
        workers = [self._worker(number, trigger) for number in range(WORKERS)]
        threads = [threading.Thread(target=worker.run, daemon=True) for worker in workers]
        for thread in threads:
            thread.start()
        if self.place.s3 and self.chance.random() < 0.3:
            self._kill_a_gateway()
        if self.chance.random() < 0.3:
            self._kill_a_writer(trigger)
        deadline, most, waits = time.monotonic() + STUCK_S, 0, Waits(self.service.pid)
        while (alive := [thread for thread in threads if thread.is_alive()]) and time.monotonic() < deadline:
            most = max(most, self.service.anonymous_bytes())
            self.kept_s = max(self.kept_s, waits.kept_s())
            alive[0].join(0.05)
            if self.service.end_if_killed():
                trigger.ending.set()
        if not trigger.ending.is_set():
            trigger.fire()
        stuck = [worker.number for worker, thread in zip(workers, threads, strict=True) if thread.is_alive()]
        under_way = "\n".join(self.journal.under_way())
        if stuck:
            self.service.kill()
        wrong = [fault for worker in workers for fault in worker.wrong]
        for worker in workers:
            self.tally.said += worker.said
        self.tally.most_bytes = max(self.tally.most_bytes, most)
        assert not stuck, f"{self.where}: workers {stuck} hang in\n{under_way}\n{self.service.log()[-3000:]}"
        assert not wrong, f"{self.where}: " + "\n".join(wrong) + self.service.log()[-2000:]
        assert most <= MAX_ANONYMOUS_BYTES, f"{self.where}: {most} bytes of memory"

    def _worker(self, number: int, trigger: Trigger) -> Worker:
        worker = Worker(
            number,
            self.journal.life,
            self.seed,
            self.journal,
            self.contents,
            trigger,
            self.service.mount,
            self.buckets,
            self.s3,
            CHANGES,
        )
        worker.edges = self.place.edges
        worker.mostly_renames = self.place.renames
        return worker

    def _trigger(self, end: str) -> Trigger:
        process, alone = self.service.running, self.chance.random() < 0.5

        def kill() -> None:
            with suppress(ProcessLookupError):
                if alone:
                    process.send_signal(signal.SIGKILL)
                else:
                    os.killpg(process.pid, signal.SIGKILL)

        at = self.chance.randint(1, WORKERS * CHANGES // 2)
        if end == "stop":
            return Trigger(process.terminate, event="answer", at=at, delay_s=0)
        if end == "rename":
            at = self.chance.randint(1, 12 if not self.place.renames else 80)
            return Trigger(kill, event="rename", at=at, delay_s=self.chance.random() * 0.0006)
        if ":" in end:
            return Trigger(kill, event="never", at=0, delay_s=0)
        delay_s = self.chance.choice([0, 0.001, 0.005]) * self.chance.random()
        if end == "close":
            at = self.chance.randint(1, 30)
        return Trigger(kill, event=end, at=at, delay_s=delay_s)

    def _kill_a_gateway(self) -> None:
        """A worker of S3 dies; the service starts another."""
        for pid in self.service.gateway_pids()[:1]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _kill_a_writer(self, trigger: Trigger) -> None:
        """A process dies in the middle of its write, and leaves what was there."""
        name = f"{self.chance.choice([b for b in self.buckets if not b.endswith('kv')])}/killed-writer"
        begun = self.journal.begin("killed writer", {name: EMPTY})
        with Helper(_WRITER, self.service.mount / name) as helper:
            assert helper.process.stdout is not None
            while not select.select([helper.process.stdout], [], [], 0.1)[0]:
                self.service.end_if_killed()
            written = helper.process.stdout.readline()
        if written:
            self.journal.failed(begun, "it was killed")
        else:  # its write was refused, and its exit closes what it had made
            self.journal.unsure(begun, "nothing could be written")

    # --- the end -------------------------------------------------------------------------------------------------
    def finish(self, end: str, offset: int) -> None:
        """The service is gone: its exit code, its log, its children, what is left on the device; then damage."""
        try:
            code = self.service.running.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self.service.kill()
            raise AssertionError(
                f"{self.where}: it does not end ({end})\n{self.service.log()[-3000:]}"
            ) from None
        log = self.service.log_since(offset)
        wanted = 0 if end == "stop" else -signal.SIGKILL
        assert code == wanted, f"{self.where}: it ended with {code} ({end})\n{log[-5000:]}"
        self._check_children()
        self._check_log(log)
        self.journal.died()
        if (settled := time.monotonic() - SETTLED_S - self.kept_s) > self.started:
            self.settled = settled
        self.kept_s = 0.0
        self.tally.lives += 1
        self.tally.ends[end.partition(":")[0]] += 1
        wrong = self.shortage.wrong()
        assert not wrong, f"{self.where}, after its end: {wrong}"
        self.fate = end
        self.fate += self.damage.harm(self.settled, self.where)

    def _check_children(self) -> None:
        deadline = time.monotonic() + ORPHAN_WAIT_S
        while left := [pid for pid in self.children if is_running(pid)]:
            assert time.monotonic() < deadline, (
                f"{self.where}: gateway processes {left} outlive their service"
            )
            time.sleep(0.01)

    def _check_log(self, log: str) -> None:
        lines = log.splitlines()
        self.tally.most_lines = max(self.tally.most_lines, len(lines))
        assert "Traceback (most recent call last)" not in log, f"{self.where}: {log[-5000:]}"
        assert len(lines) <= MAX_LOG_LINES, f"{self.where}: {len(lines)} log lines, such as\n" + "\n".join(
            lines[100:120]
        )


__all__ = ["PLACES", "Harness", "Place", "Tally"]
