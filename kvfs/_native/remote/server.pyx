"""Serving blocks to other machines, seen from Python: a thin seam over `serve_core.c` and its parts, with the rules.

Invariants: the table and the directory descriptor outlive the threads; `close` joins them.
Concurrency: every method is called from the event loop's thread.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

import os

from kvfs import limits
from kvfs.errors import InvalidRequest, from_errno

from kvfs._native.remote.channel cimport fabric_of, kvfs_channel, kvfs_fabric, note_taken, session_of
from kvfs._native.shared.slots cimport hash_descriptor
from kvfs._native.shared.table cimport Table, kvfs_table

cdef extern from "shared/hits.h" nogil:
    struct kvfs_hits:
        uint32_t count

    uint32_t kvfs_hits_take(kvfs_hits *h, uint8_t *keys, uint32_t most)

cdef extern from "remote/serve_core.h" nogil:
    int KVFS_REMOTE_READS, KVFS_REMOTE_WAIT_MS
    enum:
        KVFS_REMOTE_MATCHES

    struct kvfs_remote_binding:
        uint8_t namespace_digest[16]
        uint32_t bucket_id

    struct kvfs_remote_counts:
        uint64_t requests
        uint64_t matches
        uint64_t found
        uint64_t absent
        uint64_t too_large
        uint64_t busy
        uint64_t bytes
        uint64_t broken

    struct kvfs_remote_server:
        const kvfs_table *table
        int (*hash)(int fd, uint64_t *checksum, uint64_t *bytes) noexcept nogil
        int dirfd
        int notify_fd
        int64_t lift_wait_ns
        int idle_ms
        kvfs_hits hits

    int kvfs_remote_start(kvfs_remote_server *s, uint32_t connections, uint32_t lifts, uint32_t hits)
    void kvfs_remote_stop(kvfs_remote_server *s)
    int64_t kvfs_remote_open(kvfs_remote_server *s, kvfs_channel channel, kvfs_fabric *fabric)
    int kvfs_remote_reap(kvfs_remote_server *s, uint32_t number, int *error)
    int kvfs_remote_bind(kvfs_remote_server *s, const kvfs_remote_binding *bindings, uint32_t count)
    uint32_t kvfs_remote_take_lifts(kvfs_remote_server *s, uint8_t *pairs, uint32_t most)
    void kvfs_remote_lifted(kvfs_remote_server *s, const uint8_t *digest, const uint8_t *namespace_digest)
    uint64_t kvfs_remote_take_question(kvfs_remote_server *s, uint32_t connection, uint8_t *keys, uint32_t *count)
    void kvfs_remote_answer(kvfs_remote_server *s, uint32_t connection, uint64_t number, uint32_t found)
    void kvfs_remote_read_counts(kvfs_remote_server *s, kvfs_remote_counts *into)

READS_AT_ONCE = KVFS_REMOTE_READS
MATCHES_AT_ONCE = KVFS_REMOTE_MATCHES
LONGEST_WAIT_S = KVFS_REMOTE_WAIT_MS / 1000


cdef class Server:
    cdef kvfs_remote_server _s
    cdef Table _table
    cdef bint _running

    def __init__(self, Table table not None, directory, int connections=limits.MAX_REMOTE_CONNECTIONS,
                 int lifts=limits.MAX_REMOTE_LIFTS, int hits=limits.REMOTE_UNREPORTED_HITS):
        if self._running:
            raise InvalidRequest("this server runs already")
        memset(&self._s, 0, sizeof(self._s))
        self._table = table
        self._s.table = table.pointer()
        self._s.hash = hash_descriptor
        self._s.lift_wait_ns = <int64_t>(limits.REMOTE_LIFT_WAIT_S * 1e9)
        self._s.idle_ms = <int>(limits.REMOTE_SERVED_IDLE_S * 1000)
        self._s.dirfd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        cdef int rc = kvfs_remote_start(&self._s, connections, lifts, hits)
        if rc < 0:
            os.close(self._s.dirfd)
            raise from_errno(rc, "make a server of blocks")
        self._running = True

    def __dealloc__(self):
        self._stop()

    cdef void _stop(self):
        if self._running:
            self._running = False
            with nogil:
                kvfs_remote_stop(&self._s)
            os.close(self._s.dirfd)

    cdef int _need(self) except -1:
        if not self._running:
            raise InvalidRequest("the server of blocks is closed")
        return 0

    def fileno(self):
        self._need()
        return self._s.notify_fd

    def open(self, int fd, session=None, fabric=None):
        self._need()
        cdef int64_t number = kvfs_remote_open(&self._s, kvfs_channel(fd, session_of(session)), fabric_of(fabric))
        if number < 0:
            raise from_errno(<int>number, "serve a connection")
        note_taken(session)
        note_taken(fabric)
        return number

    def reap(self, uint32_t number):
        cdef int error = 0, ended
        self._need()
        with nogil:
            ended = kvfs_remote_reap(&self._s, number, &error)
        return -error if ended else None

    def bind(self, list pairs not None):
        cdef kvfs_remote_binding *bindings
        cdef Py_ssize_t i
        cdef bytes digest
        cdef int rc
        self._need()
        bindings = <kvfs_remote_binding *>PyMem_Malloc((len(pairs) + 1) * sizeof(kvfs_remote_binding))
        if bindings == NULL:
            raise MemoryError
        try:
            for i in range(len(pairs)):
                digest, bindings[i].bucket_id = pairs[i]
                if PyBytes_GET_SIZE(digest) != 16:
                    raise InvalidRequest("a namespace's digest has 16 bytes")
                memcpy(bindings[i].namespace_digest, PyBytes_AS_STRING(digest), 16)
            rc = kvfs_remote_bind(&self._s, bindings, <uint32_t>len(pairs))
        finally:
            PyMem_Free(bindings)
        if rc < 0:
            raise from_errno(rc, "bind namespaces")

    def take_lifts(self):
        cdef uint8_t some[64 * 32]
        cdef uint32_t n, i
        cdef const char *pairs = <const char *>some
        self._need()
        n = kvfs_remote_take_lifts(&self._s, some, 64)
        return [(pairs[i * 32:i * 32 + 16], pairs[i * 32 + 16:i * 32 + 32]) for i in range(n)]

    def lifted(self, bytes digest not None, bytes namespace not None):
        self._need()
        if PyBytes_GET_SIZE(digest) != 16 or PyBytes_GET_SIZE(namespace) != 16:
            raise InvalidRequest("a prefix hash and a namespace's digest have 16 bytes")
        kvfs_remote_lifted(&self._s, <const uint8_t *>PyBytes_AS_STRING(digest),
                           <const uint8_t *>PyBytes_AS_STRING(namespace))

    def take_question(self, uint32_t connection):
        cdef uint8_t keys[(1 + KVFS_REMOTE_MATCHES) * 16]
        cdef const char *found = <const char *>keys
        cdef uint32_t count = 0
        cdef uint64_t number
        self._need()
        number = kvfs_remote_take_question(&self._s, connection, keys, &count)
        return (number, found[:16], found[16:16 + count * 16]) if number else None

    def answer(self, uint32_t connection, uint64_t number, uint32_t count):
        self._need()
        kvfs_remote_answer(&self._s, connection, number, count)

    def take_hits(self, uint32_t most):
        self._need()
        cdef bytes keys = PyBytes_FromStringAndSize(NULL, most * 16)
        cdef uint32_t n = kvfs_hits_take(&self._s.hits, <uint8_t *>PyBytes_AS_STRING(keys), most)
        return keys[:n * 16]

    def counts(self):
        cdef kvfs_remote_counts counts
        self._need()
        kvfs_remote_read_counts(&self._s, &counts)
        return counts

    def close(self):
        self._stop()
