"""`python -m tests.support.run_fuzz TARGET CORPUS [libFuzzer's options]`: a target of fuzz_targets under atheris.

It fuzzes until it finds something, which it leaves in the corpus' directory, or for `-max_total_time` seconds.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    import atheris

    name, corpus, *options = sys.argv[1:]
    with atheris.instrument_imports(include=["gateway"]):
        from tests.support.fuzz_targets import TARGETS
    target = TARGETS[name]
    for number, seed in enumerate(target.seeds):
        (Path(corpus) / f"seed-{number}").write_bytes(seed)
    atheris.Setup([sys.argv[0], f"-artifact_prefix={corpus}/found-", *options, corpus], target.run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
