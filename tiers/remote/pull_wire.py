"""What one machine asks of another that is to fetch blocks, as bytes: a pull, and what came of it.

Responsibility: the two messages that follow a greeting for pulls; docs/formats.md has both. Integers are little endian.

Invariants: bytes of a peer are checked before they count; whatever is outside of the limits is a ProtocolError.
Concurrency: pure functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from struct import Struct
from typing import Final, NamedTuple

from kvfs import limits
from kvfs.errors import ProtocolError
from kvfs.keys import HASH_BYTES, split_keys
from tiers.transfers.other_machines import MISSING, Cause, Pulled

_PULL_MAGIC, _PULLED_MAGIC = b"KVPL", b"KVPD"
PULL, ASK = 1, 2
"""Kinds: fetch what is not there, or only say what is."""
_HEAD: Final = Struct("<4sHHIIQ16s")
_ANSWER: Final = Struct("<4sIQIHH")
_CAUSES: Final = frozenset(Cause)
HEAD_BYTES: Final = _HEAD.size
ANSWER_BYTES: Final = _ANSWER.size


@dataclass(frozen=True, slots=True)
class Pull:
    """Asks a machine to fetch blocks of a namespace from the one that asks, or which of them it has."""

    kind: int
    number: int
    namespace: bytes
    address: str
    """Where the machine that asks serves its blocks, as it is told to others."""
    digests: list[bytes]

    def encode(self) -> bytes:
        """Encode the message."""
        address = self.address.encode()
        head = _HEAD.pack(
            _PULL_MAGIC, self.kind, len(address), len(self.digests), 0, self.number, self.namespace
        )
        return head + address + b"".join(self.digests)


class PullHead(NamedTuple):
    """The fixed part of a pull, and how long the rest is."""

    kind: int
    address_bytes: int
    blocks: int
    number: int
    namespace: bytes

    @property
    def rest_bytes(self) -> int:
        """Return how many bytes follow."""
        return self.address_bytes + self.blocks * HASH_BYTES


def decode_head(data: bytes) -> PullHead:
    """Return the fixed part of a pull. Raises ProtocolError."""
    if len(data) != HEAD_BYTES:
        raise ProtocolError(f"a pull's head of {len(data)} bytes instead of {HEAD_BYTES}")
    magic, kind, address_bytes, count, reserved, number, namespace = _HEAD.unpack(data)
    if magic != _PULL_MAGIC or kind not in (PULL, ASK) or reserved:
        raise ProtocolError("no pull of blocks")
    if not 1 <= count <= limits.MAX_PULL_BLOCKS or address_bytes > limits.MAX_PULL_ADDRESS_BYTES:
        raise ProtocolError(
            f"a pull of {count} blocks with an address of {address_bytes} bytes: "
            f"1 to {limits.MAX_PULL_BLOCKS}, and {limits.MAX_PULL_ADDRESS_BYTES} at most"
        )
    return PullHead(kind, address_bytes, count, number, namespace)


def decode_pull(head: PullHead, rest: bytes) -> Pull:
    """Return a whole pull. Raises ProtocolError."""
    try:
        address = rest[: head.address_bytes].decode()
    except UnicodeDecodeError:
        raise ProtocolError("a pull's address is not UTF-8") from None
    digests = split_keys(rest[head.address_bytes :])
    return Pull(head.kind, head.number, head.namespace, address, digests)


def encode_pulled(number: int, pulled: Pulled) -> bytes:
    """Encode what came of a pull."""
    reason = pulled.reason.encode("utf-8", "replace")[: limits.MAX_PULL_REASON_BYTES]
    head = _ANSWER.pack(_PULLED_MAGIC, len(pulled.statuses), number, pulled.cause, len(reason), 0)
    return head + pulled.statuses + reason


def decode_answer_head(data: bytes, pull: Pull) -> tuple[Cause, int]:
    """Return the cause that an answer names, and how many bytes of a reason follow its statuses. Raises
    ProtocolError."""
    if len(data) != ANSWER_BYTES:
        raise ProtocolError(f"an answer's head of {len(data)} bytes instead of {ANSWER_BYTES}")
    magic, count, number, cause, reason_bytes, reserved = _ANSWER.unpack(data)
    if magic != _PULLED_MAGIC or reserved or (count, number) != (len(pull.digests), pull.number):
        raise ProtocolError("its answer is not one to what was asked")
    if cause not in _CAUSES or reason_bytes > limits.MAX_PULL_REASON_BYTES:
        raise ProtocolError(f"its answer names cause {cause}, with a reason of {reason_bytes} bytes")
    return Cause(cause), reason_bytes


def decode_pulled(cause: Cause, data: bytes, count: int) -> Pulled:
    """Return what came of a pull. Raises ProtocolError."""
    statuses = data[:count]
    if len(statuses) != count or max(statuses) > MISSING:
        raise ProtocolError("its answer has a status that there is not")
    return Pulled(statuses, cause, data[count:].decode("utf-8", "replace"))
