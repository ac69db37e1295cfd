"""The synchronous client of a local kvfs service.

Responsibility: `connect` and `Client`: names, buckets and status over one session. Bytes are read and written through
descriptors that the service sends, so they cross no socket. Names are `bucket/key` strings.

Invariants: a call that does not end within its timeout raises DeadlinePassed; a failed exchange closes the session, and
`reconnect` is explicit; nothing that a call reserved outlives its failure.

Concurrency: calls from several threads are served one after the other. A forked child makes a client of its own.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Self

import xxhash

from kvfs import limits, paths
from kvfs.client.blocks import Blocks
from kvfs.client.exchange import Exchange, check
from kvfs.client.results import Bucket, Entry, bucket_of, entry_of
from kvfs.client.transport import Transport, socket_path
from kvfs.errors import InvalidRequest, KvfsError, ObjectTooLarge, Superseded, status_error
from kvfs.namespaces import Namespace
from kvfs.protocol.messages import NameSeal, Op, OpenNames, SealNames, text


def connect(
    address: str | os.PathLike[str], *, timeout_s: float = limits.CLIENT_TIMEOUT_S, client: str = "python"
) -> Client:
    """Begin a session with the service behind `address`: a mount, a data directory or a session socket.

    Raises SessionClosed when no service answers, DeadlinePassed, FormatMismatch, LimitExceeded (of sessions).
    """
    return Client(address, timeout_s=timeout_s, client=client)


class Client:
    """Use a service over one session; `connect` makes it."""

    def __init__(self, address: str | os.PathLike[str], *, timeout_s: float, client: str) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._client = client
        self._blocks: weakref.WeakSet[Blocks] = weakref.WeakSet()
        self._exchange = self._begin()

    def _begin(self) -> Exchange:
        return Exchange(self._begin_transport(self._timeout_s))

    def _begin_transport(self, timeout_s: float) -> Transport:
        path = socket_path(self._address, timeout_s=timeout_s)
        return Transport(path, timeout_s=timeout_s, client=self._client)

    def reconnect(self) -> None:
        """Begin a new session; `blocks` begin theirs themselves. Raises as `connect`."""
        self._exchange.transport.close()
        self._exchange = self._begin()

    def close(self) -> None:
        """End the session, and those of its `blocks`. Closing twice is harmless."""
        for blocks in list(self._blocks):
            blocks.close()
        self._exchange.transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def store_id(self) -> bytes:
        """Return the store's random id, 16 bytes."""
        return self._exchange.transport.hello.store_id

    @property
    def may_open(self) -> bool:
        """Return whether this process may open slots of the tier itself: it is in the service's group."""
        return self._exchange.transport.hello.may_open

    @property
    def details(self) -> dict[str, Any]:
        """Return the details of the service's greeting: `directory`, `table`, `limits`, `quota`."""
        return self._exchange.transport.hello.details

    # --- the service and its buckets ---------------------------------------------------------------------
    def status(self) -> dict[str, Any]:
        """Return usage and counters of the service, as JSON values."""
        return self._exchange.control(Op.STATUS)

    def shutdown(self) -> None:
        """Stop the service. Raises NotPermitted unless the caller is its own user or root."""
        self._exchange.control(Op.SHUTDOWN)

    def copy_blocks(
        self, to: str, *, bucket: str | None = None, namespace: bytes | None = None
    ) -> dict[str, Any]:
        """Begin a task that copies blocks to another machine (`HOST:PORT`): of one bucket, one namespace, or all.

        Returns its description, which `status` has too. Raises NotPermitted unless the caller is the service's own user
        or root, InvalidRequest, Busy, Unsupported.
        """
        return self._begin_task(Op.CLUSTER_COPY, to, bucket, namespace)

    def move_blocks(
        self, to: str, *, bucket: str | None = None, namespace: bytes | None = None
    ) -> dict[str, Any]:
        """Begin a task that copies blocks of caches to another machine, and removes here what that one has then.

        Returns and raises as `copy_blocks`.
        """
        return self._begin_task(Op.CLUSTER_MOVE, to, bucket, namespace)

    def _begin_task(self, op: Op, to: str, bucket: str | None, namespace: bytes | None) -> dict[str, Any]:
        chosen = {"bucket": bucket, "namespace": None if namespace is None else namespace.hex()}
        given = {key: value for key, value in chosen.items() if value is not None}
        return self._exchange.control(op, to=to, **given)

    def drain(self) -> dict[str, Any]:
        """Begin a task that brings the blocks that this machine alone has to others; return its description.

        Raises as `copy_blocks`.
        """
        return self._exchange.control(Op.CLUSTER_DRAIN)

    def cancel_task(self, kind: str) -> dict[str, Any]:
        """Cancel the task of this kind ("copy", "move", "drain"). Raises NotPermitted, NotFound where none runs."""
        return self._exchange.control(Op.CLUSTER_CANCEL, kind=kind)

    def buckets(self) -> list[Bucket]:
        """Return all buckets, by name."""
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
        """Make a bucket.

        Raises Exists, InvalidRequest, AccessDenied for a caller outside the service's group, DeviceMissing for a
        durable or large bucket without an NVMe tier.
        """
        made = self._exchange.control(
            Op.BUCKET_CREATE, bucket=name, mode=mode, durable=durable, admits_all=admits_all, large=large
        )
        return bucket_of(made)

    def remove_bucket(self, name: str) -> None:
        """Remove an empty bucket. Raises BucketNotFound, NotEmpty, NotPermitted."""
        self._exchange.control(Op.BUCKET_REMOVE, bucket=name)

    # --- names -------------------------------------------------------------------------------------------
    def stat(self, name: str) -> Entry:
        """Return the entry of a name; `bucket` and `bucket/dir/` are directories. Raises NotFound."""
        pair = _name(name)
        return entry_of(pair[0], self._exchange.control(Op.STAT, name=pair))

    def list(self, prefix: str, *, delimiter: str | None = None) -> Iterator[Entry]:
        """Yield names that start with `bucket/prefix`, in byte order; names that share all up to a `delimiter` are one
        entry."""
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
        data: bytes | bytearray | memoryview,
        *,
        mode: int = 0o644,
        replace: bool = True,
        mtime_ns: int | None = None,
        user_metadata: bytes = b"",
    ) -> None:
        """Store an object, which is visible, whole, when this returns. Raises Exists, NoSpace, AccessDenied."""
        bucket, key = paths.parse(name)
        view = memoryview(data).cast("B")
        draft = self._exchange.reserve(view.nbytes)
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
            self._exchange.abort(draft)
            raise

    def open(self, name: str) -> int:
        """Return a read-only descriptor of the object's bytes, which is a lease on them; the caller closes it."""
        [(entry, descriptor)] = self._exchange.open(OpenNames((paths.parse(name),)))
        if descriptor is None:
            raise _not_opened(entry.status, name)
        return descriptor

    def get(self, name: str) -> bytes:
        """Read an object. Raises NotFound, IsDirectory, AccessDenied; IsLink, which `readlink` reads."""
        [(entry, descriptor)] = self._exchange.open(OpenNames((paths.parse(name),)))
        if descriptor is None:
            raise _not_opened(entry.status, name)
        try:
            return _read_all(descriptor, entry.size_bytes, name)
        finally:
            os.close(descriptor)

    def symlink(self, target: str, name: str, *, replace: bool = False) -> Entry:
        """Make a symbolic link, which only a mount follows; `target` is kept as it is.

        Raises Exists, InvalidRequest and NameTooLong of the target (1 to 4,095 bytes), AccessDenied.
        """
        pair = _name(name)
        made = self._exchange.control(Op.SYMLINK, name=pair, target=target, replace=replace)
        return entry_of(pair[0], made)

    def readlink(self, name: str) -> str:
        """Return where a symbolic link leads. Raises NotFound; InvalidRequest for anything but a link."""
        found = self.stat(name)
        if not found.target:
            raise InvalidRequest(f"{name} is no symbolic link")
        return found.target

    def remove(self, name: str) -> None:
        """Remove an object, a symbolic link or an empty directory (`bucket/dir/`). Raises NotFound, NotEmpty,
        AccessDenied."""
        self._exchange.control(Op.REMOVE, name=_name(name))

    def rename(self, source: str, target: str, *, replace: bool = True) -> None:
        """Rename an object, or a directory (both names end in `/`). Raises NotFound, Exists, CrossDevice."""
        self._exchange.control(Op.RENAME, source=_name(source), target=_name(target), replace=replace)

    def make_directory(self, name: str, *, mode: int = 0o755) -> Entry:
        """Make a directory. Raises Exists."""
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
        """Change the attributes that are given. Raises NotFound, NotPermitted."""
        pair = _name(name)
        changes = {"mode": mode, "uid": uid, "gid": gid, "mtime_ns": mtime_ns}
        given = {key: value for key, value in changes.items() if value is not None}
        return entry_of(pair[0], self._exchange.control(Op.SET_ATTRIBUTES, name=pair, **given))

    def pin(self, name: str) -> None:
        """Keep an object from being evicted. Raises NotFound, NotPermitted unless the caller owns it."""
        self._exchange.control(Op.PIN, name=_name(name), pinned=True)

    def unpin(self, name: str) -> None:
        """Let an object be evicted again."""
        self._exchange.control(Op.PIN, name=_name(name), pinned=False)

    def evict(self, *names: str, size_bytes: int | None = None) -> int:
        """Evict these objects, or by policy until `size_bytes` are free; return the bytes that became free."""
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
        """Open the blocks of a namespace, given by its description or its digest (16 bytes), in sessions of their own.

        The bucket bound to it is found or, for a description, created. `shard` replaces the namespace's `tensor_rank`:
        every rank of a model has its own. Raises InvalidNamespace, BucketNotFound, AccessDenied, SessionClosed.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        arguments = _namespace_arguments(namespace, shard)
        if bucket is not None:
            arguments["bucket"] = bucket
        opened = Blocks(self._begin_transport, arguments, timeout_s=limit_s)
        self._blocks.add(opened)
        return opened


def _not_opened(status: int, name: str) -> KvfsError:
    if status == ObjectTooLarge.errno:
        name += ": larger than DRAM takes, which is a quarter of its capacity; it is read on a mount"
    return status_error(status, name)


def _read_all(descriptor: int, size_bytes: int, what: str) -> bytes:
    """Read a whole object. One pread brings 2 GiB at most, so only a larger one is put together from parts."""
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


def _namespace_arguments(
    namespace: Namespace | Mapping[str, Any] | bytes, shard: int | None
) -> dict[str, Any]:
    if isinstance(namespace, bytes):
        if shard is not None:
            raise InvalidRequest("blocks: a digest names its shard already")
        return {"digest": namespace.hex()}
    description = namespace.as_mapping() if isinstance(namespace, Namespace) else dict(namespace)
    if shard is not None:
        description["tensor_rank"] = shard
    return {"description": description}


def _name(name: str) -> list[str]:
    bucket, key = paths.parse(name)
    return [text(bucket), text(key)]
