"""The blocks of a cluster: which sources hold them, by prefix hash, and which prefills are to make them."""

from collections.abc import Sequence
from typing import Final

from typing_extensions import Buffer, disjoint_base

MAX_SOURCES: Final = 1024
SPARE_SOURCES: Final = 64
"""While fewer are cleared and not swept yet, adding blocks of whatever source never waits for a sweep."""
MAX_WINDOWS: Final = 8
"""Of one source."""
MAX_STRIDE: Final = 4096
"""Blocks of a source that one of a window's may be as long as: Gemma 4's is as long as two."""

@disjoint_base
class ClusterIndex:
    """Keeps which sources hold which blocks. A source is one tier of one instance or node, numbered from 0 below
    MAX_SOURCES by the caller; a mask has bit i set for source i. `hashes` is a buffer of prefix hashes of 16 bytes,
    one behind the other, in the order of the prompt where that matters.

    Every operation may be called from any thread. Raises InvalidRequest for a source that is out of range and a buffer
    that is not a multiple of 16 bytes, and MemoryError.
    """

    def __new__(cls, max_blocks: int) -> ClusterIndex: ...

    # --- what the streams of events say -------------------------------------------------------------------
    def add(self, source: int, hashes: Buffer, parent: bytes | None = None) -> int:
        """Note that a source holds these blocks; return how many there was no room for.

        `parent`: the hash of the block before the first. Where the source does not hold that one, the blocks are not
        reachable there, and are counted (`detached`).
        """

    def remove(self, source: int, hashes: Buffer) -> int:
        """Note that a source does not hold these blocks any more; return how many of them it did hold."""

    def clear(self, source: int) -> None:
        """Note that a source holds nothing: its instance started anew, or has cleared its cache. Takes no longer for
        many blocks than for few; what is left of them is swept later."""

    def sweep(self, segments: int = 1) -> bool:
        """Sweep so many segments, of 3,069 places each, of what cleared sources held; return whether some are left.
        Changes of blocks do the same as they go. The mutex is free between two segments."""

    def set_windows(
        self,
        source: int,
        windows: Sequence[tuple[int, int, int, bool]],
        other: int | None = None,
        *,
        alone: bool = False,
    ) -> None:
        """Count a source, from the first block on, only as far as what lies beside it goes on, in place of what was
        said before; () ends it.

        `windows`: sources, MAX_WINDOWS at most, each with how many blocks of its own it must hold one behind the other
        before a boundary, or all where there are fewer: those of a sliding window, or the one of a recurrent state. Its
        third number says how many of this source's blocks one of them is as long as, MAX_STRIDE at most: it has the
        hash of the last, and a boundary is where one of each window ends. The fourth says that these are chunks of so
        many blocks, one behind the other from the first block on: a prompt then needs the blocks since the last one
        ended, and none where one ends. `runs`, `match` and `depths` then have the source up to the last boundary from
        which a prompt can go on, and the windows themselves not at all; so a source that is its own window counts
        nowhere. `other`: a source that may have what this one lacks of a prompt: both lie in one store. `alone`: the
        source is of a model without full attention, which reads none of its own blocks. Each of them counts as there,
        held or not: up to the last boundary at which its windows go on the source has all, also those that nobody
        holds. Raises InvalidRequest for more windows, longer blocks, and windows of none; and with `alone` for no
        window, and for an `other` source.
        """

    # --- what is under way --------------------------------------------------------------------------------
    def produce(self, source: int, producer: int, ends_s: float, hashes: Buffer) -> int:
        """Note that a prefill of this number, from 0 on, is to make these blocks in a source, and when it is predicted
        to end, the same for all of a number. Of several that make a block its producer is the one that ends first;
        blocks that a source holds already have none, but gain this source. Return how many there was no room for."""

    def produced(self, producer: int, hashes: Buffer) -> None:
        """Note that a prefill is done: of these blocks, those that it was to make are there."""

    # --- questions ----------------------------------------------------------------------------------------
    def runs(self, hashes: Buffer) -> tuple[tuple[int, int, int | None], ...]:
        """Return the longest prefix of the hashes that the cluster holds, in runs that the same sources hold: the mask
        of the sources, how many blocks, and the number of the prefill that is to make them. While any source has
        windows alone, all hashes are looked up."""

    def match(self, hashes: Buffer) -> list[tuple[int, int]]:
        """Return each source that has the first block, and how many of the hashes it has without a gap from there
        on; the longest first, of equals the lowest source first."""

    def depths(self, hashes: Buffer, masks: Sequence[int], limited: bool = True) -> list[int]:
        """Return for each mask how many of the hashes, from the first on without a gap, some source in it holds; where
        that is not `limited`, wherever its windows go on."""

    def holders(self, hash: bytes) -> int:
        """Return the mask of the sources that hold a block; 0 for none."""

    def lacking(self, hashes: Buffer, mask: int) -> bytes:
        """Return those of the hashes that no source in the mask holds, in their order."""

    def manifest(self, source: int) -> bytes:
        """Return the hashes of all blocks of a source, in no order."""

    def source_blocks(self, source: int) -> int:
        """Count the blocks of a source."""

    @property
    def detached(self) -> int:
        """How many blocks were added to a source that did not hold their parent."""

    @property
    def unswept_sources(self) -> int:
        """How many sources were cleared whose blocks are not swept yet; one that was cleared twice counts twice."""

    @property
    def size_bytes(self) -> int:
        """Bytes allocated now."""

    def __len__(self) -> int:
        """Count the blocks; those of cleared sources alone count until they are swept."""
