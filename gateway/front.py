"""Plain requests in front of everything else: signed GETs and HEADs of objects in DRAM, answered without Python, and
PUTs that say nothing but their bytes, recognised without it.

Responsibility: watch connections between two requests (`kvfs._native.s3_reads`), give it what the general path knows
(hosts, verified signers, rows, headers), and wake a connection's own task for all else. Hits are native, the rest is
`gateway.connection` and `gateway.handler`, which see the same bytes from their beginning.

Invariants: nothing is learned but from requests that the general path found right, under the settings in use. What is
read is what the general path would read: the row is looked up for each request, the slot checked after its open.

Measured, per GET of 4 KiB, on two cores beside other work: 15 us of the gateway's processor time where the general path
takes 150 to 200 and nginx 10; a pass of the event loop serves all that are ready (more in docs/s3.md).

Concurrency: one trio thread. `run` serves all idle connections; each connection's task waits in `wait`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from functools import partial

import trio

from gateway import addressing, checksums, claims, reading
from gateway.backend import Backend
from gateway.checksums import Algorithm, parse
from gateway.connection import date_text
from gateway.counters import Counters
from gateway.direct import Direct
from gateway.errors import S3Error
from gateway.found import Found, is_marker
from gateway.owners import Owners
from gateway.plain import PlainPut
from gateway.request import Request
from gateway.settings import GatewaySettings
from gateway.signing import Verified
from gateway.stored import stored
from gateway.transports import Gone, PlainTransport
from kvfs import limits
from kvfs._native.s3_reads import Reads
from kvfs.credentials import Credential
from kvfs.errors import BucketNotFound, Corrupt
from kvfs.messages import text
from kvfs.name_rows import RETIRED, NameRow, load_row


class Front:
    """See the module's header. `run` must run beside it."""

    def __init__(
        self, backend: Backend, counters: Counters, owners: Owners, *, clock: Callable[[], float] = time.time
    ) -> None:
        """`clock`: seconds since 1970, which signatures are checked against."""
        self._backend = backend
        self._counters = counters
        self._owners = owners
        self._clock = clock
        self._reads = Reads(secrets.randbits(64))
        self._direct: Direct | None = None
        self._settings: GatewaySettings | None = None
        self._md5s: dict[bytes, bool] = {}
        self._stopped = False
        self._counted = 0, 0, 0

    def stop(self) -> None:
        """Leave every request to the general path, which ends its connection."""
        self._stopped = True
        self._follow()

    def forget(self) -> None:
        """Learn anew, under other settings."""
        self._settings = None
        self._md5s.clear()
        self._reads.forget()

    async def run(self) -> None:
        """Until cancelled."""
        reads = self._reads
        while True:
            await trio.lowlevel.wait_readable(reads.fileno())
            self._follow()
            date = date_text().encode("ascii")
            for task in reads.serve(self._clock(), trio.current_time(), date, limits.READS_TURN_S):
                assert isinstance(task, trio.lowlevel.Task)
                trio.lowlevel.reschedule(task)
            self._count()

    async def wait(self, transport: PlainTransport) -> tuple[bytes, PlainPut | None]:
        """The first bytes of a request that is not answered here, and what it is if it is a plain PUT; b"" where the
        stream may have ended. Raises Gone, Stalled."""
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
        """What a read that was found right says of the next ones: its host and who signs."""
        host = request.header_bytes(b"host") or b""
        authorization = request.header_bytes(b"authorization") or b""
        signer = authorization.rpartition(b"Signature=")[0]
        if self._reads.knows(host, signer):
            return
        bucket = addressing.bucket_of_host(request.host, settings.domains, settings.default_bucket)
        self._reads.learn_host(host, (bucket or "").encode())
        credential, self._settings = verified.credential, settings
        self._reads.learn_signer(
            signer,
            verified.signing_key,
            verified.scope.encode("latin-1"),
            claims.header_signer(signer.decode("latin-1")).signed_headers,
            credential,
            partial(self._may, credential, {}),
        )

    def _may(
        self, credential: Credential, granted: dict[tuple[bytes, bool], bool], name: bytes, write: bool
    ) -> bool:
        """As `Call.need_right`, where that is known at once; `granted` remembers what the globs say."""
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
        """None where the bucket, or the checksum, makes it a write for the general path."""
        bucket, _, key = name.partition(b"\0")
        settings = self._settings
        assert isinstance(credential, Credential)
        if self._direct is None or settings is None or size_bytes > self._backend.largest_object_bytes:
            return None
        try:
            where = self._direct.names.bucket(bucket)
            digest = None if checksum is None else parse(Algorithm.CRC64NVME, checksum.decode("ascii"))
        except (BucketNotFound, Corrupt, S3Error):
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
        """Read from where the session of this moment lets us read."""
        direct = None if self._stopped else self._backend.direct
        if direct is self._direct:
            return
        self._direct = direct
        if direct is None:
            self._reads.detach()
        else:
            self._reads.attach(direct.table, direct.slots, self._find, _describe, self._backend.touch)

    def _find(self, name: bytes) -> bytes | None:
        assert self._direct is not None
        try:
            return self._direct.names.peek(name)
        except (BucketNotFound, Corrupt):  # the general path says so
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

    None for a marker, for what a file that was closed on the mount replaces in a moment, and for what is too long to
    remember.
    """
    try:
        row = NameRow.decode(load_row(name, data))
    except Corrupt:  # the general path says so
        return None
    if is_marker(row) or row.flags & RETIRED or len(row.user_metadata) > limits.REMEMBERED_METADATA_BYTES:
        return None
    key = row.object_id.to_bytes(16, "big")
    what = stored(Found(row.object_id, row.size_bytes, row.mtime_ns, row.user_metadata, key))
    headers = reading.stored_headers(row.user_metadata, False, row.mtime_ns, what.etag)
    checksum = what.metadata.checksum
    asked = () if checksum is None else checksums.headers(checksum).items()
    return key, row.size_bytes, _lines(headers), _lines(asked)


def _lines(headers: Iterable[tuple[str, str]]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in headers).encode("latin-1")
