"""Sealing blocks natively, seen from Python: a thin seam over `sealer_core.c`, which has the rules.

Invariants: the table and the directory descriptor outlive the threads; `close` joins them.
Concurrency: every method is called from the event loop's thread.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

import os

from kvfs import limits
from kvfs.errors import InvalidRequest, from_errno

from kvfs._native.shared.table cimport (
    Table, kvfs_entry_value, kvfs_slot_header, kvfs_table, publish_slot, put_entry,
)

cdef extern from "shared/mutex.h" nogil:
    struct kvfs_mutex:
        pass
    void kvfs_lock(kvfs_mutex *m)
    void kvfs_unlock(kvfs_mutex *m)

cdef extern from "seal/sealer_core.h" nogil:
    int KVFS_SEAL_NEW, KVFS_SEAL_THERE, KVFS_SEAL_UNINDEXED, KVFS_SEALS_AT_ONCE

    struct kvfs_sealed:
        uint32_t slot
        uint32_t generation
        uint32_t channel
        uint32_t outcome
        uint8_t key[16]
        uint8_t parent[16]
        uint64_t object_id
        uint64_t size_bytes
        uint64_t physical_bytes
        int64_t sealed_at_ns
        uint32_t has_checksum

    struct kvfs_table_writer:
        int (*put)(kvfs_table *t, const uint8_t *key, const kvfs_entry_value *value) noexcept nogil
        int (*publish)(kvfs_table *t, uint32_t slot, uint32_t draft, const kvfs_slot_header *header) noexcept nogil

    struct kvfs_sealer:
        kvfs_table *table
        kvfs_table_writer writer
        int dirfd
        uint64_t largest_bytes
        kvfs_mutex lock
        int notify_fd
        int started

    int kvfs_sealer_start(kvfs_sealer *s, uint32_t channels, uint32_t room)
    void kvfs_sealer_stop(kvfs_sealer *s)
    int64_t kvfs_sealer_open(kvfs_sealer *s, int fd, uint32_t uid, uint32_t bucket_id)
    void kvfs_sealer_close(kvfs_sealer *s, uint32_t channel)
    void kvfs_sealer_grant(kvfs_sealer *s, uint32_t slot, uint32_t generation, uint32_t channel)
    void kvfs_sealer_revoke(kvfs_sealer *s, uint32_t slot)
    void kvfs_sealer_give_ids(kvfs_sealer *s, uint64_t first, uint64_t count)
    uint64_t kvfs_sealer_ids_left(kvfs_sealer *s)
    uint32_t kvfs_sealer_pending(const kvfs_sealer *s)
    uint32_t kvfs_sealer_take(kvfs_sealer *s, kvfs_sealed *into, uint32_t most)

NEW = KVFS_SEAL_NEW
THERE = KVFS_SEAL_THERE
UNINDEXED = KVFS_SEAL_UNINDEXED
SEALS_AT_ONCE = KVFS_SEALS_AT_ONCE


cdef class Sealed:
    """The outcome of one seal."""

    cdef readonly uint32_t slot
    cdef readonly uint32_t generation
    cdef readonly uint32_t channel
    cdef readonly int outcome
    cdef readonly bytes key
    cdef readonly bytes parent
    cdef readonly uint64_t object_id
    cdef readonly uint64_t size_bytes
    cdef readonly uint64_t physical_bytes
    cdef readonly int64_t sealed_at_ns
    cdef readonly bint has_checksum


cdef Sealed make_sealed(const kvfs_sealed *raw):
    cdef Sealed sealed = Sealed.__new__(Sealed)
    sealed.slot = raw.slot
    sealed.generation = raw.generation
    sealed.channel = raw.channel
    sealed.outcome = raw.outcome
    sealed.key = PyBytes_FromStringAndSize(<const char *>raw.key, 16)
    sealed.parent = PyBytes_FromStringAndSize(<const char *>raw.parent, 16)
    sealed.object_id = raw.object_id
    sealed.size_bytes = raw.size_bytes
    sealed.physical_bytes = raw.physical_bytes
    sealed.sealed_at_ns = raw.sealed_at_ns
    sealed.has_checksum = raw.has_checksum != 0
    return sealed


cdef class Sealer:
    cdef kvfs_sealer _s
    cdef Table _table
    cdef bint _running
    cdef bint _held

    def __init__(self, Table table not None, int dirfd, uint64_t largest_bytes,
                 int channels=limits.MAX_SESSIONS, int room=limits.UNHEARD_SEALS):
        if self._running:
            raise InvalidRequest("this sealer runs already")
        memset(&self._s, 0, sizeof(self._s))
        self._table = table
        self._s.table = table.writer()
        self._s.writer.put = put_entry
        self._s.writer.publish = publish_slot
        self._s.largest_bytes = largest_bytes
        self._s.dirfd = os.dup(dirfd)
        cdef int rc = kvfs_sealer_start(&self._s, channels, room)
        if rc < 0:
            os.close(self._s.dirfd)
            raise from_errno(rc, "make a sealer")
        self._running = True

    def __dealloc__(self):
        self._stop()

    cdef void _stop(self):
        if self._running:
            self._running = False
            with nogil:
                kvfs_sealer_stop(&self._s)
            os.close(self._s.dirfd)

    cdef int _need(self) except -1:
        if not self._running:
            raise InvalidRequest("the sealer is closed")
        return 0

    def fileno(self):
        self._need()
        return self._s.notify_fd

    def open(self, int fd, uint32_t uid, uint32_t bucket_id):
        self._need()
        cdef int64_t number = kvfs_sealer_open(&self._s, fd, uid, bucket_id)
        if number < 0:
            raise from_errno(<int>number, "open a seal channel")
        return number

    def close_channel(self, uint32_t channel):
        self._need()
        kvfs_sealer_close(&self._s, channel)

    def grant(self, uint32_t slot, uint32_t generation, uint32_t channel):
        self._need()
        kvfs_sealer_grant(&self._s, self._table._slot(slot), generation, channel)

    def revoke(self, uint32_t slot):
        self._need()
        kvfs_sealer_revoke(&self._s, self._table._slot(slot))

    def give_ids(self, uint64_t first, uint64_t count):
        self._need()
        kvfs_sealer_give_ids(&self._s, first, count)

    @property
    def ids_left(self):
        self._need()
        return kvfs_sealer_ids_left(&self._s)

    @property
    def pending(self):
        return kvfs_sealer_pending(&self._s) if self._running else 0

    def take(self):
        cdef kvfs_sealed some[64]
        cdef uint32_t n, i
        self._need()
        n = kvfs_sealer_take(&self._s, some, 64)
        return [make_sealed(&some[i]) for i in range(n)]

    def __enter__(self):
        """Stop all seals until the end of the block, so that what the event loop looks at stays."""
        self._need()
        if self._held:
            raise InvalidRequest("the sealer is held already")
        with nogil:
            kvfs_lock(&self._s.lock)
        self._held = True
        return self

    def __exit__(self, *_):
        self._held = False
        kvfs_unlock(&self._s.lock)

    def close(self):
        self._stop()
