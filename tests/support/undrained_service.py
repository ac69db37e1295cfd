"""A service that gives up on no process of a GPU's pool: `python -m tests.support.undrained_service ARGUMENT ...`.

What an ended process might still write is not reused for as long as a test takes, however long that is; and whether it
may be is looked at all the time.
"""

from __future__ import annotations

from typing import Final

from kvfs import limits
from kvfs.cli.main import main

MODULE: Final = "tests.support.undrained_service"

if __name__ == "__main__":
    vars(limits).update(HBM_DRAIN_S=3600.0, MAINTAIN_INTERVAL_S=0.02)
    vars(limits).update(HBM_LISTING_PAUSE_S=0.02, HBM_LISTINGS=1 << 30)
    main()
