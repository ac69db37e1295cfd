"""One HTTP/1.1 connection: requests in, one exchange after the other, answers out in their order.

Responsibility: find each request's head, pass an `Exchange` to the application, and go on with the next request or
close. The application reads bodies straight into its memory; `100 Continue` goes out when it first asks for the body,
so a refusal before that spares the client the upload.

Concurrency: one task per connection.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from kvfs import limits
from kvfs.http.connection_slots import Place
from kvfs.http.head import BadHead, Head, parse_head
from kvfs.http.http_exchange import REASONS, BodyLost, Exchange, Headers, Recognised, date_text
from kvfs.http.input_buffer import InputBuffer
from kvfs.http.transports import Gone, Stalled, Transport

log = logging.getLogger("kvfs.http")

Application = Callable[[Exchange], Awaitable[None]]
Refusal = Callable[[int, str], tuple[Headers, bytes]]
"""Headers and body of the answer to what is no request: a status and a message."""


class Connection:
    """Serve one transport to its end."""

    def __init__(
        self,
        transport: Transport,
        application: Application,
        refuse: Refusal,
        wait: Callable[[], Awaitable[tuple[bytes, Recognised | None]]] | None = None,
        place: Place | None = None,
    ) -> None:
        """Serve `transport`. `place` notes whether a request is under way.

        `wait` replaces the transport's wait for a request: it returns the first bytes (b"" at the end of the stream),
        and the request that they begin if it is recognised. It raises Gone, Stalled.
        """
        self._transport = transport
        self._application = application
        self._refuse = refuse
        self._wait = wait
        self._place = place or Place("")
        self._place.transport = transport
        self._input = InputBuffer(transport)
        self._is_idle = False
        self._exchange: Exchange | None = None
        self._stopping = False

    def stop(self) -> None:
        """End after the request under way; at once without one."""
        self._stopping = True
        if self._exchange is not None:
            self._exchange.keep_alive = False
        if self._is_idle:
            self._transport.wake()

    async def serve(self) -> None:
        """Serve requests until the connection ends, and close it."""
        linger = False
        try:
            while await self._serve_one():
                pass
            linger = True
        except BadHead as error:
            linger = True
            await self._answer_bad_head(error)
        except (Gone, Stalled, BodyLost) as error:
            log.debug("%s: %s", self._transport.peer, error)
        finally:
            with trio.CancelScope(shield=True):
                await self._transport.close(linger=linger)

    async def _serve_one(self) -> bool:
        """Serve one exchange; return whether there may be another."""
        if self._stopping:
            return False
        self._is_idle = True
        self._place.silent_s = trio.current_time()
        recognised = None
        if self._wait is not None and not self._input.pending:
            data, recognised = await self._wait()
            self._input.feed(data)
        if recognised is not None:
            self._input.consume(recognised.head_bytes)
            head = Head(
                "PUT", recognised.target, [], recognised.size_bytes, False, recognised.expects_continue, True
            )
        else:
            found = await self._input.head()
            if found is None:
                return False
            head = parse_head(found)
        self._is_idle = False
        self._place.silent_s = None
        self._exchange = exchange = Exchange(
            head, self._transport, self._input, recognised, self._place.scope
        )
        exchange.keep_alive = exchange.keep_alive and not self._stopping
        await self._application(exchange)
        self._exchange = None
        self._transport.quiet_s = limits.KEEP_ALIVE_S
        self._place.known = self._place.known or exchange.signed
        if not exchange.answered:
            log.error("%s: a request was left without an answer", self._transport.peer)
            return False
        if not exchange.body_done:
            await exchange.drain()
        return exchange.keep_alive

    async def _answer_bad_head(self, error: BadHead) -> None:
        headers, body = self._refuse(error.status, str(error))
        lines = [f"HTTP/1.1 {error.status} {REASONS.get(error.status, '')}"]
        lines += [f"{name}: {value}" for name, value in headers]
        lines += [f"Content-Length: {len(body)}", f"Date: {date_text()}", "Connection: close", "\r\n"]
        try:
            await self._transport.send(["\r\n".join(lines).encode("latin-1") + body])
        except (Gone, Stalled) as gone:
            log.debug("%s: %s", self._transport.peer, gone)
