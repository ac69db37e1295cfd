"""`kvfs simulate` and `kvfs plan`: read a trace, run, print.

Responsibility: from the command line's texts to options, and from results to text or JSON. Exit codes are
those of `kvfs.cli.main`.

Concurrency: none.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from kvfs.config.sizes import format_size, parse_duration, parse_rate, parse_size
from kvfs.errors import ConfigError
from scheduler.reports.option_texts import parse_failures, parse_tiers
from scheduler.reports.plots import check_plot, plot_plan, plot_result
from scheduler.reports.progress import progress_bar
from scheduler.routing.admission import Mode, Slo
from scheduler.routing.cost import CostModel, table_costs
from scheduler.routing.queues import Discipline
from scheduler.routing.roles import Rules
from scheduler.simulation.options import Options
from scheduler.simulation.plan import Plan, Reuse, Site, plan
from scheduler.simulation.results import finite
from scheduler.simulation.simulate import simulate
from scheduler.simulation.traces import read_trace

E = TypeVar("E", bound=Enum)
V = TypeVar("V")


# --- options -----------------------------------------------------------------------------------------------
TraceFile = Annotated[Path, typer.Argument(metavar="TRACE", help="A .jsonl or .jsonl.zst request trace.")]
TtftSlo = Annotated[
    str | None, typer.Option(metavar="TIME", help='Longest time to the first token, such as "30s".')
]
TbtSlo = Annotated[
    str | None, typer.Option(metavar="TIME", help='Longest time between tokens, such as "60ms".')
]
DecodeFactor = Annotated[float, typer.Option(help="Decode steps take this many times as long.")]
ModelName = Annotated[str, typer.Option(help="A model of the cost table.")]
DeviceName = Annotated[str, typer.Option(help="A device of the cost table.")]
Devices = Annotated[int, typer.Option(help="Devices of an instance.")]
Network = Annotated[str, typer.Option(metavar="RATE", help='What a node sends, such as "100Gbit".')]
PlotFile = Annotated[
    Path | None, typer.Option("--plot", metavar="FILE", help="Plot to FILE (.png, .svg, .pdf).")
]


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """The options of `kvfs simulate`, as texts."""

    trace: TraceFile
    policy: Annotated[
        str,
        typer.Option(
            help="default, kvcache-centric, local, longest-prefix, least-queued, round-robin or random."
        ),
    ] = "default"
    queue: Annotated[str, typer.Option(help="fcfs or length-aware.")] = "fcfs"
    admission: Annotated[str, typer.Option(help="none, early or default.")] = "none"
    prefill: Annotated[int, typer.Option(help="Prefill instances.")] = 8
    decode: Annotated[int, typer.Option(help="Decode instances; 0 leaves decoding out.")] = 8
    speed: Annotated[float, typer.Option(help="Arrivals this many times as fast.")] = 1.0
    ttft_slo: TtftSlo = "30s"
    tbt_slo: TbtSlo = None
    decode_factor: DecodeFactor = 1.0
    cache_blocks: Annotated[int, typer.Option(help="DRAM cache of a prefill instance, in blocks.")] = 5859
    model: ModelName = "llama3-70b"
    device: DeviceName = "a800-80g"
    devices: Devices = 8
    network: Network = "87GB/s"
    fitted: Annotated[
        bool, typer.Option("--fitted", help="Policies learn the costs instead of knowing them.")
    ] = False
    coupled: Annotated[
        bool,
        typer.Option("--coupled", help="The prefill instances decode as well; --decode counts for nothing."),
    ] = False
    chunk: Annotated[
        int,
        typer.Option(metavar="TOKENS", help="Prompts beside batches go in such chunks; 0 for whole ones."),
    ] = 0
    handover: Annotated[
        str | None,
        typer.Option(
            metavar="RATE", help="Decode instances read a prompt's cache at this rate once it is made."
        ),
    ] = None
    relabel: Annotated[
        bool, typer.Option("--relabel", help="Instances change their roles with the load.")
    ] = False
    replicate: Annotated[bool, typer.Option("--replicate", help="Hot blocks are copied ahead of demand.")] = (
        False
    )
    group: Annotated[int, typer.Option(help="The most instances that prefill one prompt in a pipeline.")] = 1
    relay: Annotated[
        bool, typer.Option("--relay", help="A prompt may begin on one instance and go on at another.")
    ] = False
    tiers: Annotated[
        str,
        typer.Option(
            metavar="TIERS",
            help="Below DRAM, as NAME:BLOCKS:RATE[:LATENCY[:DEPTH]],...; cold is one for all nodes.",
        ),
    ] = ""
    failures: Annotated[
        str, typer.Option(metavar="FAILURES", help="As prefill:NUMBER:AT:DOWN,... or decode:...")
    ] = ""
    seed: Annotated[int, typer.Option(help="Of the random policy.")] = 0
    plot: PlotFile = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options of `kvfs plan`, as texts."""

    trace: TraceFile
    model: ModelName = "llama3-70b"
    device: DeviceName = "a800-80g"
    devices: Devices = 8
    instances: Annotated[int, typer.Option(help="Instances in all, for prefill and decode.")] = 16
    dram: Annotated[str, typer.Option(metavar="SIZE", help="DRAM for blocks, per instance.")] = "480GiB"
    nvme: Annotated[str, typer.Option(metavar="SIZE", help="NVMe for blocks, per instance.")] = "0"
    network: Network = "87GB/s"
    speed: Annotated[float, typer.Option(help="Arrivals this many times as fast.")] = 1.0
    ttft_slo: TtftSlo = "30s"
    tbt_slo: TbtSlo = "100ms"
    decode_factor: DecodeFactor = 1.0
    plot: PlotFile = None
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False


