"""A service that gives up on no process of a GPU's pool: `python -m tests.support.undrained_service ARGUMENT ...`.

What an ended process might still write is not reused for as long as a test takes, however long that is.
"""

from __future__ import annotations

from typing import Final

from kvfs import limits
from kvfs.cli.main import main

MODULE: Final = "tests.support.undrained_service"

if __name__ == "__main__":
    vars(limits)["HBM_DRAIN_S"] = 3600.0
    main()
