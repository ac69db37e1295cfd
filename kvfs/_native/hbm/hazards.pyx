"""Hazards and generations seen from Python: a thin seam over `hazards_core.c`, which states the order of accesses.

Invariants: a mapping lives as long as its object; a descriptor that an object made, too.
Concurrency: any thread, but for `Generations.set`, which is the service's thread's. No call waits.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t

import errno
import os

from kvfs import limits
from kvfs.errors import Busy, InvalidRequest, Superseded, from_errno

cdef extern from "hbm/hazards_core.h" nogil:
    uint32_t KVFS_HAZARD_MAX_SLOTS

    struct kvfs_words:
        uint64_t *at
        uint32_t count

    int kvfs_words_make(kvfs_words *words, uint32_t count, int one_writer)
    int kvfs_words_map(kvfs_words *words, int fd, int writable)
    void kvfs_words_unmap(kvfs_words *words)
    uint64_t kvfs_generation_get(const kvfs_words *generations, uint32_t slot)
    void kvfs_generation_set(const kvfs_words *generations, uint32_t slot, uint64_t generation)
    int64_t kvfs_hazard_publish(const kvfs_words *hazards, const kvfs_words *generations, uint32_t slot,
                                uint64_t generation)
    int kvfs_hazard_clear(const kvfs_words *hazards, uint32_t place)
    int kvfs_hazards_name(const kvfs_words *hazards, uint32_t slot, uint64_t generation)


cdef int _make(kvfs_words *words, uint32_t count, int one_writer) except -1:
    if not 0 < count <= KVFS_HAZARD_MAX_SLOTS:
        raise InvalidRequest(f"{count} words: from 1 to {KVFS_HAZARD_MAX_SLOTS}")
    cdef int fd = kvfs_words_make(words, count, one_writer)
    if fd < 0:
        raise from_errno(fd, f"make {count} words of shared memory")
    return fd


cdef _map(kvfs_words *words, int fd, int writable):
    cdef int rc = kvfs_words_map(words, fd, writable)
    if rc < 0:
        raise from_errno(rc, f"map descriptor {fd}")


cdef class Generations:
    cdef kvfs_words _words
    cdef readonly int fd

    def __cinit__(self, uint32_t slots):
        self.fd = -1
        self.fd = _make(&self._words, slots, 1)

    def __dealloc__(self):
        kvfs_words_unmap(&self._words)
        if self.fd >= 0:
            os.close(self.fd)

    def get(self, uint32_t slot):
        return kvfs_generation_get(&self._words, slot)

    def set(self, uint32_t slot, uint64_t generation):
        if slot >= self._words.count:
            raise InvalidRequest(f"slot {slot} of {self._words.count}")
        kvfs_generation_set(&self._words, slot, generation)


cdef class Hazards:
    cdef kvfs_words _words
    cdef readonly int fd

    def __cinit__(self, uint32_t places=limits.HBM_HAZARDS):
        self.fd = -1
        self.fd = _make(&self._words, places, 0)

    def __dealloc__(self):
        kvfs_words_unmap(&self._words)
        if self.fd >= 0:
            os.close(self.fd)

    def name(self, uint32_t slot, uint64_t generation):
        cdef int named
        with nogil:
            named = kvfs_hazards_name(&self._words, slot, generation)
        return named != 0


cdef class ClientHazards:
    cdef kvfs_words _hazards
    cdef kvfs_words _generations

    def __cinit__(self, int generations_fd, int hazards_fd):
        _map(&self._generations, generations_fd, 0)
        _map(&self._hazards, hazards_fd, 1)

    def __dealloc__(self):
        kvfs_words_unmap(&self._generations)
        kvfs_words_unmap(&self._hazards)

    def publish(self, uint32_t slot, uint64_t generation):
        cdef int64_t place = kvfs_hazard_publish(&self._hazards, &self._generations, slot, generation)
        if place == -errno.ESTALE:
            raise Superseded(f"slot {slot} no longer holds generation {generation}")
        if place == -errno.EAGAIN:
            raise Busy(f"all {self._hazards.count} leases of this client are in use")
        return place

    def clear(self, uint32_t place):
        if kvfs_hazard_clear(&self._hazards, place) < 0:
            raise InvalidRequest(f"no lease at place {place} of {self._hazards.count}")
