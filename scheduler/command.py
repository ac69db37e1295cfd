"""`kvfs simulate` and `kvfs plan`: read a trace, run, print.

Responsibility: from the command line's texts to options, and from results to text or JSON. A progress bar goes to
stderr where that is a terminal. Exit codes are those of `kvfs.cli`.

Concurrency: none.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from kvfs.errors import ConfigError
from kvfs.sizes import format_size, parse_duration, parse_rate, parse_size
from scheduler.admission import Mode, Slo
from scheduler.cost import table_costs
from scheduler.plan import Plan, Reuse, Site, plan
from scheduler.queues import Discipline
from scheduler.results import finite
from scheduler.simulate import Options, simulate
from scheduler.traces import Request, read_trace

Progress = Callable[[int, int], None]
E = TypeVar("E", bound=Enum)
V = TypeVar("V")


# --- simulate --------------------------------------------------------------------------------------------
def run_simulate(
    trace: Path,
    *,
    policy: str,
    queue: str,
    admission: str,
    prefill: int,
    decode: int,
    speed: float,
    ttft_slo: str | None,
    tbt_slo: str | None,
    decode_factor: float,
    cache_blocks: int,
    model: str,
    device: str,
    devices: int,
    network: str | None,
    fitted: bool,
    seed: int,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Replay a trace and print what came of it. Raises KvfsError, OSError."""
    options = Options(
        policy=policy,
        discipline=_choice(Discipline, "--queue", queue),
        admission=_choice(Mode, "--admission", admission),
        prefill=prefill,
        decode=decode,
        speed=speed,
        slo=_slo(ttft_slo, tbt_slo),
        decode_factor=decode_factor,
        cache_blocks=cache_blocks,
        costs=table_costs(model, device, devices=devices, **_network(network)),
        fitted=fitted,
        seed=seed,
    )
    options.check()
    _check_plot(plot)
    requests = _read(trace)
    with _progress("simulating") as progress:
        result = simulate(requests, options, progress=progress)
    if plot is not None:
        from scheduler.plots import plot_result

        plot_result(result, plot)
    figures = result.figures()
    if as_json:
        print(json.dumps(figures, indent=2))
    else:
        _print_figures(figures)


def _print_figures(figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in figures.items():
        table.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    Console().print(table)


# --- plan ------------------------------------------------------------------------------------------------
def run_plan(
    trace: Path,
    *,
    model: str,
    device: str,
    devices: int,
    instances: int,
    dram: str,
    nvme: str,
    network: str,
    speed: float,
    ttft_slo: str | None,
    tbt_slo: str | None,
    decode_factor: float,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Say whether cache logistics pay for a trace. Raises KvfsError, OSError."""
    costs = table_costs(model, device, devices=devices, **_network(network)).slowed_decode(decode_factor)
    site = Site(
        costs=costs,
        instances=instances,
        dram_bytes=_parsed("--dram", parse_size, dram),
        nvme_bytes=_parsed("--nvme", parse_size, nvme),
        slo=_slo(ttft_slo, tbt_slo),
        speed=speed,
    )
    site.check()
    _check_plot(plot)
    requests = _read(trace)
    with _progress("planning") as progress:
        found = plan(requests, site, progress=progress)
    if plot is not None:
        from scheduler.plots import plot_plan

        plot_plan(found, site.block_bytes, plot)
    if as_json:
        best = None if found.best is None else asdict(found.best)
        speed_bytes_s = finite(found.break_even_bytes_s)
        print(json.dumps({**asdict(found), "break_even_bytes_s": speed_bytes_s, "best": best}, indent=2))
    else:
        print(page(found, site, model, device, devices))


def page(found: Plan, site: Site, model: str, device: str, devices: int) -> str:
    """The plan in plain words."""
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
def _check_plot(path: Path | None) -> None:
    """Before the work, not after it."""
    if path is not None:
        from scheduler.replay_plot import check_plot

        check_plot(path)


def _slo(ttft: str | None, tbt: str | None) -> Slo:
    unlimited = float("inf")
    return Slo(
        ttft_s=unlimited if ttft is None else _parsed("--ttft-slo", parse_duration, ttft),
        tbt_s=unlimited if tbt is None else _parsed("--tbt-slo", _parse_tbt, tbt),
    )


def _parse_tbt(text: str) -> float:
    """A number alone is in seconds below 1 and in milliseconds from there on: nobody waits 1 s for a token."""
    seconds = parse_duration(text)
    return seconds / 1000 if text.strip()[-1].isdigit() and seconds >= 1 else seconds


def _network(text: str | None) -> dict[str, float]:
    return {} if text is None else {"network_bytes_s": _parsed("--network", parse_rate, text)}


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


def _read(trace: Path) -> list[Request]:
    with _progress("reading") as progress:
        return read_trace(trace, progress=progress)


@contextmanager
def _progress(what: str) -> Iterator[Progress | None]:
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress as Bar

    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
