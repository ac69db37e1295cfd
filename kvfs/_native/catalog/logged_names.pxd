"""The log's names for the module that takes records in."""

from libc.stdint cimport uint8_t, uint32_t, uint64_t


cdef struct LoggedName:
    uint64_t object_id
    uint64_t sequence
    uint64_t at             # of the body, in `_bytes`
    uint32_t bucket_bytes
    uint32_t key_bytes
    uint32_t body_bytes     # 0: removed
    uint32_t next_id
    uint32_t next_name


cdef class LoggedNames:
    cdef LoggedName *_names
    cdef uint32_t _count, _room, _there
    cdef uint32_t *_by_id
    cdef uint32_t *_by_name
    cdef uint32_t _mask
    cdef uint8_t *_bytes
    cdef uint64_t _used, _bytes_room
    cdef readonly list contended
    cdef LoggedName *entry(self, uint64_t object_id) noexcept
    cdef int add(self, uint64_t object_id, uint64_t sequence, const uint8_t *body, uint32_t body_bytes) except -1
    cdef LoggedName *_of_name(self, const uint8_t *body, uint32_t bytes, uint32_t bucket_bytes) noexcept
    cdef int _grow(self) except -1
    cdef uint32_t _home(self, const uint8_t *name, uint32_t bytes) noexcept
    cdef bytes _piece(self, uint64_t at, uint64_t bytes)
