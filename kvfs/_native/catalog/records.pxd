"""The rows' C side, for the modules that a start fills and reads them with."""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from "catalog/records_core.h" nogil:
    enum:
        KVFS_RECORD_UNIT
        KVFS_RECORD_MAX_HITS
        KVFS_RECORD_USED
        KVFS_RECORD_BLOCK
        KVFS_RECORD_PLACED
        KVFS_RECORD_HAS_META
        KVFS_RECORD_NAMED
        KVFS_RECORD_KEPT
        KVFS_RECORD_RESTORED
    struct kvfs_record:
        uint64_t object_id
        uint64_t first_sequence
        uint64_t writing
        uint64_t checksum
        int64_t sealed_at_ns
        uint32_t size_bytes
        uint16_t segment
        uint16_t record_units
        uint32_t offset_units
        uint32_t bucket_id
        uint32_t uid
        uint32_t hits
        uint32_t flags
        uint8_t key[16]
        uint8_t parent[16]
        uint64_t meta_segment
        uint64_t meta_offset
        uint64_t meta_counted
    struct kvfs_records:
        kvfs_record *rows
        uint32_t room
        uint32_t used
        uint32_t count
        uint32_t mask

    int kvfs_records_init(kvfs_records *r)
    void kvfs_records_free(kvfs_records *r)
    kvfs_record *kvfs_records_find(const kvfs_records *r, uint64_t id)
    kvfs_record *kvfs_records_insert(kvfs_records *r, uint64_t id)
    void kvfs_records_remove(kvfs_records *r, uint64_t id)


cdef class RecordRows:
    cdef kvfs_records _r
    cdef tuple _fields(self, const kvfs_record *row)
