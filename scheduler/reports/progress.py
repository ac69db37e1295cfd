"""A bar on a terminal's stderr for commands that take long; elsewhere nothing.

Responsibility: names of steps and their progress, as a bar that is gone afterwards. Concurrency: none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import TextColumn, TimeElapsedColumn

from scheduler.simulation.traces import Progress, Steps


@contextmanager
def progress_bar() -> Iterator[Steps]:
    """Show a bar; yield a function that begins a step by its name and returns the step's Progress."""
    columns = (*Bar.get_default_columns()[1:], TimeElapsedColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    with Bar(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("", total=None)

        def start(what: str) -> Progress:
            bar.update(task, description=what, completed=0, refresh=True)
            return lambda done, total: bar.update(task, completed=done, total=total)

        yield start
