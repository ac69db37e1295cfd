"""A store's status as figures and tables.

Responsibility: what `kvfs status --json` has, as a `Snapshot`: fill and reads of each tier, lookups, latencies of each
door, counts, and what is wrong. Concurrency: pure functions but for the window, which they note counters in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kvfs.watch.panels import Column, Figure, Panel, Row, Snapshot, first_problems
from kvfs.watch.window import Window

_RATES: Final = {
    "seals": "Seals",
    "removals": "Removals",
    "promotions": "Promotions",
    "demotions": "Demotions",
    "evictions": "Evictions",
}
_COUNTS: Final = {
    "objects": "Objects",
    "blocks": "Blocks",
    "buckets": "Buckets",
    "sessions": "Sessions",
    "sessions_cut_off": "Sessions cut off",
    "session_drafts": "Drafts of sessions",
    "open_drafts": "Open drafts",
    "unverified": "Not yet verified",
}
_READS: Final = {"nvme": "reads", "cold": "fetches"}
"""The counter of a tier's reads; DRAM's are the hits that no lower tier answered."""
_WRONG: Final = {
    "corrupt": "extents that did not match their checksums",
    "bad_segments": "segments that the device failed",
    "write_errors": "writes that the device refused",
    "lost": "objects that somebody else deleted",
}
"""Counters of a tier of which each count is a problem."""
DOOR_COLUMNS: Final = (
    Column("door"),
    Column("operation"),
    Column("rate", "per_s"),
    Column("so far"),
    Column("median", "s"),
    Column("99 %", "s"),
)


def store_snapshot(status: Mapping[str, Any], window: Window, at_s: float) -> Snapshot:
    """Return what is shown of a store, from its status. REQUIRES a sample of the window that was begun."""
    doors = tuple(
        row for door, found in status.get("latencies", {}).items() for row in door_rows(door, found, window)
    )
    return Snapshot(
        kind="store",
        name=str(status["data_dir"]),
        at_s=at_s,
        window_s=window.seconds,
        problems=first_problems(store_problems(status)),
        panels=(
            _lookups(status, window),
            _tiers(status, window),
            _counts(status),
            Panel(title="Doors", columns=DOOR_COLUMNS, rows=doors),
        ),
    )


def unreachable_store(problem: str, window: Window, at_s: float) -> Snapshot:
    """Return what is shown of a store that does not answer; the window begins anew."""
    window.clear()
    return Snapshot(kind="store", name="kvfs", at_s=at_s, window_s=0.0, problems=(problem,))


def door_rows(door: str, latencies: Mapping[str, Any], window: Window) -> Iterator[Row]:
    """Yield a row of DOOR_COLUMNS for each operation of a door, from `Latencies.status`."""
    for operation, found in latencies.items():
        count, median_s, most_s = window.histogram(f"{door} {operation}", found)
        rate = count / window.seconds if window.seconds else None
        yield door, operation, rate, sum(found["buckets"].values()), median_s, most_s


def _lookups(status: Mapping[str, Any], window: Window) -> Panel:
    ratio = window.share("hits", status["hits"], status["misses"])
    return Panel(
        title="Lookups",
        figures=(
            Figure(title="Hit ratio", value=ratio, unit="share", charted=True),
            _rate("Hits", "hits", status, window),
            _rate("Misses", "misses", status, window),
            *(_rate(title, key, status, window) for key, title in _RATES.items()),
        ),
    )


def _rate(title: str, key: str, status: Mapping[str, Any], window: Window) -> Figure:
    """Return a counter's growth in a second; before that is known, the counter."""
    rate = window.rate(f"rate of {key}", status[key])
    if rate is None:
        return Figure(title=title, value=status[key])
    return Figure(title=title, value=rate, unit="per_s", charted=True)


def _tiers(status: Mapping[str, Any], window: Window) -> Panel:
    lower = status["promotions"] + status["read_around"]
    rows: list[Row] = []
    for tier in status["tiers"]:
        name, capacity = tier["name"], tier["capacity_bytes"]
        reads = tier[_READS[name]] if name in _READS else max(status["hits"] - lower, 0)
        rows.append(
            (
                name,
                tier["backing"],
                tier["used_bytes"],
                capacity,
                tier["used_bytes"] / capacity if capacity else None,
                tier.get("slots", tier.get("objects")),
                reads,
                window.rate(f"reads of {name}", reads),
            )
        )
    return Panel(
        title="Tiers",
        note="Reads of DRAM are the hits that needed no lower tier; of the others, what was read there.",
        columns=(
            Column("tier"),
            Column("on"),
            Column("used", "bytes"),
            Column("of", "bytes"),
            Column("full", "share"),
            Column("objects"),
            Column("reads"),
            Column("rate", "per_s"),
        ),
        rows=tuple(rows),
    )


def _counts(status: Mapping[str, Any]) -> Panel:
    return Panel(
        title="Store",
        figures=tuple(Figure(title=title, value=status.get(key)) for key, title in _COUNTS.items()),
    )


def store_problems(status: Mapping[str, Any]) -> Iterator[str]:
    """Yield what needs somebody's attention."""
    for tier in status["tiers"]:
        yield from _tier_problems(tier)
    scrub = status.get("scrub", {})
    damaged = sum(scrub.get(key, 0) for key in ("damaged_extents", "damaged_slots", "unreadable"))
    if damaged:
        yield f"the scrub found {damaged} damaged extents and slots"
    missing: Sequence[str] = (status.get("mount") or {}).get("missing", ())
    yield from (f"missing: {lack}" for lack in missing)


def _tier_problems(tier: Mapping[str, Any]) -> Iterator[str]:
    name = tier["name"]
    if tier.get("trouble"):
        yield f"{name}: {tier['trouble']}"
    elif tier.get("is_up") is False:
        yield f"{name}: the endpoint does not answer"
    for key, text in _WRONG.items():
        if tier.get(key):
            yield f"{name}: {tier[key]} {text}"
