"""A store as figures and tables: from a real store's status, and at a gateway's admin port."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs.client import connect
from kvfs.watch.panels import Panel, Snapshot
from kvfs.watch.store_panels import store_snapshot, unreachable_store
from kvfs.watch.window import Window
from tests.cli.test_metrics import status_of
from tests.support.gateway import Gateway, gateway
from tests.support.watching import page_url


def cells(panel: Panel, key: str) -> dict[str, Any]:
    """Return the cells of a row by the titles of their columns."""
    [row] = [row for row in panel.rows if row[0] == key]
    return dict(zip((column.title for column in panel.columns), row, strict=True))


def panel(found: Snapshot, title: str) -> Panel:
    [one] = [each for each in found.panels if each.title == title]
    return one


async def test_a_stores_tiers_rates_and_troubles(tmp_path: Path) -> None:
    status = await status_of(tmp_path / "store")
    window = Window()
    window.begin(0)
    first = store_snapshot(status, window, 0)
    assert first.problems == ()
    nvme = cells(panel(first, "Tiers"), "nvme")
    assert (nvme["used"], nvme["of"]) == (
        status["tiers"][1]["used_bytes"],
        status["tiers"][1]["capacity_bytes"],
    )
    assert nvme["full"] == pytest.approx(nvme["used"] / nvme["of"])
    status |= {
        "hits": status["hits"] + 30,
        "misses": status["misses"] + 10,
        "promotions": status["promotions"] + 4,
    }
    status["tiers"][1] |= {"reads": status["tiers"][1]["reads"] + 4, "trouble": "no space", "corrupt": 2}
    status["tiers"][2] |= {"is_up": False, "trouble": "<timeout>"}
    status["scrub"]["damaged_slots"] = 3
    window.begin(2)
    then = store_snapshot(status, window, 2)
    figures = {each.title: each.value for each in panel(then, "Lookups").figures}
    assert (figures["Hit ratio"], figures["Hits"], figures["Misses"], figures["Promotions"]) == (
        0.75,
        15,
        5,
        2,
    )
    assert cells(panel(then, "Tiers"), "dram")["rate"] == 13
    assert cells(panel(then, "Tiers"), "nvme")["rate"] == 2
    assert then.problems == (
        "nvme: no space",
        "nvme: 2 extents that did not match their checksums",
        "cold: <timeout>",
        "the scrub found 3 damaged extents and slots",
    )


async def test_after_a_silence_rates_are_of_what_came_since(tmp_path: Path) -> None:
    status = await status_of(tmp_path / "store")
    window = Window()
    for second, found in enumerate((status, None, status, status)):
        window.begin(second)
        if found is None:
            assert unreachable_store("gone", window, second).problems == ("gone",)
            continue
        shown = store_snapshot(found, window, second)
        assert all(not each.value for each in panel(shown, "Lookups").figures if each.unit == "per_s")
    assert shown.window_s == 1


@pytest.fixture(scope="module")
def door() -> Iterator[Gateway]:
    with gateway(mode="off", settings='admin = "127.0.0.1:0"') as door:
        yield door


def panels_of(door: Gateway) -> dict[str, Any]:
    with urllib.request.urlopen(page_url(door) + "v1/panels") as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


def test_the_admin_port_has_the_doors_and_says_where_it_is(door: Gateway) -> None:
    s3 = door.client()
    s3.create_bucket(Bucket="panels")
    s3.put_object(Bucket="panels", Key="x", Body=b"x")
    with connect(door.service.data) as client:
        client.stat("panels/x")
    found = panels_of(door)
    assert (found["kind"], found["name"], found.get("process", "")) == ("store", str(door.service.data), "")
    [doors] = [each for each in found["panels"] if each["title"] == "Doors"]
    shown = {(row[0], row[1]): row[3] for row in doors["rows"]}
    assert shown["S3", "CreateBucket"] == 1
    assert shown["session", "stat"] >= 1
    assert {each["title"] for each in found["panels"]} >= {"Tiers", "Lookups", "Store", "S3 errors"}


def test_a_service_that_does_not_answer_is_shown_as_one(door: Gateway) -> None:
    with urllib.request.urlopen(page_url(door) + "v1/panels") as answer:
        assert answer.headers["Content-Type"] == "application/json"
    with door.service.paused():
        assert panels_of(door)["problems"] == ["the service does not answer within 2 s"]
