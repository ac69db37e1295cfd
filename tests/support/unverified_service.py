"""A service that verifies nothing in the background: `python -m tests.support.unverified_service ARGUMENT ...`.

What such a service took over unverified is hashed for those alone who ask for it.
"""

from __future__ import annotations

from typing import Final

import trio

import tiers.store.store
from kvfs.cli.main import main
from tiers.dram.verification import Verifier

MODULE: Final = "tests.support.unverified_service"


class Idle(Verifier):
    async def run(self) -> None:
        await trio.sleep_forever()


if __name__ == "__main__":
    vars(tiers.store.store)["Verifier"] = Idle
    main()
