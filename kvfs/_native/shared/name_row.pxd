"""Rows of the name index, for the native modules that a start reads them with."""

from libc.stdint cimport uint32_t, uint64_t

cdef extern from "shared/name_row.h" nogil:
    enum:
        KVFS_ROW_CHECK_BYTES
        KVFS_ROW_PINNED
        KVFS_ROW_DIRECTORY
        KVFS_ROW_RETIRED
        KVFS_ROW_LINK
    struct kvfs_name_row:
        uint32_t flags
        uint64_t object_id
        uint64_t size_bytes
        uint64_t sequence

    bint kvfs_name_row_read(const char *row, uint64_t bytes, kvfs_name_row *out)
    bint kvfs_name_row_load(const char *name, uint64_t name_bytes, const char *stored, uint64_t stored_bytes, kvfs_name_row *out)
    uint64_t kvfs_unit_bytes(const char *key, uint64_t bytes)
