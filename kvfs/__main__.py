"""Run `kvfs`, also as `python -m kvfs`.

The package alone, without an extra, has the client and no command line.
"""

import sys
from importlib.util import find_spec

if missing := [name for name in ("rich", "typer") if find_spec(name) is None]:
    sys.exit(f"kvfs: the command line needs {' and '.join(missing)}: pip install 'kvfs[cli]'")

from kvfs.cli.main import main

if __name__ == "__main__":
    main()
