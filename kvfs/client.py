"""The synchronous client of a local kvfs service.

Responsibility: `connect` and `Client`: names, buckets, blocks and status over one session. Bytes are read
and written through descriptors that the service hands out, so they cross no socket. Names are `bucket/key`
strings.

Invariants: every call ends within its timeout or raises DeadlinePassed; a failed exchange closes the
session and `reconnect` is explicit; nothing that a call reserved outlives its failure.

Concurrency: calls from several threads are served one after the other. Do not share a client with a forked
child.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import xxhash

from kvfs import limits, paths
from kvfs.blocks import Blocks
from kvfs.errors import InvalidRequest, KvfsError, NotFound, ObjectTooLarge, Superseded
from kvfs.exchange import Exchange, check, status_error
from kvfs.messages import (
    DIGEST_BYTES,
    NO_PARENT,
    BlockSeal,
    DigestBatch,
    ExtentResult,
    NameSeal,
    Op,
    OpenNames,
    SealBlocks,
    SealNames,
    text,
)
from kvfs.namespaces import Namespace
from kvfs.results import Bucket, Entry, bucket_of, entry_of
from kvfs.transport import Transport, close_all, socket_path

Flags = list[bool]
Values = list[bytes | None]
Data = bytes | bytearray | memoryview
_BLOCKS_AT_ONCE = limits.MAX_FDS_PER_MESSAGE
"""So that a client with the usual 1,024 open files never meets that limit."""


@dataclass(frozen=True, slots=True)
class NamespaceHandle:
    """A namespace that this session opened; another session must open it anew."""

    digest: bytes
    bucket: str
    handle: int
    session: int


@dataclass(frozen=True, slots=True)
class Block:
    """A block to put: its prefix hash (16 bytes), its bytes, and the prefix hash of the block before it."""

    digest: bytes
    data: Data
    parent: bytes | None = None


def connect(
    address: str | os.PathLike[str], *, timeout_s: float = limits.CLIENT_TIMEOUT_S, client: str = "python"
) -> Client:
    """A session with the service behind `address`: a mount, a data directory or a session socket.

    Raises SessionClosed when no service answers, DeadlinePassed, FormatMismatch, LimitExceeded (of sessions).
    """
    return Client(address, timeout_s=timeout_s, client=client)


class Client:
    """One session. See `connect`."""

    def __init__(self, address: str | os.PathLike[str], *, timeout_s: float, client: str) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._client = client
        self._sessions = 1
        self._blocks: weakref.WeakSet[Blocks] = weakref.WeakSet()
        self._exchange = self._begin()

    def _begin(self) -> Exchange:
        return Exchange(self._begin_transport(self._timeout_s))

    def _begin_transport(self, timeout_s: float) -> Transport:
        path = socket_path(self._address, timeout_s=timeout_s)
        return Transport(path, timeout_s=timeout_s, client=self._client)

    def reconnect(self) -> None:
        """Begin a new session; namespaces must be opened anew (`blocks` do so themselves). Raises as `connect`."""
        self._exchange.transport.close()
        self._sessions += 1
        self._exchange = self._begin()

    def close(self) -> None:
        """End the session, and those of its `blocks`. Closing twice is harmless."""
        for blocks in list(self._blocks):
            blocks.close()
        self._exchange.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def store_id(self) -> bytes:
        """16 bytes."""
        return self._exchange.transport.hello.store_id

    @property
    def may_open(self) -> bool:
        """Whether this process may open slots of the tier itself, being in the service's group."""
        return self._exchange.transport.hello.may_open

    @property
    def details(self) -> dict[str, Any]:
        """What the service said at HELLO: `directory`, `table`, `limits`, `quota`."""
        return self._exchange.transport.hello.details

    # --- the service and its buckets ---------------------------------------------------------------------
    def status(self) -> dict[str, Any]:
        """Usage and counters of the service, as JSON values."""
        return self._exchange.control(Op.STATUS)

    def shutdown(self) -> None:
        """Stop the service. Raises NotPermitted unless the caller is its own user or root."""
        self._exchange.control(Op.SHUTDOWN)

    def buckets(self) -> list[Bucket]:
        found: list[Bucket] = []
        after: str | None = ""
        while after is not None:
            page = self._exchange.control(Op.BUCKET_LIST, after=after)
            found += map(bucket_of, page["buckets"])
            after = page["next_after"]
        return found

    def create_bucket(
        self,
        name: str,
        *,
        mode: int = 0o755,
        durable: bool = False,
        admits_all: bool = True,
        large: bool = False,
    ) -> Bucket:
        """Raises Exists, InvalidRequest, AccessDenied unless the caller is in the service's group, and DeviceMissing
        for a durable or large one where there is no NVMe tier."""
        made = self._exchange.control(
            Op.BUCKET_CREATE, bucket=name, mode=mode, durable=durable, admits_all=admits_all, large=large
        )
        return bucket_of(made)

    def remove_bucket(self, name: str) -> None:
        """Raises BucketNotFound, NotEmpty, NotPermitted."""
        self._exchange.control(Op.BUCKET_REMOVE, bucket=name)

    # --- names -------------------------------------------------------------------------------------------
    def stat(self, name: str) -> Entry:
        """What a name stands for; `bucket` or `bucket/dir/` gives a directory. Raises NotFound."""
        pair = _name(name)
        return entry_of(pair[0], self._exchange.control(Op.STAT, name=pair))

    def list(self, prefix: str, *, delimiter: str | None = None) -> Iterator[Entry]:
        """Names that start with `bucket/prefix`, in byte order; past `delimiter` they are one entry."""
        bucket, key = _name(prefix)
        after: str | None = ""
        while after is not None:
            page = self._exchange.control(
                Op.LIST, bucket=bucket, prefix=key, after=after, delimiter=delimiter or ""
            )
            for entry in page["entries"]:
                yield entry_of(bucket, entry)
            after = page["next_after"]

    def put(
        self,
        name: str,
        data: Data,
        *,
        mode: int = 0o644,
        replace: bool = True,
        mtime_ns: int | None = None,
        user_metadata: bytes = b"",
    ) -> None:
        """Store an object; it is visible when this returns, whole. Raises Exists, NoSpace, AccessDenied."""
        bucket, key = paths.parse(name)
        view = memoryview(data).cast("B")
        [draft] = self._exchange.reserve([view.nbytes])
        try:
            draft.write(view)
            seal = NameSeal(
                draft.slot,
                draft.generation,
                bucket,
                key,
                mode=mode,
                replace=replace,
                mtime_ns=mtime_ns,
                checksum=xxhash.xxh3_64_intdigest(view),
                user_metadata=user_metadata,
            )
            [result] = self._exchange.results(SealNames((seal,)))
            check(result, name)
        except BaseException:
            self._exchange.abort([draft])
            raise

    def open(self, name: str) -> int:
        """A read-only descriptor of the object's bytes, which is a lease on them; the caller closes it."""
        [(entry, descriptor)] = self._exchange.open(OpenNames((paths.parse(name),)))
        if descriptor is None:
            raise _not_opened(entry.status, name)
        return descriptor

    def get(self, name: str) -> bytes:
        """Raises NotFound, IsDirectory, AccessDenied."""
        [(entry, descriptor)] = self._exchange.open(OpenNames((paths.parse(name),)))
        if descriptor is None:
            raise _not_opened(entry.status, name)
        try:
            return _read(descriptor, entry.size_bytes, name)
        finally:
            os.close(descriptor)

    def remove(self, name: str) -> None:
        """Remove an object or an empty directory (`bucket/dir/`). Raises NotFound, NotEmpty, AccessDenied."""
        self._exchange.control(Op.REMOVE, name=_name(name))

    def rename(self, source: str, target: str, *, replace: bool = True) -> None:
        """Move an object, or a directory (both names end in `/`). Raises NotFound, Exists, CrossDevice."""
        self._exchange.control(Op.RENAME, source=_name(source), target=_name(target), replace=replace)

    def make_directory(self, name: str, *, mode: int = 0o755) -> Entry:
        """Raises Exists."""
        bucket, key = _name(name)
        return entry_of(
            bucket, self._exchange.control(Op.MKDIR, name=[bucket, key.rstrip("/") + "/"], mode=mode)
        )

    def set_attributes(
        self,
        name: str,
        *,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        mtime_ns: int | None = None,
    ) -> Entry:
        """Change what is given. Raises NotFound, NotPermitted."""
        pair = _name(name)
        changes = {"mode": mode, "uid": uid, "gid": gid, "mtime_ns": mtime_ns}
        given = {key: value for key, value in changes.items() if value is not None}
        return entry_of(pair[0], self._exchange.control(Op.SET_ATTRIBUTES, name=pair, **given))

    def pin(self, name: str) -> None:
        """Keep an object from being evicted. Raises NotFound, NotPermitted unless the caller owns it."""
        self._exchange.control(Op.PIN, name=_name(name), pinned=True)

    def unpin(self, name: str) -> None:
        self._exchange.control(Op.PIN, name=_name(name), pinned=False)

    def evict(self, *names: str, size_bytes: int | None = None) -> int:
        """Evict these objects, or by policy until `size_bytes` are free; the bytes that became free."""
        if bool(names) == (size_bytes is not None):
            raise InvalidRequest("evict: give either names or size_bytes")
        if size_bytes is not None:
            return int(self._exchange.control(Op.EVICT, bytes=size_bytes)["freed_bytes"])
        freed = 0
        for at in range(0, len(names), limits.MAX_BATCH):
            some = [_name(name) for name in names[at : at + limits.MAX_BATCH]]
            freed += int(self._exchange.control(Op.EVICT, names=some)["freed_bytes"])
        return freed

    # --- blocks ------------------------------------------------------------------------------------------
    def blocks(
        self,
        namespace: Namespace | Mapping[str, Any] | bytes,
        shard: int | None = None,
        *,
        bucket: str | None = None,
        timeout_s: float | None = None,
    ) -> Blocks:
        """The blocks of a namespace (or, given 16 bytes, of the one with this digest), in sessions of their own.

        The bucket that is bound to it is found or, for a description, created. `shard` replaces the namespace's
        `tensor_rank`: every rank of a model has its own. Raises InvalidNamespace, BucketNotFound, AccessDenied,
        SessionClosed.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        arguments = _namespace_arguments(namespace, shard)
        if bucket is not None:
            arguments["bucket"] = bucket
        opened = Blocks(self._begin_transport, arguments, timeout_s=limit_s)
        self._blocks.add(opened)
        return opened

    def open_namespace(
        self,
        namespace: Namespace | dict[str, Any] | None = None,
        *,
        digest: bytes | None = None,
        bucket: str | None = None,
    ) -> NamespaceHandle:
        """Find or create the bucket bound to a namespace, or find the one bound to a digest.

        Raises InvalidNamespace, BucketNotFound, AccessDenied.
        """
        arguments: dict[str, Any] = {"bucket": bucket} if bucket is not None else {}
        if (namespace is None) == (digest is None):
            raise InvalidRequest("open_namespace: give either a namespace or a digest")
        if digest is not None:
            arguments["digest"] = digest.hex()
        else:
            arguments["description"] = (
                namespace.as_mapping() if isinstance(namespace, Namespace) else namespace
            )
        found = self._exchange.control(Op.OPEN_NAMESPACE, **arguments)
        return NamespaceHandle(
            bytes.fromhex(found["digest"]), found["bucket"]["name"], found["handle"], self._sessions
        )

    def match(self, namespace: NamespaceHandle, digests: Sequence[bytes]) -> int:
        """How many blocks are there without a gap from the first on."""
        hits = 0
        for at in range(0, len(digests), limits.MAX_BATCH):
            some = digests[at : at + limits.MAX_BATCH]
            found = self._exchange.count(self._digests(Op.MATCH, namespace, some))
            hits += found
            if found < len(some):
                break
        return hits

    def touch(self, namespace: NamespaceHandle, digests: Sequence[bytes]) -> int:
        """Count hits of blocks that were read without the service; how many of them were found."""
        return sum(
            self._exchange.count(self._digests(Op.TOUCH, namespace, digests[at : at + limits.MAX_BATCH]))
            for at in range(0, len(digests), limits.MAX_BATCH)
        )

    def put_blocks(self, namespace: NamespaceHandle, blocks: Sequence[Block]) -> Flags:
        """Store blocks, parents first; True where the block is new, False where it was there already.

        Raises the error of the first block that failed (NoSpace, ...); those before it are stored.
        """
        stored: Flags = []
        for at in range(0, len(blocks), _BLOCKS_AT_ONCE):
            stored += self._put_some(namespace, blocks[at : at + _BLOCKS_AT_ONCE])
        return stored

    def get_blocks(self, namespace: NamespaceHandle, digests: Sequence[bytes]) -> Values:
        """The blocks' bytes, None for a miss."""
        found: Values = []
        for at in range(0, len(digests), _BLOCKS_AT_ONCE):
            some = digests[at : at + _BLOCKS_AT_ONCE]
            opened = self._exchange.open(self._digests(Op.OPEN_BLOCK, namespace, some))
            try:
                for digest, (entry, descriptor) in zip(some, opened, strict=True):
                    found.append(_block(entry, descriptor, digest.hex()))
            finally:
                close_all([descriptor for _, descriptor in opened if descriptor is not None])
        return found

    def remove_blocks(self, namespace: NamespaceHandle, digests: Sequence[bytes]) -> int:
        """Remove blocks; how many were there."""
        removed = 0
        for at in range(0, len(digests), limits.MAX_BATCH):
            some = digests[at : at + limits.MAX_BATCH]
            for digest, result in zip(
                some, self._exchange.results(self._digests(Op.REMOVE_BLOCK, namespace, some)), strict=True
            ):
                if result.status != errno.ENOENT:
                    check(result, digest.hex())
                    removed += 1
        return removed

    def _put_some(self, namespace: NamespaceHandle, blocks: Sequence[Block]) -> Flags:
        views = [memoryview(block.data).cast("B") for block in blocks]
        self._digests(Op.SEAL_BLOCK, namespace, [block.digest for block in blocks])
        drafts = self._exchange.reserve([view.nbytes for view in views])
        try:
            for draft, view in zip(drafts, views, strict=True):
                draft.write(view)
            seals = [
                BlockSeal(
                    draft.slot,
                    draft.generation,
                    block.digest,
                    block.parent or NO_PARENT,
                    xxhash.xxh3_64_intdigest(view),
                )
                for draft, block, view in zip(drafts, blocks, views, strict=True)
            ]
            results = self._exchange.results(SealBlocks(namespace.handle, tuple(seals)))
            for block, result in zip(blocks, results, strict=True):
                if result.status != errno.EEXIST:
                    check(result, block.digest.hex())
        except BaseException:
            self._exchange.abort(drafts)
            raise
        return [result.status == 0 for result in results]

    def _digests(self, op: Op, namespace: NamespaceHandle, digests: Sequence[bytes]) -> DigestBatch:
        if namespace.session != self._sessions:
            raise InvalidRequest(
                f"namespace {namespace.bucket} was opened in an earlier session: open it again"
            )
        if any(len(digest) != DIGEST_BYTES for digest in digests):
            raise InvalidRequest(f"a prefix hash has {DIGEST_BYTES} bytes")
        return DigestBatch(op, namespace.handle, b"".join(digests))


