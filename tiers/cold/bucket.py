"""The S3 bucket under the cold tier, as the tier sees it.

Responsibility: six calls on a bucket elsewhere, through boto3, and every way in which they fail as one of four errors.
What the objects mean is `tiers.cold`'s, what they look like `tiers.cold.format`'s.

Invariants: each call ends within limits.COLD_ATTEMPTS times connect and read timeout; retries of a request, with
backoff, are botocore's. Bodies are sent from, and received into, memory of the caller's: nothing is copied whole.
Secrets stand in no message.

Concurrency: blocking; called in worker threads, any number at once (boto3's clients are made for it).
"""

from __future__ import annotations

import base64
import io
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Protocol

from kvfs import limits
from kvfs.config.settings import ColdSettings
from kvfs.errors import ConfigError, Corrupt, InvalidRequest, KvfsError, NotFound, TierUnreachable


class ColdBucket(Protocol):
    """Keeps objects in a bucket, under a prefix that names are without. Every call raises TierUnreachable."""

    place: str
    """Endpoint, bucket and prefix, for people, and to distinguish one from another."""

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        """Store an object, whole or not at all. Raises InvalidRequest for one that will never be taken."""
        ...

    def get(self, name: str, head: bytearray, payload: memoryview) -> int:
        """Fill `head`, then `payload`; return the bytes read. Raises NotFound, Corrupt (the object has more)."""
        ...

    def read(self, name: str, limit: int) -> bytes:
        """Return a small object, at most `limit` bytes of it. Raises NotFound."""
        ...

    def create(self, name: str, data: bytes) -> bool:
        """Store an object unless there is one; return whether it was stored."""
        ...

    def delete(self, names: Sequence[str]) -> list[str]:
        """Remove objects, there or not, at most limits.MAX_DELETE_KEYS; return those that still exist."""
        ...

    def page(self, prefix: str, after: str) -> tuple[list[tuple[str, int]], bool]:
        """Return (name, bytes) of the next objects past `after`, ordered by name, and whether there are more."""
        ...


def open_bucket(settings: ColdSettings) -> ColdBucket:
    """Return the bucket that the settings name; nothing is asked of it yet. Raises ConfigError without boto3."""
    if find_spec("boto3") is None:
        raise ConfigError("[cold] needs boto3, which is not installed: pip install 'kvfs[cold]'")
    return S3Bucket(settings)


class S3Bucket:
    """Implements `ColdBucket` for one bucket and prefix, through boto3."""

    def __init__(self, settings: ColdSettings) -> None:
        assert settings.bucket is not None
        self._settings = settings
        self._bucket = settings.bucket
        self._prefix = settings.prefix
        self.place = f"{settings.endpoint or 'https://s3.amazonaws.com'}/{self._bucket}/{self._prefix}"
        self._made: Any = None

    @property
    def _client(self) -> Any:
        """Return the client, made at the first call in a worker thread: importing boto3 takes half a second."""
        if self._made is None:
            self._made = _make_client(self._settings)
        return self._made

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> None:
        body = _Parts(parts)
        with _failures(name):
            # Given as a header, which every server takes: botocore's own way over TLS is a trailer, which few do.
            self._client.put_object(
                Bucket=self._bucket, Key=self._prefix + name, Body=body, ChecksumCRC32=body.crc32
            )

    def get(self, name: str, head: bytearray, payload: memoryview) -> int:
        # Botocore repeats a request that fails, but not one whose answer breaks off.
        for _ in range(limits.COLD_ATTEMPTS - 1):
            stream = self._open(name)
            with suppress(TierUnreachable), _failures(name):
                return _receive(name, stream, head, payload)
        stream = self._open(name)
        with _failures(name):
            return _receive(name, stream, head, payload)

    def _open(self, name: str) -> Any:
        with _failures(name):
            return self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)["Body"]

    def read(self, name: str, limit: int) -> bytes:
        stream = self._open(name)
        with _failures(name), closing(stream) as body:
            return bytes(body.read(limit))

    def create(self, name: str, data: bytes) -> bool:
        from botocore.exceptions import ClientError

        with _failures(name):
            try:
                self._client.put_object(
                    Bucket=self._bucket, Key=self._prefix + name, Body=data, IfNoneMatch="*"
                )
            except ClientError as error:
                if _status(error) in (409, 412):
                    return False
                raise
        return True

    def delete(self, names: Sequence[str]) -> list[str]:
        objects = [{"Key": self._prefix + name} for name in names]
        with _failures(names[0]):
            answer = self._client.delete_objects(
                Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True}
            )
        cut = len(self._prefix)
        return [error["Key"][cut:] for error in answer.get("Errors", ()) if error.get("Code") != "NoSuchKey"]

    def page(self, prefix: str, after: str) -> tuple[list[tuple[str, int]], bool]:
        after = max(prefix, after)  # "" is before every name under the prefix
        with _failures(prefix):
            answer = self._client.list_objects_v2(
                Bucket=self._bucket,
                Prefix=self._prefix + prefix,
                StartAfter=self._prefix + after,
                MaxKeys=limits.MAX_LIST_ENTRIES,
            )
        cut = len(self._prefix)
        found = [(each["Key"][cut:], int(each["Size"])) for each in answer.get("Contents", ())]
        return found, bool(answer["IsTruncated"])


