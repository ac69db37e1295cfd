"""A snapshot as text for a terminal.

Responsibility: what is wrong, figures side by side and tables, within a width. Text from elsewhere is shown as it is:
neither rich's markup nor a terminal's control characters in it count. Concurrency: pure functions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import datetime
from typing import Final

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvfs.config.sizes import format_size
from kvfs.watch.panels import Cell, Figure, Panel, Snapshot, Unit

UNKNOWN: Final = "-"
_FILE_COLUMNS: Final = 200
"""The width where there is no terminal: no table of ours is wider, and none is folded."""


def print_frame(found: Snapshot) -> None:
    """Print a snapshot to its end."""
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _FILE_COLUMNS
    console.print(frame(found))


def frame(found: Snapshot, note: str = "") -> RenderableType:
    """Return a whole snapshot; `note` stands beside its name."""
    return Group(*_parts(found, note))


def _parts(found: Snapshot, note: str) -> Iterator[RenderableType]:
    since = f"figures of the last {found.window_s:.0f} s" if found.window_s else "figures since the start"
    yield Text(f"{plain(found.name)}  {text_of(found.at_s, 'time')}  {since}  {note}".rstrip(), style="bold")
    for problem in found.problems:
        yield Text(f"! {plain(problem)}", style="bold red")
    for panel in found.panels:
        yield from _panel(panel)


def _panel(panel: Panel) -> Iterator[RenderableType]:
    if not panel.figures and not panel.rows:
        return
    yield Text()
    if panel.figures:
        yield Text(panel.title, style="bold cyan")
        yield Columns([_figure(each) for each in panel.figures], padding=(0, 3), equal=True)
    if panel.rows:
        yield table(panel)


def _figure(figure: Figure) -> Text:
    return Text.assemble((f"{plain(figure.title)} ", "dim"), text_of(figure.value, figure.unit))


def table(panel: Panel) -> Table:
    """Return the rows of a panel as a table."""
    made = Table(
        title=None if panel.figures else Text(panel.title, style="bold cyan"),
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
        header_style="dim",
    )
    for at, column in enumerate(panel.columns):
        is_number = any(isinstance(row[at], int | float) for row in panel.rows)
        made.add_column(Text(column.title), justify="right" if is_number else "left", overflow="fold")
    for row in panel.rows:
        made.add_row(
            *(Text(text_of(cell, column.unit)) for cell, column in zip(row, panel.columns, strict=True))
        )
    return made


def text_of(value: Cell, unit: Unit = "") -> str:
    """Return the text of a value."""
    if value is None:
        return UNKNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return plain(value)
    match unit:
        case "bytes":
            return format_size(int(value))
        case "s":
            return _seconds_text(value)
        case "share":
            return f"{value:.1%}"
        case "per_s":
            return f"{value:.2f}/s" if value < 10 else f"{value:,.0f}/s"
        case "time":
            return datetime.fromtimestamp(value).strftime("%H:%M:%S")
    return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}"


def _seconds_text(value: float) -> str:
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= factor:
            return f"{value / factor:.4g} {unit}"
    return "0 s" if value == 0 else f"{value * 1e6:.3g} us"


def plain(text: str) -> str:
    """Return a text with its control characters as escapes, which a terminal does not obey."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