def _not_opened(status: int, name: str) -> KvfsError:
    if status == ObjectTooLarge.errno:
        name += ": larger than DRAM takes, which is a quarter of its capacity; it is read on a mount"
    return status_error(status, name)


def _namespace_arguments(
    namespace: Namespace | Mapping[str, Any] | bytes, shard: int | None
) -> dict[str, Any]:
    if isinstance(namespace, bytes):
        if shard is not None:
            raise InvalidRequest("blocks: a digest says the shard already")
        return {"digest": namespace.hex()}
    description = namespace.as_mapping() if isinstance(namespace, Namespace) else dict(namespace)
    if shard is not None:
        description["tensor_rank"] = shard
    return {"description": description}


def _name(name: str) -> list[str]:
    bucket, key = paths.parse(name)
    return [text(bucket), text(key)]


def _block(entry: ExtentResult, descriptor: int | None, what: str) -> bytes | None:
    if descriptor is None:
        error = status_error(entry.status, what)
        if isinstance(error, NotFound):
            return None
        raise error
    return _read(descriptor, entry.size_bytes, what)


def _read(descriptor: int, size_bytes: int, what: str) -> bytes:
    """All of an object; one pread brings up to 2 GiB, so only larger ones are put together from parts."""
    data = os.pread(descriptor, size_bytes, 0)
    if len(data) == size_bytes:
        return data
    parts, at = [data], len(data)
    while at < size_bytes and parts[-1]:
        parts.append(os.pread(descriptor, size_bytes - at, at))
        at += len(parts[-1])
    if at < size_bytes:
        raise Superseded(f"{what}: {at} bytes where the service said {size_bytes}")
    return b"".join(parts)
