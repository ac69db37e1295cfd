"""Bytes between machines by UCX (libucp): each connection has a worker, which sends pieces or receives them.

It is built where UCX's headers are.
"""

from typing_extensions import CapsuleType, disjoint_base

MAX_ADDRESS_BYTES: int
"""The longest address of a worker."""

def version() -> tuple[int, int]:
    """Return the version of the library, major and minor."""

@disjoint_base
class Context:
    """The devices of this machine, as UCX's variables of the environment have them. Raises Unsupported without any."""

    def worker(self) -> Worker:
        """Return a worker. Raises TierUnreachable."""

@disjoint_base
class Worker:
    """One connection's. What takes its time leaves the interpreter's lock alone."""

    @property
    def address(self) -> bytes:
        """Return where a peer reaches the worker."""

    def greet(self, address: bytes, tag: int) -> None:
        """Name the peer, and the tag before that of the first piece; begin to greet it, as the end that serves. Raises
        TierUnreachable."""

    def connect(self, address: bytes, tag: int) -> None:
        """Name the peer and the tag, as the end that asks. Raises TierUnreachable."""

    def await_greeting(self, wait_s: float) -> None:
        """Wait for the peer's greeting. Raises TierUnreachable."""

    @property
    def capsule(self) -> CapsuleType:
        """Return the worker as `Stream` and `Server.open` take it."""

    def take(self) -> None:
        """Leave the worker to who has taken it."""

    def close(self) -> None:
        """End the worker, unless it is taken: within some ms, or a second where the peer does not answer."""
