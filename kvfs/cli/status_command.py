"""`kvfs status`: what runs, as a page, as JSON or for Prometheus.

Responsibility: one call of `kvfs.client`, text out; errors are those of `kvfs.cli.main`. `--json`, which scripts call
often, loads neither rich nor prometheus_client. Concurrency: none.
"""

from __future__ import annotations

from typing import Annotated

import typer

from kvfs.cli import lazy
from kvfs.cli.options import At, Json, connected
from kvfs.cli.output import print_json

app = typer.Typer()


@app.command()
def status(
    at: At = None,
    as_json: Json = False,
    as_metrics: Annotated[bool, typer.Option("--metrics", help="Print Prometheus metrics instead.")] = False,
) -> None:
    """Show what runs, how full it is and what it has done."""
    if as_json and as_metrics:
        raise typer.BadParameter("give either --json or --metrics")
    with connected(at) as client:
        found = client.status()
    if as_json:
        print_json(found)
    elif as_metrics:
        metrics = lazy.load("kvfs.system.metrics")
        print(metrics.exposition(metrics.StatusCollector(found)), end="")
    else:
        lazy.load("kvfs.cli.status_page").status_page(found)
