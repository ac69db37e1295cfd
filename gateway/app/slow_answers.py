"""Answers to operations that may take longer than clients wait for a first byte.

Responsibility: let an operation run, and where it takes long, begin the answer before it has ended: 200, the XML
declaration, and white space now and then, as S3 does for copies and completed uploads ("an error inside a 200", S3 API
Reference, CompleteMultipartUpload). botocore gives up after 60 s of silence, and would repeat the operation beside the
first.

Invariants: an operation that ends within limits.SLOW_ANSWER_S is answered as any other, with its own status. One whose
client has gone is cancelled.

Concurrency: the operation is a task of its own within `stream_slow_answer`; the caller's task sends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from kvfs import limits
from kvfs.http.http_exchange import Exchange, Headers
from kvfs.http.transports import Gone, Stalled

DECLARATION = b'<?xml version="1.0" encoding="UTF-8"?>\n'
T = TypeVar("T")


async def stream_slow_answer(
    exchange: Exchange,
    work: Callable[[], Awaitable[T]],
    headers: Headers,
    body_of: Callable[[T | Exception], bytes],
) -> T | None:
    """Return what `work` returns, or raise what it raises; where that takes long, send the answer and return None.

    That answer has `headers` and the body that `body_of` makes of the outcome. Raises Gone, Stalled.
    """
    ended = trio.Event()
    outcome: list[T | Exception] = []
    gone: Gone | Stalled | None = None

    async def run() -> None:
        try:
            outcome.append(await work())
        except Exception as error:
            outcome.append(error)
        ended.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run)
        if not await _ends_soon(ended):
            try:
                await _send_slowly(exchange, ended, headers, lambda: body_of(outcome[0]))
            except (Gone, Stalled) as error:
                gone = error
                nursery.cancel_scope.cancel()
    if gone is not None:
        raise gone
    if exchange.answered:
        return None
    found = outcome[0]
    if isinstance(found, Exception):
        raise found
    return found


async def _ends_soon(ended: trio.Event) -> bool:
    with trio.move_on_after(limits.SLOW_ANSWER_S):
        await ended.wait()
    return ended.is_set()


async def _send_slowly(
    exchange: Exchange, ended: trio.Event, headers: Headers, body: Callable[[], bytes]
) -> None:
    await exchange.begin_slowly(200, headers)
    await exchange.send_part(DECLARATION)
    while not await _ends_soon(ended):
        await exchange.send_part(b" ")
    await exchange.send_part(body().removeprefix(DECLARATION))
    await exchange.end_slowly()
