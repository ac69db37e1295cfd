"""The time that a store with many objects takes to start: `python -m bench.start --records 1000000 --kind blocks`.

Responsibility: fill the log of an empty store, through the tier as the service does, stop it cleanly or as if
killed, and start a store on it in a fresh process, which logs the time of each phase.

Objects are small (PAYLOAD_BYTES), since a start reads no payload: a million of them take 4.5 GiB of segments.
The figures are seconds, and bytes of anonymous memory for each object: the table and the index are files.
There is no baseline.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Final

import trio

from bench import keys
from bench.measure import Result
from kvfs import limits
from kvfs._native.shared.slots import xxh3_64
from kvfs.index.rows import NameRow
from tiers.device.device import open_device
from tiers.log.records import MetaBody
from tiers.model.tier import Kind, StoreKey, object_key
from tiers.nvme.stored import Stored
from tiers.nvme.tier import NvmeTier
from tiers.nvme.write_behind import NvmeJournal
from tiers.recovery.start import NvmeOptions, StoreOptions, start_store
from tiers.store.store import Store

PAYLOAD_BYTES: Final = 512
CHAIN_BLOCKS: Final = 64
"""Blocks of one prompt, each the parent of the next."""
BATCH: Final = 50_000
DRAM_BYTES: Final = 256 * limits.MIB
BUCKET: Final = b"b"
NAMESPACE: Final = replace(keys.NAMESPACE, block_tokens=16)
KINDS: Final = ("blocks", "names", "names-killed", "names-rebuilt")
"""The objects, and the state of the index: after a clean stop, after a kill, or removed."""


@dataclass(frozen=True, slots=True)
class Started:
    """One start. Seconds, and those of its processors; MiB of anonymous memory before and after; objects found."""

    kind: str
    records: int
    start_s: float
    cpu_s: float
    before_mib: int
    after_mib: int
    objects: int

    @property
    def object_bytes(self) -> float:
        """Return the anonymous memory of each object."""
        return (self.after_mib - self.before_mib) * limits.MIB / max(self.objects, 1)


class _Payload:
    """The bytes of one object, unlike any other's."""

    size_bytes = PAYLOAD_BYTES
    checksum: int | None = None

    def __init__(self, number: int) -> None:
        self._number = number

    async def read_into(self, view: memoryview) -> int:
        data = payload_of(self._number)
        view[:PAYLOAD_BYTES] = data
        return xxh3_64(data)


