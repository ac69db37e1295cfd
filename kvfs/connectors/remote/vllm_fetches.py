"""Fetches of blocks from other machines for an engine's scheduler: begun, looked at and ended, never waited for.

Responsibility: have the service fetch the blocks of a request, of all ranks, from the machine that the request names,
or from whichever has them. The service reads only from machines of its own cluster.

Invariants:
- A request's fetches, its second one included, are over CONNECTOR_FETCH_S after the first began, whatever the service
  and other machines do.
- At most CONNECTOR_FETCHES are under way, those counted whose request has gone on or ended; further ones do not begin.
- A fetch that fails is a miss. It is logged once, until one brings blocks again.

Concurrency: the engine's scheduler thread. Futures run on the client's threads; namespaces of further ranks are opened
by a thread of this object's own, since that connects.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from kvfs.client.blocks import Blocks
from kvfs.errors import KvfsError
from kvfs.limits import CONNECTOR_FETCH_S, CONNECTOR_FETCHES
from kvfs.namespaces import Namespace

_TRIES = 2
"""Fetches of one request: the second one is for blocks that were still being stored over there."""


class Opener(Protocol):
    """What opens the blocks of namespaces; see `kvfs.connectors.common.Link`."""

    def blocks(self, namespace: Namespace) -> Blocks | None:
        """Return the blocks of a namespace, if they are open; never waits."""

    def open(self, namespace: Namespace) -> Blocks | None:
        """Open the blocks of a namespace; return None during an outage. May wait."""

    def failed(self, error: BaseException) -> bool:
        """Log a failure; return whether it is the service that does not answer."""


@dataclass(slots=True)
class Fetch:
    """The fetches of one request, one after the other."""

    source: str
    """The machine to read from; "" for any."""
    until_s: float
    tries: int = 0
    there: int = 0
    """Blocks of the request, from the first on, that were here when the last one began."""
    error: str = ""
    waiting: dict[Namespace, bytes] = field(default_factory=dict)
    """Keys whose namespace is not open yet."""
    futures: list[Future[int]] = field(default_factory=list)
    has_opened: bool = False
    """Whether it had namespaces opened."""
    is_settled: bool = True
    """Whether the last one is over and counted."""

    @property
    def is_running(self) -> bool:
        """Return whether a fetch of the request waits or is under way."""
        return bool(self.waiting) or not all(future.done() for future in self.futures)

    def may_go_again(self, now_s: float) -> bool:
        """Return whether a second fetch may bring what the first did not."""
        return self.tries < _TRIES and not self.error and now_s < self.until_s

    def end(self) -> None:
        """Take no more interest: what is being read over there still arrives."""
        self.until_s = -math.inf
        self.waiting.clear()
        for future in self.futures:
            future.cancel()


class PeerFetches:
    """Begin and bound the fetches of an engine's requests; `counts` are the planner's."""

    def __init__(self, opener: Opener, counts: dict[str, int], log: logging.Logger) -> None:
        self._opener, self._counts, self._log = opener, counts, log
        self._under_way: list[Fetch] = []
        self._opening: threading.Thread | None = None
        self._is_said = False
        """Whether a failure was logged since the last fetch that brought blocks."""
        counts.update(fetches=0, fetched_blocks=0, failed_fetches=0)

    def begin(
        self, fetch: Fetch | None, source: str, wanted: Mapping[Namespace, bytes], there: int, now_s: float
    ) -> Fetch | None:
        """Begin a request's first fetch, or the next one of `fetch`; return it, None where too many are under way.

        `there`: the request's blocks that are here. REQUIRES that the last one is over.
        """
        for each in self._under_way:
            if now_s >= each.until_s:  # of a request that nobody asks about any more
                each.end()
        self._under_way = [each for each in self._under_way if each.is_running]
        if len(self._under_way) >= CONNECTOR_FETCHES:
            return fetch
        fetch = fetch or Fetch(source, now_s + CONNECTOR_FETCH_S)
        fetch.tries += 1
        fetch.there, fetch.waiting, fetch.futures, fetch.is_settled = there, dict(wanted), [], False
        self._under_way.append(fetch)
        self._counts["fetches"] += 1
        return fetch

    def goes_on(self, fetch: Fetch, now_s: float) -> bool:
        """Return whether to ask again; begin what had to wait for its namespace."""
        if fetch.waiting and now_s < fetch.until_s:
            self._start(fetch, now_s)
        if not fetch.is_running:
            return False
        if now_s < fetch.until_s:
            return True
        fetch.error = fetch.error or "it did not end in time"
        fetch.end()
        return False

    def settle(self, fetch: Fetch, there: int) -> None:
        """Count, once, what a fetch that is over has brought: `there` blocks of the request are here."""
        if fetch.is_settled:
            return
        fetch.is_settled = True
        failed = (future.exception() for future in fetch.futures if future.done() and not future.cancelled())
        fetch.error = fetch.error or next((str(error) for error in failed if error is not None), "")
        brought = max(there - fetch.there, 0)
        self._counts["fetched_blocks"] += brought
        self._counts["failed_fetches"] += not brought
        if not brought and not (fetch.source or fetch.error):
            return  # nobody has them: most prompts are new
        if not brought and not self._is_said:
            self._log.warning(
                "no block was fetched from %s: %s (logged once until some are)",
                repr(fetch.source) if fetch.source else "any machine",
                fetch.error or "it has none, or does not answer",
            )
        self._is_said = not brought

    def _start(self, fetch: Fetch, now_s: float) -> None:
        was_opening = self._opening is not None and self._opening.is_alive()
        for namespace, keys in list(fetch.waiting.items()):
            blocks = self._opener.blocks(namespace)
            if blocks is None:
                continue
            del fetch.waiting[namespace]
            try:
                fetch.futures.append(
                    blocks.fetch(keys, hint=fetch.source or None, timeout_s=fetch.until_s - now_s)
                )
            except KvfsError as error:
                fetch.error = str(error)
        if not fetch.waiting or was_opening:
            return
        if fetch.has_opened:
            fetch.error = fetch.error or "the namespaces of all ranks could not be opened"
            fetch.waiting.clear()
        else:
            fetch.has_opened = True
            self._opening = threading.Thread(
                target=self._open, args=[list(fetch.waiting)], daemon=True, name="kvfs-open"
            )
            self._opening.start()

    def _open(self, namespaces: Sequence[Namespace]) -> None:
        for namespace in namespaces:
            try:
                self._opener.open(namespace)
            except (KvfsError, OSError) as error:
                self._opener.failed(error)
                return
