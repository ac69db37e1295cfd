"""`kvfs bench`, `simulate`, `plan` and `replay`: the commands that need no running service.

Responsibility: arguments in, one call of `scheduler.reports` or of the checkout's `bench`; errors are those of
`kvfs.cli.main`. Concurrency: none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvfs.cli import lazy
from kvfs.cli.options import Json, options_of
from kvfs.errors import InvalidRequest
from scheduler.reports.command import PlanOptions, SimulateOptions, run_plan, run_simulate
from scheduler.reports.replay_command import run

app = typer.Typer()


@app.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
)
def bench(context: typer.Context) -> None:
    """Measure this machine's doors against its memory; `kvfs bench --help` shows the options."""
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / "bench" / "__init__.py").exists():
        raise InvalidRequest(
            "bench: the measurements are in the source checkout (folder bench/), not in an installed kvfs"
        )
    lazy.load_from(checkout, "bench.command").run_command(context.args)


@app.command()
@options_of(SimulateOptions)
def simulate(options: SimulateOptions) -> None:
    """Replay a request trace over simulated instances, with the scheduler's own policies deciding."""
    run_simulate(options)


@app.command()
@options_of(PlanOptions)
def plan(options: PlanOptions) -> None:
    """Say whether keeping and moving KV cache pays for a request trace, and what it takes."""
    run_plan(options)


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="A request trace, .jsonl or .jsonl.zst.")],
    policy: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="lru-leaf, s3-fifo, arc, min or default; all.")
    ] = None,
    capacity: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZE", help="Blocks, or a share of the footprint such as 5%; comma-separated."),
    ] = None,
    measure_from: Annotated[float, typer.Option(help="Count hits from this share of the requests on.")] = 0.0,
    as_json: Json = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the curves: .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Show what eviction policies would have hit of a request trace; needs no service."""
    run(
        trace,
        policies=policy or [],
        capacities=capacity or [],
        measure_from=measure_from,
        as_json=as_json,
        plot_file=plot,
    )