@asynccontextmanager
async def opened(data: Path, records: int) -> AsyncIterator[Store]:
    """Open a store on `data` with room for so many objects, which keeps nothing in DRAM when it is closed."""
    segment_bytes = limits.MAX_SEGMENT_BYTES // 4 if records > 100_000 else 16 * limits.MIB
    need = records * 5 * limits.KIB + limits.MIN_SEGMENTS * segment_bytes
    device = open_device("auto")
    try:
        store = await start_store(
            StoreOptions(
                data,
                dram_bytes=DRAM_BYTES,
                max_slots=limits.MAX_SLOTS,
                backing="directory",
                nvme=NvmeOptions(device, need // segment_bytes * segment_bytes, segment_bytes=segment_bytes),
            )
        )
        try:
            yield store
        finally:
            store.close(keep=False)
    finally:
        with trio.CancelScope(shield=True):
            await device.aclose()


# --- filling -----------------------------------------------------------------------------------------------
async def fill(data: Path, kind: str, records: int) -> None:
    """Put `records` objects in an empty store, and stop it."""
    async with opened(data, records) as store:
        await _fill_open(store, kind, records)
    leave_index(data, kind)


def leave_index(data: Path, kind: str) -> None:
    """Have the index of a store that was stopped be in the state of `kind`."""
    if kind == "names-killed":
        _look_killed(data)
    elif kind == "names-rebuilt":
        shutil.rmtree(data / "index")


async def _fill_open(store: Store, kind: str, records: int) -> None:
    assert isinstance(store.journal, NvmeJournal)
    bucket = store.create_bucket(BUCKET, uid=0, gid=0, namespace=NAMESPACE if kind == "blocks" else None)
    tier = store.journal.nvme
    first = store.names.next_ids(records)
    put = _put_block if kind == "blocks" else _put_named
    for number in range(records):
        put(tier, bucket.bucket_id, first, number)
        if tier.log.backlog >= BATCH:
            await tier.log.drain()
    if kind != "blocks":
        rows = ((BUCKET + b"\0" + key_of(number), _row(first + number).encode()) for number in range(records))
        store.names.put_many(rows)
    await store.finish()


def digest_of(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()[:16]


def payload_of(number: int) -> bytes:
    return digest_of(number) * (PAYLOAD_BYTES // 16)


def key_of(number: int) -> bytes:
    """Return a key as engines name their files: a directory for each object, by hash."""
    return b"model/%s/layer.safetensors" % digest_of(number).hex().encode()


def _put_block(tier: NvmeTier, bucket_id: int, first: int, number: int) -> None:
    parent = digest_of(number - 1) if number % CHAIN_BLOCKS else bytes(16)
    key = StoreKey(Kind.BLOCK, digest_of(number))
    tier.put(Stored(key, first + number, PAYLOAD_BYTES, bucket_id, parent), [_Payload(number)], None)


def _put_named(tier: NvmeTier, bucket_id: int, first: int, number: int) -> None:
    object_id = first + number
    meta = MetaBody(BUCKET, key_of(number), _row(object_id))
    tier.put(Stored(object_key(object_id), object_id, PAYLOAD_BYTES, bucket_id), [_Payload(number)], meta)


def _row(object_id: int) -> NameRow:
    return NameRow(object_id, object_id, PAYLOAD_BYTES, 0o644, 0, 0, 7, 8, object_id, 0)


def _look_killed(data: Path) -> None:
    file = data / "format.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "clean": False}))


# --- starting ----------------------------------------------------------------------------------------------
async def start(data: Path, kind: str, records: int) -> Started:
    """Start a store on what `fill` left, and close it."""
    before_mib = _anonymous_mib()
    began, began_cpu = time.monotonic(), sum(os.times()[:4])
    async with opened(data, records) as store:
        start_s, cpu_s = time.monotonic() - began, sum(os.times()[:4]) - began_cpu
        return Started(kind, records, start_s, cpu_s, before_mib, _anonymous_mib(), store.object_count)


def _anonymous_mib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return (
        int(next(each for each in lines if each.startswith("RssAnon:")).split()[1]) * limits.KIB // limits.MIB
    )


def _in_process(work: Callable[[], object]) -> None:
    """Run in a process of its own, so that no memory of one step is reused by the next. Raises RuntimeError."""
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"exit status {process.exitcode}")


def _fill_process(data: Path, kind: str, records: int) -> None:
    began = time.monotonic()
    trio.run(fill, data, kind, records)
    print(f"{kind}: {records} objects written in {time.monotonic() - began:.1f} s", file=sys.stderr)


def _start_process(data: Path, kind: str, records: int, as_json: bool) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    found = trio.run(start, data, kind, records)
    if as_json:
        print(json.dumps(asdict(found)))
        return
    print(
        f"{found.kind}: {found.objects} objects there after {found.start_s:.2f} s ({found.cpu_s:.2f} s of CPU); "
        f"{found.after_mib} MiB of its own, {found.object_bytes:.0f} bytes an object"
    )


# --- figures of `kvfs bench` ----------------------------------------------------------------------------------
def start_adopt_1m_nvme(_: float) -> Result:
    return Result("start.adopt_1m_nvme", measured("blocks").start_s, "s")


def start_adopt_1m_named(_: float) -> Result:
    return Result("start.adopt_1m_named", measured("names").start_s, "s")


def memory_block_nvme(_: float) -> Result:
    return Result("memory.block_nvme", measured("blocks").object_bytes, "bytes")


def memory_object_nvme(_: float) -> Result:
    return Result("memory.object_nvme", measured("names").object_bytes, "bytes")


@cache
def measured(kind: str) -> Started:
    """Fill and start a store of a million objects once, in processes of their own."""
    command = [sys.executable, "-m", "bench.start", "--json", "--kind", kind]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    return Started(**json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.start", description=__doc__.partition("\n")[0])
    parser.add_argument("--records", type=int, default=1_000_000, help="objects (default: %(default)s)")
    parser.add_argument("--kind", choices=KINDS, action="append", help="default: each of them")
    parser.add_argument("--at", type=Path, default=Path(tempfile.gettempdir()), help="a folder with room")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for kind in options.kind or KINDS:
        with tempfile.TemporaryDirectory(prefix="kvfs-bench-", dir=options.at) as name:
            data = Path(name)
            _in_process(partial(_fill_process, data, kind, options.records))
            _in_process(partial(_start_process, data, kind, options.records, options.json))


if __name__ == "__main__":
    main()
