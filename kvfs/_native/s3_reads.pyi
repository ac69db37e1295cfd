"""Plain S3 reads, recognised, verified and answered without Python."""

from collections.abc import Callable
from typing import Final

from typing_extensions import disjoint_base

from kvfs._native.table import Table

@disjoint_base
class Idle:
    """One connection while it waits for a request, and what the wait left for Python to do."""

    def __init__(self, descriptor: int) -> None:
        """`descriptor`: of a connected socket, which stays its owner's."""

    @property
    def descriptor(self) -> int: ...
    @property
    def task(self) -> object:
        """What `Reads.watch` was told; None while it is not watched."""

    @property
    def served_s(self) -> float:
        """When the last answer was sent, by the clock of `Reads.serve`."""

    @property
    def data(self) -> bytes:
        """What came and is not answered."""

    @property
    def rest(self) -> bytes:
        """Of an answer: what the socket did not take yet; after it `left` bytes of `file` from `offset` on."""

    @property
    def file(self) -> int:
        """-1 for none."""

    @property
    def offset(self) -> int: ...
    @property
    def left(self) -> int: ...
    @property
    def gone(self) -> bool:
        """Whether the connection failed."""

    @property
    def write(self) -> tuple[bytes, object, int, bytes, int, bytes | None, bool] | None:
        """Where `data` begins with a plain PUT: its name, the credential, the bytes of its head, the target, the length
        of the body, the base64 of its CRC-64/NVME, and whether the client waits for a 100 Continue."""

    def take_file(self) -> int:
        """The descriptor, which is the caller's from here on."""

@disjoint_base
class Reads:
    """Watches idle connections and answers what they ask for, as far as it can."""

    gets: Final[int]
    """Answers since it was made."""
    heads: Final[int]
    sent_bytes: Final[int]
    """Of objects."""

    def __init__(self, first_request_id: int) -> None: ...
    def fileno(self) -> int:
        """Readable while a connection is to be looked at."""

    def attach(
        self,
        table: Table,
        slots: int,
        find: Callable[[bytes], bytes | None],
        describe: Callable[[bytes, bytes], tuple[bytes, int, bytes, bytes] | None],
        touch: Callable[[bytes], None],
    ) -> None:
        """Answer from this table and the slots in this directory, both open until `detach`.

        `find` gives the row of `bucket NUL key`; `describe` what follows from a name and its row: the store key, the
        size, lines of the answer's head, and those for who asks for the checksum (None: not ours). `touch` hears of
        hits by store key. None of them raises.
        """

    def detach(self) -> None:
        """Answer nothing from here on."""

    @property
    def attached(self) -> bool: ...
    def forget(self) -> None:
        """Hosts and signers."""

    def knows(self, host: bytes, signer: bytes) -> bool: ...
    def learn_host(self, host: bytes, bucket: bytes) -> None:
        """What a Host header means: a bucket, or nothing where the path begins with it."""

    def learn_signer(
        self,
        signer: bytes,
        signing_key: bytes,
        scope: bytes,
        signed_headers: bytes,
        credential: object,
        may: Callable[[bytes, bool], bool],
    ) -> bool:
        """`signer`: an Authorization header less its signature, which must have been found right once. `may`: whether
        the credential may read, or write, in a bucket; asked for each request. False where the signed names are none
        of a plain request."""

    def recognise(self, data: bytes, now_s: float) -> tuple[bytes, bytes, int] | None:
        """Method, name and length of a head that is a plain request, rightly signed and allowed; None for all else."""

    def watch(self, idle: Idle, task: object) -> None:
        """Raises OSError."""

    def unwatch(self, idle: Idle) -> None:
        """Twice is harmless."""

    def serve(self, now_s: float, clock_s: float, date: bytes, turn_s: float) -> list[object]:
        """Answer what has come, for `turn_s` at most; the tasks of connections that are not watched any more.

        `now_s`: seconds since 1970, for signatures; `clock_s`: of the event loop; `date`: of the answers.
        """
