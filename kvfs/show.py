"""What the command line prints: names, attributes and usage, for people or as JSON.

Responsibility: text from values; nothing is looked up here. Lists are plain lines, made to be piped; the one
page meant for eyes, `status`, is a table. Concurrency: none.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

from kvfs.sizes import format_size

if TYPE_CHECKING:
    from rich.table import Table

    from kvfs.results import Bucket, Entry


def buckets(found: Iterable[Bucket], *, long: bool, as_json: bool) -> None:
    """One bucket a line; long: mode, owner, class, time, name, what else is special."""
    if as_json:
        print(json.dumps([_jsonable(bucket) for bucket in found], indent=2))
        return
    for bucket in found:
        if long:
            kind = "durable" if bucket.durable else "cache"
            mode = stat.filemode(stat.S_IFDIR | bucket.mode)
            large = "  large" if bucket.large else ""
            bound = f"  namespace {bucket.namespace.hex()}" if bucket.namespace else ""
            print(
                f"{mode} {bucket.uid:>5} {bucket.gid:>5} {kind:>9} {_time(bucket.mtime_ns)} {bucket.name}{large}{bound}"
            )
        else:
            print(bucket.name)


def entries(found: Iterable[Entry], prefix: str, *, long: bool, as_json: bool) -> None:
    """One name a line, without `prefix`; long: mode, owner, size, hits, time, and `pinned`."""
    if as_json:
        print(json.dumps([entry_object(entry) for entry in found], indent=2))
        return
    for entry in found:
        name = entry.name.removeprefix(prefix)
        if long:
            size = "-" if entry.is_directory else str(entry.size_bytes)
            pinned = "  pinned" if entry.pinned else ""
            print(
                f"{_mode(entry)} {entry.uid:>5} {entry.gid:>5} {size:>12} {entry.hits:>6} "
                f"{_time(entry.mtime_ns)} {name}{pinned}"
            )
        else:
            print(name)


def entry(found: Entry) -> None:
    """All that is known of one name."""
    lines = {
        "name": found.name,
        "mode": f"{_mode(found)}  uid {found.uid}  gid {found.gid}",
        "modified": datetime.fromtimestamp(found.mtime_ns / 1e9).astimezone().isoformat(),
        "inode": str(found.ino),
    }
    if not found.is_directory:
        kind = "block, " if found.is_block else ""
        lines["size"] = f"{found.size_bytes} bytes ({format_size(found.size_bytes)})"
        lines["lies in"] = f"{kind}{found.tier}{', pinned' if found.pinned else ''}"
        lines["hits"] = str(found.hits)
    for name, value in lines.items():
        print(f"{name:>9}  {value}")


def entry_object(found: Entry) -> dict[str, Any]:
    """The JSON form of an entry; bytes are hexadecimal."""
    return {"name": found.name, **_jsonable(found)}


def check_report(found: Mapping[str, Any]) -> None:
    """What `kvfs fsck` found: a line for each problem, then what was looked at, then how it ends."""
    for problem in found["problems"]:
        print(f"{problem['where']}: {problem['what']}; {problem['consequence']}")
    print(
        f"{found['segments']} segments with {found['records']} records of {found['objects']} objects, "
        f"{found['slots']} slots, {found['names']} names in {found['buckets']} buckets: "
        f"{format_size(found['bytes_verified'])} verified in {found['seconds']:.2f} s "
        f"({found['bytes_verified'] / max(found['seconds'], 1e-9) / 1e9:.2f} GB/s)"
    )
    print(found["result"])


def status_table(found: Mapping[str, Any]) -> None:
    """The page of `kvfs status`."""
    from rich.console import Console
    from rich.table import Table

    tiers = Table(
        "tier", "on", "used", "of", "", "held", "slots", title=found["data_dir"], title_justify="left"
    )
    for column in (2, 3, 4, 5, 6):
        tiers.columns[column].justify = "right"
    for tier in found["tiers"]:
        share = tier["used_bytes"] / tier["capacity_bytes"]
        tiers.add_row(
            tier["name"],
            tier["backing"],
            format_size(tier["used_bytes"]),
            format_size(tier["capacity_bytes"]),
            f"{share:.0%}",
            format_size(tier["held_bytes"]) if "held_bytes" in tier else "",
            f"{tier['slots']} of {tier['max_slots']}" if "slots" in tier else f"{tier['objects']} objects",
        )
    counts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    mount = found.get("mount")
    if mount is not None:
        counts.add_row("mount", f"{mount['path']}, {mount['mode']}")
        for lack in mount["missing"]:
            counts.add_row("missing", lack)
    counts.add_row(
        "holds", f"{found['objects']} objects, {found['blocks']} blocks, {found['buckets']} buckets"
    )
    counts.add_row("reads", f"{found['hits']} hits, {found['misses']} misses")
    counts.add_row(
        "writes", f"{found['seals']} seals, {found['removals']} removals, {found['evictions']} evictions"
    )
    for tier in found["tiers"]:
        if tier["name"] == "nvme":
            _nvme_rows(counts, tier)
        if tier["name"] == "cold":
            _cold_rows(counts, tier)
    if found.get("scrub", {}).get("rate_bytes_s"):
        counts.add_row("scrub", _scrub_text(found["scrub"]))
    counts.add_row("sessions", f"{found['sessions']}, with {found['session_drafts']} drafts")
    console = Console()
    console.print(tiers)
    console.print(counts)


def _scrub_text(scrub: Mapping[str, Any]) -> str:
    damaged = scrub["damaged_extents"] + scrub["damaged_slots"] + scrub["unreadable"]
    last = scrub["last_finished_s"]
    finished = "" if last is None else f", the last ended {_time(int(last * 1e9))}"
    return (
        f"{format_size(scrub['verified_bytes'])} verified, {damaged} damaged; {scrub['passes']} passes"
        f"{finished}; {scrub['progress']:.0%} of this one"
    )


def _nvme_rows(counts: Table, tier: Mapping[str, Any]) -> None:
    durable, room = format_size(tier["durable_bytes"]), format_size(tier["durable_capacity_bytes"])
    counts.add_row("durable", f"{durable} of {room}")
    written, behind = format_size(tier["appended_bytes"]), tier["write_behind"] + tier["backlog"]
    counts.add_row(
        "to NVMe", f"{written}, {tier['write_amplification']:.2f} times what was asked; {behind} objects wait"
    )
    if tier["trouble"]:
        counts.add_row("trouble", tier["trouble"])


def _cold_rows(counts: Table, tier: Mapping[str, Any]) -> None:
    sent, fetched = format_size(tier["uploaded_bytes"]), format_size(tier["fetched_bytes"])
    waiting = tier["queued"] + tier["leaving"]
    counts.add_row("to and from cold", f"{sent} sent, {fetched} read back; {waiting} objects wait")
    if not tier["is_up"]:
        counts.add_row("cold trouble", tier["trouble"])


def _jsonable(value: Entry | Bucket) -> dict[str, Any]:
    return {name: field.hex() if isinstance(field, bytes) else field for name, field in asdict(value).items()}


def _mode(entry: Entry) -> str:
    kind = stat.S_IFDIR if entry.is_directory else stat.S_IFREG
    return stat.filemode(kind | entry.mode)


def _time(time_ns: int) -> str:
    return datetime.fromtimestamp(time_ns / 1e9).strftime("%Y-%m-%d %H:%M")
