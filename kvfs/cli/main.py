"""The command line: `kvfs serve` runs the service, the other commands talk to one that runs.

Responsibility: the list of commands and their modules. A failure is one line on stderr, `kvfs: ...`, and an exit code.

Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 3 no such name, 4 no service there, 130
interrupted. `kvfs fsck` has its own (`kvfs.cli.offline.fsck_command`).

Concurrency: none. A command's module is imported when the command is called (`kvfs.cli.lazy`): `kvfs status` must
answer in 0.3 s, and trio, pydantic and rich together take most of that.
"""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from kvfs.cli import lazy
from kvfs.cli.lazy import LazyCommand, application
from kvfs.errors import ConfigError, KvfsError, NotFound, SessionClosed, find_shortage

FAILED, USAGE, NOT_FOUND, NOT_RUNNING, INTERRUPTED = 1, 2, 3, 4, 130

_COMMANDS = {
    "service_commands": {
        "serve": "Run the service in the foreground until Ctrl-C or SIGTERM.",
        "gateway": "Serve S3 in front of a running service, in the foreground until Ctrl-C or SIGTERM.",
        "umount": "Unmount; the service behind it, where there is one, stops cleanly.",
        "drop": "Free the memory of the objects that a stopped service keeps for its next start.",
    },
    "offline.fsck_command": {
        "fsck": "Verify every checksum in a data directory that no service uses, and repair what is damaged."
    },
    "measure_commands": {
        "bench": "Measure this machine's doors against its memory; `kvfs bench --help` shows the options.",
        "simulate": "Replay a request trace over simulated instances, with the scheduler's own policies deciding.",
        "plan": "Say whether keeping and moving KV cache pays for a request trace, and what it takes.",
        "replay": "Show what eviction policies would have hit of a request trace; needs no service.",
    },
    "proxy_command": {
        "proxy": "Serve OpenAI's interface in front of engines, until Ctrl-C or SIGTERM.",
    },
    "status_command": {
        "status": "Show what runs, how full it is and what it has done.",
    },
    "top.top_command": {
        "top": "Show figures of a store or a Conductor as they change, until q; without a terminal once.",
    },
    "name_commands": {
        "ls": "List names, in byte order.",
        "stat": "Show all attributes of names.",
        "pin": "Keep objects from being evicted.",
        "unpin": "Allow objects to be evicted again.",
        "evict": "Evict objects by name, or by policy until --bytes are free; print the bytes that became free.",
        "rm": "Remove objects; an empty bucket or directory too.",
    },
}
_GROUPS = {
    "bucket_command": ("bucket", "Make, list and remove buckets."),
    "cluster_command": (
        "cluster",
        "Show the machines that blocks are read from, and bring blocks to them.",
    ),
    "conductor_command": (
        "conductor",
        "Choose the instance for each request; run it, or show what it knows.",
    ),
    "credentials_command": ("credentials", "Add, list and remove access keys of the S3 door."),
    "offline.device_command": ("device", "Show and empty block devices for the NVMe tier."),
    "offline.nvmeof_command": (
        "nvmeof",
        "Connect to devices that other machines export by NVMe over Fabrics.",
    ),
}
COMMANDS = [
    LazyCommand(name, f"kvfs.cli.{module}", help_line)
    for module, commands in _COMMANDS.items()
    for name, help_line in commands.items()
] + [
    LazyCommand(name, f"kvfs.cli.{module}", help_line, is_group=True)
    for module, (name, help_line) in _GROUPS.items()
]

app = application(
    COMMANDS,
    name="kvfs",
    help="A tiered store for the KV cache of large language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> NoReturn:
    """Run a command; turn its failure into a line and an exit code."""
    try:
        app()
    except KvfsError as error:
        fail(str(error), exit_code(error))
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), FAILED)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BaseException as error:
        shortage = find_shortage(error)
        if shortage is None:
            raise
        fail(str(shortage) or "not enough memory", FAILED)
    sys.exit(0)


def exit_code(error: KvfsError) -> int:
    """Return the documented exit code of an error."""
    for kind, code in ((NotFound, NOT_FOUND), (SessionClosed, NOT_RUNNING), (ConfigError, USAGE)):
        if isinstance(error, kind):
            return code
    return FAILED


def fail(message: str, code: int) -> NoReturn:
    """Print a message to stderr and exit with `code`."""
    print(f"kvfs: {message}", file=sys.stderr)
    sys.exit(code)


def _show_version(wanted: bool) -> None:
    if wanted:
        print("kvfs", lazy.load("importlib.metadata").version("kvfs"))
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


if __name__ == "__main__":
    main()
