"""Pulls of other machines: blocks that this one is asked to fetch from them.

Responsibility: which bucket they go to, the fetch, and what is answered.

Invariants:
- A pull reaches only what an order of a Conductor could: a peer of the settings or a member of the directory, and a
  namespace that has a bucket here, a cache, whose owner is charged. Fetches wait behind urgent reads.
- Blocks that came are written to NVMe whatever the bucket admits: somebody has asked for them by name.
- limits.REMOTE_PULLS are carried out at a time, limits.MAX_CLUSTER_NODES connections are open.

Concurrency: the service's trio thread, a task for each connection.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager

import trio

from kvfs import limits
from kvfs.errors import (
    Busy,
    DeadlinePassed,
    InvalidRequest,
    KvfsError,
    NoSpace,
    QuotaExceeded,
    TierUnreachable,
)
from tiers.model.objects import Bucket
from tiers.model.tier import Kind, StoreKey
from tiers.remote.connections.connection import Connection
from tiers.remote.fetch import Fetcher
from tiers.remote.peer import Peer
from tiers.remote.pull_wire import ASK, HEAD_BYTES, Pull, decode_head, decode_pull, encode_pulled
from tiers.store.store import Store
from tiers.transfers.block_batches import is_served
from tiers.transfers.other_machines import BROUGHT, MISSING, THERE, Cause, Pulled

log = logging.getLogger("kvfs.remote")

_WITHIN = "within a pull"
PeerAt = Callable[[str, bytes], Peer]
"""Finds the peer at an address, or with a store's id. Raises InvalidRequest."""


