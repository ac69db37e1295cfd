"""KV events: vLLM's messages about the contents of its caches.

Responsibility: encode and decode one batch, and keep the recent past of a stream for replays. A message has three
frames: topic, sequence number (8 bytes, big-endian), and a batch in msgpack:

    [time in seconds, [event, ...], data-parallel rank or nil]

An event is a map with a `type`, as vLLM writes it since 0.11, or an array that begins with it, as SGLang and older
releases do; both are read, maps are written. Unknown fields are skipped, since releases add some.

Invariants: a batch that is malformed raises InvalidRequest and changes nothing. Concurrency: pure functions; a
`Replay` belongs to one thread.

Needs the extra `events` (msgspec).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec

from kvfs.errors import InvalidRequest
from kvfs.groups import Group
from kvfs.limits import MAX_EVENT_BATCHES, MAX_EVENT_BYTES, MAX_REPLAY_BYTES, MAX_WINDOW_TOKENS

BlockHash = bytes | int
"""Bytes from kvfs and newer engines; the last 64 bits from engines with default settings."""

GPU: Final = "GPU"
CPU: Final = "CPU"
STORAGE: Final = "STORAGE"

SEQUENCE_BYTES: Final = 8
END_OF_REPLAY: Final = b"\xff" * SEQUENCE_BYTES
"""In place of a sequence number: a replay ends."""
MANIFEST: Final = b"\xff" * 7 + b"\xfe"
"""In a request for a replay, in place of a sequence number: publish all that is there again, and then end the replay.
A publisher that does not know it takes it for a number that is yet to come, and ends the replay at once."""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, frozen=True):
    """Consecutive blocks are in a cache; `parent_block_hash` precedes the first."""

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    """The tokens of all the blocks; empty from kvfs, which knows hashes alone."""
    block_size: int
    """Tokens of one block."""
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    layers_of: bytes | None = None
    """From kvfs, of models with several kinds of attention: `namespace_groups.NamespaceGroup.model`."""
    chunk_tokens: int | None = None
    """From kvfs, of chunked local attention."""


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, frozen=True):
    """Blocks have left a cache."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None
    layers_of: bytes | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True):
    """The cache is empty."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """The events of one message."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = None


class _RawBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


encode_batch: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_RawBatch).decode
# Names of vLLM's KVCacheSpecKind.
_WINDOWS: Final = frozenset(("sliding_window", "sliding_window_mla"))
_STATES: Final = frozenset(("mamba",))
CHUNKS: Final = frozenset(("chunked_local_attention",))


def group_of(event: BlockStored) -> Group:
    """Return what the layers of an event's blocks read of a prefix: everything, where it does not say what they are, or
    says too little, as engines do of chunked local attention: not how long a chunk is."""
    window, chunk = event.kv_cache_spec_sliding_window, event.chunk_tokens
    return group_of_kind(event.kv_cache_spec_kind, window, chunk, max(event.block_size, 1))


@lru_cache(maxsize=256)
def group_of_kind(
    kind: str | None, window_tokens: int | None, chunk_tokens: int | None, block_tokens: int
) -> Group:
    """Return the group of layers that a kind names, as `group_of` does. Each event asks, and engines name few."""
    if kind in _WINDOWS and window_tokens and 0 < window_tokens <= MAX_WINDOW_TOKENS:
        return Group.of_window(window_tokens, block_tokens)
    whole_tokens = 0 if chunk_tokens is None or chunk_tokens % block_tokens else chunk_tokens
    if kind in CHUNKS and 0 < whole_tokens <= MAX_WINDOW_TOKENS:
        return Group.of_chunks(whole_tokens, block_tokens)
    return Group.of_state() if kind in _STATES else Group()


_KINDS: Final[dict[str, type[KVEvent]]] = {
    kind.__name__: kind for kind in (BlockStored, BlockRemoved, AllBlocksCleared)
}


def decode_batch(payload: bytes) -> Batch:
    """Decode a batch; skip events of unknown types. Raises InvalidRequest."""
    if len(payload) > MAX_EVENT_BYTES:
        raise InvalidRequest(f"KV events: batch of {len(payload)} bytes, the limit is {MAX_EVENT_BYTES}")
    try:
        raw = _decode(payload)
        events = [event for each in raw.events if (event := _event(each)) is not None]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"KV events: no batch of events: {error}") from None
    return Batch(raw.ts, events, raw.data_parallel_rank)


def _event(raw: object) -> KVEvent | None:
    if isinstance(raw, list) and raw:
        tag, kind = raw[0], _KINDS.get(str(raw[0]))
        if kind is None:
            return None
        fields = dict(zip(kind.__struct_fields__, raw[1:], strict=False))
        # Before `medium` was there, everything was in GPU memory; `lora_name` came with later releases.
        raw = {"medium": None, "lora_id": None, "lora_name": None, **fields, "type": tag}
    if not isinstance(raw, dict):
        raise msgspec.ValidationError(f"event is a {type(raw).__name__}")
    kind = _KINDS.get(str(raw.get("type")))
    return None if kind is None else msgspec.convert(raw, kind)


def sequence_of(frame: bytes) -> int:
    """Decode a sequence number. Raises InvalidRequest."""
    if len(frame) != SEQUENCE_BYTES:
        raise InvalidRequest(f"KV events: sequence number of {len(frame)} bytes, not {SEQUENCE_BYTES}")
    return int.from_bytes(frame, "big")


def sequence_frame(sequence: int) -> bytes:
    """Encode a sequence number as a message's frame."""
    return sequence.to_bytes(SEQUENCE_BYTES, "big")


_COUNTING_BITS: Final = 22


def first_sequence(time_s: float) -> int:
    """Return the number of the first batch of a publisher that begins at a Unix time: its milliseconds, before 22 bits
    that count.

    Engines begin with 0. Whoever loses the first batches of one that began anew, and as many as it knew from before,
    would take the next for what continues. A stream runs past 22 bits in order, and never overtakes the clock: that
    would be 4 million batches in a millisecond.
    """
    return int(time_s * 1000) << _COUNTING_BITS


def start_of(sequence: int) -> int:
    """Return the number with which a publisher began that has come to this one: 0 of an engine."""
    return sequence >> _COUNTING_BITS << _COUNTING_BITS


class Replay:
    """Keep the last batches of a stream for replays, bounded in number and in bytes."""

    def __init__(self, max_batches: int = MAX_EVENT_BATCHES, max_size_bytes: int = MAX_REPLAY_BYTES) -> None:
        self._batches: deque[tuple[int, bytes]] = deque()
        self._max_batches, self._max_size_bytes = max_batches, max_size_bytes
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._batches)

    def add(self, sequence: int, payload: bytes) -> None:
        """Keep a batch; drop the oldest ones over the limits."""
        self._batches.append((sequence, payload))
        self.size_bytes += len(payload)
        while len(self._batches) > self._max_batches or self.size_bytes > self._max_size_bytes:
            self.size_bytes -= len(self._batches.popleft()[1])

    def since(self, sequence: int) -> Iterator[Sequence[bytes]]:
        """Yield the sequence and payload frames of the kept batches from `sequence` on, in order."""
        for number, payload in list(self._batches):
            if number >= sequence:
                yield sequence_frame(number), payload
