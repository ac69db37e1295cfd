"""Grafana's boards: every metric and label that they query exists, and Grafana can load them."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.app.metrics import Connections, Counters, WorkerCollector
from kvfs.system.latencies import Latencies
from kvfs.system.metrics import StatusCollector, exposition
from scheduler.conductor.door.conductor_metrics import ConductorCollector
from scheduler.conductor.values import Refused, RouteRequest, Usage
from tests.cli.test_metrics import status_of
from tests.support.conductors import Clock, conductor, hears, instance, routed, tokens
from tests.support.service import ROOT

BOARDS: Final = sorted((ROOT / "packaging" / "grafana").glob("*.json"))
OF_THE_SCRAPE: Final = {"job", "instance", "exported_instance"}
"""Labels that Prometheus gives: an `instance` of ours becomes `exported_instance`."""
COLUMNS: Final = 24
Samples = dict[str, set[str]]
"""The labels of each name that may be queried."""


def board_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def samples(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


async def of_a_store(where: Path) -> Samples:
    latencies = Latencies()
    latencies.observe("read", 0.1)
    status = await status_of(where / "store") | {
        "latencies": {"session": latencies.status(), "mount": latencies.status()}
    }
    counters = Counters(Counter(GetObject=1), Counter(NoSuchKey=1), latencies)
    worker = WorkerCollector(counters, lambda: Connections(1, 2, 3, 4, 5, True))
    return samples(exposition(StatusCollector(status), worker))


def of_a_conductor() -> Samples:
    made = conductor(Clock(), instance("a"))
    prompt = tokens(1, 100)
    hears(made, "engine-a", prompt)
    id = routed(made, prompt).id
    made.first_token(id)
    made.done(id, Usage(cached_tokens=1, output_tokens=5))
    made.registry.has_topic("stranger")
    made.registry.drain("a", draining=True)
    assert isinstance(made.route(RouteRequest(model="m", tokens=prompt)), Refused)
    latencies = Latencies()
    latencies.observe("route", 0.1)
    collector = ConductorCollector(made.status(), Counter(route=1), Counter(NotFound=1), latencies.status())
    return samples(exposition(collector))


def queries(board: dict[str, Any]) -> list[str]:
    return [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
async def test_every_metric_and_label_exists(path: Path, tmp_path: Path) -> None:
    there = await of_a_store(tmp_path) if path.stem == "kvfs-store" else of_a_conductor()
    board = board_of(path)
    asked = queries(board)
    assert len(asked) > 20
    probes = [each["definition"] for each in board["templating"]["list"] if "definition" in each]
    for expression in asked + probes:
        names = re.findall(r"\bkvfs_\w+", expression)
        assert names, expression
        for name in names:
            assert name in there, expression
        labels = set(re.findall(r"[{,](\w+)[=!]", expression))
        for group in re.findall(r"by \(([^)]*)\)", expression):
            labels |= set(group.split(", "))
        for label in labels - OF_THE_SCRAPE:
            assert any(label in there[name] for name in names), (label, expression)


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_it_has_what_grafana_needs(path: Path) -> None:
    board = board_of(path)
    assert board["id"] is None, "a number would be that of another board"
    assert board["uid"] == path.stem
    assert 8 <= len(board["uid"]) <= 40
    for name, kind in {
        "title": str,
        "schemaVersion": int,
        "version": int,
        "time": dict,
        "templating": dict,
        "annotations": dict,
        "panels": list,
    }.items():
        assert isinstance(board[name], kind), name
    assert [each["name"] for each in board["templating"]["list"]] == ["datasource", "job", "instance"]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in board["panels"]:
        assert panel["title"]
        if panel["type"] == "row":
            continue
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["fieldConfig"]["defaults"]["unit"]
        references = [target["refId"] for target in panel["targets"]]
        assert references
        assert len(set(references)) == len(references)
        assert all(target["expr"] and target["legendFormat"] for target in panel["targets"])
        assert all(count["expr"].count("(") == count["expr"].count(")") for count in panel["targets"])


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_no_panel_lies_on_another_or_outside(path: Path) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in board_of(path)["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= COLUMNS
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_there_is_a_board_for_both() -> None:
    assert [path.stem for path in BOARDS] == ["kvfs-conductor", "kvfs-store"]
