"""What other machines' blocks are worth, and what knowing of them costs:
`python -m bench.cluster_simulation --trace FILE`.

Responsibility: requests of a trace, spread over machines at random, go through the eviction policy of each machine,
once alone and once with the blocks of all others, whose locations are written to a real Redis or Valkey server by the
directory's own scripts. Printed are the hit ratios, the server's memory for a block, and the messages in a second of
the trace. The trace is played in copies beside each other, each with blocks of its own, as large as a cluster.

A hit is a block that is here, or elsewhere, with all before it in its prompt. What another machine has is copied here,
as a fetch does; what is missed is made here. Locations are known at once: a directory lags by some milliseconds.

Concurrency: one trio thread; the server is a process of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import socket
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import trio
from rich.console import Console
from rich.table import Table

from bench.directory_server import directory_server
from kvfs import limits
from kvfs._native.evict.policy import Policy
from kvfs.errors import DeviceMissing
from scheduler.simulation.traces import Request, read_trace
from tiers.cluster.changes import PendingChanges
from tiers.cluster.location_format import decode_holders, encode_changes, encode_places
from tiers.cluster.membership import Membership
from tiers.cluster.redis_server import RedisServer
from tiers.cluster.scripts import BEAT, CHANGE, LOOKUP

MACHINES, BLOCKS, COPIES = 16, 10_000_000, 55
CHECKED = 1000
"""Of so many look-ups one is put to the server, and its answer compared."""
ANSWER_S = 5.0
BEATEN_S = limits.DIRECTORY_LEASE_S / 5


class Cache:
    """The blocks of one machine, each of size 1."""

    def __init__(self, capacity: int) -> None:
        self._policy, self._capacity = Policy("default"), capacity

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._policy

    def use(self, digests: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        """Use the blocks of a prompt; return what came and what was evicted."""
        policy, came, went, above = self._policy, [], [], None
        for digest in digests:
            if digest in policy:
                policy.touch(digest, 0.0)
            else:
                policy.insert(digest, size_bytes=1, parent=above, now=0.0)
                came.append(digest)
            above = digest
        if (most := len(policy) - self._capacity) > 0:
            for unit in policy.victims(most, 0.0):
                for digest in unit:
                    policy.remove(digest)
                    went.append(digest)
        return came, went


@dataclass(slots=True)
class Machine:
    """One machine: its cache without others, its cache among them, and what it has to write."""

    membership: Membership
    alone: Cache
    shared: Cache
    pending: PendingChanges = field(default_factory=PendingChanges)


@dataclass(slots=True)
class Counts:
    """What is counted of all machines."""

    blocks: int = 0
    alone: int = 0
    here: int = 0
    elsewhere: int = 0
    changes: int = 0
    lookups: int = 0
    messages: int = 0
    held: int = 0
    """Blocks that any machine has at the end."""


def prompts(requests: Sequence[Request], copies: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield each copy's prompts, in the order of arrival: the copy and its blocks."""
    for request in requests:
        for copy in range(copies):
            yield copy, request.blocks


def digest_of(copy: int, block: int) -> bytes:
    """Return a block's prefix hash."""
    return hashlib.blake2b(b"%d %d" % (copy, block), digest_size=16).digest()


