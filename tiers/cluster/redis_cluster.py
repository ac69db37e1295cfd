"""The Redis Cluster that the directory is on: scripts called on the server that has their keys.

Responsibility: which server has which slots, as the servers themselves say, and a `RedisServer` for each that has some
or was configured. What is asked of one server waits for no other.

Invariants: a call whose keys have gone to another server fails, and the map is asked for anew; so it is while a server
of the map is down, a replica of which may have taken its place. No more than MAX_DIRECTORY_SERVERS are followed.

Concurrency: the service's trio thread.
"""

from __future__ import annotations

import logging
import re
from binascii import crc_hqx
from collections import Counter, deque
from collections.abc import Sequence
from functools import partial
from ipaddress import IPv6Address
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import trio

from kvfs import limits
from kvfs.errors import KvfsError, ProtocolError, TierUnreachable
from tiers.cluster.redis_server import RedisServer

log = logging.getLogger("kvfs.cluster")

SLOTS: Final = 16384
"""Of every Redis Cluster (its specification, "Key distribution model")."""
_HOST: Final = re.compile(r"[A-Za-z0-9._-]+")


def slot_of(key: bytes) -> int:
    """Return the slot of a key: by what is in its braces, where there is something."""
    _, brace, rest = key.partition(b"{")
    tag, end, _ = rest.partition(b"}")
    return crc_hqx(tag if brace and end and tag else key, 0) % SLOTS


class SlotRange(NamedTuple):
    """Slots that one server has, the last one included."""

    first: int
    last: int
    address: str


def decode_slots(answer: object, asked: str) -> list[SlotRange]:
    """Return who has which slots, of an answer to CLUSTER SLOTS by the server at `asked`. Raises ProtocolError."""
    try:
        if not isinstance(answer, list):
            raise TypeError("no list")
        return [_decode_range(each, asked) for each in answer]
    except (ValueError, TypeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"the directory's answer is none to CLUSTER SLOTS: {error}") from None


def _decode_range(row: Any, asked: str) -> SlotRange:
    first, last, (host, port, *_), *_ = row
    if not all(isinstance(each, int) for each in (first, last, port)) or not 0 <= first <= last < SLOTS:
        raise ValueError("no range of slots")
    if not isinstance(host, bytes | None) or not 0 < port < 1 << 16:
        raise TypeError("no address of a server")
    # A server that does not know how it is reached says no host: it is the one that was asked.
    name = host.decode() if host else asked.rpartition(":")[0].strip("[]")
    if ":" in name:
        name = f"[{IPv6Address(name)}]"
    elif not _HOST.fullmatch(name):
        raise ValueError(f"a server whose host is {name!r:.80}")
    return SlotRange(first, last, f"{name}:{port}")


def _covered(ranges: Sequence[SlotRange]) -> int:
    return sum(each.last - each.first + 1 for each in ranges)


