"""A bucket elsewhere that is a directory: what the cold tier asks of S3, with failures on demand.

Names are files, percent-encoded; each is written aside and renamed, so a kill leaves whole objects only, as S3 does.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote, unquote

from kvfs.errors import InvalidRequest, NotFound, TierUnreachable
from kvfs.limits import GIB, MAX_LIST_ENTRIES
from tests.support.waits import WAIT_S
from tiers.cold.bucket import ColdOptions


class FolderBucket:
    """A `tiers.cold.bucket.ColdBucket`."""

    def __init__(self, path: Path, *, page_size: int = MAX_LIST_ENTRIES) -> None:
        self.place = str(path)
        self.path = path
        self.page_size = page_size
        self.down = False
        self.refused: set[str] = set()
        """Beginnings of names that `put` refuses."""
        self.gate: threading.Event | None = None
        """What every `get` and `put` waits for, where it is set."""
        self.entered = threading.Semaphore(0)
        """Released by each `get` and `put` that comes to the gate."""
        path.mkdir(exist_ok=True)

    def _file(self, name: str) -> Path:
        return self.path / quote(name, safe="")

    def _check(self) -> None:
        if self.down:
            raise TierUnreachable("the bucket is down")

    def _wait(self) -> None:
        if self.gate is not None:
            self.entered.release()
            assert self.gate.wait(WAIT_S)

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        self._check()
        if any(name.startswith(each) for each in self.refused):
            raise InvalidRequest(f"{name}: refused")
        if not name.startswith("owner"):
            self._wait()
        aside = self.path / f".{os.getpid()}-{threading.get_ident()}"
        aside.write_bytes(b"".join(parts))
        aside.rename(self._file(name))

    def get(self, name: str, head: bytearray, payload: memoryview) -> int:
        self._wait()
        data = self.read(name, 1 << 40)
        head[: len(data)] = data[: len(head)]
        rest = data[len(head) :]
        payload[: len(rest)] = rest[: len(payload)]
        return len(data)

    def read(self, name: str, limit: int) -> bytes:
        self._check()
        try:
            return self._file(name).read_bytes()[:limit]
        except FileNotFoundError:
            raise NotFound(name) from None

    def create(self, name: str, data: bytes) -> bool:
        self._check()
        try:
            with self._file(name).open("xb") as file:
                file.write(data)
        except FileExistsError:
            return False
        return True

    def delete(self, names: Sequence[str]) -> list[str]:
        self._check()
        for name in names:
            self._file(name).unlink(missing_ok=True)
        return []

    def page(self, prefix: str, after: str) -> tuple[list[tuple[str, int]], bool]:
        self._check()
        names = [name for name in self.names() if name.startswith(prefix) and name > after]
        page = [(name, size) for name in names[: self.page_size] if (size := self._size(name)) is not None]
        return page, len(names) > self.page_size

    def _size(self, name: str) -> int | None:
        """None for what was deleted while it was listed."""
        try:
            return self._file(name).stat().st_size
        except FileNotFoundError:
            return None

    def names(self) -> list[str]:
        """All that is there, in order."""
        return sorted(unquote(name) for name in os.listdir(self.path) if not name.startswith("."))

    def objects(self) -> list[str]:
        return [name for name in self.names() if name.startswith(("blocks/", "objects/"))]


def options(
    bucket: FolderBucket, *, capacity_bytes: int = GIB, admits_all: bool = True, take_over: bool = False
) -> ColdOptions:
    return ColdOptions(bucket, capacity_bytes, admits_all=admits_all, take_over=take_over)