class Simulation:
    """Plays prompts on machines."""

    def __init__(self, server: RedisServer, machines: int, blocks: int) -> None:
        self._server = server
        self.machines = [
            Machine(
                Membership(bytes([n]) * 16, f"10.0.0.{n}:9400", 1),
                Cache(blocks // machines),
                Cache(blocks // machines),
            )
            for n in range(machines)
        ]
        self._where: dict[bytes, int] = {}
        """The machines that have each block, a bit for each."""
        self.counts = Counts()
        self._beaten_s = float("-inf")

    async def play(self, number: int, digests: Sequence[bytes]) -> None:
        """Have a machine serve a prompt."""
        machine, counts = self.machines[number], self.counts
        counts.blocks += len(digests)
        counts.alone += _leading(digest in machine.alone for digest in digests)
        machine.alone.use(digests)
        here = _leading(digest in machine.shared for digest in digests)
        counts.here += here
        if missing := digests[here:]:
            counts.lookups += 1
            counts.messages += 1
            if counts.lookups % CHECKED == 0:
                await self._check(missing)
            counts.elsewhere += _leading(bool(self._where.get(digest)) for digest in missing)
        came, went = machine.shared.use(digests)
        self._note(number, came, went)
        if len(machine.pending) >= limits.DIRECTORY_BATCH:
            await self._write(machine)

    def _note(self, number: int, came: Sequence[bytes], went: Sequence[bytes]) -> None:
        machine, bit = self.machines[number], 1 << number
        for digest in came:
            self._where[digest] = self._where.get(digest, 0) | bit
            machine.pending.note(digest, True, 0.0)
        for digest in went:
            machine.pending.note(digest, False, 0.0)
            if left := self._where[digest] & ~bit:
                self._where[digest] = left
            else:
                del self._where[digest]
        changed = len(came) + len(went)
        self.counts.changes += changed
        # A prompt's changes wait limits.DIRECTORY_LINGER_S for more: none comes in that time to one machine.
        self.counts.messages += -(-changed // limits.DIRECTORY_BATCH)

    async def _write(self, machine: Machine) -> None:
        await self._beat()
        while changes := machine.pending.take():
            answer = await self._server.call(
                CHANGE, machine.membership.store_id, b"1", encode_changes(changes)
            )
            if answer != 0:
                raise RuntimeError(f"bench: the directory refused changes: {answer}")

    async def _check(self, digests: Sequence[bytes]) -> None:
        """Compare what the server says of blocks with what is so."""
        for machine in self.machines:
            await self._write(machine)
        answer = await self._server.call(LOOKUP, encode_places(digests))
        members = self.machines[-1].membership.members  # who beat last has heard of all
        bits = {number: 1 << member.store_id[0] for number, member in members.items()}
        for digest, holders in zip(digests, decode_holders(answer, len(digests)), strict=True):
            if sum(bits[each] for each in holders) != self._where.get(digest, 0):
                raise RuntimeError("bench: the directory says something else than is so")

    async def finish(self) -> None:
        """Write what is still to be written, and count the blocks that any machine has."""
        for machine in self.machines:
            await self._write(machine)
        self.counts.held = len(self._where)

    async def _beat(self) -> None:
        """Keep the machines' leases."""
        if trio.current_time() - self._beaten_s < BEATEN_S:
            return
        self._beaten_s = trio.current_time()
        for machine in self.machines:
            machine.membership.take(await self._server.call(BEAT, *machine.membership.arguments({})))


def _leading(found: Iterable[bool]) -> int:
    """Count what is true, up to the first that is not."""
    count = 0
    for each in found:
        if not each:
            break
        count += 1
    return count


async def simulate(port: int, requests: Sequence[Request], options: argparse.Namespace) -> tuple[Counts, int]:
    """Play the trace; return what was counted, and the bytes that the server's memory has grown by."""
    server = RedisServer(f"redis://127.0.0.1:{port}/0")
    draw = random.Random(1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.run)
        while not server.is_up:  # noqa: ASYNC110
            await trio.sleep(0.01)
        before = memory_bytes(port)
        simulation = Simulation(server, options.machines, options.blocks)
        for copy, blocks in prompts(requests, options.copies):
            digests = [digest_of(copy, block) for block in blocks]
            await simulation.play(draw.randrange(options.machines), digests)
        await simulation.finish()
        nursery.cancel_scope.cancel()
    return simulation.counts, memory_bytes(port) - before


def memory_bytes(port: int) -> int:
    """Return the bytes that the server has allocated."""
    with (
        socket.create_connection(("127.0.0.1", port), ANSWER_S) as connection,
        connection.makefile("rb") as lines,
    ):
        connection.sendall(b"INFO memory\r\n")
        for line in lines:
            if line.startswith(b"used_memory:"):
                return int(line.partition(b":")[2])
    raise RuntimeError("bench: the directory's server does not say what it takes")


def print_counts(counts: Counts, memory: int, span_s: float, machines: int) -> None:
    """Print one table."""
    table = Table("", "")
    for name, hits in (("alone", counts.alone), ("with all others", counts.here + counts.elsewhere)):
        table.add_row(f"hit ratio, {name}", f"{hits / counts.blocks:.4f}")
    table.add_row("of which elsewhere", f"{counts.elsewhere / counts.blocks:.4f}")
    table.add_row("blocks that any machine has", f"{counts.held:,}")
    table.add_row("the directory's memory for each, bytes", f"{memory / max(counts.held, 1):.1f}")
    beats = machines / limits.DIRECTORY_BEAT_S
    table.add_row("changes in a second of the trace", f"{counts.changes / span_s:,.0f}")
    table.add_row("messages in a second of the trace", f"{counts.messages / span_s + beats:,.0f}")
    Console().print(table)


def main() -> None:
    """Play a trace and print what came of it."""
    parser = argparse.ArgumentParser(prog="python -m bench.cluster_simulation")
    parser.add_argument("--trace", required=True, help="in the format of the public Mooncake traces")
    parser.add_argument("--machines", type=int, default=MACHINES, help="default: %(default)s")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="of all machines (default: %(default)s)")
    parser.add_argument("--copies", type=int, default=COPIES, help="of the trace (default: %(default)s)")
    options = parser.parse_args()
    requests = read_trace(options.trace)
    try:
        with directory_server("the simulation") as port:
            counts, memory = trio.run(partial(simulate, port, requests, options))
    except DeviceMissing as error:
        sys.exit(str(error))
    print_counts(counts, memory, requests[-1].arrival_s, options.machines)


if __name__ == "__main__":
    main()