# --- simulate --------------------------------------------------------------------------------------------
def run_simulate(given: SimulateOptions) -> None:
    """Replay a trace and print the figures. Raises KvfsError, OSError."""
    options = _simulation(given)
    options.check()
    check_plot(given.plot)
    with progress_bar() as start:
        requests = read_trace(given.trace, progress=start(f"read {given.trace.name}"))
        result = simulate(requests, options, progress=start("simulate"))
    if given.plot is not None:
        plot_result(result, given.plot)
    figures = result.figures()
    if given.as_json:
        print(json.dumps(figures, indent=2))
    else:
        _print_figures(figures)


def _simulation(given: SimulateOptions) -> Options:
    return Options(
        policy=given.policy,
        discipline=_choice(Discipline, "--queue", given.queue),
        admission=_choice(Mode, "--admission", given.admission),
        prefill=given.prefill,
        decode=0 if given.coupled else given.decode,
        speed=given.speed,
        slo=_slo(given.ttft_slo, given.tbt_slo),
        decode_factor=given.decode_factor,
        cache_blocks=given.cache_blocks,
        costs=_costs(given),
        fitted=given.fitted,
        seed=given.seed,
        coupled=given.coupled,
        chunk_tokens=given.chunk,
        handover_bytes_s=float("inf")
        if given.handover is None
        else _parsed("--handover", parse_rate, given.handover),
        relabels=Rules() if given.relabel else None,
        replicates=given.replicate,
        group=given.group,
        relay=given.relay,
        tiers=parse_tiers(given.tiers),
        failures=parse_failures(given.failures),
    )


