"""Keys: prefix hashes of blocks, the names that they have on the mount, payload checksums.

Responsibility: check arguments and call `kvfs._native.hash.hashing`, once for any number of blocks, without the
GIL where that takes long. docs/keys.md specifies every byte; `kvfs.namespaces` says what a namespace is.

    h[i] = first 16 bytes of H(h[i-1] || tokens of block i || extra of block i); h[-1] = namespace digest

Invariants: a token is hashed as 32-bit unsigned little-endian, whatever integer type it has; a partial block's hash
has another form, so it equals no whole block's. Concurrency: pure functions.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvfs._native.hash.hashing import SHA256, XXH3_128, hash_chain, xxh3_64
from kvfs.errors import InvalidRequest, LimitExceeded
from kvfs.limits import MAX_EXTRA_BYTES
from kvfs.namespaces import DIGEST_BYTES, Namespace

if TYPE_CHECKING:
    from typing_extensions import Buffer

    class _Array(Protocol):
        """Type numpy's arrays, which a type checker takes for buffers from Python 3.12 on only."""

        @property
        def __array_interface__(self) -> dict[str, Any]: ...

    Tokens = Buffer | Sequence[int] | _Array

__all__ = [
    "Namespace",
    "block_name",
    "key_at",
    "parse_block_name",
    "prefix_hashes",
    "split_keys",
    "tail_hash",
    "xxh3_64",
]

HASH_BYTES: Final = DIGEST_BYTES
_ALGORITHMS: Final = {"sha256": SHA256, "xxh3_128": XXH3_128}
_BLOCK_NAME = re.compile(rb"kv/([0-9a-f]{2})/(\1[0-9a-f]{30})")


def prefix_hashes(
    namespace: Namespace,
    tokens: Tokens,
    *,
    parent: bytes | None = None,
    extra: Sequence[bytes | None] | None = None,
) -> bytes:
    """Return the prefix hash of every whole block of `tokens`, 16 bytes each; tokens left over are not hashed.

    `tokens` is a C-contiguous row of native integers of 2, 4 or 8 bytes (numpy, array, memoryview), or a
    list, which costs several times the hash; bytes are refused, since the width of a token is unknown.
    `parent` is the hash of the block before the first one; None at the start of a prompt. `extra` has one
    entry for each whole block: bytes that decide the block besides its tokens, or None.
    Raises InvalidRequest naming the argument (the first token that is negative or over 32 bits, with its
    index), LimitExceeded.
    """
    return _hash(namespace, _token_view(tokens), parent, extra, tail=False)


def tail_hash(
    namespace: Namespace,
    tokens: Tokens,
    *,
    parent: bytes | None = None,
    extra: bytes | None = None,
) -> bytes:
    """Return the hash of a partial last block (1 to block_tokens - 1 tokens), 16 bytes. Raises as `prefix_hashes`."""
    view = _token_view(tokens)
    count = view.nbytes // view.itemsize
    if not 0 < count < namespace.block_tokens:
        raise InvalidRequest(
            f"a partial block has 1 to {namespace.block_tokens - 1} tokens in this namespace, not {count}"
        )
    return _hash(namespace, view, parent, (extra,), tail=True)


def split_keys(joined: bytes) -> list[bytes]:
    """Split several prefix hashes in one bytes object into one each."""
    return [joined[at : at + HASH_BYTES] for at in range(0, len(joined), HASH_BYTES)]


def key_at(joined: bytes, index: int) -> bytes:
    """Return one of several prefix hashes in one bytes object; behind the last one nothing. REQUIRES index >= 0."""
    return joined[index * HASH_BYTES : (index + 1) * HASH_BYTES]


def block_name(digest: bytes) -> bytes:
    """Return the key of a block in a bucket bound to its namespace: `kv/<2 hex>/<32 hex>`."""
    if len(digest) != HASH_BYTES:
        raise InvalidRequest(f"prefix hash has {len(digest)} bytes, not {HASH_BYTES}")
    text = digest.hex().encode()
    return b"kv/%b/%b" % (text[:2], text)


def parse_block_name(key: bytes) -> bytes | None:
    """Return the prefix hash in a block's key; None for another key."""
    found = _BLOCK_NAME.fullmatch(key)
    return None if found is None else bytes.fromhex(found[2].decode())


def _hash(
    namespace: Namespace,
    tokens: memoryview,
    parent: bytes | None,
    extra: Sequence[bytes | None] | None,
    *,
    tail: bool,
) -> bytes:
    if parent is not None and not isinstance(parent, bytes):
        raise InvalidRequest(f"parent hash is a {type(parent).__name__}, not {HASH_BYTES} bytes")
    return hash_chain(
        tokens,
        namespace.digest if parent is None else parent,
        None if extra is None else tuple(map(_extra_bytes, extra)),
        algorithm=_ALGORITHMS[namespace.hash],
        block_tokens=namespace.block_tokens,
        tail=tail,
    )


def _token_view(tokens: Tokens) -> memoryview:
    if isinstance(tokens, list | tuple):
        try:
            return memoryview(array("I", tokens))
        except (OverflowError, TypeError):
            raise _bad_token(tokens) from None
    try:
        view = memoryview(tokens)  # type: ignore[arg-type]
    except (BufferError, TypeError, ValueError):
        raise InvalidRequest(
            f"tokens are a {type(tokens).__name__}, neither a buffer of integers nor a list "
            "(of a tensor, pass .numpy())"
        ) from None
    if not view.c_contiguous:
        raise InvalidRequest("tokens are not contiguous in memory")
    return view


def _bad_token(tokens: Sequence[object]) -> InvalidRequest:
    high = (1 << 32) - 1
    for index, token in enumerate(tokens):
        if not isinstance(token, int):
            return InvalidRequest(f"token {index} is {token!r}, not an integer")
        if not 0 <= token <= high:
            return InvalidRequest(f"token {index} is {token}, outside 0 to {high}")
    return InvalidRequest(f"tokens are no integers: {type(tokens).__name__}")


def _extra_bytes(extra: bytes | None) -> bytes:
    if extra is None:
        return b""
    if not isinstance(extra, bytes):
        raise InvalidRequest(f"extra holds a {type(extra).__name__}, not bytes or None")
    if len(extra) > MAX_EXTRA_BYTES:
        raise LimitExceeded(f"extra of {len(extra)} bytes, the limit is {MAX_EXTRA_BYTES}")
    return extra
