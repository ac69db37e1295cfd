"""The hand-over of a prompt from a prefill engine to a decode engine: what `kv_transfer_params` say of it.

    to the prefill engine    {"do_remote_decode": true}
    its answer               {"do_remote_prefill": true, "remote_prefill_cached_tokens": TOKENS,
                              "kvfs": {"namespace": HEX, "last_block": HEX}}
    to the decode engine     the same, with "source": ADDRESS in "kvfs" where its store is another machine's

Responsibility: make and read these fields (docs/engines.md), and say how long a decode engine waits for the block that
they name. `source`, which a router adds, is the machine whose store has the blocks; without the other fields it is a
hint for any request. vLLM adds `remote_prefill_cached_tokens` to an answer with `do_remote_prefill`, and reports that
number as the usage of the request that has both.

Invariants: the fields come from whoever sends requests: whatever they are, nothing is raised, and a request waits for
CONNECTOR_HANDOVER_S at most, once, for its last block, and CONNECTOR_FETCH_S at most for fetches from `source`.
Concurrency: the engine's scheduler thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from kvfs.keys import HASH_BYTES
from kvfs.limits import CONNECTOR_HANDOVER_S
from kvfs.namespaces import DIGEST_BYTES

MAX_SOURCE_CHARACTERS = 300
"""A host's name, 253 at most, and a port."""


@dataclass(frozen=True, slots=True)
class Handover:
    """The last block that a prefill engine has stored, or stores now."""

    last_block: bytes
    """Its prefix hash in the namespace of the first rank."""
    namespace: str
    """That namespace's digest, in hexadecimal digits."""

    @classmethod
    def read(cls, params: Any) -> Self | None:
        """Return what a request says of its hand-over; None where it says nothing that can be read."""
        fields = params.get("kvfs") if isinstance(params, Mapping) else None
        if not isinstance(fields, Mapping):
            return None
        try:
            last_block = bytes.fromhex(fields["last_block"])
        except (KeyError, TypeError, ValueError):
            return None
        namespace = str(fields.get("namespace", ""))[: 2 * DIGEST_BYTES]
        return cls(last_block, namespace) if len(last_block) == HASH_BYTES else None


def source_of(params: Any) -> str:
    """Return the address of the machine that is said to have blocks of a request; empty where none is."""
    fields = params.get("kvfs") if isinstance(params, Mapping) else None
    source = fields.get("source") if isinstance(fields, Mapping) else None
    return source if isinstance(source, str) and len(source) <= MAX_SOURCE_CHARACTERS else ""


def is_asked_for(params: Any) -> bool:
    """Return whether a request asks its prefill engine to name what it stores."""
    return isinstance(params, Mapping) and bool(params.get("do_remote_decode"))


def answer(handover: Handover | None) -> dict[str, Any]:
    """Return the parameters for the decode engine; None where not all of the prompt's blocks are being stored."""
    params: dict[str, Any] = {"do_remote_prefill": True}
    if handover is not None:
        params["kvfs"] = {"namespace": handover.namespace, "last_block": handover.last_block.hex()}
    return params


class Wait:
    """The wait of one request for its first `blocks` blocks to be stored."""

    def __init__(self, blocks: int, now_s: float) -> None:
        self.blocks = blocks
        self._until_s = now_s + CONNECTOR_HANDOVER_S

    def is_late(self, there: int, now_s: float) -> bool:
        """Return whether the time is over, and blocks are missing."""
        return there < self.blocks and now_s >= self._until_s

    def goes_on(self, there: int, now_s: float) -> bool:
        """Return whether to ask again, `there` blocks being stored; once it was False it stays so."""
        if there >= self.blocks or now_s >= self._until_s:
            self.blocks = 0
        return self.blocks > 0
