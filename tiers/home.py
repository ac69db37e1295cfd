"""The data directory: whose it is, which format it has, and that one service at a time uses it.

Responsibility: `lock` (an flock held for the life of the service), `format.json` (format version and store
id), and the paths of everything below. Invariant: nothing below the directory is touched before the lock
is held and the format is known.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from kvfs.errors import FormatMismatch, StoreLocked

FORMAT_VERSION = 1
"""Of the data directory as a whole; the formats inside have versions of their own."""


@dataclass(slots=True)
class Home:
    """An open, locked data directory."""

    path: Path
    store_id: bytes
    clean: bool
    """Whether the last service that used it stopped cleanly."""
    _lock_fd: int

    @property
    def dram(self) -> Path:
        return self.path / "dram"

    @property
    def index(self) -> Path:
        return self.path / "index"

    @property
    def socket(self) -> Path:
        return self.path / "kvfs.sock"

    def close(self, *, clean: bool = True) -> None:
        """Release the directory; `clean` records that everything in it was left consistent."""
        _write_format(self.path, self.store_id, clean=clean)
        os.close(self._lock_fd)


def open_home(path: Path) -> Home:
    """Lock and read `path`, making it where it does not exist.

    Raises StoreLocked when another service holds it, FormatMismatch when a newer or foreign format is there.
    """
    path.mkdir(parents=True, exist_ok=True)
    path = path.resolve()
    lock_fd = _lock(path)
    try:
        store_id, clean = _read_format(path)
        _write_format(path, store_id, clean=False)
    except BaseException:
        os.close(lock_fd)
        raise
    return Home(path, store_id, clean, lock_fd)


def lock_holder(path: Path) -> int | None:
    """The process that holds the lock of `path` now; None when nobody does, or it does not say."""
    try:
        lock_fd = os.open(path / "lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(lock_fd, 32, 0).strip()
        return int(text) if text.isdigit() else None
    finally:
        os.close(lock_fd)
    return None


def _lock(path: Path) -> int:
    lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock_fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock_fd)
        raise StoreLocked(
            f"data directory {path} is in use by another kvfs service (process {holder}); "
            "stop it, or give this one a directory of its own"
        ) from None
    os.ftruncate(lock_fd, 0)
    os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0)
    return lock_fd


def _read_format(path: Path) -> tuple[bytes, bool]:
    file = path / "format.json"
    try:
        found = json.loads(file.read_text())
        version, store_id, clean = (
            int(found["format"]),
            bytes.fromhex(found["store_id"]),
            bool(found["clean"]),
        )
    except FileNotFoundError:
        return secrets.token_bytes(16), True
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise FormatMismatch(f"{file} is not a kvfs format file: {error}") from None
    if version > FORMAT_VERSION:
        raise FormatMismatch(
            f"{file} says data format {version}, and this kvfs reads up to {FORMAT_VERSION}: "
            "use the newer kvfs, or another data directory"
        )
    if len(store_id) != 16:
        raise FormatMismatch(f"{file} has a store id of {len(store_id)} bytes: it must be 16")
    return store_id, clean


def _write_format(path: Path, store_id: bytes, *, clean: bool) -> None:
    text = json.dumps({"format": FORMAT_VERSION, "store_id": store_id.hex(), "clean": clean}, indent=1)
    temporary = path / "format.json.new"
    temporary.write_text(text + "\n")
    temporary.rename(path / "format.json")