class RedisCluster:
    """Calls scripts of all servers, as `RedisServer` does of one."""

    def __init__(self, url: str) -> None:
        """Take `redis+cluster://USER:PASSWORD@HOST:PORT,HOST:PORT`. Raises ValueError for a URL that coredis does not
        take."""
        parts = urlsplit(url)
        user, at, hosts = parts.netloc.rpartition("@")
        self.shown = f"{parts.scheme}://{hosts}"
        self._before_host = f"{parts.scheme.partition('+')[0]}://{user}{at}"
        self._servers = {address: self._server(address) for address in hosts.split(",")}
        self._configured = frozenset(self._servers)
        self._asked = deque(self._servers)
        """Whom to ask for the map, in turns: the last one that said it comes last."""
        self._past = Counter[str]()
        """Of servers that are followed no more."""
        self._scopes: dict[str, trio.CancelScope] = {}
        self._ranges: list[SlotRange] = []
        self._look_wanted = trio.Event()
        self._trouble = ""

    def _server(self, address: str) -> RedisServer:
        return RedisServer(f"{self._before_host}{address}/0", on_lost=lambda: self._look_wanted.set())

    @property
    def is_up(self) -> bool:
        """Return whether every slot is known to be on a server that answers."""
        return _covered(self._ranges) >= SLOTS and all(
            self._servers[each.address].is_up for each in self._ranges
        )

    @property
    def trouble(self) -> str:
        """Return why some or all of it is not asked; empty where all is well."""
        used = dict.fromkeys(each.address for each in self._ranges) or self._servers
        troubles = [
            f"{each}: {self._servers[each].trouble}" for each in used if not self._servers[each].is_up
        ]
        left = SLOTS - _covered(self._ranges)
        if left > 0 and len(troubles) < len(used):
            troubles.append(f"{left} of {SLOTS} slots are on no server")
        return "; ".join(filter(None, [*troubles, self._trouble]))

    @property
    def counts(self) -> Counter[str]:
        """Return `connections`, `failures` and `deadlines` of all servers that are, or were, followed."""
        return sum((each.counts for each in self._servers.values()), self._past)

    def connection(self, prefix: bytes) -> object:
        """Return what stands for the connection to the server that has these keys, to be compared."""
        address = self._address_of(prefix)
        return None if address is None else self._servers[address].connection(prefix)

    async def run(self) -> None:
        """Keep connections until cancelled."""
        async with trio.open_nursery() as nursery:
            for address in self._servers:
                self._follow(nursery, address)
            while True:
                self._look_wanted = trio.Event()
                await self._look(nursery)
                with trio.move_on_after(
                    limits.DIRECTORY_LOOK_S if self.is_up else limits.DIRECTORY_BEAT_S / 2
                ):
                    await trio.sleep(limits.DIRECTORY_BEAT_S / 10)
                    await self._look_wanted.wait()

    async def call(self, script: str, *arguments: bytes, prefix: bytes) -> Any:
        """Run a script within limits.DIRECTORY_CALL_S. Raises TierUnreachable, DeadlinePassed."""
        return await self._server_of(prefix).call(script, *arguments, prefix=prefix)

    async def look_up(self, script: str, argument: bytes, wait_s: float, *, prefix: bytes) -> Any:
        """Run a script that others wait for. Raises TierUnreachable, DeadlinePassed."""
        return await self._server_of(prefix).look_up(script, argument, wait_s, prefix=prefix)

    def _address_of(self, prefix: bytes) -> str | None:
        slot = slot_of(prefix)
        return next((each.address for each in self._ranges if each.first <= slot <= each.last), None)

    def _server_of(self, prefix: bytes) -> RedisServer:
        address = self._address_of(prefix)
        if address is None:
            self._look_wanted.set()
            raise TierUnreachable(
                f"the directory is not asked now: {self.trouble or 'no server has these keys'}"
            )
        return self._servers[address]

    async def _look(self, nursery: trio.Nursery) -> None:
        """Ask servers that answer for the map, one after the other, until one says where all slots are: one that was
        away may know less than the others."""
        best: list[SlotRange] = []
        trouble = ""
        for address in list(self._asked):
            if not self._servers[address].is_up:
                continue
            self._asked.remove(address)
            self._asked.append(address)
            try:
                said = decode_slots(await self._servers[address].ask(b"CLUSTER SLOTS"), address)
                self._check(said)
            except KvfsError as error:
                trouble = str(error)
                continue
            best = max(best, said, key=_covered)
            if _covered(best) >= SLOTS:
                break
        self._trouble = "" if _covered(best) >= SLOTS else trouble
        have_all_said = all(server.is_up for server in self._servers.values())
        if best and (have_all_said or _covered(best) >= _covered(self._ranges)):
            self._take(nursery, best)

    def _check(self, ranges: Sequence[SlotRange]) -> None:
        """Raise ProtocolError for more servers than are followed."""
        count = len({each.address for each in ranges} | self._configured)
        if count > limits.MAX_DIRECTORY_SERVERS:
            raise ProtocolError(
                f"the directory has {count} servers, the limit is {limits.MAX_DIRECTORY_SERVERS}"
            )

    def _take(self, nursery: trio.Nursery, ranges: list[SlotRange]) -> None:
        wanted = {each.address for each in ranges} | self._configured
        if ranges != self._ranges:
            log.info("%s: %d servers have its slots", self.shown, len({each.address for each in ranges}))
        for address in wanted - self._servers.keys():
            self._servers[address] = self._server(address)
            self._asked.append(address)
            self._follow(nursery, address)
        self._ranges = ranges
        for address in self._servers.keys() - wanted:
            self._past += self._servers.pop(address).counts
            self._asked.remove(address)
            self._scopes.pop(address).cancel()

    def _follow(self, nursery: trio.Nursery, address: str) -> None:
        scope = self._scopes[address] = trio.CancelScope()
        nursery.start_soon(partial(_run_in, scope, self._servers[address]))


async def _run_in(scope: trio.CancelScope, server: RedisServer) -> None:
    with scope:
        await server.run()
