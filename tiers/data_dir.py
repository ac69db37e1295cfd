"""The data directory: its lock, its format, and how the last service ended.

Responsibility: `lock` (an flock held for the life of the service), `format.json` (format version, store id,
and how the last service ended), and the paths of everything below.

Invariants:
- Nothing below the directory is touched before the lock is held and the format is known.
- An index is believed only if its last service stopped cleanly or the machine has not been booted since (its
  pages may not have reached the device), and if it has the mark of the last start: an older copy has not.
- A kill at any moment of a start does not make the index untrusted: the mark is changed in three steps, and until
  the last both marks count. An index that is not believed is removed before `format.json` says that a service began.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvfs import limits
from kvfs.errors import FormatMismatch, NotFound, StoreLocked
from kvfs.system import linux

FORMAT_VERSION = 1
"""Of the data directory as a whole; the formats inside have versions of their own."""


@dataclass(frozen=True, slots=True)
class _Format:
    """Holds what `format.json` says."""

    store_id: bytes
    clean: bool = True
    """Whether the last service stopped cleanly."""
    boot_id: str = ""
    """Of the boot in which it began."""
    start: str = ""
    """The random mark of that start, which the index has too."""
    previous_start: str = ""
    """The mark before, while the index may still have that one."""


@dataclass(slots=True)
class Home:
    """Holds an open, locked data directory."""

    path: Path
    _found: _Format
    _lock_fd: int
    start: str = field(default_factory=lambda: secrets.token_hex(16))
    """The random mark of this start."""
    _spare_fd: int = -1
    """Closed while `format.json` is written, so that a service that has no other descriptor can record its end."""

    @property
    def store_id(self) -> bytes:
        """Return the 16 bytes that name this store for as long as the directory lives."""
        return self._found.store_id

    @property
    def clean(self) -> bool:
        """Return whether the last service that used it stopped cleanly."""
        return self._found.clean

    @property
    def found_mark(self) -> str:
        """Return the mark of the last service's index; empty where it is not known which of two it has."""
        return "" if self._found.previous_start else self._found.start

    @property
    def dram(self) -> Path:
        """Return the directory on which the DRAM tier's tmpfs is mounted."""
        return self.path / "dram"

    @property
    def index(self) -> Path:
        """Return the directory of the name index (LMDB)."""
        return self.path / "index"

    @property
    def segments(self) -> Path:
        """Return the directory of the NVMe tier's segment files."""
        return self.path / "nvme"

    def note_segments(self, directory: Path) -> None:
        """Record where the NVMe tier's files are, so that no start does without them by mistake."""
        note = self.path / "nvme.path"
        if not note.exists() or note.read_bytes() != os.fsencode(directory):
            note.write_bytes(os.fsencode(directory))

    def known_segments(self) -> Path | None:
        """Return where an earlier start had its NVMe tier, if its files are still there."""
        note = self.path / "nvme.path"
        noted = note.read_bytes() if note.exists() else b""
        known = [Path(os.fsdecode(noted))] if noted and b"\0" not in noted else []
        return next((found for found in (*known, self.segments) if (found / "pool.json").exists()), None)

    def hbm_key(self) -> bytes:
        """Return the secret by which the store knows its segments of GPU memory, drawn where there is none: only the
        service's user reads it. One that a power failure left without its bytes is drawn anew, and one that cannot be
        written is this start's alone."""
        file, drawn = self.path / "hbm.key", self.path / "hbm.key.new"
        found = file.read_bytes() if file.exists() else b""
        if len(found) == limits.HBM_SEGMENT_TOKEN_BYTES:
            return found
        found = secrets.token_bytes(limits.HBM_SEGMENT_TOKEN_BYTES)
        with suppress(OSError):
            drawn.unlink(missing_ok=True)
            with open(
                os.open(drawn, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb"
            ) as new:
                new.write(found)
            drawn.rename(file)
        return found

    @property
    def socket(self) -> Path:
        """Return the path of the sessions' socket."""
        return self.path / "kvfs.sock"

    @property
    def index_is_durable(self) -> bool:
        """Return whether what the last service wrote to its index is what a file of it holds now."""
        return self._found.clean or self._found.boot_id == linux.boot_id()

    def knows_mark(self, mark: str) -> bool:
        """Return whether the last start left this mark in the index."""
        return mark != "" and mark in (self._found.start, self._found.previous_start)

    def begin(self, mark: str) -> None:
        """Record that a service begins, with an index that still has `mark`. Then the index takes `start`."""
        self._write(previous_start=mark, start=self.start)

    def begun(self) -> None:
        """Record that the index has taken `start`."""
        self._write(start=self.start)

    def undo_begin(self, mark: str, restore: Callable[[], bool]) -> None:
        """Undo `begin` for a start that has failed. `restore` writes `mark`, which the index had before, closes the
        index, and returns whether all of it is on the device."""
        self.begin(mark)
        if restore():
            self._write_format(self._found)

    def close(self, *, clean: bool = True) -> None:
        """Release the directory; `clean` records that everything in it was left consistent and is on the device.

        Closing twice is harmless.
        """
        if self._lock_fd < 0:
            return
        try:
            if clean:
                self._write(start=self.start, clean=True)
        finally:
            self._close_spare()
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _write(self, *, start: str, previous_start: str = "", clean: bool = False) -> None:
        self._close_spare()  # the boot's id is read from a file, too
        self._write_format(_Format(self.store_id, clean, linux.boot_id(), start, previous_start))

    def _write_format(self, new: _Format) -> None:
        self._close_spare()
        try:
            _write_format(self.path, new)
        finally:
            with suppress(OSError):
                self._spare_fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def _close_spare(self) -> None:
        if self._spare_fd >= 0:
            os.close(self._spare_fd)
            self._spare_fd = -1


def look_home(path: Path, *, write_holder: bool = False) -> Home:
    """Lock and read a data directory that exists; write nothing but, with `write_holder`, who holds the lock.

    Raises NotFound where there is none, StoreLocked, FormatMismatch.
    """
    for file in ("lock", "format.json"):
        if not (path / file).exists():
            raise NotFound(f"{path}: not a data directory of kvfs, it has no {file}")
    path = path.resolve()
    lock_fd = _lock(path, write_holder=write_holder)
    try:
        return Home(path, _read_format(path), lock_fd)
    except BaseException:
        os.close(lock_fd)
        raise


def open_home(path: Path) -> Home:
    """Lock and read `path`, making it where it does not exist.

    Raises StoreLocked when another service holds it, FormatMismatch when a newer or foreign format is there.
    """
    path.mkdir(parents=True, exist_ok=True)
    path = path.resolve()
    lock_fd = _lock(path)
    try:
        found = _read_format(path)
        if not (path / "format.json").exists():  # before anything else bears the store's id
            _write_format(path, found)
    except BaseException:
        os.close(lock_fd)
        raise
    return Home(path, found, lock_fd)


def lock_holder(path: Path) -> int | None:
    """Return the process that holds the lock of `path`; None when nobody does, or the file does not say who."""
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


def _lock(path: Path, *, write_holder: bool = True) -> int:
    """Lock the file, and write our process id into it unless nothing may be written."""
    flags = os.O_RDWR | os.O_CREAT if write_holder else os.O_RDONLY
    lock_fd = os.open(path / "lock", flags | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock_fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(lock_fd)
        raise StoreLocked(
            f"data directory {path} is in use by another kvfs service (process {holder}); "
            "stop it, or give this one a directory of its own"
        ) from None
    if write_holder:
        # Not truncated first: on a full filesystem somebody else might get its room.
        os.ftruncate(lock_fd, os.pwrite(lock_fd, f"{os.getpid()}\n".encode(), 0))
    return lock_fd


def _read_format(path: Path) -> _Format:
    file = path / "format.json"
    try:
        found = json.loads(file.read_text())
        version = int(found["format"])
        read = _Format(
            bytes.fromhex(found["store_id"]),
            bool(found["clean"]),
            *(str(found.get(key, "")) for key in ("boot_id", "start", "previous_start")),
        )
    except FileNotFoundError:
        return _Format(secrets.token_bytes(16))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise FormatMismatch(f"{file} is not a kvfs format file: {error}") from None
    if version > FORMAT_VERSION:
        raise FormatMismatch(
            f"{file} says data format {version}, and this kvfs reads up to {FORMAT_VERSION}: "
            "use the newer kvfs, or another data directory"
        )
    if len(read.store_id) != 16:
        raise FormatMismatch(f"{file} has a store id of {len(read.store_id)} bytes: it must be 16")
    return read


def _write_format(path: Path, new: _Format) -> None:
    """Write `format.json` durably: an index must not look clean after a power failure because this came too late.

    The one before stays as the file that the next is written to, so that a full filesystem refuses none.
    """
    values = {"format": FORMAT_VERSION, **asdict(new), "store_id": new.store_id.hex()}
    temporary = path / "format.json.new"
    text = json.dumps(values, indent=1) + "\n"
    descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.ftruncate(descriptor, os.pwrite(descriptor, text.encode(), 0))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    linux.replace_by(temporary, path / "format.json")
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
