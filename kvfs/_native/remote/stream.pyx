"""A stream of blocks from another machine, seen from Python: a thin seam over `stream_core.c`, which has the rules.

Invariants: a job is begun on an idle stream alone, and its descriptors are the stream's from then on. `close` joins.
Concurrency: every method is called from the event loop's thread.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy
from posix.time cimport CLOCK_MONOTONIC

from kvfs.errors import InvalidRequest, from_errno

from kvfs._native.remote.channel cimport (
    fabric_of,
    kvfs_channel,
    kvfs_channel_is_quiet,
    kvfs_fabric,
    note_taken,
    session_of,
)

cdef extern from "shared/mutex.h" nogil:
    int64_t kvfs_clock_ns(int clock)

cdef extern from "remote/stream_core.h" nogil:
    int KVFS_REMOTE_REQUEST, KVFS_REMOTE_READ, KVFS_REMOTE_MATCH, KVFS_REMOTE_URGENT, KVFS_REMOTE_BY_FABRIC
    int KVFS_REMOTE_READS, KVFS_REMOTE_MATCHES, KVFS_REMOTE_WAIT_MS
    int KVFS_REMOTE_FOUND, KVFS_REMOTE_ABSENT, KVFS_REMOTE_TOO_LARGE, KVFS_REMOTE_BUSY
    int KVFS_REMOTE_NOT_ANSWERED, KVFS_REMOTE_MISMATCH, KVFS_REMOTE_NOT_WRITTEN

    struct kvfs_remote_request:
        uint32_t magic
        uint16_t kind
        uint16_t flags
        uint32_t count
        uint32_t wait_ms
        uint64_t number
        uint8_t namespace_digest[16]

    struct kvfs_remote_want:
        uint8_t digest[16]
        uint64_t room_bytes

    struct kvfs_remote_read:
        kvfs_remote_want want
        int fd
        uint32_t status
        uint64_t size_bytes
        uint64_t checksum
        uint8_t parent[16]

    struct kvfs_remote_stream:
        kvfs_channel channel
        kvfs_fabric *fabric
        int notify_fd
        kvfs_remote_request request
        int64_t deadline_ns
        kvfs_remote_read *reads
        uint8_t *digests
        uint64_t *sizes
        uint32_t matched
        int result

    int kvfs_stream_start(kvfs_remote_stream *s, kvfs_channel channel, kvfs_fabric *fabric)
    void kvfs_stream_begin(kvfs_remote_stream *s)
    int kvfs_stream_take(kvfs_remote_stream *s)
    void kvfs_stream_stop(kvfs_remote_stream *s)

FOUND = KVFS_REMOTE_FOUND
ABSENT = KVFS_REMOTE_ABSENT
TOO_LARGE = KVFS_REMOTE_TOO_LARGE
BUSY = KVFS_REMOTE_BUSY
NOT_ANSWERED = KVFS_REMOTE_NOT_ANSWERED
MISMATCH = KVFS_REMOTE_MISMATCH
NOT_WRITTEN = KVFS_REMOTE_NOT_WRITTEN


cdef class Stream:
    cdef kvfs_remote_stream _s
    cdef bint _running
    cdef bint _busy
    cdef uint64_t _number

    def __init__(self, int socket, session=None, fabric=None):
        if self._running:
            raise InvalidRequest("this stream runs already")
        cdef int rc = kvfs_stream_start(&self._s, kvfs_channel(socket, session_of(session)), fabric_of(fabric))
        if rc < 0:
            raise from_errno(rc, "begin a stream")
        note_taken(session)
        note_taken(fabric)
        self._running = True

    def __dealloc__(self):
        self._stop()

    cdef void _stop(self):
        if self._running:
            self._running = False
            with nogil:
                kvfs_stream_stop(&self._s)

    cdef int _prepare(self, int kind, Py_ssize_t count, Py_ssize_t most, bytes namespace, double wait_s) except -1:
        if not self._running or self._busy:
            raise InvalidRequest("the stream is closed or at work")
        if not 0 < count <= most or PyBytes_GET_SIZE(namespace) != 16:
            raise InvalidRequest(f"{count} blocks at once: 1 to {most}, of a namespace's digest of 16 bytes")
        if not 0 < wait_s <= KVFS_REMOTE_WAIT_MS / 1000:
            raise InvalidRequest(f"a wait of {wait_s:g} s: at most {KVFS_REMOTE_WAIT_MS // 1000}")
        self._number += 1
        self._s.request.magic = KVFS_REMOTE_REQUEST
        self._s.request.kind = kind
        self._s.request.flags = 0
        self._s.request.count = <uint32_t>count
        self._s.request.wait_ms = max(<uint32_t>(wait_s * 1000), 1)
        self._s.request.number = self._number
        memcpy(self._s.request.namespace_digest, PyBytes_AS_STRING(namespace), 16)
        self._s.deadline_ns = kvfs_clock_ns(CLOCK_MONOTONIC) + <int64_t>(wait_s * 1e9)
        return 0

    def fileno(self):
        return self._s.notify_fd if self._running else -1

    def begin_read(self, bytes namespace not None, list wants not None, double wait_s, bint urgent=False):
        cdef Py_ssize_t i
        cdef bytes digest
        cdef kvfs_remote_read *read
        self._prepare(KVFS_REMOTE_READ, len(wants), KVFS_REMOTE_READS, namespace, wait_s)
        if urgent:
            self._s.request.flags = KVFS_REMOTE_URGENT
        if self._s.fabric != NULL:
            self._s.request.flags |= KVFS_REMOTE_BY_FABRIC
        for digest, _, _ in wants:
            if PyBytes_GET_SIZE(digest) != 16:
                raise InvalidRequest("a prefix hash has 16 bytes")
        for i in range(len(wants)):
            read = &self._s.reads[i]
            digest, read.want.room_bytes, read.fd = wants[i]
            memcpy(read.want.digest, PyBytes_AS_STRING(digest), 16)
            read.status = KVFS_REMOTE_NOT_ANSWERED
        self._busy = True
        kvfs_stream_begin(&self._s)

    def begin_match(self, bytes namespace not None, bytes digests not None, double wait_s):
        self._prepare(KVFS_REMOTE_MATCH, PyBytes_GET_SIZE(digests) // 16, KVFS_REMOTE_MATCHES, namespace, wait_s)
        memcpy(self._s.digests, PyBytes_AS_STRING(digests), self._s.request.count * 16)
        self._busy = True
        kvfs_stream_begin(&self._s)

    def take(self):
        if self._busy and kvfs_stream_take(&self._s):
            self._busy = False
        return not self._busy

    @property
    def error(self):
        return 0 if self._busy else -self._s.result

    @property
    def is_quiet(self):
        return self._running and not self._busy and kvfs_channel_is_quiet(&self._s.channel)

    def reads(self):
        cdef uint32_t i
        cdef kvfs_remote_read *read
        cdef list found = []
        if self._busy:
            raise InvalidRequest("the stream is at work")
        for i in range(self._s.request.count):
            read = &self._s.reads[i]
            found.append((
                <int>read.status, read.size_bytes, read.checksum,
                PyBytes_FromStringAndSize(<const char *>read.parent, 16),
            ))
        return found

    def sizes(self):
        cdef uint32_t i
        if self._busy:
            raise InvalidRequest("the stream is at work")
        return [self._s.sizes[i] for i in range(self._s.matched)]

    def close(self):
        self._stop()
        self._busy = False
