"""Probes of slots, for the other native modules."""

from libc.stdint cimport uint32_t, uint64_t

cdef extern from "shared/slots_core.h" nogil:
    struct kvfs_slot_stat:
        uint64_t size_bytes
        uint64_t physical_bytes


cdef int has_writer(int fd) noexcept nogil
cdef int check_slot(int dirfd, uint32_t slot, kvfs_slot_stat *out) noexcept nogil
cdef int hash_descriptor(int fd, uint64_t *checksum, uint64_t *bytes_) noexcept nogil
