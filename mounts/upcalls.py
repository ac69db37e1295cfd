"""Calls from the native loop: the frequent requests that need the store, without pyfuse3 on their way.

Responsibility: LOOKUP of names that the loop does not know, CREATE, UNLINK, RENAME and the later part of listings,
answered through the loop; RELEASE and FORGET, which need no answer; reports of files that the loop has created and
renamed by itself. The functions behind all of them are those of pyfuse3's handlers. Measured beside each other: 25 us a
call, 70 us for the same request relayed to pyfuse3.

Invariants: every call that waits for an answer has exactly one. Calls are handled in the kernel's order, and
before any relayed request that came after them (`LoopCalls.catch_up`).

Concurrency: one task on the service's trio thread; a call is one step. While calls come, the task looks for the next
one without the GIL and without sleeping, WATCH_NS at a time.
"""

from __future__ import annotations

import errno
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import trio

from kvfs import limits
from kvfs._native.fuse import loop as fuse_loop
from kvfs._native.fuse.loop import Call, FuseLoop
from kvfs.errors import Superseded
from kvfs.system.latencies import Latencies
from mounts.kernel.call_queue import LoopCalls
from mounts.kernel.errnos import errno_of
from mounts.kernel.nodes import Node
from mounts.tree import name_ops
from mounts.tree.fetches import Batch
from mounts.tree.handles import OpenFiles
from mounts.tree.opener import FileOpener
from mounts.tree.spare_drafts import SpareDrafts
from mounts.tree.store_changes import StoreChanges
from mounts.tree.view import View

UNANSWERED = frozenset((fuse_loop.RELEASE, fuse_loop.FORGET, fuse_loop.CREATED, fuse_loop.RENAMED))
OPERATIONS = {
    fuse_loop.LOOKUP: "lookup",
    fuse_loop.CREATE: "create",
    fuse_loop.UNLINK: "unlink",
    fuse_loop.RENAME: "rename",
    fuse_loop.FALLOCATE: "fallocate",
    fuse_loop.READDIRPLUS: "readdirplus",
}
"""Names of the calls that are answered, for latencies and logs."""
WATCH_NS = 50_000
"""The longest that this thread looks for the next call without sleeping, while other tasks wait."""
WATCHES = 4
"""How often in succession it looks. Asleep, this thread costs the native loop 5 to 15 us to wake for each call; and
while it sleeps, the kernel puts the caller and the loop on two processors, which costs both a wake-up of 30 us in each
request (a virtual machine of two processors; 5 us for both on one). A file created, written and renamed takes 150 us
with this and 400 us without; 500 us in all are no better than 200, and 50 are not always enough."""
DRAIN_INTERVAL_S = 0.001
"""How often a stop looks whether the loop has read all that the kernel has queued."""
TURN_S = 0.0005
"""How long calls are handled one by one, as they come, before other tasks get their turn."""
TURN = 64
"""Calls handled before other tasks get their turn: about 2 ms."""