def _make_client(settings: ColdSettings) -> Any:
    import boto3
    from botocore.config import Config

    secret = settings.secret_key
    session = boto3.Session(
        aws_access_key_id=settings.access_key,
        aws_secret_access_key=None if secret is None else secret.get_secret_value(),
        profile_name=settings.profile,
        region_name=settings.region,
    )
    return session.client(
        "s3",
        endpoint_url=settings.endpoint,
        config=Config(
            signature_version="s3v4",
            connect_timeout=limits.COLD_CONNECT_S,
            read_timeout=settings.timeout_s,
            retries={"mode": "standard", "total_max_attempts": limits.COLD_ATTEMPTS},
            max_pool_connections=limits.COLD_THREADS,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",  # every byte is verified against its own header
            s3={"addressing_style": "path" if settings.endpoint else "auto"},
        ),
    )


@contextmanager
def _failures(name: str) -> Iterator[None]:
    """Raise every failure of a call as one of kvfs's errors."""
    from botocore.exceptions import ClientError

    try:
        yield
    except KvfsError:
        raise
    except ClientError as error:
        code, status = error.response["Error"].get("Code", "?"), _status(error)
        text = f"{name}: {code} ({status}): {error.response['Error'].get('Message', '')[:200]}"
        if code in ("NoSuchKey", "404"):
            raise NotFound(text) from None
        if status in (400, 405, 411, 413, 414):
            raise InvalidRequest(text) from None
        raise TierUnreachable(text) from None
    except Exception as error:  # of boto3, urllib3 and what they parse with, which have no base in common
        raise TierUnreachable(f"{name}: {type(error).__name__}: {error}") from None


def _status(error: Any) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def _receive(name: str, stream: Any, head: bytearray, payload: memoryview) -> int:
    # As a context itself the stream gives the one below, which does not notice missing bytes at its end.
    with closing(stream) as body:
        done = _fill(body, memoryview(head))
        if done == len(head):
            done += _fill(body, payload)
        if done == len(head) + len(payload) and body.read(1):
            raise Corrupt(f"{name}: it has more than {done} bytes")
        return done


def _fill(body: Any, view: memoryview) -> int:
    """Read until `view` is full or the body ends; return the count."""
    done, deadline = 0, time.monotonic() + limits.COLD_FETCH_S
    while done < len(view):
        if time.monotonic() > deadline:
            raise TierUnreachable(f"the answer took longer than {limits.COLD_FETCH_S} s")
        count = body.readinto(view[done : done + limits.COLD_READ_BYTES])
        if not count:
            break
        done += count
    return done


class _Parts(io.RawIOBase):
    """Reads several buffers of the caller's as one file, again for each retry."""

    def __init__(self, parts: Sequence[bytes | memoryview]) -> None:
        self._parts = [memoryview(part) for part in parts]
        self._size = sum(len(part) for part in self._parts)
        self._at = 0

    @property
    def crc32(self) -> str:
        """Return the CRC32 of all buffers, as S3 writes it."""
        value = 0
        for part in self._parts:
            value = zlib.crc32(part, value)
        return base64.b64encode(value.to_bytes(4, "big")).decode()

    def __len__(self) -> int:
        return self._size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)
        start = self._at
        for part in self._parts:
            if start < len(part):
                count = min(len(view), len(part) - start)
                view[:count] = part[start : start + count]
                self._at += count
                return count
            start -= len(part)
        return 0


@dataclass(frozen=True, slots=True)
class ColdOptions:
    """Holds the settings of a store's cold tier."""

    bucket: ColdBucket
    capacity_bytes: int
    admits_all: bool = False
    """Whether everything is written there; else only what was read at least once."""
    take_over: bool = False
    """Whether to go on with what another store has left there."""
