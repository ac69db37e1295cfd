"""The figures of `kvfs bench`: each is measured in one place and named on a page; both sides of a query agree."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from bench import command, conductor, conductor_queries, fabric
from kvfs._native.cluster.index import MAX_SOURCES, ClusterIndex
from kvfs.errors import DeviceMissing
from scheduler.routing.prefix_index import PrefixIndex
from tests.support.pages import PAGES

BLOCKS = conductor_queries.TOKENS // conductor_queries.BLOCK_TOKENS


def test_each_figure_is_measured_in_one_place() -> None:
    measured = [
        *command.AT_DOORS,
        *command.OVER_NVME,
        *command.ON_DEVICE,
        *command.ALONE,
    ]
    assert Counter(measured) == Counter(command.NAMES)
    assert set(command.BASELINES) <= set(command.NAMES)


def test_pages_name_the_figures_of_the_conductor_and_the_proxy() -> None:
    text = "\n".join(page.read_text() for page in PAGES)
    figures = [name for name in command.NAMES if name.startswith(("conductor.", "proxy."))]
    assert [name for name in figures if name not in text] == []


def test_bytes_of_a_block_are_counted_with_all_the_sources_there_may_be() -> None:
    index = ClusterIndex(1 << 19)
    conductor.fill_tiers(index, 1 << 19)
    blocks = [index.source_blocks(source) for source in range(MAX_SOURCES)]
    assert len(index) == 1 << 19
    assert min(blocks) > 0
    assert sum(blocks) > 3 * len(index)
    assert index.size_bytes / len(index) <= 56


def test_ucx_is_measured_against_its_own_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DeviceMissing, match="ucx_perftest"):
        fabric.ucx_get_1m(0)


# --- queries ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", conductor_queries.CASES)
def test_both_indexes_answer_a_query_alike(name: str) -> None:
    kind, replicas = conductor_queries.CASES[name]
    holders = {"common": range(replicas), "disjoint": [0], "miss": [], "filtered": [0]}[kind]
    case = conductor_queries.case_of(kind, replicas)
    assert case.native() == case.python() == dict.fromkeys(holders, BLOCKS)
    assert len(case.index) == len(case.prefixes) == (BLOCKS * replicas if kind == "disjoint" else BLOCKS)


@pytest.mark.parametrize("seed", range(20))
def test_depths_of_runs_are_those_of_the_native_index(seed: int) -> None:
    draw = Random(seed)
    index, prefixes = ClusterIndex(1_000), PrefixIndex()
    numbers = [draw.getrandbits(128) for _ in range(32)]
    hashes = [number.to_bytes(16, "big") for number in numbers]
    for source in range(12):
        held = [n for n in range(draw.choice((0, 5, 20, 32))) if draw.random() < 0.97]
        index.add(source, b"".join(hashes[n] for n in held))
        for n in held:
            prefixes.add(numbers[n], source)
    mask = draw.getrandbits(12)
    wanted = {source: depth for source, depth in index.match(b"".join(hashes)) if mask >> source & 1}
    assert conductor_queries.depths_of(prefixes, numbers, mask) == wanted


def test_readers_beside_a_writer_all_read() -> None:
    case = conductor_queries.case_of("common", 8)
    times = conductor_queries.read_beside(case.native, lambda: None, 0.0)
    assert len(times) == conductor_queries.READERS
    result = conductor_queries.query_readers64(0.01)
    assert result.baseline is not None
    assert result.ratio == pytest.approx(result.baseline / result.value)
