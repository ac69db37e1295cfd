"""Bearer tokens of requests (RFC 6750), for the doors that take some.

Responsibility: whether a head has one of the tokens of the configuration.

Invariant: how long that takes says nothing of any token, nor how many there are: what is compared are keyed digests,
with a key of this process.

Concurrency: none; nothing changes.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from hashlib import blake2b

from kvfs.http.head import Head

_KEY_BYTES = 32


class BearerTokens:
    """Know a set of tokens; without any, everybody may ask."""

    def __init__(self, tokens: Collection[str]) -> None:
        self._key = secrets.token_bytes(_KEY_BYTES)
        self._digests = frozenset(self._digest(b"Bearer " + token.encode()) for token in tokens)

    def __bool__(self) -> bool:
        """Return whether a token is wanted."""
        return bool(self._digests)

    def allow(self, head: Head) -> bool:
        """Return whether a request has a token, or none is wanted."""
        if not self._digests:
            return True
        given = next((value for name, value in head.headers if name == b"authorization"), b"")
        return self._digest(given) in self._digests

    def _digest(self, given: bytes) -> bytes:
        return blake2b(given, key=self._key).digest()
