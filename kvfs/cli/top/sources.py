"""Where snapshots come from: a store's session, or the stream of events of a Conductor or an admin port.

Responsibility: one snapshot, or one after the other. Concurrency: one thread for each source.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from typing import Any, Protocol
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import msgspec

from kvfs.client import connect, discovery
from kvfs.errors import InvalidRequest, SessionClosed
from kvfs.limits import CLIENT_TIMEOUT_S, MAX_WATCH_EVENT_BYTES, WATCH_INTERVAL_S
from kvfs.watch.panels import Snapshot
from kvfs.watch.store_panels import store_snapshot
from kvfs.watch.window import Window

TOKEN_VARIABLE = "KVFS_CONDUCTOR_TOKEN"
_decode = msgspec.json.Decoder(Snapshot).decode


class Source(Protocol):
    """Return snapshots of what runs, one or a stream of them."""

    def once(self) -> Snapshot:
        """Return what there is now. Raises SessionClosed."""
        ...

    def follow(self) -> Iterator[Snapshot]:
        """Yield snapshots as they come. Raises SessionClosed when there are no more, and as `once`."""
        ...


def source_at(at: str | None) -> Source:
    """Return the source at a URL, a mount or a session socket; None: the default mount."""
    return Events(at.rstrip("/")) if at is not None and "://" in at else Sessions(at)


class Sessions:
    """Implement `Source` for a store, by the status that its session answers with."""

    def __init__(self, at: str | None) -> None:
        self._at = at

    def once(self) -> Snapshot:
        with connect(discovery.address(self._at), client="kvfs top") as client:
            return _shown(client.status(), Window())

    def follow(self) -> Iterator[Snapshot]:
        window = Window()
        with connect(discovery.address(self._at), client="kvfs top") as client:
            while True:
                yield _shown(client.status(), window)
                time.sleep(WATCH_INTERVAL_S)


def _shown(status: dict[str, Any], window: Window) -> Snapshot:
    now_s = time.time()
    window.begin(now_s)
    return store_snapshot(status, window, now_s)


class Events:
    """Implement `Source` for a Conductor, or a store behind the admin port of a gateway."""

    def __init__(self, url: str) -> None:
        """Ask at `url`. Raises InvalidRequest for one that is not HTTP's."""
        if not url.startswith(("http://", "https://")):
            raise InvalidRequest(f"--at {url}: must be http:// or https://, a mount or a session socket")
        self._url = url

    def once(self) -> Snapshot:
        with self._open("/v1/panels") as answer:
            return self._snapshot(answer.read(MAX_WATCH_EVENT_BYTES + 1))

    def json(self, path: str) -> Any:
        """Return the JSON value at a path. Raises SessionClosed."""
        with self._open(path) as answer:
            try:
                return json.loads(answer.read())
            except ValueError as error:
                raise SessionClosed(f"{self._url}{path}: {error}") from None

    def follow(self) -> Iterator[Snapshot]:
        with self._open("/v1/events") as answer:
            while line := answer.readline(MAX_WATCH_EVENT_BYTES + 1):
                if line.startswith(b"data: "):
                    yield self._snapshot(line[6:])
        raise SessionClosed(f"{self._url}: the stream ended")

    def _snapshot(self, data: bytes) -> Snapshot:
        try:
            return _decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise SessionClosed(f"{self._url}: no figures of kvfs: {error}") from None

    @contextmanager
    def _open(self, path: str) -> Iterator[HTTPResponse]:
        token = os.environ.get(TOKEN_VARIABLE)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        url = self._url + path
        try:
            with urlopen(Request(url, headers=headers), timeout=CLIENT_TIMEOUT_S) as answer:
                yield answer
        except HTTPError as error:
            with error:
                raise SessionClosed(f"{url}: {error.code} {error.reason}") from None
        except (URLError, HTTPException, OSError) as error:
            raise SessionClosed(f"{url}: nobody answers: {getattr(error, 'reason', error)}") from None
