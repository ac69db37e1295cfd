"""Named instants at which a test kills the service.

Responsibility: `reach(name)` marks an instant between two steps of a protocol that a crash could separate. It does
nothing unless the process was started with KVFS_CRASH_AT=NAME or NAME:COUNT, which ends it with SIGKILL when that
instant is reached for the COUNT-th time.

Concurrency: any thread.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Final

VARIABLE: Final = "KVFS_CRASH_AT"

POINTS: Final = frozenset(
    {
        "cold.after_put",
        "cold.after_row",
        "cold.after_delete",
        "log.before_write",
        "log.after_write",
        "log.before_sync",
        "log.after_sync",
        "log.after_endings",
        "log.before_footer",
        "log.after_footer",
        "reclaim.before_rewrite",
        "reclaim.after_rewrite",
        "reclaim.after_release",
        "store.after_dram_seal",
        "store.after_index_put",
        "store.after_rename",
        "store.after_remove",
        "start.after_names",
        "start.after_log",
    }
)
"""Every name that the code reaches; the crash harness uses all of them."""


def _ignore(name: str) -> None:
    """Do nothing: no instant was named."""


def _killer(wanted: str) -> Callable[[str], None]:
    name, _, count = wanted.partition(":")
    if name not in POINTS:
        raise ValueError(f"{VARIABLE}={wanted!r}: no such instant; there are {', '.join(sorted(POINTS))}")
    left = int(count or "1")

    def reach(reached: str) -> None:
        nonlocal left
        if reached == name:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    return reach


reach: Final[Callable[[str], None]] = _killer(os.environ[VARIABLE]) if VARIABLE in os.environ else _ignore
