"""A small name index, and rows for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfs.index.names import BucketRow, NameIndex, NameRow
from kvfs.limits import MIB


def row(object_id: int = 1, **changes: Any) -> NameRow:
    plain = NameRow(object_id, object_id, 4096, 0o100644, 1000, 1000, 5, 6, 7, 0)
    return dataclasses.replace(plain, **changes)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[NameIndex]:
    with NameIndex.open(tmp_path / "names", map_size_bytes=MIB) as opened:
        yield opened


def bucket(name: bytes = b"models", **changes: Any) -> BucketRow:
    plain = BucketRow(name, 7, "cache", 0, 0, 0o755, 10, 11)
    return dataclasses.replace(plain, **changes)
