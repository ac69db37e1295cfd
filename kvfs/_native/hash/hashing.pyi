"""Prefix hashes, without the GIL where they take long, and checksums. `kvfs.keys` is the interface to use."""

from typing_extensions import Buffer

SHA256: int
XXH3_128: int
AUTO: int
PORTABLE: int
SHA_NI: int

def hash_chain(
    tokens: Buffer,
    parent: bytes,
    extra: tuple[bytes, ...] | None,
    *,
    algorithm: int,
    block_tokens: int,
    tail: bool,
    engine: int = 0,
) -> bytes:
    """Return 16 bytes for each whole block of `block_tokens` (at least 1), or one hash of all tokens as a `tail`.

    `tokens` is one row of 2-, 4- or 8-byte native integers; `extra` has one entry for each hash. Raises
    InvalidRequest naming the first token that is no 32-bit unsigned number, BufferError for another than a
    contiguous buffer, DeviceMissing for an engine that this processor lacks.
    """

def sha256(data: Buffer, *, engine: int = 0) -> bytes:
    """Return the 32-byte digest. Raises DeviceMissing."""

def sha256_engine() -> int:
    """Return the engine that AUTO means on this processor."""

def xxh3_64(data: Buffer) -> int:
    """Return XXH3-64 of a buffer."""
