"""Tokens of segments: a service that was started again knows by one that its store made the segment, and for whom.

Responsibility: make them and check them, without a list: half of a token is drawn, the other half is its keyed hash
with the pool that the segment is of.

Invariants: who has not the store's key makes no token, and one of another uid, device or size of segments counts for
nothing. Concurrency: pure but for what is drawn.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from kvfs import limits

_HALF_BYTES = limits.HBM_SEGMENT_TOKEN_BYTES // 2


class SegmentTokens:
    """Makes and checks the tokens of one pool's segments."""

    def __init__(self, key: bytes, device: str, uid: int, segment_bytes: int) -> None:
        self._key = key
        self._pool = f"{device} {uid} {segment_bytes}".encode()

    def make(self) -> bytes:
        """Draw a token."""
        drawn = secrets.token_bytes(_HALF_BYTES)
        return drawn + self._proof(drawn)

    def has_made(self, token: bytes) -> bool:
        """Return whether a token was made with the same key for the same pool."""
        drawn, proof = token[:_HALF_BYTES], token[_HALF_BYTES:]
        return hmac.compare_digest(self._proof(drawn), proof)

    def _proof(self, drawn: bytes) -> bytes:
        return hashlib.blake2b(drawn + self._pool, key=self._key, digest_size=_HALF_BYTES).digest()
