"""Blocks read in place: a thin seam over `reader_core.c`, which says why no call to the service is needed.

Invariants: a `View` is a lease on its block until it is released or collected, and cannot be released while
something made from it (a memoryview, an array) is alive; no descriptor outlives a call.
Concurrency: any threads; every batch drops the GIL. A `Reader` is closed by its owner when no call is in it.
"""

from cpython.buffer cimport PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from posix.unistd cimport close

import os

from kvfs import limits
from kvfs.errors import InvalidRequest, LimitExceeded, SessionClosed, from_errno

from kvfs._native.blocks.pieces cimport Pieces, iovec, join_keys
from kvfs._native.shared.table cimport Table, kvfs_table, kvfs_table_alive, kvfs_table_match

cdef extern from "<sys/mman.h>" nogil:
    int munmap(void *address, size_t length)

cdef extern from "errno.h":
    int EMFILE, ENFILE, ENOMEM

cdef extern from "shared/hits.h" nogil:
    struct kvfs_hits:
        uint32_t count

    int kvfs_hits_init(kvfs_hits *h, uint32_t room)
    void kvfs_hits_free(kvfs_hits *h)
    uint32_t kvfs_hits_take(kvfs_hits *h, uint8_t *keys, uint32_t most)

cdef extern from "blocks/reader_core.h" nogil:
    int KVFS_READ_MISS, KVFS_READ_BELOW, KVFS_READ_NO_ROOM, KVFS_READ_ERROR

    struct kvfs_read_job:
        const kvfs_table *table
        int dirfd
        const uint8_t *keys
        int64_t n
        const iovec *vectors
        const Py_ssize_t *starts
        int64_t *results
        int64_t next
        uint64_t stream_bytes

    void kvfs_read_batch(kvfs_read_job *job, kvfs_hits *hits)
    void kvfs_map_batch(const kvfs_table *t, int dirfd, const uint8_t *keys, int64_t n, void **places,
                        int64_t *results, kvfs_hits *hits)
    void kvfs_find_batch(const kvfs_table *t, const uint8_t *keys, int64_t n, uint8_t *tiers)
    int64_t kvfs_read_fd(int fd, uint64_t offset, const iovec *vectors, Py_ssize_t pieces, uint64_t size)
    int64_t kvfs_map_fd(int fd, uint64_t size, void **place)
    void kvfs_copy_out(const uint8_t *source, uint64_t size, const iovec *vectors, Py_ssize_t pieces)

MISS = KVFS_READ_MISS
BELOW = KVFS_READ_BELOW
NO_ROOM = KVFS_READ_NO_ROOM


cdef object trouble(int64_t code):
    """Return the exception of a result that is neither a hit nor a miss."""
    cdef int number = <int>(KVFS_READ_ERROR - code)
    if number in (EMFILE, ENFILE):
        return LimitExceeded("a block was not opened: this process is at its limit of open files")
    if number == ENOMEM:
        return LimitExceeded("a block was not mapped: this process has no memory or no mappings left, release some views")
    return from_errno(number, "reading a block")


cdef class View:
    """A block, read-only, leased."""

    cdef void *_place
    cdef Py_ssize_t _size
    cdef Py_ssize_t _exports
    cdef bint _released

    def __cinit__(self):
        self._place = NULL

    def __dealloc__(self):
        if self._place != NULL:
            munmap(self._place, self._size)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        if self._released:
            raise BufferError("this view was released")
        PyBuffer_FillInfo(buffer, self, self._place if self._place != NULL else <void *>b"", self._size, 1, flags)
        self._exports += 1

    def __releasebuffer__(self, Py_buffer *buffer):
        self._exports -= 1

    def __len__(self):
        return self._size

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.release()

    def release(self):
        if self._exports:
            raise BufferError(f"{self._exports} objects made from this view are alive")
        self._released = True
        if self._place != NULL:
            place, self._place = self._place, NULL
            with nogil:
                munmap(place, self._size)

    @property
    def released(self):
        return self._released

    @staticmethod
    def of_descriptor(int fd, uint64_t size):
        cdef void *place = NULL
        cdef int64_t got
        with nogil:
            got = kvfs_map_fd(fd, size, &place)
        if got <= KVFS_READ_ERROR:
            raise trouble(got)
        return None if got < 0 else make_view(place, size)

    @staticmethod
    def copy(list views not None, Py_ssize_t offset, Py_ssize_t size, Pieces pieces not None):
        cdef Py_ssize_t i
        cdef View view
        cdef const uint8_t *place
        if len(views) != pieces.blocks:
            raise InvalidRequest(f"{len(views)} views and places for {pieces.blocks}")
        for i in range(len(views)):
            if views[i] is None:
                continue
            view = <View?>views[i]
            if view._released:
                raise InvalidRequest(f"view {i} was released")
            if offset < 0 or size < 0 or offset > view._size - size:
                raise InvalidRequest(f"view {i}: {size} bytes at {offset} of a block of {view._size}")
            if pieces.size_of(i) < <size_t>size:
                raise InvalidRequest(f"view {i}: {size} bytes into a buffer of {pieces.size_of(i)}")
            place = <const uint8_t *>view._place + offset
            view._exports += 1
            try:
                with nogil:
                    kvfs_copy_out(place, size, pieces.vectors + pieces.starts[i],
                                  pieces.starts[i + 1] - pieces.starts[i])
            finally:
                view._exports -= 1


cdef View make_view(void *place, uint64_t size):
    cdef View view = View.__new__(View)
    view._place = place
    view._size = size
    return view


