"""Copies between a device's memory and another: planned once, started as one."""

from collections.abc import Iterable, Sequence
from typing import Final, final

from typing_extensions import Buffer

from kvfs._native.cuda.driver import Context, Event, Stream

LINK_BLOCKS: Final = 2
"""Thread blocks of a kernel that copies over the link to the host: more move no more, and slow the model down."""
DEVICE_BLOCKS: Final = 264
"""Thread blocks of one that copies within the device: two for each multiprocessor of an H100."""
ENGINE_BYTES: Final = 1048576
"""Mean size of pieces from which on a copy engine moves them over the link as fast, and takes no multiprocessor."""

@final
class Plan:
    """Plan copies, merged where they lie side by side at both ends.

    `pieces` holds 64-bit numbers, three a piece: destination address, source address, bytes. Both sides of a piece lie
    inside one of the regions (address, bytes): mappings, allocations, registrations. Raises InvalidRequest where one
    does not, or where a destination overlaps another or a source; LimitExceeded above limits.MAX_COPY_PIECES.
    """

    def __init__(
        self, pieces: Buffer, destinations: Sequence[tuple[int, int]], sources: Sequence[tuple[int, int]]
    ) -> None: ...
    def __len__(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...
    def copies(self) -> list[tuple[int, int, int]]:
        """Return (destination, source, bytes) of what is to be copied, by destination."""

    def start(self, stream: Stream, done: Event, after: Event | None = None) -> None:
        """Start the copies on a side stream, behind `after`; record `done` behind them.

        The memory stays the copies' until `done` is reached. Raises the driver's error when nothing is in flight any
        more; what the destinations hold is unknown then.
        """

@final
class DevicePlaces:
    """Describe where blocks lie in pieces, such as those of a paged cache.

    Block i has `piece_bytes` bytes at `starts[i]` + each of `offsets` in turn: addresses, or one of the two relative to
    the other. All lie in `regions` (address, bytes), which a plan checks.
    """

    regions: list[tuple[int, int]]
    def __init__(
        self,
        starts: Sequence[int],
        offsets: Sequence[int],
        piece_bytes: int,
        regions: Sequence[tuple[int, int]],
    ) -> None: ...
    def __len__(self) -> int: ...
    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block: of all its pieces."""

    @property
    def block_pieces(self) -> int:
        """Return the pieces of one block."""

    def choose(self, which: Iterable[int]) -> DevicePlaces:
        """Return the places of some blocks, in this order. Raises InvalidRequest."""

    def load_plan(self, whole: Sequence[int], sources: Sequence[tuple[int, int]]) -> Plan:
        """Plan copies of blocks that lie whole, each from one of these addresses on, to their places. Raises as
        `Plan`."""

    def store_plan(self, whole: Sequence[int], destinations: Sequence[tuple[int, int]]) -> Plan:
        """Plan copies of the blocks from their places to where each is to lie whole. Raises as `Plan`."""

@final
class Copier:
    """Starts plans the way that is fastest for them: a copy engine, which takes 2 to 5 us for each piece, or a kernel.

    A copier belongs to one thread at a time. It holds 6 MiB of registered memory; a start waits while sixteen
    launches before it still run, of which one starts up to 16,384 pieces.
    """

    def __init__(self, context: Context, image: bytes) -> None:
        """Load the kernel `kvfs_copy` of kernels/copy.ptx."""

    def start(
        self,
        plan: Plan,
        stream: Stream,
        done: Event,
        after: Event | None = None,
        *,
        within_device: bool = False,
    ) -> None:
        """Start a plan as `Plan.start` does; `within_device`: both sides are the device's memory."""

    def close(self) -> None:
        """End it, once what it has started has ended."""
