"""`kvfs bench`: choose figures, measure, print a table or JSON.

Responsibility: the arguments and the output. Exit codes are those of `kvfs.cli`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import client, cold, doors, keys, memory, nvme, s3
from bench.measure import Result
from bench.places import Places, open_places

SECONDS = 3.0

IN_MEMORY: dict[str, Callable[[float], Result]] = {
    "memcpy.1m": memory.memcpy_1m,
    "keys.sha256_512": keys.sha256_512,
    "keys.sha256_512_int64": keys.sha256_512_int64,
    "keys.xxh3_512": keys.xxh3_512,
}
"""Need no mount."""
AT_DOORS: dict[str, Callable[[Places, float], Result]] = {
    "tmpfs.pread_1m": doors.tmpfs_pread_1m,
    "mount.pread_1m": doors.mount_pread_1m,
    "mount.pread_4k": doors.mount_pread_4k,
    "mount.open_read_close_1m": doors.mount_open_read_close_1m,
    "mount.create_write_rename_1m": doors.mount_create_write_rename_1m,
    "client.get_into_1m": client.get_into_1m,
    "client.get_into_4k": client.get_into_4k,
    "client.batch16_get_into_1m": client.batch16_get_into_1m,
    "client.put_1m": client.put_1m,
    "client.match_64": client.match_64,
}
ON_DEVICE: dict[str, Callable[[Path, float], Result]] = {"nvme.read_1m_qd8": nvme.read_1m_qd8}
"""Need a folder on the device."""
AT_S3: dict[str, Callable[[float], Result]] = {
    "s3.get_1m": s3.get_1m,
    "s3.get_4k": s3.get_4k,
    "s3.put_1m_crc64": s3.put_1m_crc64,
    "cold.fetch_1m": cold.fetch_1m,
    "cold.fetch_16m": cold.fetch_16m,
}
"""Start a service and nginx of their own."""
NAMES = [*IN_MEMORY, *AT_DOORS, *ON_DEVICE, *AT_S3]
BASELINES = {
    "keys.sha256_512": "SHA-256 of the tokens",
    "keys.sha256_512_int64": "SHA-256 of the tokens",
    "keys.xxh3_512": "SHA-256 of the tokens",
    "tmpfs.pread_1m": "default tmpfs",
    "mount.pread_1m": "backing tmpfs",
    "mount.pread_4k": "backing tmpfs",
    "mount.open_read_close_1m": "backing tmpfs",
    "mount.create_write_rename_1m": "default tmpfs",
    "client.get_into_1m": "memcpy",
    "client.get_into_4k": "memcpy",
    "client.batch16_get_into_1m": "memcpy",
    "client.put_1m": "memcpy",
    "client.match_64": "py-lmdb getmulti",
    "nvme.read_1m_qd8": "fio, io_uring",
    "s3.get_1m": "nginx, sendfile",
    "s3.get_4k": "nginx, sendfile",
    "s3.put_1m_crc64": "the GET",
    "cold.fetch_1m": "boto3's GET",
    "cold.fetch_16m": "boto3's GET",
}


def run_command(arguments: list[str]) -> None:
    options = _parse(arguments)
    chosen = options.only or NAMES
    needs_mount = any(name in AT_DOORS for name in chosen)
    with open_places(options.at) if needs_mount else nullcontext() as places:
        if places is not None:
            print(f"bench: the mount runs in this mode: {places.mode}", file=sys.stderr)
        results = []
        for name in chosen:
            if places is not None and name in AT_DOORS:
                results.append(AT_DOORS[name](places, options.seconds))
            elif name in ON_DEVICE:
                results.append(ON_DEVICE[name](options.folder, options.seconds))
            else:
                results.append((IN_MEMORY | AT_S3)[name](options.seconds))
            if not options.json:
                print(f"bench: {name} done", file=sys.stderr)
    if options.json:
        print(json.dumps([result.as_json() for result in results], indent=2))
    else:
        _print_table(results)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="kvfs bench",
        description="Ratios of one run, medians of single operations taken in turns: how many times as fast "
        "as the baseline. Needs root, for the baseline's own tmpfs.",
    )
    parser.add_argument("--json", action="store_true", help="a list of {name, value, unit, baseline, ratio}")
    parser.add_argument("--only", type=_names, metavar="NAME,...", help=f"some of: {', '.join(NAMES)}")
    parser.add_argument(
        "--at", metavar="MOUNT", help="the mount of a running service; default: one of its own"
    )
    parser.add_argument(
        "--folder", type=Path, default=Path(), help="on the NVMe device, with 2.5 GiB free (default: here)"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="per figure (default: %(default)s)")
    return parser.parse_args(arguments)


def _names(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    for name in names:
        if name not in NAMES:
            raise argparse.ArgumentTypeError(f"{name}: no such figure; there are {', '.join(NAMES)}")
    return names


def _print_table(results: list[Result]) -> None:
    table = Table(
        "figure", "median", "baseline", "", "ratio", caption="ratio: how many times as fast as the baseline"
    )
    for column in table.columns:
        column.no_wrap = True
    for index in (1, 2, 4):
        table.columns[index].justify = "right"
    for result in results:
        table.add_row(
            result.name,
            f"{result.value:.2f} {result.unit}",
            "" if result.baseline is None else f"{result.baseline:.2f} {result.unit}",
            BASELINES.get(result.name, "information"),
            "" if result.ratio is None else f"{result.ratio:.2f}",
        )
    # Figures cut short are no figures: wider than a narrow terminal rather.
    Console(width=max(Console().width, 110)).print(table)
