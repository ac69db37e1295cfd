"""One background thread that computes the checksums of sealed slots."""

from typing_extensions import disjoint_base

from kvfs._native.shared.table import Table

@disjoint_base
class Checksummer:
    """Read queued slots of `dirfd` and store their XXH3-64 in the table. Raises OSError without a thread."""

    def __init__(self, table: Table, dirfd: int, capacity: int = ...) -> None: ...
    def push(self, slot: int, generation: int) -> bool:
        """Queue a sealed slot; return False when the queue is full (limits.CHECKSUM_QUEUE)."""

    def pause(self, slot: int) -> bool:
        """Have the thread close `slot` until `resume`; return False, with nothing paused, where it did not close it
        within limits.CHECKSUM_PAUSE_WAIT_S."""

    def resume(self) -> None: ...
    def drain(self, timeout_s: float) -> None:
        """Wait until the queue is empty. Raises DeadlinePassed."""

    def close(self) -> None:
        """End the thread; queued slots keep no checksum. Closing twice is harmless."""

    @property
    def idle(self) -> bool: ...
    @property
    def done(self) -> int: ...
    @property
    def abandoned(self) -> int:
        """Return the number of jobs whose slot had another generation."""

    @property
    def failed(self) -> int: ...
    @property
    def yielded(self) -> int:
        """Return how often a pause met the thread inside the slot, where it went on afterwards."""
