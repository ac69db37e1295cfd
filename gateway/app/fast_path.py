"""Plain requests in front of everything else: signed GETs and HEADs of objects in DRAM, answered without Python, and
PUTs of nothing but bytes, recognised without it.

Responsibility: watch connections between two requests (`kvfs._native.s3.fast_path`), give it what the general path
knows (hosts, verified signers, rows, headers), and wake a connection's own task for all else. Hits are native, the
rest is `kvfs.http.connection` and `gateway.app.handler`, which see the same bytes from their beginning.

Invariants: hosts and signers are learned only from requests that the general path accepted under the settings in use.
What is read is what the general path would read: the row is looked up for each request, the slot checked after its
open.

Measured, per GET of 4 KiB, on two cores beside other work: 15 us of the gateway's processor time where the general path
takes 150 to 200 and nginx 10; a pass of the event loop serves all that are ready (more in docs/s3.md).

Concurrency: one trio thread. `run` serves all idle connections; each connection's task waits in `wait`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from functools import partial

import trio

from gateway.app.metrics import Counters
from gateway.auth import authorization
from gateway.auth.sigv4 import Verified
from gateway.backend.backend import Backend
from gateway.backend.bucket_owners import Owners
from gateway.backend.local_reads import LocalReads
from gateway.backend.lookup import ObjectLookup, is_in_row
from gateway.call.object_view import stored
from gateway.call.settings import GatewaySettings
from gateway.operations import get_object
from gateway.protocol import addressing, checksums
from gateway.protocol.checksums import Algorithm, parse
from gateway.protocol.errors import S3Error
from gateway.protocol.plain_put import PlainPut
from gateway.protocol.request import Request
from kvfs import limits
from kvfs._native.s3.fast_path import Reads
from kvfs.config.credentials import Credential
from kvfs.errors import Corrupt, KvfsError
from kvfs.http.http_exchange import date_text
from kvfs.http.transports import Gone, PlainTransport
from kvfs.index.rows import RETIRED, NameRow, load_row
from kvfs.protocol.messages import text


class FastPath:
    """See the module's header. `run` must run beside it."""

    def __init__(self, backend: Backend, counters: Counters, owners: Owners) -> None:
        self._backend = backend
        self._counters = counters
        self._owners = owners
        self._reads = Reads(secrets.randbits(64))
        self._local: LocalReads | None = None
        self._settings: GatewaySettings | None = None
        self._md5s: dict[bytes, bool] = {}
        self._stopped = False
        self._counted = 0, 0, 0

    def stop(self) -> None:
        """Stop answering here: every request goes to the general path, which ends its connection."""
        self._stopped = True
        self._follow()

    def reset(self) -> None:
        """Drop what was learned under the settings before."""
        self._settings = None
        self._md5s.clear()
        self._reads.forget()

    async def run(self) -> None:
        """Serve idle connections until cancelled."""
        reads = self._reads
        while True:
            await trio.lowlevel.wait_readable(reads.fileno())
            self._follow()
            date = date_text().encode("ascii")
            for task in reads.serve(time.time(), trio.current_time(), date, limits.READS_TURN_S):
                assert isinstance(task, trio.lowlevel.Task)
                trio.lowlevel.reschedule(task)
            self._count()

    async def wait(self, transport: PlainTransport) -> tuple[bytes, PlainPut | None]:
        """Return the first bytes of the next request that is not answered here, and the request if it is a plain PUT.

        The bytes are empty where the stream may have ended. Raises Gone, Stalled.
        """
        while True:
            idle = await transport.park(self._reads)
            if idle.gone:
                raise Gone("the connection failed")
            if idle.left:
                await transport.send_rest(idle.rest, idle.take_file(), idle.offset, idle.left)
            elif idle.rest:
                await transport.send([idle.rest])
            elif not idle.data:
                return b"", None
            if idle.data:
                return idle.data, None if idle.write is None else self._plain_put(*idle.write)

    def learn(self, request: Request, verified: Verified, settings: GatewaySettings) -> None:
        """Remember the host and the signer of a read that the general path accepted."""
        host = request.header_bytes(b"host") or b""
        signer = (request.header_bytes(b"authorization") or b"").rpartition(b"Signature=")[0]
        if self._reads.knows(host, signer):
            return
        bucket = addressing.bucket_of_host(request.host, settings.domains, settings.default_bucket)
        self._reads.learn_host(host, (bucket or "").encode())
        credential, self._settings = verified.credential, settings
        self._reads.learn_signer(
            signer,
            verified.signing_key,
            verified.scope.encode("latin-1"),
            authorization.header_signer(signer.decode("latin-1")).signed_headers,
            credential,
            partial(self._may, credential, {}),
        )

    def _may(
        self, credential: Credential, granted: dict[tuple[bytes, bool], bool], name: bytes, write: bool
    ) -> bool:
        """Check a right as `Call.need_right`, where that is known at once; `granted` remembers what the globs say."""
        found = granted.get((name, write))
        if found is None:
            if len(granted) >= limits.MAX_REMEMBERED_OWNERS:
                granted.clear()
            found = granted[name, write] = credential.may("write" if write else "read", text(name))
        return found and self._owners.lets_in(credential, text(name))

    def _plain_put(
        self,
        name: bytes,
        credential: object,
        head_bytes: int,
        target: bytes,
        size_bytes: int,
        checksum: bytes | None,
        expects_continue: bool,
    ) -> PlainPut | None:
        """Describe a plain PUT; return None where its bucket or checksum needs the general path."""
        bucket, _, key = name.partition(b"\0")
        settings = self._settings
        assert isinstance(credential, Credential)
        if (
            self._local is None
            or settings is None
            or size_bytes > self._backend.sessions.largest_object_bytes
        ):
            return None
        try:
            where = self._local.names.bucket(bucket)
            digest = None if checksum is None else parse(Algorithm.CRC64NVME, checksum.decode("ascii"))
        except (KvfsError, S3Error):  # the general path says so
            return None
        if where.namespace is not None or self._takes_md5(settings, bucket):
            return None
        owner = credential.owner_id
        return PlainPut(
            text(bucket), text(key), owner, head_bytes, target, size_bytes, digest, expects_continue
        )

    def _takes_md5(self, settings: GatewaySettings, bucket: bytes) -> bool:
        known = self._md5s.get(bucket)
        if known is None:
            if len(self._md5s) >= limits.REMEMBERED_OBJECTS:
                self._md5s.clear()
            known = self._md5s[bucket] = settings.takes_md5(text(bucket))
        return known

    # --- what is read in place ---------------------------------------------------------------------------
    def _follow(self) -> None:
        """Attach the files that the session of this moment may read, or detach them."""
        local = None if self._stopped else self._backend.sessions.local
        if local is self._local:
            return
        self._local = local
        if local is None:
            self._reads.detach()
        else:
            self._reads.attach(local.table, local.slots, self._find, _describe, self._backend.sessions.touch)

    def _find(self, name: bytes) -> bytes | None:
        assert self._local is not None
        try:
            return self._local.names.peek(name)
        except KvfsError:  # the general path says so
            return None

    def _count(self) -> None:
        reads = self._reads
        now = reads.gets, reads.heads, reads.sent_bytes
        gets, heads, sent_bytes = (value - before for value, before in zip(now, self._counted, strict=True))
        self._counted = now
        self._counters.front_reads += gets + heads
        if gets:
            self._counters.requests["GetObject"] += gets
            self._counters.sent_bytes += sent_bytes
        if heads:
            self._counters.requests["HeadObject"] += heads


def _describe(name: bytes, data: bytes) -> tuple[bytes, int, bytes, bytes] | None:
    """Read what an answer says of an object from its row.

    None for a marker or symbolic link, for what a file that was closed on the mount replaces in a moment, and for what
    is too long to remember.
    """
    try:
        row = NameRow.decode(load_row(name, data))
    except Corrupt:  # the general path says so
        return None
    if is_in_row(row) or row.flags & RETIRED or len(row.user_metadata) > limits.REMEMBERED_METADATA_BYTES:
        return None
    key = row.object_id.to_bytes(16, "big")
    what = stored(ObjectLookup(row.object_id, row.size_bytes, row.mtime_ns, row.user_metadata, key))
    headers = get_object.stored_headers(row.user_metadata, False, row.mtime_ns, what.etag)
    checksum = what.metadata.checksum
    asked = () if checksum is None else checksums.headers(checksum).items()
    return key, row.size_bytes, _lines(headers), _lines(asked)


def _lines(headers: Iterable[tuple[str, str]]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in headers).encode("latin-1")
