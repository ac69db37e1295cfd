"""The table's C side, for the other native modules."""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from "shared/table_core.h" nogil:
    struct kvfs_table_header:
        uint8_t store_id[16]
        uint32_t slot_count
        uint32_t entry_count
        uint32_t clean
        uint32_t live_entries
        uint32_t hidden_tiers
        uint32_t slots_used
        uint64_t created_ns
        uint64_t file_bytes

    struct kvfs_index_entry:
        uint8_t key[16]

    struct kvfs_slot_header:
        uint16_t version
        uint8_t state
        uint8_t kind
        uint32_t generation
        uint32_t flags
        uint8_t key[16]
        uint64_t object_id
        uint64_t sequence
        uint64_t size_bytes
        uint64_t checksum
        uint8_t parent[16]
        uint32_t uid
        uint32_t bucket_id
        int64_t sealed_at_ns
        uint32_t marks
        uint64_t header_checksum

    struct kvfs_table:
        kvfs_table_header *header
        kvfs_slot_header *slots
        kvfs_index_entry *entries
        uint32_t slot_count
        uint32_t entry_mask
        int writable

    struct kvfs_entry_view:
        uint32_t slot
        uint32_t generation
        uint64_t size_bytes
        uint64_t location
        uint32_t hits
        uint32_t last_access_s
        uint8_t kind
        uint8_t tiers
        uint8_t flags

    struct kvfs_entry_value:
        uint32_t slot
        uint32_t generation
        uint64_t size_bytes
        uint64_t location
        uint8_t kind
        uint8_t tiers
        uint8_t flags

    int kvfs_table_attach(kvfs_table *t, const char *path, const uint8_t *store_id, const char **why)
    int kvfs_table_create(kvfs_table *t, const char *path, const uint8_t *store_id, uint32_t slots, uint32_t entries)
    int kvfs_table_mark_dead(const char *path)
    void kvfs_table_close(kvfs_table *t)
    int kvfs_table_put(kvfs_table *t, const uint8_t *key, const kvfs_entry_value *value)
    int kvfs_table_remove(kvfs_table *t, const uint8_t *key)
    int kvfs_table_touch(kvfs_table *t, const uint8_t *key)
    int kvfs_table_set_access(kvfs_table *t, const uint8_t *key, uint32_t hits, uint32_t last_access_s)
    int kvfs_table_lookup(const kvfs_table *t, const uint8_t *key, kvfs_entry_view *out)
    int64_t kvfs_table_match(const kvfs_table *t, const uint8_t *keys, uint64_t n, uint8_t kind)
    uint32_t kvfs_table_generation(const kvfs_table *t, uint32_t slot)
    int kvfs_table_alive(const kvfs_table *t)
    int kvfs_entry_at(const kvfs_table *t, uint32_t index, uint8_t *key, kvfs_entry_view *out)
    int kvfs_slot_header_read(const kvfs_table *t, uint32_t slot, kvfs_slot_header *out)
    int kvfs_slot_header_write(kvfs_table *t, uint32_t slot, const kvfs_slot_header *header)
    int kvfs_slot_begin(kvfs_table *t, uint32_t slot, uint32_t *generation)
    int kvfs_slot_publish(kvfs_table *t, uint32_t slot, uint32_t draft, const kvfs_slot_header *header)
    int kvfs_slot_retire(kvfs_table *t, uint32_t slot, uint32_t generation)
    int kvfs_slot_set_generation(kvfs_table *t, uint32_t slot, uint32_t generation)
    int kvfs_slot_set_checksum(kvfs_table *t, uint32_t slot, uint32_t generation, uint64_t value)
    int kvfs_table_set_clean(kvfs_table *t, uint32_t clean)
    int kvfs_table_set_dead(kvfs_table *t)
    void kvfs_table_hide(kvfs_table *t, uint32_t tiers)
    uint64_t kvfs_slot_header_checksum(const kvfs_slot_header *header)


cdef class Table:
    cdef kvfs_table _table
    cdef bint _open
    cdef readonly str path
    cdef kvfs_table *pointer(self) except NULL
    cdef kvfs_table *writer(self) except NULL
    cdef uint32_t _slot(self, uint32_t slot) except? 0xFFFFFFFF


cdef int put_entry(kvfs_table *t, const uint8_t *key, const kvfs_entry_value *value) noexcept nogil
cdef int publish_slot(kvfs_table *t, uint32_t slot, uint32_t draft, const kvfs_slot_header *header) noexcept nogil
cdef int write_slot(kvfs_table *t, uint32_t slot, const kvfs_slot_header *header) noexcept nogil
cdef int set_slot_generation(kvfs_table *t, uint32_t slot, uint32_t generation) noexcept nogil
cdef int set_entry_access(kvfs_table *t, const uint8_t *key, uint32_t hits, uint32_t last_access_s) noexcept nogil
