"""`kvfs fsck`: check the data of a stopped service, and repair it.

Responsibility: arguments in, `tiers.fsck.check` and `tiers.fsck.repair`, text or JSON out. The exit codes of the
command are defined here; 2 means wrong usage, as everywhere in `kvfs`.

Concurrency: holds the lock of the data directory to the end, so no service starts meanwhile.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Annotated, Any, Self

import trio
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from kvfs.cli.output import check_report, print_json
from kvfs.config.load import load
from kvfs.errors import KvfsError
from kvfs.system.linux import raise_file_limit
from tiers.data_dir import look_home
from tiers.device.device import open_device
from tiers.fsck import repair as repairs
from tiers.fsck.check import examine
from tiers.fsck.findings import Cost, Findings
from tiers.fsck.loss_note import drop_losses

app = typer.Typer()


class Exit(IntEnum):
    """Exit codes of `kvfs fsck`."""

    CLEAN = 0
    REPAIRED = 1
    """There were problems, and all are repaired; no durable object was lost."""
    DURABLE_LOST = 3
    """Damage has cost durable objects, or may have, where nothing that is left names what is gone; all else is as for
    REPAIRED, or with --check-only as for LEFT."""
    CANNOT_RUN = 4
    """A service runs, another format, no permission, no such directory."""
    LEFT = 5
    """Problems are left: --check-only, or the repair failed."""


@app.command()
def fsck(
    data: Annotated[
        str | None, typer.Option(metavar="DIR", help="The data directory of a stopped service.")
    ] = None,
    nvme: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where its segments lie, if not in the data directory.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The service's configuration, which says both.")
    ] = None,
    repair: Annotated[
        bool, typer.Option("--repair/--check-only", help="Put right what is found, or only say it.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Verify every checksum in a data directory that no service uses, and repair what is damaged.

    Exit codes: 0 clean; 1 problems found, all repaired; 3 damage has cost durable objects, or may have; 4 cannot run
    (a service runs, another format, no permission); 5 problems found and left; 2 wrong usage.
    """
    settings = load(config, {("store", "data"): data, ("nvme", "path"): nvme})
    try:
        found = _check(
            settings.store.data,
            settings.nvme_path,
            repair,
            print_json if as_json else check_report,
            settings.nvme.device,
        )
    except (KvfsError, OSError) as error:
        print(f"kvfs: {error}", file=sys.stderr)
        raise typer.Exit(Exit.CANNOT_RUN) from None
    except Exception:  # else the interpreter ends with 1, which means that all is repaired
        traceback.print_exc()
        raise typer.Exit(Exit.CANNOT_RUN) from None
    raise typer.Exit(found["exit_code"])


def _unprinted(_: dict[str, Any]) -> None:
    """Tell nobody: the caller takes the report."""


def _check(
    data: Path,
    segments: Path,
    repair: bool,
    tell: Callable[[dict[str, Any]], None] = _unprinted,
    devices: tuple[Path, ...] = (),
) -> dict[str, Any]:
    """Check, and repair if asked; tell and return the report. What is lost is noted until it was told.

    Raises NotFound, StoreLocked, FormatMismatch, DeviceFailed, OSError.
    """
    raise_file_limit()
    home = look_home(data, write_holder=repair)

    async def run() -> dict[str, Any]:
        device = open_device(has_deadlines=False)  # to nobody is a drive that is slow a miss
        try:
            began = time.monotonic()
            try:
                with _Bar() as bar:
                    findings = await examine(home, device, segments, bar, devices)
            except BaseException:
                home.close(clean=False)
                raise
            seconds = time.monotonic() - began
            failure = ""
            try:
                if repair and findings.problems:
                    failure = await _repair(findings)
                report = _describe(findings, seconds, failure)
                tell(report)
                sys.stdout.flush()
                if repair and not failure:
                    drop_losses(home.path)
            finally:
                findings.close()
            return report
        finally:
            with trio.CancelScope(shield=True):
                await device.aclose()

    return trio.run(run)


async def _repair(findings: Findings) -> str:
    """Repair; return why it failed, the empty string after success."""
    try:
        await repairs.repair(findings)
    except (KvfsError, OSError) as error:
        return str(error)
    return ""


def _describe(findings: Findings, seconds: float, failure: str) -> dict[str, Any]:
    problems = findings.problems
    repaired = all(problem.repaired for problem in problems)
    code = Exit.CLEAN
    if problems:
        code = Exit.REPAIRED if repaired else Exit.LEFT
        code = Exit.DURABLE_LOST if findings.cost is Cost.DURABLE else code
    count = "clean" if not problems else f"{len(problems)} problem{'s' * (len(problems) > 1)}"
    state = "" if not problems else ", repaired" if repaired else ", left"
    result = count + state + (f": {failure}" if failure else "")
    return {
        "exit_code": int(code),
        "result": result + _loss(findings),
        "problems": [
            {
                "where": problem.where,
                "what": problem.what,
                "consequence": problem.consequence,
                "cost": problem.cost.name.lower(),
                "repaired": problem.repaired,
            }
            for problem in problems
        ],
        "lost": sorted(name.decode(errors="backslashreplace") for name in findings.lost),
        "may_have_lost_more": findings.lost_unknown,
        **findings.counts(),
        "seconds": round(seconds, 3),
    }


def _loss(findings: Findings) -> str:
    """Return what the result says of durable objects that are lost."""
    if findings.cost is not Cost.DURABLE:
        return ""
    if not findings.durables_unknown:
        return "; durable objects are lost"
    return "; durable objects may be lost, besides those that are named"


class _Bar:
    """Show a progress bar on stderr, where that is a terminal."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(binary_units=True),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def begin(self, what: str, total_bytes: int) -> None:
        if self._progress is not None:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(what, total=total_bytes or None)

    def advance(self, size_bytes: int) -> None:
        if self._progress is not None and self._task is not None:
            self._progress.advance(self._task, size_bytes)
