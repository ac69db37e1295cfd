"""`kvfs bench`: choose figures, measure, print a table or JSON.

Responsibility: the arguments and the output. Exit codes are those of `kvfs.cli.main`.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import (
    adoption,
    client,
    cold,
    conductor,
    conductor_http,
    conductor_queries,
    conductor_restart,
    doors,
    fabric,
    keys,
    large_table,
    memory,
    names,
    nvme,
    proxy,
    remote,
    s3,
    start,
)
from bench.measure import Result
from bench.names import NamePlaces, open_name_places
from bench.places import Once, Places, open_places
from kvfs.errors import DeviceMissing, KvfsError

SECONDS = 3.0


def _lookup_64(seconds: float) -> Result:
    if find_spec("coredis") is None:
        raise DeviceMissing("directory.lookup_64 needs coredis: pip install 'kvfs[server,cluster]'")
    result: Result = import_module("bench.directory").lookup_64(seconds)
    return result


IN_MEMORY: dict[str, Callable[[float], Result]] = {
    "memcpy.1m": memory.memcpy_1m,
    "keys.sha256_512": keys.sha256_512,
    "keys.sha256_512_int64": keys.sha256_512_int64,
    "keys.xxh3_512": keys.xxh3_512,
}
"""Need no mount."""
OF_A_CLUSTER: dict[str, Callable[[float], Result]] = {
    "conductor.decisions": conductor.decisions,
    "conductor.decision_p99": conductor.decision_p99,
    "conductor.match_256": conductor.match_256,
    "conductor.bytes_per_block": conductor.bytes_per_block,
}
"""Take a gigabyte of memory for a million blocks, twice."""
OF_QUERIES: dict[str, Callable[[float], Result]] = {
    **{f"conductor.query_{case}": partial(conductor_queries.query, case) for case in conductor_queries.CASES},
    "conductor.query_readers64": conductor_queries.query_readers64,
}
"""Ask indexes of some thousand blocks."""
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
    "client.put_4m": client.put_4m,
    "client.batch16_put_64k": client.batch16_put_64k,
    "client.batch16_put_1m": client.batch16_put_1m,
    "client.batch8_put_4m": client.batch8_put_4m,
    "client.put_1m_full": client.put_1m_full,
    "client.match_64": client.match_64,
}
ON_DEVICE: dict[str, Callable[[Path, float], Result]] = {
    "nvme.read_1m_qd8": nvme.read_1m_qd8,
    "nvme.device_read_1m": nvme.device_read_1m,
}
"""Need a folder on the device."""
OVER_NVME: dict[str, Callable[[NamePlaces, float], Result]] = {
    "mount.rename": names.rename,
    "mount.unlink": names.unlink,
    "mount.create_close_4k": names.create_close_4k,
    "mount.readdir_10k": names.readdir_10k,
    "mount.stat": names.stat,
    "mount.remove_10k": names.remove_10k,
}
"""Need a folder on the device, and start a service with a mount there."""
AT_S3: dict[str, Callable[[float], Result]] = {
    "s3.get_1m": s3.get_1m,
    "s3.get_4k": s3.get_4k,
    "s3.put_1m": s3.put_1m,
    "s3.put_64k": s3.put_64k,
    "cold.fetch_1m": cold.fetch_1m,
    "cold.fetch_16m": cold.fetch_16m,
    "conductor.route_http": conductor_http.route_http,
    "conductor.watched_256": conductor_http.watched_256,
    "conductor.restart_240k": conductor_restart.restart_240k,
}
"""Start services of their own, and most of them nginx."""
OF_MACHINES: dict[str, Callable[[float], Result]] = {
    "remote.get_1m": remote.get_1m,
    "remote.batch16_1m": remote.batch16_1m,
    "remote.get_64k": remote.get_64k,
    "remote.get_1m_tls": remote.get_1m_tls,
    "remote.ucx_get_1m": fabric.ucx_get_1m,
}
"""Start a process that stands for another machine."""
OF_DIRECTORY: dict[str, Callable[[float], Result]] = {"directory.lookup_64": _lookup_64}
"""Start a Redis or Valkey server."""
OF_PROXY: dict[str, Callable[[float], Result]] = {
    "proxy.cpu_per_request": proxy.cpu_per_request,
    "proxy.cpu_per_token": proxy.cpu_per_token,
    "proxy.ttft_1k": proxy.ttft_1k,
}
"""Start a proxy and engines that take next to nothing."""
OF_A_MILLION: dict[str, Callable[[float], Result]] = {
    "table.match_64_10m": large_table.match_64_10m,
    "start.adopt_1m": adoption.start_adopt_1m,
    "start.adopt_1m_cpu": adoption.start_adopt_1m_cpu,
    "start.adopt_1m_nvme": start.start_adopt_1m_nvme,
    "start.adopt_1m_named": start.start_adopt_1m_named,
    "start.adopt_1m_files": adoption.start_adopt_1m_files,
    "start.adopt_1m_files_cpu": adoption.start_adopt_1m_files_cpu,
    "stop.keep_1m": adoption.stop_keep_1m,
    "stop.keep_1m_files": adoption.stop_keep_1m_files,
    "memory.block_filled": adoption.memory_block_filled,
    "memory.block_adopted": adoption.memory_block_adopted,
    "memory.object_filled": adoption.memory_object_filled,
    "memory.object_adopted": adoption.memory_object_adopted,
    "memory.block_nvme": start.memory_block_nvme,
    "memory.object_nvme": start.memory_object_nvme,
}
"""Take gigabytes of memory; all but the first come from one run of a service with a million blocks."""
ALONE = IN_MEMORY | OF_A_CLUSTER | OF_QUERIES | AT_S3 | OF_MACHINES | OF_DIRECTORY | OF_PROXY | OF_A_MILLION
"""Need nothing that others need, too."""
NAMES = [
    *IN_MEMORY,
    *OF_A_CLUSTER,
    *OF_QUERIES,
    *AT_DOORS,
    *OVER_NVME,
    *ON_DEVICE,
    *AT_S3,
    *OF_MACHINES,
    *OF_DIRECTORY,
    *OF_PROXY,
    *OF_A_MILLION,
]
BASELINES = {
    "keys.sha256_512": "SHA-256 of the tokens",
    "keys.sha256_512_int64": "SHA-256 of the tokens",
    "keys.xxh3_512": "SHA-256 of the tokens",
    "tmpfs.pread_1m": "default tmpfs",
    "mount.pread_1m": "backing tmpfs",
    "mount.pread_4k": "backing tmpfs",
    "mount.open_read_close_1m": "backing tmpfs",
    "mount.create_write_rename_1m": "default tmpfs",
    **dict.fromkeys(OVER_NVME, "the disk's filesystem"),
    "client.get_into_1m": "memcpy",
    "client.get_into_4k": "memcpy",
    "client.batch16_get_into_1m": "memcpy",
    "client.put_1m": "memcpy",
    "client.put_4m": "memcpy",
    "client.batch16_put_64k": "memcpy",
    "client.batch16_put_1m": "memcpy",
    "client.batch8_put_4m": "memcpy",
    "client.put_1m_full": "memcpy",
    "client.match_64": "py-lmdb getmulti",
    **dict.fromkeys(ON_DEVICE, "fio, io_uring"),
    "table.match_64_10m": "one million",
    "conductor.decisions": "the Python policy",
    "conductor.match_256": "the Python index",
    **dict.fromkeys(OF_QUERIES, "the Python index"),
    "conductor.watched_256": "no instances",
    "s3.get_1m": "nginx, sendfile",
    "s3.get_4k": "nginx, sendfile",
    "s3.put_1m": "a bare handler",
    "s3.put_64k": "a bare handler",
    **dict.fromkeys(OF_MACHINES, "sendfile to recv"),
    "remote.get_1m_tls": "the same without TLS",
    "remote.ucx_get_1m": "ucx_perftest -e -E sleep",
    **dict.fromkeys(OF_DIRECTORY, "MGET of 64 keys"),
    "proxy.cpu_per_request": "both legs alone",
    "proxy.ttft_1k": "both legs alone",
    "cold.fetch_1m": "boto3's GET",
    "cold.fetch_16m": "boto3's GET",
}


class _Stage:
    """What figures are measured in, each opened for the first figure that needs it."""

    def __init__(self, options: argparse.Namespace, stack: ExitStack) -> None:
        self._options = options
        self._places = Once(partial(_open_places, options.at), stack)
        self._disk = Once(partial(open_name_places, options.folder), stack)

    def measure(self, name: str) -> Result:
        """Measure a figure. Raises whatever it does, and again what opening its places did."""
        seconds = self._options.seconds
        if name in AT_DOORS:
            return AT_DOORS[name](self._places.get(), seconds)
        if name in OVER_NVME:
            return OVER_NVME[name](self._disk.get(), seconds)
        if name in ON_DEVICE:
            return ON_DEVICE[name](self._options.folder, seconds)
        return ALONE[name](seconds)


@contextmanager
def _open_places(at: str | None) -> Iterator[Places]:
    with open_places(at) as places:
        print(f"bench: the mount runs in this mode: {places.mode}", file=sys.stderr)
        yield places


def run_command(arguments: list[str]) -> None:
    """Measure what is chosen, and print it; a figure that fails costs no other. Raises KvfsError after failures."""
    options = _parse(arguments)
    results, failures = [], {}
    with ExitStack() as stack:
        stage = _Stage(options, stack)
        for name in options.only or NAMES:
            try:
                results.append(stage.measure(name))
            except Exception as error:
                failures[name] = _reason(error)
                print(f"bench: {name} failed: {failures[name]}", file=sys.stderr)
                continue
            if not options.json:
                print(f"bench: {name} done", file=sys.stderr)
        if options.json:
            print(json.dumps([result.as_json() for result in results], indent=2))
        else:
            _print_table(results)
    if failures:
        raise KvfsError(
            f"bench: {len(failures)} of {len(results) + len(failures)} figures failed: "
            + "; ".join(f"{name}: {reason}" for name, reason in failures.items())
        )


def _reason(error: Exception) -> str:
    """Say in a line why a figure failed; the place, too, where that is no error of kvfs's."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, KvfsError):
        return str(error)
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"


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
        "--folder", type=Path, default=Path(), help="on the NVMe device, with 3 GiB free (default: here)"
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
        *("figure", "median", "p99", "baseline", "p99", "", "ratio"),
        caption="ratio: how many times as fast as the baseline",
    )
    for column in table.columns:
        column.no_wrap = True
    for index in (1, 2, 3, 4, 6):
        table.columns[index].justify = "right"
    for result in results:
        table.add_row(
            result.name,
            f"{result.value:.2f} {result.unit}",
            "" if result.p99 is None else f"{result.p99:.2f}",
            "" if result.baseline is None else f"{result.baseline:.2f} {result.unit}",
            "" if result.baseline_p99 is None else f"{result.baseline_p99:.2f}",
            BASELINES.get(result.name, "information"),
            "" if result.ratio is None else f"{result.ratio:.2f}",
        )
    # Figures cut short are no figures: wider than a narrow terminal rather.
    Console(width=max(Console().width, 110)).print(table)
