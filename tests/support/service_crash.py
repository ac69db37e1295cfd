"""Lives of one real service, each ended in the middle of its work, each judged through all doors by the next.

Responsibility: run `kvfs serve` in one of several places (DRAM only, a small or a full NVMe tier, memory that others
hold, a full filesystem, one place damaged between lives), have `service_load` change it from several threads, end it
(SIGKILL within milliseconds of an answer or in a rename, at a crash point, a clean stop), and hold what `service_look`
finds after the next start against the journal. What is bounded while it runs is watched: memory, log lines, exit codes.

Concurrency: one test's thread, and the workers' threads while `load` runs.
"""

from __future__ import annotations

import os
import random
import re
import select
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import boto3
from botocore.config import Config

from kvfs.cli.offline.fsck_command import _check
from kvfs.client import Client, connect
from kvfs.errors import KvfsError, NoSpace, NotFound, QuotaExceeded
from kvfs.keys import block_name
from kvfs.limits import MIB
from kvfs.system import crashpoints, linux
from tests.support.crash_harness import fast_directory
from tests.support.damage import damage_rows
from tests.support.gateway import ACCESS, REGION, SECRET
from tests.support.killed_kvfs import MODULE
from tests.support.processes import Helper
from tests.support.processor_waits import Waits
from tests.support.service import Service, ServiceFailed
from tests.support.service_calls import Trigger, is_gone
from tests.support.service_journal import EMPTY, Contents, Journal, digest_of
from tests.support.service_load import (
    BLOCK_SALTS,
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
from tests.support.service_places import PLACES, Lease, Place, Tally
from tests.support.waits import WAIT_S
from tiers.dram import tmpfs

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
_LISTENING = re.compile(r"S3 +(https?)://([^:]+):(\d+)")
_WRITER: Final = """
import contextlib, os, sys
with contextlib.suppress(OSError):  # without room, too, it dies by a signal: else it would close a file that it made
    fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(fd, os.urandom(50_000))
print("written", flush=True)
sys.stdin.readline()
"""


class KilledService(Service):
    """A service that ends at `crash_at`, a crash point and a count, if there is one."""

    crash_at = ""

    def command(self) -> list[str]:
        python, option, module, *arguments = super().command()
        return [python, option, *([MODULE, self.crash_at] if self.crash_at else [module]), *arguments]


class Harness:
    """Lives of one service."""

    def __init__(self, place: Place, seed: int, tally: Tally | None = None) -> None:
        self.place, self.seed, self.tally = place, seed, tally or Tally()
        self.chance = random.Random(f"{seed}/{place.name}")
        self.journal, self.contents = Journal(), Contents()
        self.base = Path(tempfile.mkdtemp(prefix="kvfs-lives-", dir=fast_directory()))
        self.leases: list[Lease] = []
        self.fate, self.is_damaged = "new", False
        self.said_lost: set[str] = set()
        """What fsck said that the next start misses, as it says it."""
        self.may_have_lost_more = False
        self.started = self.settled = time.monotonic()
        """What ended before `settled` is on the device."""
        self.kept_s = 0.0
        """How long threads of the service were kept waiting for a processor in this life."""
        self.service = KilledService(mode=place.mode, dram=place.dram, nvme=place.nvme, base=self.base)
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
        for lease in self.leases:
            lease.end()
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
                self.s3 = self._connect_s3(offset)
            self.started = time.monotonic()
        except ServiceFailed as error:
            if ":" in end and self.service.running.poll() == -signal.SIGKILL:
                return False
            raise AssertionError(f"{self.where}: the service does not start: {str(error)[-4000:]}") from None
        return True

    def _connect_s3(self, offset: int) -> Any:
        deadline = time.monotonic() + WAIT_S
        while (found := _LISTENING.search(self._log_since(offset))) is None:
            if self.service.running.poll() is not None or time.monotonic() > deadline:
                raise ServiceFailed(self.service.log())
            time.sleep(0.01)
        return boto3.client(
            "s3",
            endpoint_url=f"http://{found[2]}:{found[3]}",
            region_name=REGION,
            aws_access_key_id=ACCESS,
            aws_secret_access_key=SECRET,
            config=Config(
                retries={"max_attempts": 1},
                s3={"addressing_style": "path"},
                connect_timeout=WAIT_S,
                read_timeout=WAIT_S,
                request_checksum_calculation="when_required",
            ),
        )

    def _log_since(self, offset: int) -> str:
        with self.service.log_path.open("rb") as file:
            file.seek(offset)
            return file.read().decode(errors="replace")

    def judge(self) -> None:
        """What the start shows. A crash point may end the service meanwhile: then the next life judges."""
        try:
            with connect(self.service.mount) as client:
                shown = self._look(client)
                self.make_buckets(client)
                self.fill(client)
        except (OSError, KvfsError) as error:
            with suppress(subprocess.TimeoutExpired):
                self.service.running.wait(2)
            if self.service.crash_at and self.service.running.poll() == -signal.SIGKILL:
                return
            raise AssertionError(
                f"{self.where}: {type(error).__name__}: {error}\n{self.service.log()[-3000:]}"
            ) from error
        self.contents.keep({value for name in self.journal.names() for value in self.journal.possible(name)})
        wrong = shown.wrong + [fault for lease in self.leases if (fault := lease.wrong())]
        assert not wrong, f"{self.where}: " + "\n".join(wrong) + self.service.log()[-3000:]

    def _look(self, client: Client) -> Look:
        there = {bucket.name for bucket in client.buckets()}
        made = [bucket for bucket in dict.fromkeys(self.buckets) if bucket in there]
        names = self.journal.names()
        damaged = {n for n in names if self.may_have_lost_more or _as_fsck_says(n) in self.said_lost}
        shown = look(self.service.mount, made, client, self.s3, names, damaged, self.chance)
        verdict = self.journal.judge(shown.found, PROMISED)
        for name in verdict.lost:
            if _as_fsck_says(name) in self.said_lost or self.may_have_lost_more:
                self.journal.give_up(name)
            else:
                shown.wrong.append(
                    f"{name} is lost, and was not said to be\n    {self.journal.explain(name)}"
                )
        for name in shown.found:
            if _as_fsck_says(name) in self.said_lost:
                shown.wrong.append(
                    f"{name} is there, and was said to be lost\n    {self.journal.explain(name)}"
                )
        self.said_lost, self.may_have_lost_more = set(), False
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

    def fill(self, client: Client) -> None:
        """Use up what this place runs short of."""
        if self.place.full_nvme:
            self._put_until_full(client, f"{DURABLE}/ballast", 200_000, hold=False)
            for name in self.chance.sample(
                [name for name in self.journal.names() if name.startswith(f"{DURABLE}/ballast")], 4
            ):
                begun = self.journal.begin("session remove", {name: None})
                try:
                    client.remove(name)
                except KvfsError as error:
                    if is_gone(error):  # at a crash point: it was removed or not
                        raise
                    self.journal.failed(begun, error)
                else:
                    self.journal.done(begun)
        if self.place.held:
            for lease in self.chance.sample(self.leases, len(self.leases) // 3):
                lease.end()
                self.leases.remove(lease)
            self._put_until_full(client, f"{CACHE}/held", 300_000, hold=True)
        if self.place.full_disk:
            ballast = self.service.data / "ballast"
            ballast.unlink(missing_ok=True)
            free = shutil.disk_usage(self.service.data).free
            spare = self.chance.choice([0, 0, 4096, 65_536, 300_000])
            with ballast.open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, max(4096, free // 4096 * 4096 - spare))

    def _put_until_full(self, client: Client, directory: str, size: int, *, hold: bool) -> None:
        for number in range(400):
            data = self.chance.randbytes(size)
            name = f"{directory}/{self.journal.life}-{number}"
            begun = self.journal.begin("session put", {name: self.contents.note(data)})
            try:
                client.put(name, data)
                self.journal.done(begun)
                if hold:
                    with suppress(NotFound, FileNotFoundError):  # it may be evicted at once
                        self.hold(client, name, digest_of(data))
            except (NoSpace, QuotaExceeded) as error:
                if not begun.done:
                    self.journal.failed(begun, error)
                return

    def hold(self, client: Client, name: str, value: str) -> None:
        """From now on this process has it open, through a session or the mount."""
        if self.chance.random() < 0.7:
            self.leases.append(Lease(name, client.open(name), value, is_slot=True))
        else:
            descriptor = os.open(self.service.mount / name, os.O_RDONLY)
            self.leases.append(Lease(name, descriptor, value, is_slot=False))

    # --- the work ----------------------------------------------------------------------------------------------
    def work(self, end: str) -> None:
        """Workers change things until the service is ended, or by themselves."""
        if self.service.running.poll() is not None:
            return
        self.children = self._gateway_pids()
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
            most = max(most, self._anonymous_bytes())
            self.kept_s = max(self.kept_s, waits.kept_s())
            alive[0].join(0.05)
            if self._end_if_killed():
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

    def _end_if_killed(self) -> bool:
        """Whether it was. A thread of it may wait in the kernel for a caller of its own mount, until that is ended."""
        if _is_running(self.service.pid):
            return False
        self.service.kill()
        return True

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

    def _gateway_pids(self) -> list[int]:
        """Of all processes that the service has started."""
        pids: list[int] = []
        with suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{self.service.pid}/task").iterdir():
                pids += map(int, (task / "children").read_text().split())
        return pids

    def _kill_a_gateway(self) -> None:
        """A worker of S3 dies; the service starts another."""
        for pid in self._gateway_pids()[:1]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _kill_a_writer(self, trigger: Trigger) -> None:
        """A process dies in the middle of its write, and leaves what was there."""
        name = f"{self.chance.choice([b for b in self.buckets if not b.endswith('kv')])}/killed-writer"
        begun = self.journal.begin("killed writer", {name: EMPTY})
        with Helper(_WRITER, self.service.mount / name) as helper:
            assert helper.process.stdout is not None
            while not select.select([helper.process.stdout], [], [], 0.1)[0]:
                self._end_if_killed()
            written = helper.process.stdout.readline()
        if written:
            self.journal.failed(begun, "it was killed")
        else:  # its write was refused, and its exit closes what it had made
            self.journal.unsure(begun, "nothing could be written")

    def _anonymous_bytes(self) -> int:
        with suppress(OSError):
            for line in Path(f"/proc/{self.service.pid}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    return int(line.split()[1]) * 1024
        return 0

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
        log = self._log_since(offset)
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
        wrong = [fault for lease in self.leases if (fault := lease.wrong())]
        assert not wrong, f"{self.where}, after its end: {wrong}"
        self.fate = end
        self._damage(end)

    def _check_children(self) -> None:
        deadline = time.monotonic() + ORPHAN_WAIT_S
        while left := [pid for pid in self.children if _is_running(pid)]:
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

    def _damage(self, end: str) -> None:
        """DRAM or index lost, a segment or rows of the index damaged; what fsck says is what a start misses."""
        # A start that was killed early has not made the index again that was lost before it; and none looks for damage.
        is_whole = (self.service.data / "index").exists() and not self.is_damaged
        if self.place.nvme != "0" and self.chance.random() < 0.4 and is_whole:
            self._check_clean()
        if self.chance.random() < 0.2 and not self.place.held:
            self._lose_dram()
            self.fate += ", DRAM lost"
        if self.chance.random() < 0.15 and self.place.nvme != "0":
            shutil.rmtree(self.service.data / "index", ignore_errors=True)
            self.fate += ", index lost"
            self._may_come_back()
        if self.place.damage:
            if self.chance.random() < 0.7:
                self.fate += f", {self._damage_segment()}"
                self.is_damaged = True
            if self.chance.random() < 0.3 and (self.service.data / "index/data.mdb").exists():
                self.fate += f", {damage_rows(self.service.data / 'index', self.chance)}"
                self._may_come_back()
            found = self._fsck()
            self.said_lost |= set(found["lost"])
            self.may_have_lost_more |= found["may_have_lost_more"]

    def _may_come_back(self) -> None:
        """The index no longer says what a cache has ended, and the device may not know yet."""
        self.journal.index_lost(self.settled, [f"{CACHE}/", f"{LARGE}/"])

    def _lose_dram(self) -> None:
        while tmpfs.is_mounted(self.service.data / "dram"):
            linux.unmount(self.service.data / "dram", linux.MNT_DETACH)
        shutil.rmtree(self.service.data / "dram", ignore_errors=True)

    def _damage_segment(self) -> str:
        """One place of one segment that is in use."""
        files = [
            file for file in sorted((self.service.data / "nvme").glob("*.seg")) if file.stat().st_blocks > 64
        ]
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
        return _check(self.service.data, self.service.data / "nvme", repair=False)

    def _check_clean(self) -> None:
        """A kill leaves nothing to repair, but a last write of a segment, or a slot's header, that is torn."""
        found = self._fsck()
        wrong = [each for each in found["problems"] if each["cost"] == "durable" or not _is_torn(each)]
        assert not wrong, f"{self.where}: fsck says {wrong}"


def _is_torn(problem: dict[str, Any]) -> bool:
    return " at " in problem["where"] or "was being written" in problem["what"]


def _as_fsck_says(name: str) -> str:
    """A name of the journal as `kvfs fsck` has it."""
    bucket, colon, digest = name.partition(":")
    if colon and bucket in BLOCK_SALTS:
        return f"{bucket}/{block_name(bytes.fromhex(digest)).decode()}"
    return name.removesuffix("#pin")


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


__all__ = ["PLACES", "Harness", "Place", "Tally"]