def _print_figures(figures: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in figures.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console().print(table)


# --- plan ------------------------------------------------------------------------------------------------
def run_plan(given: PlanOptions) -> None:
    """Print whether cache logistics pay for a trace. Raises KvfsError, OSError."""
    site = _site(given)
    site.check()
    check_plot(given.plot)
    with progress_bar() as start:
        requests = read_trace(given.trace, progress=start(f"read {given.trace.name}"))
        found = plan(requests, site, start=start)
    if given.plot is not None:
        plot_plan(found, site.block_bytes, given.plot)
    if given.as_json:
        best = None if found.best is None else asdict(found.best)
        speed_bytes_s = finite(found.break_even_bytes_s)
        print(json.dumps({**asdict(found), "break_even_bytes_s": speed_bytes_s, "best": best}, indent=2))
    else:
        print(page(found, site, given.model, given.device, given.devices))


def _site(given: PlanOptions) -> Site:
    return Site(
        costs=_costs(given).slowed_decode(given.decode_factor),
        instances=given.instances,
        dram_bytes=_parsed("--dram", parse_size, given.dram),
        nvme_bytes=_parsed("--nvme", parse_size, given.nvme),
        slo=_slo(given.ttft_slo, given.tbt_slo),
        speed=given.speed,
    )


def page(found: Plan, site: Site, model: str, device: str, devices: int) -> str:
    """Render a plan as text."""
    network = site.costs.network_bytes_s
    lines = [
        f"{found.requests} requests in {found.duration_s:.0f} s; {model} on {site.instances} instances "
        f"of {devices} x {device}.",
        "",
        f"Without a cache their prefill takes {found.prefill_s:.0f} instance-seconds "
        f"({found.prefill_s / max(found.duration_s, 1):.1f} instances busy all the time).",
        *_reuse_lines(found),
        "",
        f"Recomputing is faster than loading below {_rate(found.break_even_bytes_s)} on average, and below "
        f"{_rate(found.break_even_first_bytes_s)} for the first block of a prompt. The network has "
        f"{_rate(network)} per node, {network / found.break_even_bytes_s:.1f} times the first figure.",
        "",
        *_split_lines(found),
        "",
        _verdict(found, network),
    ]
    return "\n".join(lines)


def _reuse_lines(found: Plan) -> list[str]:
    rows = (("DRAM", found.dram), ("DRAM and NVMe", found.both), ("unlimited", found.unlimited))
    lines = [
        "",
        f"{'pooled cache':>14} {'blocks':>9} {'hits':>6} {'prefill saved':>14} {'to move, mean':>14} {'peak':>12}",
    ]
    for name, reuse in rows:
        blocks = "all" if reuse is found.unlimited else str(reuse.capacity_blocks)
        lines.append(
            f"{name:>14} {blocks:>9} {reuse.hit_ratio:>6.1%} {_share(reuse, found):>14} "
            f"{_rate(reuse.mean_bytes_s):>14} {_rate(reuse.peak_bytes_s):>12}"
        )
    return lines


def _share(reuse: Reuse, found: Plan) -> str:
    return f"{reuse.saved_s:.0f} s ({reuse.saved_s / found.prefill_s:.0%})"


def _split_lines(found: Plan) -> list[str]:
    best = found.best
    if best is None:
        return ["One instance alone cannot be split into prefill and decode."]
    lines = [f"{'split':>9} {'in time':>8} {'rejected':>9} {'TTFT mean':>10} {'P90':>8} {'TBT P90':>9}"]
    for split in found.splits:
        figures = split.figures
        lines.append(
            f"{split.prefill:>4}P+{split.decode}D".rjust(9)
            + f" {figures['slo_attainment']:>8.1%} {figures['rejected']:>9} {figures['ttft_mean_s']:>8.2f} s "
            f"{figures['ttft_p90_s']:>6.2f} s {figures['tbt_p90_s'] * 1000:>6.1f} ms"
        )
    lines.append(f"The best split of these is {best.prefill} for prefill and {best.decode} for decode.")
    return lines


def _verdict(found: Plan, network_bytes_s: float) -> str:
    saved = found.both.saved_s / found.prefill_s
    if found.unlimited.saved_s <= 0 or saved < 0.02:
        return "Cache logistics do not pay here: hardly any prefill would be saved."
    if network_bytes_s < found.break_even_bytes_s:
        return (
            "A cache on each instance pays, sharing it over this network does not: recomputing is faster "
            "than loading."
        )
    return (
        f"Cache logistics pay: {saved:.0%} of the prefill is saved, the work of "
        f"{found.both.saved_s / max(found.duration_s, 1):.1f} instances, and loading is "
        f"{network_bytes_s / found.break_even_bytes_s:.0f} times as fast as recomputing."
    )


def _rate(bytes_s: float) -> str:
    return f"{format_size(int(bytes_s))}/s" if bytes_s < float("inf") else "any speed"


# --- arguments -------------------------------------------------------------------------------------------
def _slo(ttft: str | None, tbt: str | None) -> Slo:
    unlimited = float("inf")
    return Slo(
        ttft_s=unlimited if ttft is None else _parsed("--ttft-slo", parse_duration, ttft),
        tbt_s=unlimited if tbt is None else _parsed("--tbt-slo", _parse_tbt, tbt),
    )


def _parse_tbt(text: str) -> float:
    """Parse a time; a number alone is in seconds below 1 and in milliseconds from there on: nobody waits 1 s for a
    token."""
    seconds = parse_duration(text)
    return seconds / 1000 if text.strip()[-1].isdigit() and seconds >= 1 else seconds


def _costs(given: SimulateOptions | PlanOptions) -> CostModel:
    network_bytes_s = _parsed("--network", parse_rate, given.network)
    return table_costs(given.model, given.device, devices=given.devices, network_bytes_s=network_bytes_s)


def _parsed(option: str, parse: Callable[[str], V], text: str) -> V:
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{option} {text}: {error}") from None


def _choice(kind: type[E], option: str, text: str) -> E:
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{option} {text}: there are {', '.join(one.value for one in kind)}") from None
