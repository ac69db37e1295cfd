"""Every number of the status is a metric, every metric is in the docs, and Prometheus could read them."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from pydantic import SecretStr

from gateway.app import metrics as worker_metrics
from gateway.app.metrics import Connections, Counters, WorkerCollector
from kvfs.client import connect
from kvfs.config.settings import ClusterSettings
from kvfs.limits import MIB
from kvfs.system.latencies import BOUNDS_S, Latencies
from kvfs.system.metrics import HISTOGRAMS, METRICS, StatusCollector, exposition
from tests.support.cold import FolderBucket, options
from tests.support.door import need_mount
from tests.support.machines import write_secret
from tests.support.nvme_stores import put, running, until_written
from tests.support.service import ROOT, Service, run_kvfs
from tiers.cluster.directory import Directory
from tiers.eviction.policy import policy_named
from tiers.fsck.scrub import Scrub
from tiers.hbm.device_pools import DevicePools
from tiers.model.objects import Name
from tiers.remote.cluster import Cluster

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
        secret = write_secret(path.with_name("secret"))
        settings = ClusterSettings(
            listen="127.0.0.1:1", secret_file=secret, directory=SecretStr("redis://127.0.0.1:1/0")
        )
        cluster = Cluster(settings, store, directory=Directory(settings, store))
        pools = DevicePools(policy=partial(policy_named, "default"), expected=store.checksum)
        parts = {"scrub": scrub.status(), "cluster": cluster.status(), "hbm": pools.status()}
        return store.usage() | SESSIONS | parts


async def test_every_number_is_a_metric_and_every_metric_a_number(tmp_path: Path) -> None:
    status = await status_of(tmp_path)
    optional = {"recovery.rebuilt_names", "scrub.last_pass_s", "scrub.last_finished_s", "tiers.nvme.trouble"}
    assert {metric.path for metric in METRICS} - optional == set(numbers(status)) - optional
    assert status["recovery"]["log_s"] > 0


def test_the_names_are_of_one_form() -> None:
    names = [metric.name for metric in METRICS + HISTOGRAMS]
    assert len(names) == len(set(names))
    for name in names:
        assert re.fullmatch(
            r"kvfs_(store|session|mount|hbm|dram|nvme|cold|scrub|cluster|directory|recovery)_[a-z_]+", name
        ), name


def worker() -> WorkerCollector:
    return WorkerCollector(Counters(Counter(GetObject=1)), lambda: Connections(1, 2, 3, 4, 5, True))


def test_the_docs_have_the_tables() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    rows = [f"| `{each.name}` | {each.kind} | `{each.path}` | {each.help} |" for each in METRICS + HISTOGRAMS]
    table = "\n".join(["| metric | type | in `kvfs status --json` | |", "|---|---|---|---|", *rows])
    assert text.endswith(f"\n\n{table}\n")
    assert f"\n\n{worker_metrics.table(worker())}\n" in text


def samples(text: str) -> dict[str, float]:
    """Every sample by its name and labels; families whose names clash would hide one another's samples."""
    families = list(text_string_to_metric_families(text))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    assert all(family.documentation for family in families)
    return {
        sample.name + "".join(f",{key}={value}" for key, value in sorted(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
    }


async def test_the_text_is_what_prometheus_reads(tmp_path: Path) -> None:
    status = await status_of(tmp_path)
    text = exposition(StatusCollector(status), worker())
    values = samples(text)
    assert values["kvfs_store_objects"] == 1
    assert values["kvfs_nvme_trouble_bool"] == 0
    assert values["kvfs_nvme_used_bytes"] == status["tiers"][1]["used_bytes"]
    assert values["kvfs_scrub_verified_bytes_total"] == 20_000
    assert values["kvfs_s3_requests_total,operation=GetObject"] == 1
    assert text.count("# TYPE kvfs_store_hits_total counter\n") == 1
    status["tiers"][1]["trouble"] = "no space"
    assert samples(exposition(StatusCollector(status)))["kvfs_nvme_trouble_bool"] == 1
    del status["tiers"][1]
    assert "kvfs_nvme" not in exposition(StatusCollector(status))


def test_a_duration_is_in_the_buckets_that_it_does_not_exceed() -> None:
    latencies = Latencies()
    for duration_s in (0.0, *BOUNDS_S, 1000.0):
        latencies.observe("lookup", duration_s)
    values = samples(exposition(StatusCollector({"latencies": {"mount": latencies.status()}})))
    name = "kvfs_mount_operation_seconds"
    counts = [values[f"{name}_bucket,le={bound},operation=lookup"] for bound in (*BOUNDS_S, "+Inf")]
    assert counts == [*range(2, len(BOUNDS_S) + 2), len(BOUNDS_S) + 2]
    assert values[f"{name}_count,operation=lookup"] == len(BOUNDS_S) + 2
    assert values[f"{name}_sum,operation=lookup"] == sum(BOUNDS_S) + 1000


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
        del status["latencies"]
        assert {metric.path for metric in METRICS if metric.name in shown} >= set(numbers(status))
        assert "scrub" in run_kvfs("status", "--at", str(service.mount)).stdout
        assert run_kvfs("status", "--json", "--metrics", "--at", str(service.mount)).returncode == 2


def test_the_mount_and_sessions_count_what_was_asked(tmp_path: Path) -> None:
    need_mount()
    with Service() as service, connect(str(service.mount)) as client:
        for n in range(3):
            (service.mount / f"b{n}").mkdir()
        (service.mount / "b0" / "x").write_bytes(b"x")
        (service.mount / "b0" / "x").unlink()
        client.create_bucket("c")
        for _ in range(4):
            client.stat("b0")
        values = samples(exposition(StatusCollector(client.status())))
    mount, session = "kvfs_mount_operation_seconds", "kvfs_session_operation_seconds"
    assert values[f"{mount}_count,operation=mkdir"] == 3
    assert values[f"{mount}_count,operation=unlink"] == 1
    assert values[f"{session}_count,operation=bucket_create"] == 1
    assert values[f"{session}_count,operation=stat"] == 4
    for name in (f"{mount}_%s,operation=mkdir", f"{session}_%s,operation=stat"):
        assert 0 < values[name % "sum"] < 60
