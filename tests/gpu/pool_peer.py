"""A process that adds blocks to a service's pool of GPU memory, and stays: python -m tests.gpu.pool_peer DATA KEYS."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.pool_engines import PoolEngine


def main(data: str, joined: str) -> None:
    keys = [bytes.fromhex(key) for key in joined.split(",")]
    with PoolEngine(Path(data)) as engine:
        assert engine.promote(keys) == [True] * len(keys)
        print("ready", flush=True)
        sys.stdin.read(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
