"""A request's body into a draft, and its checksums, without Python."""

from typing import Final

from typing_extensions import Buffer, disjoint_base

MOVED: Final[int]
"""Why `Receiver.receive` came back: as much as was asked for was moved..."""
WAIT: Final[int]
"""...nothing more is there yet..."""
END: Final[int]
"""...the stream ended..."""
GONE: Final[int]
"""...the connection failed."""

@disjoint_base
class Receiver:
    """One body: XXH3-64 of it, and CRC-64/NVME if wanted."""

    def __init__(self, crc64nvme: bool) -> None: ...
    @property
    def size_bytes(self) -> int:
        """What came so far."""

    def update(self, data: Buffer) -> None:
        """Bytes that came another way, and were written by the caller."""

    def receive(self, socket: int, descriptor: int, most: int) -> int:
        """Move at most so many bytes to where the body ends so far. Raises KvfsError of the file."""

    @property
    def xxh3(self) -> int: ...
    @property
    def crc64nvme(self) -> int: ...

def engine(wanted: int = 0) -> int:
    """What takes the CRC: 1 tables, 2 and 3 carry-less multiplication of 128 and 512 bits; 0 asks for the best, and -1
    is one that this processor has not."""

def crc64nvme(data: Buffer, crc: int = 0, engine: int = 0) -> int:
    """Of what `crc` is of, and then `data`. Raises InvalidRequest."""
