"""One part of the directory: this machine's lease there, what it writes under it, and look-ups.

Responsibility: which parts there are, and the lease of each. On one server there is one part. On a Redis Cluster there
are DIRECTORY_PARTS, each with the blocks whose places begin with some bytes, under keys that one server has. Members
are with the first; a machine that is one takes a lease at each other itself, and tells its number there.

Invariants: a lease that is new, or was lost meanwhile, and a connection that is new are followed by a manifest. A part
whose server does not answer holds up no other.

Concurrency: the service's trio thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from kvfs import limits
from kvfs.errors import KvfsError, TierUnreachable
from tiers.cluster.location_format import decode_holders, encode_places
from tiers.cluster.locations import Locations
from tiers.cluster.membership import Membership
from tiers.cluster.redis_cluster import SLOTS, slot_of
from tiers.cluster.scripts import LEND, LOOKUP, PREFIX, RELEASE
from tiers.store.store import Store

_FIRST_BYTES = 256


class Server(Protocol):
    """Calls scripts where the keys of a prefix are: `RedisServer`, `RedisCluster`."""

    def connection(self, prefix: bytes) -> object:
        """Return what stands for the connection over which keys of this prefix are reached, to be compared."""

    async def call(self, script: str, *arguments: bytes, prefix: bytes) -> Any:
        """Run a script within limits.DIRECTORY_CALL_S. Raises TierUnreachable, DeadlinePassed."""

    async def look_up(self, script: str, argument: bytes, wait_s: float, *, prefix: bytes) -> Any:
        """Run a script that others wait for. Raises TierUnreachable, DeadlinePassed."""


class Reach(NamedTuple):
    """Which blocks a part has, and under which keys."""

    prefix: bytes
    first_bytes: range
    """Of the places of these blocks."""


def reaches(count: int) -> list[Reach]:
    """Return `count` parts of equal size. The slots of several are as far apart as can be, so that servers with equal
    shares of the slots have as many parts each, give or take one."""
    if count == 1:
        return [Reach(PREFIX, range(_FIRST_BYTES))]
    found: dict[int, bytes] = {}
    number = 0
    while len(found) < count:
        prefix = PREFIX + b"{%d}:" % number
        found.setdefault(slot_of(prefix) * count // SLOTS, prefix)
        number += 1
    edges = [_FIRST_BYTES * at // count for at in range(count + 1)]
    return [Reach(found[at], range(edges[at], edges[at + 1])) for at in range(count)]


class DirectoryPart:
    """Holds this machine's lease at one part. Implement `Lease`."""

    def __init__(
        self, server: Server, reach: Reach, membership: Membership, store: Store, *, has_members: bool
    ) -> None:
        self._server, self._prefix, self._membership = server, reach.prefix, membership
        self._first_bytes, self._has_members = reach.first_bytes, has_members
        self.locations = Locations(store, self, reach.first_bytes)
        self._is_lent = False
        self._connection: object = None
        """Behind which the lease was taken or extended last."""
        self.on_ended: Callable[[], None] = lambda: None
        """Called where a lease turns out to have ended."""

    @property
    def is_held(self) -> bool:
        """Return whether this machine is a member and has its lease here, as far as is known."""
        return self._membership.is_joined and self._is_lent

    @property
    def connection(self) -> object:
        """Return what stands for the connection now; it is asked for before a lease is taken."""
        return self._server.connection(self._prefix)

    def has(self, digest: bytes) -> bool:
        """Return whether the part has a block's place."""
        return digest[0] in self._first_bytes

    async def call(self, script: str, *arguments: bytes) -> Any:
        """Run a script on this part's keys. Raises KvfsError."""
        return await self._server.call(script, *arguments, prefix=self._prefix)

    def extended(self, connection: object, *, is_new: bool) -> None:
        """Note that the lease was taken or extended over a connection."""
        # behind a new connection the server may be another one, or without the last second before its end
        if is_new or not self._is_lent or connection != self._connection or self.locations.is_behind:
            self.locations.want_manifest()
        self._connection, self._is_lent = connection, True

    def ended(self) -> None:
        """Note that the lease has to be taken again before anything is written."""
        self._is_lent = False

    async def lend(self) -> None:
        """Take or extend the lease of a member, where members are at another part; log nothing where it fails."""
        connection, membership = self.connection, self._membership
        arguments = membership.store_id, b"%d" % membership.epoch, membership.number, limits.DIRECTORY_LEASE_S
        try:
            answer = await self.call(LEND, *arguments[:3], b"%d" % (arguments[3] * 1000))
        except KvfsError:
            return
        if answer in (0, 1):
            self.extended(connection, is_new=answer == 1)
        else:
            self.ended()

    async def write(self, script: str, *arguments: bytes) -> int:
        """Run a script that proves the lease in the same step. Raises KvfsError, also where another has it."""
        membership = self._membership
        if not self.is_held:
            raise TierUnreachable("this machine has no lease now")
        answer = await self.call(script, membership.store_id, b"%d" % membership.epoch, *arguments)
        if isinstance(answer, int) and answer >= 0:
            return answer
        self.ended()
        if self._has_members:
            membership.lapse()
        self.on_ended()
        raise TierUnreachable("this machine's lease has ended")

    async def release(self) -> None:
        """End the lease. Raises KvfsError."""
        await self.call(RELEASE, self._membership.store_id, b"%d" % self._membership.epoch)

    async def holders(self, digests: Sequence[bytes], wait_s: float) -> list[tuple[int, ...]]:
        """Return the numbers of each block's holders. Raises KvfsError."""
        answer = await self._server.look_up(LOOKUP, encode_places(digests), wait_s, prefix=self._prefix)
        return decode_holders(answer, len(digests))
