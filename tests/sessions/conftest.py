"""Servers and clients that the tests of sessions share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import kvfs
from tests.support.sessions import Server, session_server


@pytest.fixture
def server() -> Iterator[Server]:
    with session_server() as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[kvfs.Client]:
    with server.connect() as connected:
        connected.create_bucket("files")
        yield connected


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Server]:
    with session_server() as running:
        with running.connect() as client:
            client.create_bucket("files")
            client.put("files/a", b"a")
        yield running
