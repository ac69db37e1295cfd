"""Damage to the files of a store that no service uses.

Responsibility: a part of one file is cut, zeroed or flipped; a record's payload, rows of the name index or a slot are
changed where LMDB, or the record's header, does not notice.

Concurrency: one test's thread.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

from kvfs.formats import RECORD_HEADER, SEGMENT_DATA_START, SLOT_HEADER, TABLE_HEADER, RecordType
from kvfs.index.rows import store_row
from tiers.recovery.index_check import IndexReader


def damage_one_place(files: list[Path], chance: random.Random) -> str:
    """Cut, zero or flip part of one file that was written; what was done. The newest are as likely as all others."""
    written = sorted(
        (file for file in files if any(file.read_bytes())), key=lambda file: file.stat().st_mtime_ns
    )
    file = written[-1] if chance.random() < 0.5 else chance.choice(written)
    data = file.read_bytes()
    end = len(data.rstrip(b"\0"))
    used = len(data[:-4096].rstrip(b"\0")) if chance.random() < 0.8 else end
    how = chance.choice(["cut", "zero", "flip"])
    at = chance.randrange(max(used, 1))
    if how == "cut":
        os.truncate(file, at)
        return f"{file.name} cut at {at} of {used}"
    if how == "flip":
        with file.open("r+b") as opened:
            for place in [
                at,
                *(min(at + chance.randrange(2000), end - 1) for _ in range(chance.choice([0, 3]))),
            ]:
                opened.seek(place)
                opened.write(bytes([data[place] ^ 1 << chance.randrange(8)]))
        return f"{file.name} flipped at {at} of {used}"
    length = chance.choice([512, 4096, 65_536, len(data)])
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(bytes(min(length, len(data) - at)))
    return f"{file.name} zeroed at {at} for {length} of {used}"


def damage_rows(index: Path, chance: random.Random) -> str:
    """Flip a bit in the values of some rows, wherever the file has them; LMDB does not notice."""
    with IndexReader(index) as reader:
        rows = [(bucket + b"\0" + key, row.encode()) for bucket, key, row in reader.rows() if row is not None]
        rows += [
            (name, row.encode())
            for name, row in reader.buckets()
            if row is not None and chance.random() < 0.3
        ]
    file = index / "data.mdb"
    data, done = bytearray(file.read_bytes()), []
    for name, row in chance.sample(rows, min(len(rows), chance.choice([1, 1, 3]))):
        value, place = store_row(name, row), chance.randrange(len(row))
        at, bit = data.find(value), 1 << chance.randrange(8)
        while at >= 0:
            data[at + place] ^= bit
            at = data.find(value, at + 1)
        done.append(name)
    with file.open("r+b") as opened:
        opened.write(data)
    return f"rows {done}"


def damage_slot(dram: Path, chance: random.Random) -> str:
    """Flip a bit of a slot's payload, or of its header in the table."""
    if not dram.exists():
        return "no DRAM"
    slots = [file for file in sorted((dram / "slots").iterdir()) if file.stat().st_size]
    if not slots:
        return "no slots"
    file = chance.choice(slots)
    at = chance.randrange(file.stat().st_size)
    if chance.random() < 0.5:
        with (dram / "table").open("rb") as table:
            head = TABLE_HEADER.decode(table.read(TABLE_HEADER.size))
        at = head["slots_offset"] + int(file.name, 16) * SLOT_HEADER.size + chance.randrange(SLOT_HEADER.size)
        file = dram / "table"
    flip(file, at, chance)
    return f"{file.name} flipped at {at}"


def damage_payload(files: list[Path], chance: random.Random) -> str:
    """Flip a byte of a payload, whose record's header holds."""
    places = []
    for file in files:
        data = file.read_bytes()
        at = SEGMENT_DATA_START
        while at < len(data) - RECORD_HEADER.size:
            step = 512
            if data[at : at + 4] == b"KVFR":
                raw = RECORD_HEADER.decode(data[at : at + RECORD_HEADER.size])
                if raw["type"] == RecordType.DATA and raw["payload_bytes"]:
                    places.append((file, at + raw["payload_offset"] + chance.randrange(raw["payload_bytes"])))
                step = raw["record_bytes"]  # a footer has copies of headers in it
            at += step
    file, at = chance.choice(places)
    flip(file, at, chance)
    return f"{file.name} payload at {at}"


def flip(file: Path, at: int, chance: random.Random) -> None:
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1 << chance.randrange(8)]))
