"""The output of commands about names and checks, as text or JSON.

Responsibility: text from values. Lists are plain lines, for pipes.
Concurrency: none.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from kvfs.client.results import Bucket, Entry
from kvfs.config.sizes import format_size


def buckets(found: Iterable[Bucket], *, long: bool, as_json: bool) -> None:
    """Print one bucket a line; long: mode, owner, class, time, name, `large`, namespace with its
    model and the number and size of its blocks."""
    if as_json:
        print_json([_jsonable(bucket) for bucket in found])
        return
    for bucket in found:
        if long:
            kind = "durable" if bucket.durable else "cache"
            mode = stat.filemode(stat.S_IFDIR | bucket.mode)
            large = "  large" if bucket.large else ""
            bound = f"  {_bound(bucket)}" if bucket.namespace else ""
            owner, time = f"{bucket.uid:>5} {bucket.gid:>5}", time_text(bucket.mtime_ns)
            print(f"{mode} {owner} {kind:>9} {time} {bucket.name}{large}{bound}")
        else:
            print(bucket.name)


def _bound(bucket: Bucket) -> str:
    size = format_size(bucket.block_bytes)
    return f"namespace {(bucket.namespace or b'').hex()}, {bucket.model}: {bucket.blocks} blocks, {size}"


def entries(found: Iterable[Entry], prefix: str, *, long: bool, as_json: bool) -> None:
    """Print one name a line, without `prefix`, and where a symbolic link leads.

    `long`: mode, owner, size, hits, time, and `pinned`."""
    if as_json:
        print_json([entry_object(entry) for entry in found])
        return
    for entry in found:
        name = entry.name.removeprefix(prefix) + _leads_to(entry)
        if long:
            size = "-" if entry.is_directory else str(entry.size_bytes)
            pinned = "  pinned" if entry.pinned else ""
            print(
                f"{_mode(entry)} {entry.uid:>5} {entry.gid:>5} {size:>12} {entry.hits:>6} "
                f"{time_text(entry.mtime_ns)} {name}{pinned}"
            )
        else:
            print(name)


def entry(found: Entry) -> None:
    """Print all attributes of one name."""
    lines = {
        "name": found.name + _leads_to(found),
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
    """Return the JSON form of an entry; bytes are hexadecimal."""
    return {"name": found.name, **_jsonable(found)}


def check_report(found: Mapping[str, Any]) -> None:
    """Print the report of `kvfs fsck`: a line for each problem, the counts, and the result."""
    for problem in found["problems"]:
        print(f"{problem['where']}: {problem['what']}; {problem['consequence']}")
    print(
        f"{found['segments']} segments with {found['records']} records of {found['objects']} objects, "
        f"{found['slots']} slots, {found['names']} names in {found['buckets']} buckets: "
        f"{format_size(found['bytes_verified'])} verified in {found['seconds']:.2f} s "
        f"({found['bytes_verified'] / max(found['seconds'], 1e-9) / 1e9:.2f} GB/s)"
    )
    print(found["result"])


def _jsonable(value: Entry | Bucket) -> dict[str, Any]:
    return {name: field.hex() if isinstance(field, bytes) else field for name, field in asdict(value).items()}


def _mode(entry: Entry) -> str:
    kind = stat.S_IFDIR if entry.is_directory else stat.S_IFLNK if entry.target else stat.S_IFREG
    return stat.filemode(kind | entry.mode)


def _leads_to(entry: Entry) -> str:
    return f" -> {entry.target}" if entry.target else ""


def time_text(time_ns: int) -> str:
    """Format nanoseconds since 1970 as local date and time, to the minute."""
    return datetime.fromtimestamp(time_ns / 1e9).strftime("%Y-%m-%d %H:%M")


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    print(json.dumps(value, indent=2))
