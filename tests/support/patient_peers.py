"""`kvfs` that greets other machines for as long as a test waits: `python -m tests.support.patient_peers ARGUMENT ...`.

A task for a machine that is stopped meanwhile runs until it goes on.
"""

from __future__ import annotations

from typing import Final

from kvfs import limits
from kvfs.cli.main import main
from tests.support.waits import WAIT_S

MODULE: Final = "tests.support.patient_peers"

if __name__ == "__main__":
    vars(limits)["REMOTE_GREETING_S"] = WAIT_S
    main()
