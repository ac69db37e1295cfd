"""A request's body into a draft, and its checksums, without Python."""

from typing import Final

from typing_extensions import Buffer, disjoint_base

MOVED: Final[int]
"""`Receiver.receive` moved as much as was asked for."""
WAIT: Final[int]
"""`Receiver.receive` ended: nothing more is there yet."""
END: Final[int]
"""`Receiver.receive` ended: the stream ended."""
GONE: Final[int]
"""`Receiver.receive` ended: the connection failed."""

@disjoint_base
class Receiver:
    """Receive one body; compute its XXH3-64, and CRC-64/NVME if wanted."""

    def __init__(self, crc64nvme: bool) -> None: ...
    @property
    def size_bytes(self) -> int:
        """Return the bytes received so far."""

    def update(self, data: Buffer) -> None:
        """Count and hash bytes that the caller has written."""

    def receive(self, socket: int, descriptor: int, most: int) -> int:
        """Append at most `most` bytes to the file; return why it ended. Raises KvfsError of the file."""

    @property
    def xxh3(self) -> int: ...
    @property
    def crc64nvme(self) -> int: ...

def engine(wanted: int = 0) -> int:
    """Return the engine of the CRC: 1 tables, 2 and 3 carry-less multiplication of 128 and 512 bits, -1 for one that
    this processor lacks. `wanted` 0: the best."""

def crc64nvme(data: Buffer, crc: int = 0, engine: int = 0) -> int:
    """Return the CRC of the bytes of `crc` followed by `data`. Raises InvalidRequest."""
