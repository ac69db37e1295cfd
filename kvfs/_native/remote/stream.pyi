"""Streams that receive blocks of another machine straight into drafts, each on a thread of its own."""

from typing_extensions import CapsuleType, disjoint_base

FOUND: int
"""A status: the block is in its draft, and matches its checksum."""
ABSENT: int
TOO_LARGE: int
"""A status: it is longer than the room for it."""
BUSY: int
"""A status: the peer could not bring it up in time."""
NOT_ANSWERED: int
"""A status: the stream ended before."""
MISMATCH: int
"""A status: the bytes are not those of the checksum that came along."""
NOT_WRITTEN: int
"""A status: the draft could not be written, which ended the stream."""

@disjoint_base
class Stream:
    """One connection to a peer that was verified."""

    def __init__(
        self, socket: int, session: CapsuleType | None = None, fabric: CapsuleType | None = None
    ) -> None:
        """Take over a socket, a session over it (`kvfs._native.remote.tls`), and a fabric by which blocks come
        (`kvfs._native.remote.ucx`), unless it raises OSError."""

    def fileno(self) -> int:
        """Return a descriptor that is readable once a job is done."""

    def begin_read(
        self, namespace: bytes, wants: list[tuple[bytes, int, int]], wait_s: float, urgent: bool = False
    ) -> None:
        """Begin to read blocks: (digest, room in bytes, descriptor of its draft, which is the stream's from now on)."""

    def begin_match(self, namespace: bytes, digests: bytes, wait_s: float) -> None:
        """Begin to ask how many blocks the peer has, without a gap from the first on."""

    def take(self) -> bool:
        """Return whether no job is under way; one that is done is the caller's again."""

    @property
    def error(self) -> int:
        """Return the errno that ended the last job and made the stream useless, or 0."""

    @property
    def is_quiet(self) -> bool:
        """Return whether the stream is idle, and its peer neither gone nor talking unasked."""

    def reads(self) -> list[tuple[int, int, int, bytes]]:
        """Return for each block of the last job (status, size in bytes, checksum, parent)."""

    def sizes(self) -> list[int]:
        """Return the sizes in bytes of the blocks that the peer has, from the first on."""

    def close(self) -> None:
        """End the stream, a job with it, and join its thread."""
