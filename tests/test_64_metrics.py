"""Every number of the status is a metric, every metric is in the docs, and Prometheus could read them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvfs.limits import MIB
from kvfs.metrics import METRICS, exposition, table
from tests.support.cold import FolderBucket, options
from tests.support.door import need_mount
from tests.support.service import ROOT, Service, run_kvfs
from tests.test_42_store_nvme import put, running, until_written
from tiers.model import Name
from tiers.scrub import Scrub

SESSIONS = {"sessions": 2, "sessions_accepted": 5, "sessions_cut_off": 1, "session_drafts": 3}


def numbers(value: Any, path: str = "") -> Iterator[str]:
    """The paths of all numbers, as `Metric.path` says them; None and text are none."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from numbers(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for inner in value:
            if isinstance(inner, Mapping):
                yield from numbers(inner, f"{path}.{inner['name']}")
    elif isinstance(value, int | float):
        yield path


async def status_of(path: Path) -> dict[str, Any]:
    async with running(path, cold=options(FolderBucket(path.with_name("cold")))) as store:
        if not store.buckets():
            store.create_bucket(b"b", uid=0, gid=0)
        put(store, Name(b"b", b"x"), 10_000)
        await until_written(store, 1)
        scrub = Scrub(store, MIB)
        await scrub._pass()
        return store.usage() | SESSIONS | {"scrub": scrub.status()}


async def test_every_number_is_a_metric_and_every_metric_a_number(tmp_path: Path) -> None:
    status = await status_of(tmp_path)
    optional = {"recovery.rebuilt_names", "scrub.last_pass_s", "scrub.last_finished_s", "tiers.nvme.trouble"}
    assert {metric.path for metric in METRICS} - optional == set(numbers(status)) - optional
    assert status["recovery"]["log_s"] > 0


def test_the_names_are_of_one_form() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    for name in names:
        assert re.fullmatch(r"kvfs_(store|session|dram|nvme|cold|scrub|recovery)_[a-z_]+", name), name


def test_the_docs_have_the_table() -> None:
    assert (ROOT / "docs" / "metrics.md").read_text().endswith("\n\n" + table())


async def test_the_text_is_what_prometheus_reads(tmp_path: Path) -> None:
    status = await status_of(tmp_path)
    lines = exposition(status).splitlines()
    values = {}
    for line in lines:
        found = re.fullmatch(r"# (HELP|TYPE) (\w+) (.+)|(\w+) (-?[0-9.e+-]+)", line)
        assert found, line
        if found[4]:
            values[found[4]] = float(found[5])
    assert values["kvfs_store_objects"] == 1
    assert values["kvfs_nvme_trouble_bool"] == 0
    assert values["kvfs_nvme_used_bytes"] == status["tiers"][1]["used_bytes"]
    assert values["kvfs_scrub_verified_bytes_total"] == 20_000
    assert lines.count("# TYPE kvfs_store_hits_total counter") == 1
    status["tiers"][1]["trouble"] = "no space"
    assert "kvfs_nvme_trouble_bool 1\n" in exposition(status)
    del status["tiers"][1]
    assert "kvfs_nvme" not in exposition(status)


def test_a_service_shows_them(tmp_path: Path) -> None:
    need_mount()
    with Service(arguments=["--nvme", "64MiB"]) as service:
        (service.mount / "b").mkdir()
        (service.mount / "b" / "x").write_bytes(bytes(10_000))
        done = run_kvfs("status", "--metrics", "--at", str(service.mount))
        assert (done.returncode, done.stderr) == (0, "")
        shown = {line.split()[0] for line in done.stdout.splitlines() if not line.startswith("#")}
        status = json.loads(run_kvfs("status", "--json", "--at", str(service.mount)).stdout)
        del status["caller"]  # who asks
        assert {metric.path for metric in METRICS if metric.name in shown} >= set(numbers(status))
        assert "scrub" in run_kvfs("status", "--at", str(service.mount)).stdout
        assert run_kvfs("status", "--json", "--metrics", "--at", str(service.mount)).returncode == 2