@dataclass(eq=False)
class CallServer:
    """Takes and answers the calls of one loop."""

    _loop: FuseLoop
    _calls: LoopCalls
    _changes: StoreChanges
    _files: OpenFiles
    _opener: FileOpener
    _spares: SpareDrafts
    _view: View
    _latencies: Latencies
    _continues: bool = False
    _is_answered: bool = False
    _began_s: float = 0.0

    def __post_init__(self) -> None:
        self._handlers: dict[int, Callable[[Call], None]] = {
            fuse_loop.LOOKUP: self._lookup,
            fuse_loop.FORGET: self._drop_lookups,
            fuse_loop.CREATE: self._create,
            fuse_loop.UNLINK: self._unlink,
            fuse_loop.RENAME: self._rename,
            fuse_loop.FALLOCATE: self._allocate,
            fuse_loop.RELEASE: self._release,
            fuse_loop.READDIRPLUS: self._list,
            fuse_loop.CREATED: self._created,
            fuse_loop.RENAMED: self._renamed,
        }

    async def serve(self) -> None:
        """Handle calls until cancelled."""
        async with self._open():
            await self._take()

    async def serve_last(self, *, is_unused: bool) -> None:
        """Handle and answer what was queued when the mount went, for LAST_CALLS_WAIT_S at most; `is_unused`: nobody has
        a file open, whether the kernel came to say so or not."""
        with trio.move_on_after(limits.LAST_CALLS_WAIT_S):
            async with self._open():
                if is_unused:
                    self._calls.catch_up()
                    self._files.release_flushed()
                else:
                    await self._drain()
                await self._view.drafts.publisher.publish_last()

    async def _drain(self) -> None:
        """Handle what the kernel has queued of the files that were closed, beside those that are still open."""
        with trio.move_on_after(limits.LAST_REQUESTS_WAIT_S):
            while not self._loop.is_drained:
                self._calls.catch_up()
                await trio.sleep(DRAIN_INTERVAL_S)

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[None]:
        """Handle calls while the context lasts, and wait for the tasks that they begin; other calls stay queued."""
        async with trio.open_nursery() as self._waiting:
            with self._calls.handled_by(self._handle, self._changes.check_emptied):
                yield

    async def _take(self) -> None:
        while True:
            await trio.lowlevel.wait_readable(self._loop.calls_fd)
            self._loop.watch_calls(True)
            try:
                await self._serve_burst()
            finally:
                self._loop.watch_calls(False)

    async def _serve_burst(self) -> None:
        """Handle calls until there was none for WATCHES looks in succession."""
        quiet, end_s, has_more = 0, time.perf_counter() + TURN_S, False
        while quiet < WATCHES:
            self._calls.catch_up(TURN)
            if not self._loop.calls_waiting:
                has_more = self._spares.refill()
                has_more |= self._view.drafts.publisher.publish_ripe(self._calls.is_behind)
            if self._loop.await_calls(0 if has_more else WATCH_NS) or has_more:
                quiet = 0
                if time.perf_counter() < end_s:  # a checkpoint first would cost the caller 10 us
                    continue
            else:
                quiet += 1
            await trio.lowlevel.checkpoint()
            end_s = time.perf_counter() + TURN_S

    def _handle(self, call: Call) -> None:
        self._began_s, self._continues, self._is_answered = time.perf_counter(), False, False
        try:
            self._handlers[call.opcode](call)
        except Exception as error:
            number = errno_of(error, f"call {call.opcode}")
            if not (call.opcode in UNANSWERED or self._continues or self._is_answered):
                self._loop.answer_status(call.unique, number)
        if not (call.opcode in UNANSWERED or self._continues or self._is_answered):
            self._latencies.observe(OPERATIONS[call.opcode], time.perf_counter() - self._began_s)

    def _continue(self, answer: Callable[..., Awaitable[None]], call: Call, *args: object) -> None:
        """Answer the call that is being handled from a task of its own, with its error where `answer` raises."""
        self._continues = True
        self._waiting.start_soon(self._answer_later, self._began_s, answer, call, *args)

    async def _answer_later(
        self, began_s: float, answer: Callable[..., Awaitable[None]], call: Call, *args: object
    ) -> None:
        name = OPERATIONS[call.opcode]
        try:
            await answer(call, *args)
        except Exception as error:
            self._loop.answer_status(call.unique, errno_of(error, name))
        self._latencies.observe(name, time.perf_counter() - began_s)

    def _lookup(self, call: Call) -> None:
        parent = self._view.directory(call.nodeid)
        if self._view.retries.get(call.pid) is not None:
            self._continue(self._look_again, call, parent)
            return
        node = self._view.find(parent, call.name)
        asked = None if node is not None else self._ask(call, parent)
        if asked is not None:
            self._continue(self._look_elsewhere, call, asked)
        else:
            self._answer_found(call, node)

    async def _look_again(self, call: Call, parent: Node) -> None:
        node = await self._opener.look_again(parent, call.name, pid=call.pid)
        asked = None if node is not None else self._ask(call, parent)
        if asked is not None:
            await self._look_elsewhere(call, asked)
        else:
            self._answer_found(call, node)

    def _ask(self, call: Call, parent: Node) -> Batch | None:
        return self._view.fetches.ask(parent, call.name, uid=call.uid, gid=call.gid, pid=call.pid)

    async def _look_elsewhere(self, call: Call, asked: Batch) -> None:
        """Look a name up again once other machines were asked for it, or the mount ends."""
        await asked.wait()
        parent = self._view.directory(call.nodeid)
        self._answer_found(call, await self._opener.look_again(parent, call.name, pid=call.pid))

    def _answer_found(self, call: Call, node: Node | None) -> None:
        if node is None:
            self._loop.answer_status(call.unique, errno.ENOENT)
        else:
            self._loop.answer_entry(call.unique, node.nodeid)

    def _drop_lookups(self, call: Call) -> None:
        """Subtract lookups of a node: those counted natively, and `other` of those counted here."""
        node = self._view.nodes.find(call.nodeid)
        if node is not None:
            self._view.nodes.drop_lookups(node, call.other)

    def _create(self, call: Call) -> None:
        parent = self._view.directory(call.nodeid)
        mode = stat.S_IMODE(call.mode)
        try:
            node = self._opener.create(parent, call.name, call.flags, mode, uid=call.uid, gid=call.gid)
        except Superseded:
            self._continue(self._open_existing, call, parent, mode)
            return
        number = self._opener.open_new(node, call.flags, pid=call.pid)
        self._loop.answer_created(call.unique, node.nodeid, number)
        self._view.drafts.publisher.ripen()
        self._view.names.learn(parent)
        self._spares.wanted()

    async def _open_existing(self, call: Call, parent: Node, mode: int) -> None:
        node, number = await self._opener.open_existing(
            parent, call.name, call.flags, mode, uid=call.uid, gid=call.gid, pid=call.pid
        )
        self._loop.answer_created(call.unique, node.nodeid, number)

    def _created(self, call: Call) -> None:
        self._spares.adopt(call)
        self._view.drafts.publisher.ripen()

    def _renamed(self, call: Call) -> None:
        node = self._view.nodes.get(call.offset)
        above, below = self._view.nodes.get(call.nodeid), self._view.nodes.get(call.other)
        name_ops.renamed(self._view, node, above, below, call.new_name, call.when_ns)

    def _unlink(self, call: Call) -> None:
        before = self._view.store.journal.awaited_ticket
        answer = partial(self._answer_settled, call, before)
        name_ops.remove_file(self._view, self._view.directory(call.nodeid), call.name, answer)

    def _rename(self, call: Call) -> None:
        above, below = self._view.directory(call.nodeid), self._view.directory(call.other)
        unsettled = name_ops.draft_to_settle(self._view, above, call.name, below)
        if unsettled is not None:
            self._continue(self._rename_later, call, unsettled)
            return
        before = self._view.store.journal.awaited_ticket
        answer = partial(self._answer_settled, call, before)
        name_ops.rename(self._view, above, call.name, below, call.new_name, call.flags, answer)

    async def _rename_later(self, call: Call, unsettled: Node) -> None:
        """Rename a file once its bytes are on the device."""
        view = self._view
        if unsettled.draft is not None:
            await view.drafts.persistence.persist(unsettled, unsettled.draft)
        self._calls.catch_up()
        above, below = view.directory(call.nodeid), view.directory(call.other)
        name_ops.rename(view, above, call.name, below, call.new_name, call.flags)
        await self._settle(call)

    def _answer_settled(self, call: Call, before: int) -> None:
        """Answer once the change is as durable as its bucket demands, which in a cache is at once: in the middle of its
        step, so that the caller goes on beside the rest of it. `before`: the ticket that others waited for."""
        if self._view.store.journal.awaited_ticket == before:
            self._loop.answer_status(call.unique, 0)
            self._is_answered = True
            self._latencies.observe(OPERATIONS[call.opcode], time.perf_counter() - self._began_s)
        else:
            self._continue(self._settle, call)

    async def _settle(self, call: Call) -> None:
        await self._view.store.journal.settle()
        self._view.drafts.persistence.retire_settled()
        self._loop.answer_status(call.unique, 0)

    def _allocate(self, call: Call) -> None:
        """Allocate bytes for which there was no room natively, after eviction; `other` is the length."""
        self._view.store.make_room(call.other)
        self._continue(self._allocate_aside, call)

    async def _allocate_aside(self, call: Call) -> None:
        """Allocate in a worker thread, since that takes as long as the memory does."""
        number = await trio.to_thread.run_sync(
            self._loop.allocate, call.nodeid, call.mode, call.offset, call.other
        )
        self._loop.answer_status(call.unique, number)

    def _list(self, call: Call) -> None:
        """List the names of a directory behind those that the loop has."""
        if self._view.listings.fill(call.other, call.offset):
            self._loop.answer_listing(call.unique, call.other, call.offset, call.size)
        else:
            self._continue(self._list_in_turns, call)

    async def _list_in_turns(self, call: Call) -> None:
        await self._view.listings.fill_in_turns(call.other, call.offset)
        self._loop.answer_listing(call.unique, call.other, call.offset, call.size)

    def _release(self, call: Call) -> None:
        try:
            self._files.release(call.other)
        except KeyError:
            raise Superseded(f"handle {call.other} is not open") from None
