"""Servers and clients that the tests of sessions share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import kvfs
from tests.support.cuda_standin import build_standin
from tests.support.sessions import Server, session_server


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for libcuda."""
    return build_standin(tmp_path_factory.mktemp("standin"))


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
