"""`kvfs status` and `kvfs cluster status`: what runs, as a page, as JSON or for Prometheus.

Responsibility: one call of `kvfs.client`, text out; errors are those of `kvfs.cli.main`. `--json`, which scripts call
often, loads neither rich nor prometheus_client. Concurrency: none.
"""

from __future__ import annotations

from typing import Annotated

import typer

from kvfs.cli import lazy
from kvfs.cli.options import At, Json, connected
from kvfs.cli.output import print_json
from kvfs.errors import Unsupported

app = typer.Typer()
cluster = typer.Typer(
    help="Show the machines that blocks are read from, and what was read.", no_args_is_help=True
)
app.add_typer(cluster, name="cluster")


@cluster.callback()
def _cluster() -> None:
    pass


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


@cluster.command("status")
def cluster_status(at: At = None, as_json: Json = False) -> None:
    """Show each peer, whether it is asked now, and what was read from it."""
    with connected(at) as client:
        found = client.status().get("cluster")
    if found is None:
        raise Unsupported("this service has no [cluster]")
    if as_json:
        print_json(found)
    else:
        lazy.load("kvfs.cli.status_page").cluster_page(found)
