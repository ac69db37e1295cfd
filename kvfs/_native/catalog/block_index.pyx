"""The blocks of a store seen from Python: a thin seam over `catalog_core.c`.

Invariants: keys have 16 bytes, and a bucket's number is one that `open_bucket` returned; both are checked here.
Concurrency: one thread, with the GIL.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcpy

import os

from kvfs.errors import InvalidRequest, from_errno

cdef extern from "catalog/catalog_core.h" nogil:
    kvfs_catalog *kvfs_catalog_new(uint64_t seed)
    void kvfs_catalog_free(kvfs_catalog *c)
    int kvfs_catalog_add(kvfs_catalog *c, const kvfs_block *block)
    int kvfs_catalog_remove(kvfs_catalog *c, const uint8_t *key, kvfs_block *removed)
    int kvfs_catalog_get(const kvfs_catalog *c, const uint8_t *key, kvfs_block *found)
    int kvfs_catalog_pin(kvfs_catalog *c, const uint8_t *key, int pinned)
    int kvfs_catalog_of_sequence(const kvfs_catalog *c, uint64_t sequence, uint8_t *key)
    uint32_t kvfs_catalog_count(const kvfs_catalog *c)
    uint64_t kvfs_catalog_state_bytes(const kvfs_catalog *c)
    int64_t kvfs_catalog_open_bucket(kvfs_catalog *c)
    void kvfs_catalog_close_bucket(kvfs_catalog *c, uint32_t bucket)
    uint64_t kvfs_catalog_bucket_blocks(const kvfs_catalog *c, uint32_t bucket)
    uint64_t kvfs_catalog_bucket_bytes(const kvfs_catalog *c, uint32_t bucket)
    uint32_t kvfs_catalog_shelf_blocks(const kvfs_catalog *c, uint32_t bucket, uint8_t first)
    void kvfs_catalog_shelf(const kvfs_catalog *c, uint32_t bucket, uint8_t first, uint8_t *keys)
    int kvfs_catalog_keys(const kvfs_catalog *c, uint8_t *keys)
    int64_t kvfs_catalog_descendants(const kvfs_catalog *c, const uint8_t *key, uint8_t **keys)
    uint32_t kvfs_catalog_children(const kvfs_catalog *c, const uint8_t *key)


cdef const uint8_t *key_pointer(bytes key) except NULL:
    if len(key) != KVFS_BLOCK_KEY_BYTES:
        raise InvalidRequest(f"a prefix hash has {KVFS_BLOCK_KEY_BYTES} bytes, not {len(key)}")
    return <const uint8_t *>PyBytes_AS_STRING(key)


cdef bytes key_of(const uint8_t *key):
    return PyBytes_FromStringAndSize(<const char *>key, KVFS_BLOCK_KEY_BYTES)


cdef list split(const uint8_t *keys, Py_ssize_t count):
    return [key_of(keys + at * KVFS_BLOCK_KEY_BYTES) for at in range(count)]


cdef tuple make_tuple(const kvfs_block *block):
    return (block.bucket, block.uid, block.size_bytes, block.sequence, block.sealed_ns, bool(block.pinned),
            key_of(block.parent) if block.has_parent else None)


cdef class BlockIndex:
    def __cinit__(self):
        self._c = kvfs_catalog_new(int.from_bytes(os.urandom(8), "little"))
        if self._c == NULL:
            raise MemoryError

    def __dealloc__(self):
        kvfs_catalog_free(self._c)

    cdef int add_block(self, const kvfs_block *block) except -1:
        cdef int rc = kvfs_catalog_add(self._c, block)
        if rc < 0:
            raise from_errno(rc, f"enter a block in bucket {block.bucket}")
        return 0

    cdef bint find_block(self, const uint8_t *key, kvfs_block *found) noexcept:
        return kvfs_catalog_get(self._c, key, found) != 0

    def add(self, bytes key not None, uint32_t bucket, uint32_t uid, uint64_t size_bytes, uint64_t sequence,
            int64_t sealed_ns, bint pinned, bytes parent):
        cdef kvfs_block block
        memcpy(block.key, key_pointer(key), KVFS_BLOCK_KEY_BYTES)
        block.has_parent = parent is not None
        if parent is not None:
            memcpy(block.parent, key_pointer(parent), KVFS_BLOCK_KEY_BYTES)
        block.bucket = bucket
        block.uid = uid
        block.size_bytes = size_bytes
        block.sequence = sequence
        block.sealed_ns = sealed_ns
        block.pinned = pinned
        self.add_block(&block)

    def remove(self, bytes key not None):
        cdef kvfs_block block
        if not kvfs_catalog_remove(self._c, key_pointer(key), &block):
            return None
        return make_tuple(&block)

    def get(self, bytes key not None):
        cdef kvfs_block block
        if not kvfs_catalog_get(self._c, key_pointer(key), &block):
            return None
        return make_tuple(&block)

    def sequence_of(self, bytes key not None):
        cdef kvfs_block block
        if not kvfs_catalog_get(self._c, key_pointer(key), &block):
            return None
        return block.sequence

    def of_sequence(self, uint64_t sequence):
        cdef uint8_t key[16]
        if not kvfs_catalog_of_sequence(self._c, sequence, key):
            return None
        return key_of(key)

    def pin(self, bytes key not None, bint pinned):
        kvfs_catalog_pin(self._c, key_pointer(key), pinned)

    def __contains__(self, bytes key not None):
        cdef kvfs_block block
        return kvfs_catalog_get(self._c, key_pointer(key), &block) != 0

    def __len__(self):
        return kvfs_catalog_count(self._c)

    @property
    def state_bytes(self):
        return kvfs_catalog_state_bytes(self._c)

    def open_bucket(self):
        cdef int64_t number = kvfs_catalog_open_bucket(self._c)
        if number < 0:
            raise MemoryError
        return number

    def close_bucket(self, uint32_t bucket):
        kvfs_catalog_close_bucket(self._c, bucket)

    def bucket_blocks(self, uint32_t bucket):
        return kvfs_catalog_bucket_blocks(self._c, bucket)

    def bucket_bytes(self, uint32_t bucket):
        return kvfs_catalog_bucket_bytes(self._c, bucket)

    def shelf_blocks(self, uint32_t bucket, uint8_t first):
        return kvfs_catalog_shelf_blocks(self._c, bucket, first)

    def shelf(self, uint32_t bucket, uint8_t first):
        cdef Py_ssize_t count = kvfs_catalog_shelf_blocks(self._c, bucket, first)
        cdef bytearray keys = bytearray(count * KVFS_BLOCK_KEY_BYTES)
        cdef uint8_t *room = <uint8_t *>keys
        kvfs_catalog_shelf(self._c, bucket, first, room)
        return split(room, count)

    def keys(self):
        cdef bytearray keys = bytearray(kvfs_catalog_count(self._c) * KVFS_BLOCK_KEY_BYTES)
        if kvfs_catalog_keys(self._c, <uint8_t *>keys) < 0:
            raise MemoryError
        return keys

    def children(self, bytes key not None):
        return kvfs_catalog_children(self._c, key_pointer(key))

    def descendants(self, bytes key not None):
        cdef uint8_t *keys = NULL
        cdef int64_t count = kvfs_catalog_descendants(self._c, key_pointer(key), &keys)
        if count < 0:
            raise MemoryError
        try:
            return split(keys, count)
        finally:
            free(keys)
