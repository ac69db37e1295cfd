"""Threads that serve blocks to other machines without the event loop."""

from os import PathLike

from typing_extensions import CapsuleType, disjoint_base

from kvfs._native.shared.table import Table

READS_AT_ONCE: int
"""The most blocks of one READ."""
MATCHES_AT_ONCE: int
"""The most digests of one MATCH."""
LONGEST_WAIT_S: float
"""The longest time that a request may say its asker waits."""

@disjoint_base
class Server:
    """Serve the blocks of one store; a thread for each connection."""

    def __init__(
        self,
        table: Table,
        directory: str | PathLike[str],
        connections: int = ...,
        lifts: int = ...,
        hits: int = ...,
    ) -> None:
        """Serve what is in `table` and `directory`, over so many connections; of at most `lifts` blocks at a time it
        asks that they be brought up, and `hits` that were served it remembers. Raises OSError."""

    def fileno(self) -> int:
        """Return a descriptor that is readable while there are lifts or questions to take or connections to reap."""

    def open(self, fd: int, session: CapsuleType | None = None, fabric: CapsuleType | None = None) -> int:
        """Take over the socket of a peer that was verified, a session over it (`kvfs._native.remote.tls`), and a fabric
        that it gets blocks by (`kvfs._native.remote.ucx`), unless it raises LimitExceeded; return the connection's
        number."""

    def reap(self, number: int) -> int | None:
        """Close a connection that has ended and return the errno that ended it, 0 for the peer; None while it goes
        on."""

    def bind(self, pairs: list[tuple[bytes, int]]) -> None:
        """Serve these alone: (digest of a namespace, id of the bucket that is bound to it)."""

    def take_lifts(self) -> list[tuple[bytes, bytes]]:
        """Return blocks to bring up, each once, with the namespace that asks for it; `lifted` ends the wait for one."""

    def lifted(self, digest: bytes, namespace: bytes) -> None:
        """End the wait for a block, which was brought up or not."""

    def take_question(self, connection: int) -> tuple[int, bytes, bytes] | None:
        """Return what a connection waits for, if it does: the question's number, the digest of a namespace, and of
        blocks below DRAM, 16 bytes each, for `answer`."""

    def answer(self, connection: int, number: int, count: int) -> None:
        """Say how many of a question's blocks, from the first on, are the namespace's."""

    def take_hits(self, most: int) -> bytes:
        """Take the digests of blocks that were served whole, for eviction, 16 bytes each."""

    def counts(self) -> dict[str, int]:
        """Return `requests`, `matches`, `found`, `absent`, `too_large`, `busy`, `bytes` and `broken`."""

    def close(self) -> None:
        """End every connection and join its thread."""
