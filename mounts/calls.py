"""Calls from the native loop: the frequent requests that need the store, without pyfuse3 on their way.

Responsibility: LOOKUP of names that the loop does not know, CREATE, UNLINK, RENAME and the far part of listings,
answered through the loop; RELEASE and FORGET, which need no answer; what the loop has created and renamed by itself,
which has its answer. What one of them cannot do as a call it does not do otherwise: the functions behind them are those
of pyfuse3's handlers. Measured beside each other: 25 us a call, 70 us for the same request relayed to pyfuse3.

Invariants: every call that waits for an answer has exactly one. Calls are handled in the kernel's order, and
before any relayed request that came after them (`View.catch_up`).

Concurrency: one task on the service's trio thread; a call is one step. While calls come, the task looks for the next
one without the GIL and without sleeping, WATCH_NS at a time.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from kvfs import limits
from kvfs._native import fuse_loop
from kvfs._native.fuse_loop import Call, FuseLoop
from kvfs.errors import KvfsError, Superseded
from mounts import names
from mounts.answers import errno_of
from mounts.files import OpenFiles
from mounts.nodes import Node
from mounts.spares import SpareDrafts
from mounts.view import View

UNANSWERED = frozenset((fuse_loop.RELEASE, fuse_loop.FORGET, fuse_loop.CREATED, fuse_loop.RENAMED))
WATCH_NS = 50_000
"""Looked for the next call without sleeping, other tasks wait for no longer than this..."""
WATCHES = 4
"""...and so many times in succession. Asleep, this thread costs the native loop 5 to 15 us to wake for each call; and
while it sleeps, the kernel puts the caller and the loop on two processors, which costs both a wake-up of 30 us in each
request (a virtual machine of two processors; 5 us for both on one). A file created, written and renamed takes 150 us
with this and 400 us without; 500 us in all are no better than 200, and 50 are not always enough."""
TURN = 64
"""Calls handled before other tasks get their turn: about 2 ms."""


class CallServer:
    """Takes and answers the calls of one loop."""

    def __init__(self, loop: FuseLoop, view: View, files: OpenFiles, spares: SpareDrafts) -> None:
        self._loop = loop
        self._view = view
        self._files = files
        self._spares = spares
        self._handlers: dict[int, Callable[[Call], None]] = {
            fuse_loop.LOOKUP: self._lookup,
            fuse_loop.FORGET: self._forget,
            fuse_loop.CREATE: self._create,
            fuse_loop.UNLINK: self._unlink,
            fuse_loop.RENAME: self._rename,
            fuse_loop.FALLOCATE: self._allocate,
            fuse_loop.RELEASE: self._release,
            fuse_loop.READDIRPLUS: self._list,
            fuse_loop.CREATED: self._created,
            fuse_loop.RENAMED: self._renamed,
        }
        self._handling = self._is_open = False
        view.catch_up = self.catch_up
        view.is_behind = self.is_behind

    async def serve(self) -> None:
        """Until cancelled."""
        async with self._open():
            await self._take()

    async def serve_last(self) -> None:
        """Handle and answer what was queued when the mount went, for LAST_CALLS_WAIT_S at most."""
        with trio.move_on_after(limits.LAST_CALLS_WAIT_S):
            async with self._open():
                self._view.drafts.publish_closed()

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[None]:
        """Meanwhile calls are handled, and what they begin is waited for; before and after, they stay queued."""
        async with trio.open_nursery() as self._waiting:
            self._is_open = True
            try:
                yield
            finally:
                self._is_open = False

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
        quiet = 0
        while quiet < WATCHES:
            self.catch_up(TURN)
            if not self._loop.calls_waiting:
                self._spares.refill()
                self._view.drafts.publish_ripe(self.is_behind)
            quiet = 0 if self._loop.await_calls(WATCH_NS) else quiet + 1
            await trio.lowlevel.checkpoint()

    def catch_up(self, limit: int = 1 << 20) -> None:
        """Handle what is queued, `limit` calls or a few more at most."""
        handled = 0
        if self._handling or not self._is_open or not self._loop.calls_waiting:
            return
        self._handling = True
        while handled < limit and (calls := self._loop.take_calls()):
            for call in calls:
                self._handle(call)
            handled += len(calls)
        self._handling = False
        if not self._loop.calls_waiting:
            self._view.check_emptied()

    def is_behind(self) -> bool:
        """Whether there are calls, so that what the loop did by itself may not be in the tree yet."""
        return self._handling or self._loop.calls_waiting

    def _handle(self, call: Call) -> None:
        try:
            self._handlers[call.opcode](call)
        except Exception as error:
            number = errno_of(error, f"call {call.opcode}")
            if call.opcode not in UNANSWERED:
                self._loop.answer_status(call.unique, number)

    def _lookup(self, call: Call) -> None:
        parent = self._view.directory(call.nodeid)
        if self._view.promises.of(call.pid) is not None:
            self._waiting.start_soon(self._look_again, call, parent)
        else:
            self._answer_found(call, self._view.find(parent, call.name))

    async def _look_again(self, call: Call, parent: Node) -> None:
        try:
            self._answer_found(call, await self._files.look_again(parent, call.name, pid=call.pid))
        except Exception as error:
            self._loop.answer_status(call.unique, errno_of(error, "lookup"))

    def _answer_found(self, call: Call, node: Node | None) -> None:
        if node is None:
            self._loop.answer_status(call.unique, errno.ENOENT)
        else:
            self._loop.answer_entry(call.unique, node.nodeid)

    def _forget(self, call: Call) -> None:
        """The kernel forgot the lookups counted natively, and `other` of those counted here."""
        node = self._view.nodes.find(call.nodeid)
        if node is not None:
            self._view.nodes.forget(node, call.other)

    def _create(self, call: Call) -> None:
        parent = self._view.directory(call.nodeid)
        mode = stat.S_IMODE(call.mode)
        try:
            node = self._files.create(parent, call.name, call.flags, mode, uid=call.uid, gid=call.gid)
        except Superseded:
            self._waiting.start_soon(self._open_existing, call, parent)
            return
        number = self._files.open_new(node, call.flags, pid=call.pid)
        self._loop.answer_created(call.unique, node.nodeid, number)
        self._view.drafts.ripen()
        self._view.learn_names(parent)
        self._spares.wanted()

    async def _open_existing(self, call: Call, parent: Node) -> None:
        try:
            node, number = await self._files.open_existing(
                parent, call.name, call.flags, uid=call.uid, gid=call.gid, pid=call.pid
            )
        except Exception as error:
            self._loop.answer_status(call.unique, errno_of(error, "create"))
        else:
            self._loop.answer_created(call.unique, node.nodeid, number)

    def _created(self, call: Call) -> None:
        self._spares.adopt(call)
        self._view.drafts.ripen()

    def _renamed(self, call: Call) -> None:
        node = self._view.nodes.get(call.offset)
        above, below = self._view.nodes.get(call.nodeid), self._view.nodes.get(call.other)
        names.renamed(self._view, node, above, below, call.new_name, call.when_ns)

    def _unlink(self, call: Call) -> None:
        names.remove_file(self._view, self._view.directory(call.nodeid), call.name)
        self._answer_settled(call.unique)

    def _rename(self, call: Call) -> None:
        above, below = self._view.directory(call.nodeid), self._view.directory(call.other)
        unsettled = names.draft_to_settle(self._view, above, call.name, below)
        if unsettled is not None:
            self._waiting.start_soon(self._rename_later, call, unsettled)
            return
        names.rename(self._view, above, call.name, below, call.new_name, call.flags)
        self._answer_settled(call.unique)

    async def _rename_later(self, call: Call, unsettled: Node) -> None:
        """Rename a file once it is on the device."""
        view, number = self._view, 0
        try:
            if unsettled.draft is not None:
                await view.drafts.persist(unsettled, unsettled.draft)
            view.catch_up()
            above, below = view.directory(call.nodeid), view.directory(call.other)
            names.rename(view, above, call.name, below, call.new_name, call.flags)
            await view.store.journal.settle()
            view.drafts.retire_settled()
        except (KvfsError, OSError) as error:
            number = errno_of(error, "a rename")
        self._loop.answer_status(call.unique, number)

    def _answer_settled(self, unique: int) -> None:
        """Answer once what was done is as durable as promised; mostly it is at once."""
        if self._view.store.journal.is_settled:
            self._loop.answer_status(unique, 0)
        else:
            self._waiting.start_soon(self._settle, unique)

    async def _settle(self, unique: int) -> None:
        number = 0
        try:
            await self._view.store.journal.settle()
            self._view.drafts.retire_settled()
        except KvfsError as error:
            number = errno_of(error, "a change of names")
        self._loop.answer_status(unique, number)

    def _allocate(self, call: Call) -> None:
        """What found no room natively, once more after eviction; `other` is the length."""
        self._view.store.make_room(call.other)
        self._waiting.start_soon(self._allocate_aside, call)

    async def _allocate_aside(self, call: Call) -> None:
        """By a worker thread: it takes as long as memory does."""
        number = await trio.to_thread.run_sync(
            self._loop.allocate, call.nodeid, call.mode, call.offset, call.other
        )
        self._loop.answer_status(call.unique, number)

    def _list(self, call: Call) -> None:
        """Names of a directory behind those that the loop was given."""
        if self._view.listings.fill(call.other, call.offset):
            self._loop.answer_listing(call.unique, call.other, call.offset, call.size)
        else:
            self._waiting.start_soon(self._list_in_turns, call)

    async def _list_in_turns(self, call: Call) -> None:
        try:
            await self._view.listings.fill_in_turns(call.other, call.offset)
        except Exception as error:
            self._loop.answer_status(call.unique, errno_of(error, "a listing"))
        else:
            self._loop.answer_listing(call.unique, call.other, call.offset, call.size)

    def _release(self, call: Call) -> None:
        try:
            self._files.release(call.other)
        except KeyError:
            raise Superseded(f"handle {call.other} is not open") from None
