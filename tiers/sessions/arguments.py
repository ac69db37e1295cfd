"""Arguments and results of control requests as JSON objects.

Responsibility: take typed, bounded values out of a request's object, and put what the store returns into an
answer's. A missing, unknown or mistyped argument is an InvalidRequest that names it. Concurrency: pure
values.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Sequence
from typing import Any

from kvfs import limits
from kvfs.errors import InvalidRequest
from kvfs.protocol.messages import text, untext
from tiers.model.objects import Bucket, Directory, Name, ObjectInfo

MAX_INTEGER = (1 << 63) - 1


class Arguments:
    """Takes values out of one request's object. Every argument is taken once; `done` refuses what is left."""

    def __init__(self, what: str, values: dict[str, Any]) -> None:
        self._what = what
        self._left = dict(values)

    def has(self, key: str) -> bool:
        """Return whether an argument is given, and is not null; does not take it."""
        return self._left.get(key) is not None

    def done(self) -> None:
        """Refuse arguments that nothing has taken. Raises InvalidRequest."""
        if self._left:
            raise InvalidRequest(f"{self._what}: unknown argument {sorted(self._left)[0]!r}")

    def name(self, key: str = "name") -> Name:
        """Take `[bucket, key]`."""
        return self._as_name(key, self._take(key, list))

    def optional_name(self, key: str) -> Name | None:
        """Take a name; None where it is absent."""
        return None if self._is_absent(key) else self.name(key)

    def names(self, key: str) -> list[Name]:
        """Take a list of at most limits.MAX_BATCH names. Raises InvalidRequest."""
        values = self._take(key, list)
        if len(values) > limits.MAX_BATCH:
            raise InvalidRequest(f"{self._what}: {len(values)} {key}, over {limits.MAX_BATCH}")
        return [self._as_name(key, value) for value in values]

    def text(self, key: str, default: str | None = None) -> bytes:
        """Take a string as bytes. Raises InvalidRequest for another type, or where it is absent without a default."""
        return untext(default if default is not None and self._is_absent(key) else self._take(key, str))

    def flag(self, key: str, default: bool) -> bool:
        """Take a boolean. Raises InvalidRequest for another type."""
        return default if self._is_absent(key) else bool(self._take(key, bool))

    def integer(self, key: str, default: int, *, most: int = MAX_INTEGER) -> int:
        """Take an integer from 0 to `most`. Raises InvalidRequest."""
        return default if self._is_absent(key) else self._integer(key, most)

    def optional_integer(self, key: str, *, most: int = MAX_INTEGER) -> int | None:
        """Take an integer from 0 to `most`; None where it is absent. Raises InvalidRequest."""
        return None if self._is_absent(key) else self._integer(key, most)

    def optional_integers(self, key: str, count: int) -> list[int | None]:
        """Take a list of so many, each an integer or null."""
        values: list[Any] = self._take(key, list)
        whole = all(
            value is None
            or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INTEGER)
            for value in values
        )
        if len(values) != count or not whole:
            raise InvalidRequest(f"{self._what}: {key} are to be {count} integers from 0 on, or null")
        return values

    def hex(self, key: str, width: int) -> int:
        """Take so many bytes in hex, as a number. Raises InvalidRequest."""
        value = self._take(key, str)
        number = _hex(value, width)
        if number is None:
            raise InvalidRequest(f"{self._what}: {key} = {value!r:.80}: {width} bytes in hex are wanted")
        return number

    def rows(self, key: str, *widths: int) -> list[list[int]]:
        """Take a list of at most limits.MAX_BATCH rows of numbers: a width of 0 is an integer from 0 on, another so
        many bytes in hex, as a number. Raises InvalidRequest."""
        values: list[Any] = self._take(key, list)
        if len(values) > limits.MAX_BATCH:
            raise InvalidRequest(f"{self._what}: {len(values)} {key}, over {limits.MAX_BATCH}")
        rows = [_row(value, widths) for value in values]
        for value, row in zip(values, rows, strict=True):
            if len(row) != len(widths):
                wanted = ", ".join(f"{width} bytes in hex" if width else "an integer" for width in widths)
                raise InvalidRequest(f"{self._what}: {key} has {value!r:.120}, not [{wanted}]")
        return rows

    def optional_time_ns(self, key: str) -> int | None:
        """Take nanoseconds since 1970, negative before it, as utimensat(2) does."""
        return None if self._is_absent(key) else self._integer(key, MAX_INTEGER, least=-MAX_INTEGER - 1)

    def mode(self, default: int) -> int:
        """Take permission bits, at most 0o1777. Raises InvalidRequest."""
        return self.integer("mode", default, most=0o1777)

    def optional_bytes(self, key: str, most: int) -> bytes | None:
        """Take base64."""
        if self._is_absent(key):
            return None
        try:
            value: bytes = base64.b64decode(self._take(key, str), validate=True)
        except (binascii.Error, ValueError):
            raise InvalidRequest(f"{self._what}: {key} is not base64") from None
        if len(value) > most:
            raise InvalidRequest(f"{self._what}: {key} has {len(value)} bytes, over {most}")
        return value

    def object(self, key: str) -> dict[str, Any]:
        """Take a JSON object. Raises InvalidRequest for another type."""
        return dict(self._take(key, dict))

    def _integer(self, key: str, most: int, *, least: int = 0) -> int:
        value = self._take(key, int)
        if isinstance(value, bool) or not least <= value <= most:
            raise InvalidRequest(
                f"{self._what}: {key} = {value!r}: an integer from {least} to {most} is wanted"
            )
        return int(value)

    def _is_absent(self, key: str) -> bool:
        """Return whether an argument is missing or null; a null is taken."""
        return self._left.get(key) is None and self._left.pop(key, None) is None

    def _take(self, key: str, kind: type) -> Any:
        if key not in self._left:
            raise InvalidRequest(f"{self._what}: argument {key!r} is missing")
        value = self._left.pop(key)
        if not isinstance(value, kind):
            raise InvalidRequest(f"{self._what}: {key} is a {type(value).__name__}, not a {kind.__name__}")
        return value

    def _as_name(self, key: str, value: Any) -> Name:
        if not isinstance(value, list) or len(value) != 2 or not all(isinstance(part, str) for part in value):
            raise InvalidRequest(f"{self._what}: {key} must be [bucket, key]")
        bucket, tail = untext(value[0]), untext(value[1])
        if (
            len(bucket) > limits.MAX_BUCKET_NAME_BYTES
            or len(tail) > limits.MAX_KEY_BYTES
            or b"\0" in bucket + tail
        ):
            raise InvalidRequest(
                f"{self._what}: {key} of {len(bucket)} + {len(tail)} bytes: at most "
                f"{limits.MAX_BUCKET_NAME_BYTES} + {limits.MAX_KEY_BYTES}, and no NUL"
            )
        return Name(bucket, tail)


