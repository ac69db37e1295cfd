"""What a page and a terminal show of a running kvfs: figures and tables, of one form for a store and a Conductor.

Responsibility: values and their JSON. Text in them may come from anywhere: who shows it escapes it.
Concurrency: none; values never change.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from kvfs.limits import MAX_PROBLEMS

Unit = Literal["", "bytes", "s", "share", "per_s", "time"]
"""`share`: of 1; `time`: seconds of the calendar."""
Cell = bool | int | float | str | None
Row = tuple[Cell, ...]


class Column(msgspec.Struct, frozen=True, omit_defaults=True):
    """One column of a table: its title, and the unit of its values."""

    title: str
    unit: Unit = ""


class Figure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One number with its name."""

    title: str
    value: Cell
    unit: Unit = ""
    charted: bool = False
    """Whether its course is worth a chart."""


class Panel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Figures, a table, or both, under a title that no other panel has."""

    title: str
    note: str = ""
    figures: tuple[Figure, ...] = ()
    columns: tuple[Column, ...] = ()
    rows: tuple[Row, ...] = ()


class Snapshot(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """All that is shown at one moment."""

    kind: Literal["store", "conductor"]
    name: str
    """What is shown: a data directory, or the service."""
    process: str = ""
    """Differs after a restart; empty where nobody follows."""
    at_s: float
    """Seconds of the calendar."""
    window_s: float
    """What rates, shares and quantiles are about: so many seconds before this moment; 0: since the start."""
    problems: tuple[str, ...] = ()
    """What needs somebody's attention."""
    panels: tuple[Panel, ...] = ()
    decisions: Panel | None = None
    """Decisions that are new or changed since the last event; the first cell of a row is its id."""


def first_problems(found: Iterable[str]) -> tuple[str, ...]:
    """Return the first problems, and how many more there are."""
    named = tuple(found)
    more = len(named) - MAX_PROBLEMS
    return named if more <= 0 else (*named[:MAX_PROBLEMS], f"and {more} more")
