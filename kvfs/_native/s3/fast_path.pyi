"""Plain S3 reads, recognised, verified and answered without Python."""

from collections.abc import Callable
from typing import Final

from typing_extensions import disjoint_base

from kvfs._native.shared.table import Table

@disjoint_base
class Idle:
    """One connection while it waits for a request, and the work that the wait left for Python."""

    def __init__(self, descriptor: int) -> None:
        """Take the `descriptor` of a connected socket, which stays its owner's."""

    @property
    def descriptor(self) -> int: ...
    @property
    def task(self) -> object:
        """Return the task that `Reads.watch` was given; None while it is not watched."""

    @property
    def served_s(self) -> float:
        """Return when the last answer was sent, by the clock of `Reads.serve`."""

    @property
    def data(self) -> bytes:
        """Return the bytes that came and are not answered."""

    @property
    def rest(self) -> bytes:
        """Return the part of an answer that the socket did not take; `left` bytes of `file` from `offset` on follow."""

    @property
    def file(self) -> int:
        """Return the descriptor of the answer's slot, -1 for none."""

    @property
    def offset(self) -> int: ...
    @property
    def left(self) -> int: ...
    @property
    def gone(self) -> bool:
        """Return whether the connection failed."""

    @property
    def write(self) -> tuple[bytes, object, int, bytes, int, bytes | None, bool] | None:
        """Return a plain PUT at the start of `data`; None for other bytes.

        It is its name, the credential, the bytes of its head, the target, the length of the body, the base64 of its
        CRC-64/NVME, and whether the client waits for a 100 Continue.
        """

    def take_file(self) -> int:
        """Return the descriptor, which the caller closes from here on."""

@disjoint_base
class Reads:
    """Watch idle connections and answer the plain reads among their requests."""

    gets: Final[int]
    """The number of answers."""
    heads: Final[int]
    sent_bytes: Final[int]
    """Bytes of objects sent."""

    def __init__(self, first_request_id: int) -> None: ...
    def fileno(self) -> int:
        """Return a descriptor that is readable while a connection has input."""

    def attach(
        self,
        table: Table,
        slots: int,
        find: Callable[[bytes], bytes | None],
        describe: Callable[[bytes, bytes], tuple[bytes, int, bytes, bytes] | None],
        touch: Callable[[bytes], None],
    ) -> None:
        """Answer from this table and the slots in this directory, both open until `detach`.

        `find` returns the row of `bucket NUL key`; `describe` makes of a name and its row the store key, the size, the
        lines of the answer's head, and those for a request with checksums (None: not ours). `touch` is called with the
        store keys of hits. None of them raises.
        """

    def detach(self) -> None:
        """Answer nothing more."""

    @property
    def attached(self) -> bool: ...
    def forget(self) -> None:
        """Drop all learned hosts and signers."""

    def knows(self, host: bytes, signer: bytes) -> bool: ...
    def learn_host(self, host: bytes, bucket: bytes) -> None:
        """Learn a Host header's bucket, empty where the path begins with the bucket."""

    def learn_signer(
        self,
        signer: bytes,
        signing_key: bytes,
        scope: bytes,
        signed_headers: bytes,
        credential: object,
        may: Callable[[bytes, bool], bool],
    ) -> bool:
        """Learn a `signer`: an Authorization header, once found right, less its signature.

        `may` is asked for each request whether the credential may read, or write, in a bucket. Return False where the
        signed names are not those of a plain request.
        """

    def recognise(self, data: bytes, now_s: float) -> tuple[bytes, bytes, int] | None:
        """Return method, name and length of the head of a plain, rightly signed, allowed request; None for others."""

    def watch(self, idle: Idle, task: object) -> None:
        """Watch a connection for `task`. Raises OSError."""

    def unwatch(self, idle: Idle) -> None:
        """Watch a connection no more. Unwatching twice is harmless."""

    def serve(self, now_s: float, clock_s: float, date: bytes, turn_s: float) -> list[object]:
        """Answer requests for `turn_s` at most; return the tasks of connections that are not watched any more.

        `now_s`: seconds since 1970, for signatures; `clock_s`: of the event loop; `date`: of the answers.
        """
