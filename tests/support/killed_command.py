"""`kvfs` that is killed at an instant: `python -m tests.support.killed_command INSTANT ARGUMENT ...`.

As with the variable of `kvfs.system.crashpoints`, which is read when Python starts.
"""

from __future__ import annotations

import sys
from typing import Final

from kvfs.cli.main import main
from kvfs.system import crashpoints

MODULE: Final = "tests.support.killed_command"

if __name__ == "__main__":
    vars(crashpoints)["reach"] = crashpoints._killer(sys.argv.pop(1))
    main()
