"""One background thread that computes the checksums of sealed slots."""

from typing_extensions import disjoint_base

from kvfs._native.table import Table

@disjoint_base
class Checksummer:
    """Reads queued slots of `dirfd`, stores their XXH3-64 in the table. Raises OSError without a thread."""

    def __init__(self, table: Table, dirfd: int, capacity: int = ...) -> None: ...
    def push(self, slot: int, generation: int) -> bool:
        """Queue a sealed slot; False when the queue is full (limits.CHECKSUM_QUEUE): try again later."""

    def pause(self, slot: int) -> bool:
        """Keep the thread from having `slot` open until `resume`; False if it did not let go in
        limits.CHECKSUM_PAUSE_WAIT_S (then nothing is paused)."""

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
        """Jobs whose slot had moved on."""

    @property
    def failed(self) -> int: ...
    @property
    def yielded(self) -> int:
        """How often a pause met the thread inside the slot; it went on from there afterwards."""