def read_descriptors(list descriptors not None, list sizes not None, Pieces pieces not None, Py_ssize_t first=0):
    cdef Py_ssize_t i, at
    cdef int fd
    cdef uint64_t size
    cdef int64_t got
    cdef list results = []
    if first < 0 or first + len(descriptors) > pieces.blocks:
        raise InvalidRequest(f"{len(descriptors)} blocks from {first} on, and places for {pieces.blocks}")
    for i in range(len(descriptors)):
        if descriptors[i] is None:
            results.append(KVFS_READ_MISS)
            continue
        fd, size, at = descriptors[i], sizes[i], first + i
        if pieces.size_of(at) < size:
            results.append(KVFS_READ_NO_ROOM)
            continue
        with nogil:
            got = kvfs_read_fd(fd, 0, pieces.vectors + pieces.starts[at], pieces.starts[at + 1] - pieces.starts[at],
                               size)
        if got <= KVFS_READ_ERROR:
            raise trouble(got)
        results.append(got if got == <int64_t>size else KVFS_READ_MISS)
    return results


cdef class Reader:
    """Read a store's table and slots."""

    cdef readonly Table table
    cdef int _dirfd
    cdef uint64_t _stream_bytes
    cdef kvfs_hits _hits
    cdef bint _ready

    def __init__(self, Table table not None, directory, uint64_t stream_bytes):
        self.table = table
        self._stream_bytes = stream_bytes
        self._dirfd = -1
        table.pointer()
        if kvfs_hits_init(&self._hits, limits.CLIENT_UNREPORTED_HITS) < 0:
            raise MemoryError
        self._ready = True
        self._dirfd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __dealloc__(self):
        if self._ready:
            kvfs_hits_free(&self._hits)
        if self._dirfd >= 0:
            close(self._dirfd)

    @property
    def alive(self):
        return kvfs_table_alive(self.table.pointer()) != 0

    def match(self, bytes keys not None):
        cdef const kvfs_table *table = self.table.pointer()
        cdef const uint8_t *first = <const uint8_t *>PyBytes_AS_STRING(keys)
        cdef int64_t n = PyBytes_GET_SIZE(keys) // 16, hits
        with nogil:
            hits = kvfs_table_match(table, first, n, 2)
        return max(hits, 0)

    def find(self, bytes keys not None):
        cdef const kvfs_table *table = self.table.pointer()
        cdef const uint8_t *first = <const uint8_t *>PyBytes_AS_STRING(keys)
        cdef int64_t n = PyBytes_GET_SIZE(keys) // 16
        cdef bytes tiers = PyBytes_FromStringAndSize(NULL, n)
        cdef uint8_t *out = <uint8_t *>PyBytes_AS_STRING(tiers)
        with nogil:
            kvfs_find_batch(table, first, n, out)
        return tiers

    def read(self, bytes keys not None, Pieces pieces not None):
        cdef int64_t few[16]
        cdef kvfs_read_job job
        cdef int64_t i
        job.table = self.table.pointer()
        job.dirfd = self._dirfd
        job.keys = <const uint8_t *>PyBytes_AS_STRING(keys)
        job.n = PyBytes_GET_SIZE(keys) // 16
        job.vectors = pieces.vectors
        job.starts = pieces.starts
        job.next = 0
        job.stream_bytes = self._stream_bytes
        if job.n != pieces.blocks:
            raise InvalidRequest(f"{job.n} keys and places for {pieces.blocks}")
        job.results = &few[0]
        if job.n > 16:
            job.results = <int64_t *>PyMem_Malloc(job.n * sizeof(int64_t))
        if job.results == NULL:
            raise MemoryError
        try:
            with nogil:
                kvfs_read_batch(&job, &self._hits)
            for i in range(job.n):
                if job.results[i] <= KVFS_READ_ERROR:
                    raise trouble(job.results[i])
            return [job.results[i] for i in range(job.n)]
        finally:
            if job.results != &few[0]:
                PyMem_Free(job.results)

    def read_into(self, keys, buffers):
        """Copy blocks as `read` does; return None where the caller must look at the results."""
        if not kvfs_table_alive(self.table.pointer()):
            return None
        joined = join_keys(keys)
        results = self.read(joined, Pieces(buffers, PyBytes_GET_SIZE(joined) // 16, True))
        for result in results:
            if result < KVFS_READ_MISS:
                return None
        return results

    def map(self, bytes keys not None):
        cdef const kvfs_table *table = self.table.pointer()
        cdef const uint8_t *first = <const uint8_t *>PyBytes_AS_STRING(keys)
        cdef int64_t n = PyBytes_GET_SIZE(keys) // 16, i, failed = 0
        cdef int64_t *results = <int64_t *>PyMem_Malloc((n + 1) * sizeof(int64_t))
        cdef void **places = <void **>PyMem_Malloc((n + 1) * sizeof(void *))
        cdef list views = []
        try:
            if results == NULL or places == NULL:
                raise MemoryError
            with nogil:
                kvfs_map_batch(table, self._dirfd, first, n, places, results, &self._hits)
            for i in range(n):
                views.append(make_view(places[i], results[i]) if results[i] >= 0 else results[i])
                if results[i] <= KVFS_READ_ERROR:
                    failed = results[i]
            if failed:
                raise trouble(failed)
            return views
        finally:
            PyMem_Free(results)
            PyMem_Free(places)

    @property
    def unreported(self):
        return self._hits.count

    def take_hits(self, uint32_t most):
        cdef bytes keys = PyBytes_FromStringAndSize(NULL, most * 16)
        cdef uint32_t n = kvfs_hits_take(&self._hits, <uint8_t *>PyBytes_AS_STRING(keys), most)
        return keys[:n * 16]
