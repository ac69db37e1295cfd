"""The connection over which another machine is asked to fetch blocks from this one.

Invariants: opened when it is needed; whatever goes wrong closes it, and is the answer's cause. A call ends within
limits.REMOTE_PULL_S and the greeting's time. Concurrency: the service's trio thread; calls follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import trio

from kvfs import limits
from kvfs.errors import DeadlinePassed, KvfsError, NotPermitted, TierUnreachable, Unsupported
from tiers.remote.connections.connection import Connection
from tiers.remote.peer import Peer
from tiers.remote.pull_wire import ANSWER_BYTES, ASK, PULL, Pull, decode_answer_head, decode_pulled
from tiers.transfers.other_machines import MISSING, Cause, Pulled

_BEFORE = "before it had answered"
_FINAL = (Unsupported, NotPermitted)
"""Errors that the next call would meet again."""


class PullLink:
    """Implements `Target` for one peer."""

    def __init__(self, peer: Peer, own_address: str) -> None:
        """`own_address` is what the machine is told to fetch from."""
        self._peer, self._own_address = peer, own_address
        self._connection: Connection | None = None
        self._numbers = 0

    @property
    def address(self) -> str:
        return self._peer.address

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    async def pull(self, namespace: bytes, digests: Sequence[bytes]) -> Pulled:
        return await self._call(PULL, namespace, digests)

    async def ask(self, namespace: bytes, digests: Sequence[bytes]) -> Pulled:
        return await self._call(ASK, namespace, digests)

    async def _call(self, kind: int, namespace: bytes, digests: Sequence[bytes]) -> Pulled:
        self._numbers += 1
        pull = Pull(kind, self._numbers, namespace, self._own_address, list(digests))
        try:
            return await self._exchange(pull)
        except (KvfsError, OSError) as error:
            self.close()
            cause = Cause.REFUSED if isinstance(error, _FINAL) else Cause.PASSING
            return Pulled(bytes([MISSING]) * len(digests), cause, str(error))
        except BaseException:
            self.close()
            raise

    async def _exchange(self, pull: Pull) -> Pulled:
        """Send a pull and receive what came of it. Raises KvfsError, OSError."""
        if self._connection is None:
            self._connection = await self._peer.connect_for_pulls()
        peer, count = self._connection, len(pull.digests)
        wait_s = limits.REMOTE_PULL_S if pull.kind == PULL else limits.REMOTE_READ_S
        with trio.move_on_after(wait_s):
            try:
                await peer.send_all(pull.encode())
                head = await peer.receive_all(ANSWER_BYTES, _BEFORE)
                cause, reason_bytes = decode_answer_head(head, pull)
                return decode_pulled(cause, await peer.receive_all(count + reason_bytes, _BEFORE), count)
            except OSError as error:
                raise TierUnreachable(f"the connection ended: {error.strerror or error}") from None
        raise DeadlinePassed(f"no answer within {wait_s:g} s")
