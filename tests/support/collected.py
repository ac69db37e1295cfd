"""A collection of garbage at the worst instant: as a client begins to close."""

from __future__ import annotations

import gc

import pytest

from kvfs.client.blocks import Blocks
from kvfs.client.client import Client


def collect_at_close(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Have every client's `close` begin with a collection; return where the buckets of closed blocks are noted."""
    closed: list[str] = []
    close_client, close_blocks = Client.close, Blocks.close

    def collect_and_close(client: Client) -> None:
        gc.collect()
        close_client(client)

    def note_and_close(blocks: Blocks) -> None:
        closed.append(blocks.bucket)
        close_blocks(blocks)

    monkeypatch.setattr(Client, "close", collect_and_close)
    monkeypatch.setattr(Blocks, "close", note_and_close)
    return closed
