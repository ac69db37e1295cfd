"""Names by object id, for the modules that a start fills them with."""

from libc.stdint cimport uint8_t, uint16_t, uint32_t, uint64_t


cdef packed struct ObjectName:
    uint64_t object_id
    uint32_t bucket
    uint16_t key_bytes
    char key[1]             # and those behind it


cdef class ObjectNames:
    cdef ObjectName **_places
    cdef uint64_t _mask
    cdef uint64_t _count, _key_bytes
    cdef dict _numbers
    cdef list _buckets
    cdef list _counts
    cdef uint64_t _place(self, uint64_t object_id) noexcept
    cdef int _grow(self) except -1
    cdef ObjectName *find(self, uint64_t object_id) noexcept
    cdef int put(self, uint64_t object_id, bytes bucket, const char *key, uint64_t key_bytes) except -1
    cdef int drop(self, uint64_t object_id) except -1
    cdef bint has(self, uint64_t object_id, const char *name, uint64_t name_bytes)
