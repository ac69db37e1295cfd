"""The block index's C side, for the module that enters what a start takes over."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

cdef extern from "catalog/catalog_core.h" nogil:
    enum: KVFS_BLOCK_KEY_BYTES
    struct kvfs_block:
        uint8_t key[16]
        uint8_t parent[16]
        uint64_t sequence
        uint64_t size_bytes
        int64_t sealed_ns
        uint32_t uid
        uint32_t bucket
        uint8_t has_parent
        uint8_t pinned
    struct kvfs_catalog:
        pass


cdef class BlockIndex:
    cdef kvfs_catalog *_c
    cdef int add_block(self, const kvfs_block *block) except -1
    cdef bint find_block(self, const uint8_t *key, kvfs_block *found) noexcept