def _row(value: Any, widths: Sequence[int]) -> list[int]:
    """Return the numbers of a row; fewer than there are widths where one is wrong."""
    if not isinstance(value, list) or len(value) != len(widths):
        return []
    return [
        number
        for each, width in zip(value, widths, strict=True)
        if (number := _hex(each, width) if width else _whole(each)) is not None
    ]


def _whole(value: Any) -> int | None:
    is_whole = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INTEGER
    return int(value) if is_whole else None


def _hex(value: Any, width: int) -> int | None:
    if not isinstance(value, str) or not re.fullmatch(f"[0-9a-f]{{{2 * width}}}", value):
        return None
    return int(value, 16)


def entry_object(key: bytes, found: ObjectInfo | Directory) -> dict[str, Any]:
    """Describe one name, for `stat` and `list`."""
    common = {
        "key": text(key),
        "ino": found.ino,
        "mode": found.mode,
        "uid": found.uid,
        "gid": found.gid,
        "mtime_ns": found.mtime_ns,
        "user_metadata": base64.b64encode(found.user_metadata).decode(),
    }
    if isinstance(found, Directory):
        return {**common, "directory": True, "marker_id": found.marker_id}
    return {
        **common,
        "directory": False,
        "size_bytes": found.size_bytes,
        "ctime_ns": found.ctime_ns,
        "object_id": found.object_id,
        "sequence": found.sequence,
        "tier": found.tier,
        "pinned": found.pinned,
        "hits": found.hits,
        "block": found.name is None,
        "target": text(found.target),
    }


def bucket_object(bucket: Bucket) -> dict[str, Any]:
    """Describe a bucket, for answers."""
    return {
        "name": text(bucket.name),
        "durable": bucket.durable,
        "uid": bucket.uid,
        "gid": bucket.gid,
        "mode": bucket.mode,
        "created_ns": bucket.created_ns,
        "mtime_ns": bucket.mtime_ns,
        "namespace": bucket.namespace.hex() if bucket.namespace is not None else None,
        "admits_all": bucket.admits_all,
        "large": bucket.large,
    }
