"""What one gateway process adds to the figures of its store: S3 operations beside the other doors', and connections.

Concurrency: pure functions but for the window, which they note counters in.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from gateway.app.metrics import Connections, Counters
from kvfs.watch.panels import Column, Figure, Panel, Row, Snapshot
from kvfs.watch.store_panels import DOOR_COLUMNS, door_rows
from kvfs.watch.window import Window


def with_worker(found: Snapshot, counters: Counters, now: Connections, window: Window) -> Snapshot:
    """Return a store's snapshot with what this process counts. REQUIRES a sample of the window that was begun."""
    rows = tuple(_rows(counters, window))
    panels = [
        msgspec.structs.replace(panel, rows=(*panel.rows, *rows)) if panel.columns == DOOR_COLUMNS else panel
        for panel in found.panels
    ]
    return msgspec.structs.replace(found, panels=(*panels, _errors(counters, window), _worker(now)))


def _rows(counters: Counters, window: Window) -> Iterator[Row]:
    yield from door_rows("S3", counters.latencies.status(), window)
    reads = counters.front_reads
    if reads:
        yield "S3", "GetObject, without Python", window.rate("reads without Python", reads), reads, None, None


def _errors(counters: Counters, window: Window) -> Panel:
    return Panel(
        title="S3 errors",
        columns=(Column("code"), Column("rate", "per_s"), Column("so far")),
        rows=tuple(
            (code, window.rate(f"error {code}", count), count)
            for code, count in sorted(counters.errors.items())
        ),
    )


def _worker(now: Connections) -> Panel:
    return Panel(
        title="Gateway process",
        figures=(
            Figure(title="Open connections", value=now.open, charted=True),
            Figure(title="Accepted", value=now.accepted),
            Figure(title="Closed for new ones", value=now.closed_silent),
            Figure(title="Refused", value=now.refused),
            Figure(title="Slow bodies ended", value=now.bodies_given_up),
        ),
    )
