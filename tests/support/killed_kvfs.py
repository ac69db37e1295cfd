"""`kvfs` that is killed at a crash point: `python -m tests.support.killed_kvfs POINT:COUNT ARGUMENT ...`.

Does what KVFS_CRASH_AT does, also in a process that is forked from one which has imported all that looks at that.
"""

from __future__ import annotations

import sys
from typing import Final

from kvfs.cli.main import main
from kvfs.system import crashpoints

MODULE: Final = "tests.support.killed_kvfs"

if __name__ == "__main__":
    vars(crashpoints)["reach"] = crashpoints._killer(sys.argv.pop(1))
    main()
