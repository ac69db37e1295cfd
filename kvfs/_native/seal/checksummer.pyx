"""The background checksummer seen from Python: a thin seam over `checksummer_core.c`.

Invariants: the table and the directory descriptor outlive the thread; `close` joins it.
Concurrency: `push` from any thread; `pause`/`resume` in pairs, from one thread at a time. Waits drop the GIL.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

import os

from kvfs.errors import DeadlinePassed, from_errno
from kvfs import limits

from kvfs._native.shared.table cimport Table, kvfs_table

cdef extern from "seal/checksummer_core.h" nogil:
    struct kvfs_checksummer:
        uint64_t done
        uint64_t abandoned
        uint64_t failed
        uint64_t yielded

    int kvfs_checksummer_start(kvfs_checksummer *c, kvfs_table *table, int dirfd, uint32_t capacity)
    int kvfs_checksummer_push(kvfs_checksummer *c, uint32_t slot, uint32_t generation)
    int kvfs_checksummer_pause(kvfs_checksummer *c, uint32_t slot, int64_t timeout_ns)
    void kvfs_checksummer_resume(kvfs_checksummer *c)
    int kvfs_checksummer_drain(kvfs_checksummer *c, int64_t timeout_ns)
    int kvfs_checksummer_idle(kvfs_checksummer *c)
    void kvfs_checksummer_stop(kvfs_checksummer *c)


cdef class Checksummer:
    cdef kvfs_checksummer _c
    cdef Table _table
    cdef int _dirfd
    cdef int64_t _pause_ns
    cdef bint _running

    def __init__(self, Table table not None, int dirfd, int capacity=limits.CHECKSUM_QUEUE):
        self._running = False
        self._table = table
        self._pause_ns = <int64_t>(limits.CHECKSUM_PAUSE_WAIT_S * 1e9)
        self._dirfd = os.dup(dirfd)
        cdef int rc = kvfs_checksummer_start(&self._c, table.writer(), self._dirfd, capacity)
        if rc < 0:
            os.close(self._dirfd)
            raise from_errno(rc, "start the checksum thread")
        self._running = True

    def __dealloc__(self):
        self._stop()

    cdef void _stop(self):
        if self._running:
            self._running = False
            with nogil:
                kvfs_checksummer_stop(&self._c)
            os.close(self._dirfd)

    def push(self, uint32_t slot, uint32_t generation):
        return self._running and kvfs_checksummer_push(&self._c, slot, generation) == 0

    def pause(self, uint32_t slot):
        cdef int rc = 0
        if self._running:
            with nogil:
                rc = kvfs_checksummer_pause(&self._c, slot, self._pause_ns)
        return rc == 0

    def resume(self):
        if self._running:
            kvfs_checksummer_resume(&self._c)

    def drain(self, double timeout_s):
        cdef int rc = 0
        cdef int64_t timeout_ns = <int64_t>(timeout_s * 1e9)
        if self._running:
            with nogil:
                rc = kvfs_checksummer_drain(&self._c, timeout_ns)
        if rc < 0:
            raise DeadlinePassed(f"checksums still pending after {timeout_s} s")

    def close(self):
        self._stop()

    @property
    def idle(self):
        return not self._running or kvfs_checksummer_idle(&self._c) != 0

    @property
    def done(self):
        return self._c.done

    @property
    def abandoned(self):
        return self._c.abandoned

    @property
    def failed(self):
        return self._c.failed

    @property
    def yielded(self):
        return self._c.yielded
