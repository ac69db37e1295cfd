"""A small store without any door, open while a test has it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.stores import small_store
from tiers.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with small_store(tmp_path / "data") as opened:
        yield opened
