"""Names by object id: a table of places by id, a small allocation for each name, and the names of buckets once.

Invariants: `_places` is open addressing with linear probing, at most 3/4 full, without tombstones. A bucket has a number
while any name is in it. Concurrency: one thread, with the GIL.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport UINT16_MAX, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy

from kvfs.errors import InvalidRequest

cdef extern from "catalog/records_core.h" nogil:
    uint64_t kvfs_record_mix(uint64_t x)

cdef enum:
    LEAST_PLACES = 1024
    HEAD_BYTES = 14
    DIGEST_BYTES = 16


cdef bint object_id_of(bytes digest, uint64_t *object_id):
    """Return whether a digest is of a named object's key, whose id is then set."""
    cdef const uint8_t *at = <const uint8_t *>PyBytes_AS_STRING(digest)
    cdef int i
    cdef uint64_t value = 0
    if len(digest) != DIGEST_BYTES:
        return False
    for i in range(8):
        if at[i]:
            return False
        value = value << 8 | at[8 + i]
    object_id[0] = value
    return True


cdef class ObjectNames:
    def __cinit__(self):
        self._numbers, self._buckets, self._counts = {}, [], []
        self._mask = LEAST_PLACES - 1
        self._places = <ObjectName **>calloc(LEAST_PLACES, sizeof(void *))
        if self._places == NULL:
            raise MemoryError

    def __dealloc__(self):
        cdef uint64_t at
        if self._places != NULL:
            for at in range(self._mask + 1):
                free(self._places[at])
        free(self._places)

    cdef uint64_t _place(self, uint64_t object_id) noexcept:
        cdef uint64_t at = kvfs_record_mix(object_id) & self._mask
        while self._places[at] != NULL and self._places[at].object_id != object_id:
            at = (at + 1) & self._mask
        return at

    cdef int _grow(self) except -1:
        cdef ObjectName **old = self._places
        cdef uint64_t at, places = self._mask + 1
        cdef ObjectName **more = <ObjectName **>calloc(2 * places, sizeof(void *))
        if more == NULL:
            raise MemoryError
        self._places = more
        self._mask = 2 * places - 1
        for at in range(places):
            if old[at] != NULL:
                more[self._place(old[at].object_id)] = old[at]
        free(old)
        return 0

    cdef ObjectName *find(self, uint64_t object_id) noexcept:
        return self._places[self._place(object_id)]

    cdef int put(self, uint64_t object_id, bytes bucket, const char *key, uint64_t key_bytes) except -1:
        cdef ObjectName *name
        if key_bytes > UINT16_MAX:
            raise InvalidRequest(f"a key of {key_bytes} bytes")
        self.drop(object_id)
        if self._count >= self._mask // 4 * 3:
            self._grow()
        name = <ObjectName *>malloc(HEAD_BYTES + key_bytes)
        if name == NULL:
            raise MemoryError
        number = self._numbers.get(bucket)
        if number is None:
            number = self._counts.index(0) if 0 in self._counts else len(self._counts)
            if number == len(self._counts):
                self._counts.append(0)
                self._buckets.append(bucket)
            self._buckets[number], self._numbers[bucket] = bucket, number
        self._counts[number] += 1
        name.object_id, name.bucket, name.key_bytes = object_id, number, key_bytes
        memcpy(name.key, key, key_bytes)
        self._places[self._place(object_id)] = name
        self._count += 1
        self._key_bytes += key_bytes
        return 0

    cdef int drop(self, uint64_t object_id) except -1:
        """Remove a name; return whether there was one."""
        cdef uint64_t hole = self._place(object_id), at, home
        cdef ObjectName *name = self._places[hole]
        if name == NULL:
            return 0
        at = (hole + 1) & self._mask
        while self._places[at] != NULL:
            home = kvfs_record_mix(self._places[at].object_id) & self._mask
            if ((at - home) & self._mask) >= ((at - hole) & self._mask):
                self._places[hole] = self._places[at]
                hole = at
            at = (at + 1) & self._mask
        self._places[hole] = NULL
        self._count -= 1
        self._key_bytes -= name.key_bytes
        self._counts[name.bucket] -= 1
        if not self._counts[name.bucket]:
            del self._numbers[self._buckets[name.bucket]]
        free(name)
        return 1

    cdef bint has(self, uint64_t object_id, const char *name, uint64_t name_bytes):
        """Return whether an object has this `bucket NUL key`."""
        cdef ObjectName *found = self.find(object_id)
        cdef bytes bucket
        cdef uint64_t bucket_bytes
        if found == NULL:
            return False
        bucket = self._buckets[found.bucket]
        bucket_bytes = <uint64_t>PyBytes_GET_SIZE(bucket)
        return (name_bytes == bucket_bytes + 1 + found.key_bytes and name[bucket_bytes] == 0
                and memcmp(name, PyBytes_AS_STRING(bucket), bucket_bytes) == 0
                and memcmp(name + bucket_bytes + 1, found.key, found.key_bytes) == 0)

    def get(self, bytes digest not None):
        cdef uint64_t object_id = 0
        cdef ObjectName *name = self.find(object_id) if object_id_of(digest, &object_id) else NULL
        if name == NULL:
            return None
        return self._buckets[name.bucket], PyBytes_FromStringAndSize(name.key, name.key_bytes)

    def set(self, bytes digest not None, bytes bucket not None, bytes key not None):
        cdef uint64_t object_id = 0
        if not object_id_of(digest, &object_id):
            raise InvalidRequest(f"{digest.hex()} is the key of no object")
        self.put(object_id, bucket, PyBytes_AS_STRING(key), <uint64_t>len(key))

    def remove(self, bytes digest not None):
        cdef uint64_t object_id = 0
        found = self.get(digest)
        if found is not None and object_id_of(digest, &object_id):
            self.drop(object_id)
        return found

    def __contains__(self, bytes digest not None):
        cdef uint64_t object_id = 0
        return object_id_of(digest, &object_id) and self.find(object_id) != NULL

    def __len__(self):
        return self._count

    @property
    def state_bytes(self):
        return (self._mask + 1) * sizeof(void *) + self._count * HEAD_BYTES + self._key_bytes
