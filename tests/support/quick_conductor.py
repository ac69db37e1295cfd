"""A Conductor that looks at instances ten times as often: `python -m tests.support.quick_conductor ARGUMENT ...`."""

from __future__ import annotations

from typing import Final

import scheduler.conductor.feeds.health as health
import scheduler.conductor.feeds.listener as listener
import scheduler.conductor.feeds.probes as probes
from kvfs.cli.main import main

MODULE: Final = "tests.support.quick_conductor"

if __name__ == "__main__":
    vars(listener).update(PROBE_INTERVAL_S=0.2, SILENT_STREAM_S=2.0)
    vars(probes).update(PROBE_WAIT_S=0.4)
    vars(health).update(HEALTH_ASK_INTERVAL_S=0.1, HEALTH_LOOK_S=0.04)
    main()