class Pulls:
    """Carries out what other machines ask for."""

    def __init__(self, store: Store, fetcher: Fetcher, peer_at: PeerAt, refusal: Callable[[], str]) -> None:
        """`refusal` says why this machine takes no blocks now; it is empty where it does."""
        self._store, self._fetcher, self._peer_at = store, fetcher, peer_at
        self._refusal = refusal
        self._turns = trio.CapacityLimiter(limits.REMOTE_PULLS)
        self._connections = 0
        self._counts: Counter[str] = Counter()

    def status(self) -> dict[str, int]:
        """Return counts as JSON values."""
        return {name: self._counts[name] for name in ("pulls", "pulled_blocks", "refused_pulls")}

    async def serve(self, peer: Connection, store_id: bytes, name: str) -> None:
        """Answer the pulls of a machine that was verified, until it ends the connection, which is closed."""
        with closing(peer):
            if self._connections >= limits.MAX_CLUSTER_NODES:
                log.warning("%s: refused: %d connections for pulls are open", name, self._connections)
                return
            peer.prepare_to_serve()
            self._connections += 1
            try:
                while (pull := await _next_pull(peer)) is not None:
                    pulled = await self.carry_out(pull, store_id)
                    with _bounded(limits.REMOTE_READ_S):
                        await peer.send_all(encode_pulled(pull.number, pulled))
            except (KvfsError, OSError) as error:
                log.info("%s: its pulls end: %s", name, error)
            finally:
                self._connections -= 1

    async def carry_out(self, pull: Pull, store_id: bytes) -> Pulled:
        """Fetch what a pull names and is not here, unless it only asks; return what came of each block."""
        pulled = await self._pulled(pull, store_id)
        if pull.kind == ASK:
            return pulled
        self._counts["pulls"] += 1
        self._counts["pulled_blocks"] += pulled.statuses.count(BROUGHT)
        self._counts["refused_pulls"] += pulled.cause is not Cause.NONE
        return pulled

    async def _pulled(self, pull: Pull, store_id: bytes) -> Pulled:
        nothing = bytes([MISSING]) * len(pull.digests)
        if refusal := self._refusal():
            return Pulled(nothing, Cause.REFUSED, refusal)
        bound = [each for each in self._store.catalog.buckets() if each.namespace == pull.namespace]
        if not bound:
            return Pulled(
                nothing, Cause.NAMESPACE, f"no bucket there is bound to namespace {pull.namespace.hex()}"
            )
        for digest in pull.digests:
            await self._store.verifier.verify(digest)  # who hears that it is here may remove his own
        names = {each.name for each in bound}
        here = {digest: self._has(names, digest) for digest in pull.digests}
        statuses = bytes(THERE if here[digest] else MISSING for digest in pull.digests)
        if pull.kind == ASK or MISSING not in statuses:
            return Pulled(statuses)
        bucket = min(bound, key=lambda each: each.durable)
        if bucket.durable:
            shown = bucket.name.decode(errors="replace")
            return Pulled(statuses, Cause.NAMESPACE, f"bucket {shown} there is durable, and takes no copies")
        missing = [digest for digest in here if not here[digest]]
        try:
            failures = await self._fetch(bucket, missing, self._peer_at(pull.address, store_id))
        except InvalidRequest as error:
            return Pulled(nothing, Cause.REFUSED, str(error))
        except KvfsError as error:
            return Pulled(nothing, Cause.PASSING, str(error))
        return self._answered(pull, names, here, failures)

    async def _fetch(self, bucket: Bucket, missing: Sequence[bytes], peer: Peer) -> list[Exception]:
        """Fetch blocks from one machine; return what went wrong. Raises Busy, TierUnreachable."""
        failures: list[Exception] = []
        if not peer.is_up:
            raise TierUnreachable(f"it cannot read from {peer.address} now: {peer.trouble}")
        with trio.move_on_after(limits.REMOTE_FETCH_S) as waits:
            await self._turns.acquire_on_behalf_of(turn := object())
        if waits.cancelled_caught:
            raise Busy(f"{limits.REMOTE_PULLS} other pulls are under way there, which is the limit")
        try:
            await self._fetcher.fetch(
                bucket, missing, uid=bucket.uid, hints=(peer,), urgent=False, failures=failures
            )
        finally:
            self._turns.release_on_behalf_of(turn)
        return failures

    def _answered(
        self, pull: Pull, names: Collection[bytes], here: dict[bytes, bool], failures: Sequence[Exception]
    ) -> Pulled:
        statuses = bytes(
            THERE if here[digest] else BROUGHT if self._has(names, digest) else MISSING
            for digest in pull.digests
        )
        for digest, status in zip(pull.digests, statuses, strict=True):
            if status == BROUGHT:
                self._store.journal.touched(StoreKey(Kind.BLOCK, digest))
        if MISSING not in statuses:
            return Pulled(statuses)
        return Pulled(statuses, *_reason(failures))

    def _has(self, buckets: Collection[bytes], digest: bytes) -> bool:
        """Return whether a block is in one of these buckets here, and not in the cold tier alone."""
        return self._store.block_bucket(digest) in buckets and is_served(self._store, digest)


def _reason(failures: Sequence[Exception]) -> tuple[Cause, str]:
    """Return why blocks are missing; no room goes before all else."""
    room = next((each for each in failures if isinstance(each, NoSpace | QuotaExceeded)), None)
    if room is not None:
        return Cause.ROOM, f"no room there: {room}"
    if failures:
        return Cause.NONE, str(failures[0])
    return Cause.NONE, "they did not arrive there, or another bucket there has them"


async def _next_pull(peer: Connection) -> Pull | None:
    """Receive the next pull; None at the end of the stream. Raises ProtocolError, DeadlinePassed, OSError."""
    first = await peer.receive_some(HEAD_BYTES)
    if not first:
        return None
    with _bounded(limits.REMOTE_READ_S):
        head = decode_head(first + await peer.receive_all(HEAD_BYTES - len(first), _WITHIN))
        return decode_pull(head, await peer.receive_all(head.rest_bytes, _WITHIN))


@contextmanager
def _bounded(wait_s: float) -> Iterator[None]:
    """Raise DeadlinePassed of what takes longer."""
    with trio.move_on_after(wait_s) as scope:
        yield
    if scope.cancelled_caught:
        raise DeadlinePassed(f"the machine took over {wait_s:g} s")
