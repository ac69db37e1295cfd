"""What a task needs of the cluster, and what other machines say of blocks that they were to fetch.

Responsibility: values and ports without I/O; `tiers.remote` implements the ports. Concurrency: plain values; a port's
calls are the service's trio thread's.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

THERE, BROUGHT, MISSING = 0, 1, 2
"""What came of a block: the machine had it, it fetched it, or it has it not."""


class Cause(IntEnum):
    """Why blocks are missing, as far as it decides what is asked next."""

    NONE = 0
    """Of these blocks alone: they went away, are in another bucket there, or are too large."""
    NAMESPACE = 1
    """The machine takes none of this namespace."""
    ROOM = 2
    """It has no room, or the bucket's owner is over his quota."""
    REFUSED = 3
    """It takes nothing of this machine."""
    PASSING = 4
    """It may be otherwise in a moment."""


class Pulled(NamedTuple):
    """Says what came of each block, and why some are missing."""

    statuses: bytes
    cause: Cause = Cause.NONE
    reason: str = ""


class Target(Protocol):
    """Is asked to fetch blocks from this machine; see `tiers.remote.pull_link`."""

    @property
    def address(self) -> str:
        """Return where the machine is."""

    async def pull(self, namespace: bytes, digests: Sequence[bytes]) -> Pulled:
        """Have it fetch blocks that it has not. Bounded; whatever goes wrong is the answer's cause."""

    async def ask(self, namespace: bytes, digests: Sequence[bytes]) -> Pulled:
        """Ask which blocks it has, without a fetch; else as `pull`."""

    def close(self) -> None:
        """End the connection, if there is one. Closing twice is harmless."""


class Machines(Protocol):
    """Names the other machines of the cluster; see `tiers.remote.cluster`."""

    @property
    def has_directory(self) -> bool:
        """Return whether a directory says who has which block."""

    def addresses(self) -> list[str]:
        """Return where the machines are that are asked now."""

    async def holders(self, digests: Sequence[bytes]) -> Sequence[Sequence[str]] | None:
        """Return who has each block, as the directory says; None where it does not answer."""

    def link(self, address: str) -> Target:
        """Return a connection, still to be opened, to one of the machines."""
