"""The rows of the NVMe tier's objects seen from Python: a thin seam over `records_core.h`.

Invariants: what is put in comes out equal; what does not fit in a row is refused. Concurrency: one thread, with the GIL.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.dict cimport PyDict_Next
from cpython.object cimport PyObject
from libc.stdint cimport UINT16_MAX, UINT32_MAX, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, qsort
from libc.string cimport memcmp, memcpy

cdef enum:
    KIND_OBJECT = 1
    KIND_BLOCK = 2
    KEY_BYTES = 16

cdef bytes NO_KEY = bytes(KEY_BYTES)

cdef struct Aged:
    uint64_t first_sequence
    uint64_t object_id


cdef int by_age(const void *left, const void *right) noexcept nogil:
    cdef const Aged *a = <const Aged *>left
    cdef const Aged *b = <const Aged *>right
    if a.first_sequence != b.first_sequence:
        return 1 if a.first_sequence > b.first_sequence else -1
    return (a.object_id > b.object_id) - (a.object_id < b.object_id)


cdef bint is_past(const Aged *a, uint64_t first_sequence, uint64_t object_id) noexcept nogil:
    if a.first_sequence != first_sequence:
        return a.first_sequence > first_sequence
    return a.object_id > object_id


cdef void sift(Aged *heap, Py_ssize_t at, Py_ssize_t count) noexcept nogil:
    """Put the first of a heap in its place, the youngest at the top."""
    cdef Py_ssize_t child
    cdef Aged moved = heap[at]
    while 2 * at + 1 < count:
        child = 2 * at + 1
        if child + 1 < count and by_age(&heap[child + 1], &heap[child]) > 0:
            child += 1
        if by_age(&heap[child], &moved) <= 0:
            break
        heap[at] = heap[child]
        at = child
    heap[at] = moved


cdef bint is_object_key(bytes key, uint64_t object_id):
    return key == object_id.to_bytes(KEY_BYTES, "big")


cdef class RecordRows:
    def __cinit__(self):
        if kvfs_records_init(&self._r) < 0:
            raise MemoryError

    def __dealloc__(self):
        kvfs_records_free(&self._r)

    def put(self, uint64_t object_id, tuple fields not None):
        cdef kvfs_record *row
        cdef kvfs_record value
        cdef bytes key, parent
        kind, key, parent, size, bucket, uid, sealed_ns, kept, hits, writing, first, named, piece, meta = fields
        if kvfs_records_find(&self._r, object_id) != NULL:
            raise ValueError(f"object {object_id} is here already")
        if not 0 <= size <= UINT32_MAX or not 0 <= hits <= KVFS_RECORD_MAX_HITS:
            return False
        if len(key) != KEY_BYTES or len(parent) != KEY_BYTES:
            return False
        value.flags = KVFS_RECORD_USED
        if kind == KIND_BLOCK:
            if meta is not None or named:
                return False
            value.flags |= KVFS_RECORD_BLOCK
            memcpy(value.key, PyBytes_AS_STRING(key), KEY_BYTES)
            memcpy(value.parent, PyBytes_AS_STRING(parent), KEY_BYTES)
        else:
            if kind != KIND_OBJECT or parent != NO_KEY or not is_object_key(key, object_id):
                return False
            value.meta_segment, value.meta_offset, value.meta_counted = (0, 0, 0) if meta is None else meta
            value.flags |= (meta is not None) * KVFS_RECORD_HAS_META | bool(named) * KVFS_RECORD_NAMED
        value.segment = value.record_units = value.offset_units = 0
        value.checksum = 0
        if piece is not None:
            segment, offset, record_bytes, checksum = piece
            if segment > UINT16_MAX or offset % KVFS_RECORD_UNIT or offset // KVFS_RECORD_UNIT > UINT32_MAX:
                return False
            if record_bytes % KVFS_RECORD_UNIT or record_bytes // KVFS_RECORD_UNIT > UINT16_MAX:
                return False
            value.segment, value.record_units = segment, record_bytes // KVFS_RECORD_UNIT
            value.offset_units, value.checksum = offset // KVFS_RECORD_UNIT, checksum
            value.flags |= KVFS_RECORD_PLACED
        value.flags |= bool(kept) * KVFS_RECORD_KEPT
        value.object_id, value.first_sequence, value.writing = object_id, first, writing
        value.sealed_at_ns, value.size_bytes, value.bucket_id = sealed_ns, size, bucket
        value.uid, value.hits = uid, hits
        row = kvfs_records_insert(&self._r, object_id)
        if row == NULL:
            raise MemoryError
        row[0] = value
        return True

    cdef tuple _fields(self, const kvfs_record *row):
        cdef bint is_block = row.flags & KVFS_RECORD_BLOCK
        cdef bytes key = row.object_id.to_bytes(KEY_BYTES, "big"), parent = NO_KEY
        if is_block:
            key = PyBytes_FromStringAndSize(<const char *>row.key, KEY_BYTES)
            if memcmp(row.parent, PyBytes_AS_STRING(NO_KEY), KEY_BYTES) != 0:
                parent = PyBytes_FromStringAndSize(<const char *>row.parent, KEY_BYTES)
        piece = meta = None
        if row.flags & KVFS_RECORD_PLACED:
            piece = (row.segment, row.offset_units * <uint64_t>KVFS_RECORD_UNIT, row.record_units * KVFS_RECORD_UNIT,
                     row.checksum)
        if row.flags & KVFS_RECORD_HAS_META:
            meta = (row.meta_segment, row.meta_offset, row.meta_counted)
        return (KIND_BLOCK if is_block else KIND_OBJECT, key, parent, row.size_bytes, row.bucket_id, row.uid,
                row.sealed_at_ns, (row.flags & KVFS_RECORD_KEPT) != 0, row.hits, row.writing, row.first_sequence,
                (row.flags & KVFS_RECORD_NAMED) != 0, piece, meta)

    def get(self, uint64_t object_id):
        cdef const kvfs_record *row = kvfs_records_find(&self._r, object_id)
        return None if row == NULL else self._fields(row)

    def take(self, uint64_t object_id):
        cdef const kvfs_record *row = kvfs_records_find(&self._r, object_id)
        if row == NULL:
            return None
        fields = self._fields(row)
        kvfs_records_remove(&self._r, object_id)
        return fields

    def __contains__(self, uint64_t object_id):
        return kvfs_records_find(&self._r, object_id) != NULL

    def __len__(self):
        return self._r.count

    def is_kept(self, uint64_t object_id):
        cdef const kvfs_record *row = kvfs_records_find(&self._r, object_id)
        return row != NULL and (row.flags & KVFS_RECORD_KEPT) != 0

    def ids(self):
        cdef Aged *found = <Aged *>malloc((self._r.count + 1) * sizeof(Aged))
        cdef uint32_t at
        cdef Py_ssize_t count = 0
        if found == NULL:
            raise MemoryError
        try:
            for at in range(self._r.used):
                if self._r.rows[at].flags & KVFS_RECORD_USED:
                    found[count] = Aged(self._r.rows[at].first_sequence, self._r.rows[at].object_id)
                    count += 1
            qsort(found, <size_t>count, sizeof(Aged), by_age)
            return [found[at].object_id for at in range(count)]
        finally:
            free(found)

    def oldest(self, tuple after not None, Py_ssize_t count):
        cdef uint64_t first_sequence = after[0], object_id = after[1]
        cdef Aged *heap = <Aged *>malloc((count + 1) * sizeof(Aged))
        cdef Py_ssize_t filled = 0, back
        cdef uint32_t at
        cdef Aged aged
        if heap == NULL:
            raise MemoryError
        try:
            for at in range(self._r.used):
                if (self._r.rows[at].flags & (KVFS_RECORD_PLACED | KVFS_RECORD_KEPT)) != KVFS_RECORD_PLACED:
                    continue
                aged = Aged(self._r.rows[at].first_sequence, self._r.rows[at].object_id)
                if not is_past(&aged, first_sequence, object_id):
                    continue
                if filled < count:
                    heap[filled] = aged
                    filled += 1
                    if filled == count:
                        for back in range(count // 2, -1, -1):
                            sift(heap, back, count)
                elif count and by_age(&aged, &heap[0]) < 0:
                    heap[0] = aged
                    sift(heap, 0, count)
            qsort(heap, <size_t>filled, sizeof(Aged), by_age)
            return [(heap[back].first_sequence, heap[back].object_id) for back in range(filled)]
        finally:
            free(heap)

    @property
    def state_bytes(self):
        return self._r.room * sizeof(kvfs_record) + (self._r.mask + <uint64_t>1) * sizeof(uint32_t)


def unused(dict values not None):
    cdef PyObject *key
    cdef PyObject *value
    cdef Py_ssize_t at = 0
    cdef list found = []
    while PyDict_Next(values, &at, &key, &value):
        if value.ob_refcnt == 1:
            found.append(<object>key)
    return found
