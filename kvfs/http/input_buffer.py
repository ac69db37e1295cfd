"""Received and not yet consumed bytes of a connection: heads, pipelined requests, small bodies.

Invariant: one buffer of limits.MAX_HEAD_BYTES for each connection. Concurrency: one task.
"""

from __future__ import annotations

import trio

from kvfs import limits
from kvfs.http.head import END, BadHead
from kvfs.http.transports import Transport


class InputBuffer:
    """Hold at most one head, and what follows it."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._memory = bytearray(limits.MAX_HEAD_BYTES)
        self._view = memoryview(self._memory)
        self._start = self._end = 0

    @property
    def pending(self) -> memoryview:
        """View the bytes that were received and not consumed; valid until the next change."""
        return self._view[self._start : self._end]

    def consume(self, count: int) -> None:
        """Drop the first `count` pending bytes."""
        self._start += count
        if self._start == self._end:
            self._start = self._end = 0

    def feed(self, data: bytes) -> None:
        """Take bytes that were received elsewhere. REQUIRES that nothing is pending."""
        assert self._start == self._end
        self._start, self._end = 0, len(data)
        self._memory[: len(data)] = data

    async def more(self, timeout_s: float, *, idle: bool = False) -> bool:
        """Read once into the free part; return False at the end of the stream. Raises Gone, Stalled."""
        if self._start and self._end == len(self._memory):
            self._memory[: self._end - self._start] = self._memory[self._start : self._end]
            self._start, self._end = 0, self._end - self._start
        count = await self._transport.receive_into(self._view[self._end :], timeout_s, idle=idle)
        self._end += count
        return count > 0

    async def head(self) -> bytes | None:
        """Read the next head with its empty line; None at the end of the stream. Raises BadHead, Gone, Stalled."""
        deadline_s: float | None = None
        while True:
            timeout_s = self._transport.quiet_s
            if self._start < self._end:
                head = self._take_head()
                if head is not None:
                    return head
            if self._start < self._end:
                deadline_s = deadline_s or trio.current_time() + limits.HEAD_TIMEOUT_S
                timeout_s = deadline_s - trio.current_time()
            if not await self.more(timeout_s, idle=deadline_s is None):
                return None

    def _take_head(self) -> bytes | None:
        """Return the head that is pending, if it is whole. Raises BadHead."""
        # Empty lines before a request line are skipped (RFC 9112, section 2.2).
        while self._memory.startswith(b"\r\n", self._start, self._end):
            self.consume(2)
        found = self._memory.find(END, self._start, self._end)
        if found >= 0:
            head = bytes(self._view[self._start : found + len(END)])
            self.consume(len(head))
            return head
        if self._end - self._start == len(self._memory):
            raise BadHead(431, f"headers of more than {limits.MAX_HEAD_BYTES} bytes")
        return None
