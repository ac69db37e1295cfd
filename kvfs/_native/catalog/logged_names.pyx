"""What a replay of the log takes in without Python: objects of one extent, and their names.

Invariants: whatever is unusual about a record is left to the caller (`tiers.recovery.log_replay`), which decides what it
means; so both read the same from the same records. Concurrency: one thread, with the GIL.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport INT64_MAX, UINT16_MAX, UINT32_MAX, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset

from kvfs._native.catalog.records cimport (
    KVFS_RECORD_BLOCK, KVFS_RECORD_HAS_META, KVFS_RECORD_KEPT, KVFS_RECORD_NAMED, KVFS_RECORD_PLACED,
    KVFS_RECORD_UNIT, KVFS_RECORD_USED, RecordRows, kvfs_record, kvfs_records_find, kvfs_records_insert,
)

cdef extern from "hash/xxh3.h" nogil:
    uint64_t kvfs_xxh3_64(const void *data, size_t bytes)

cdef enum:
    DATA = 1
    META = 2
    KIND_OBJECT = 1
    KIND_BLOCK = 2
    KEY_BYTES = 16
    HEADER_BYTES = 192
    LENGTH_BYTES = 4
    ROW_BYTES = 68
    ROW_FLAGS_AT = 4
    PINNED = 1
    MAX_BUCKET_ID_BITS = 53

cdef uint32_t NONE = UINT32_MAX
cdef uint64_t MAX_OBJECT_ID = (<uint64_t>1 << MAX_BUCKET_ID_BITS) - 1

# One record header of the segments (kvfs.formats.RECORD_HEADER, docs/formats.md).
cdef packed struct Header:
    uint8_t magic[4]
    uint16_t version
    uint8_t type
    uint8_t kind
    uint32_t header_bytes
    uint32_t body_bytes
    uint64_t record_bytes
    uint64_t payload_bytes
    uint32_t payload_offset
    uint32_t flags
    uint64_t segment_sequence
    uint64_t sequence
    uint8_t key[16]
    uint8_t parent[16]
    uint64_t object_id
    uint32_t extent_number
    uint32_t generation
    uint64_t object_bytes
    int64_t sealed_at_ns
    uint32_t uid
    uint32_t bucket_id
    uint64_t origin_sequence
    uint8_t reserved0[24]
    uint64_t payload_checksum
    uint64_t body_checksum
    uint8_t reserved1[8]
    uint64_t header_checksum


cdef uint32_t length_at(const uint8_t *at) noexcept nogil:
    cdef uint32_t value
    memcpy(&value, at, LENGTH_BYTES)
    return value


cdef bint is_object_key(const uint8_t *key, uint64_t object_id) noexcept nogil:
    cdef int i
    for i in range(8):
        if key[i] or key[15 - i] != <uint8_t>(object_id >> 8 * i):
            return False
    return True


cdef bint is_plain_row(const uint8_t *row, uint32_t row_bytes) noexcept nogil:
    """Return whether these bytes are a name's row (kvfs.index.rows) without any flag but that it is pinned."""
    if row_bytes < ROW_BYTES or row[0] != 1 or row[2] or row[3] or (row[1] != 0 and row[1] != KEY_BYTES):
        return False
    return row_bytes >= <uint32_t>ROW_BYTES + row[1] and (length_at(row + ROW_FLAGS_AT) & ~<uint32_t>PINNED) == 0


cdef bint is_plain_body(const uint8_t *body, uint32_t body_bytes) noexcept nogil:
    """Return whether these bytes are a META's body with such a row, and nothing else."""
    cdef uint64_t at = 0, part
    for part in range(2):
        if at + LENGTH_BYTES > body_bytes:
            return False
        at += LENGTH_BYTES + <uint64_t>length_at(body + at)
    if at + LENGTH_BYTES > body_bytes or at + LENGTH_BYTES + length_at(body + at) != body_bytes:
        return False
    return is_plain_row(body + at + LENGTH_BYTES, <uint32_t>(body_bytes - at - LENGTH_BYTES))


cdef class LoggedNames:
    def __cinit__(self):
        self.contended = []
        self._grow()

    def __dealloc__(self):
        free(self._names)
        free(self._by_id)
        free(self._by_name)
        free(self._bytes)

    cdef uint32_t _home(self, const uint8_t *name, uint32_t bytes) noexcept:
        return <uint32_t>kvfs_xxh3_64(name, bytes) & self._mask

    cdef int _grow(self) except -1:
        """Have room for twice as many."""
        cdef uint32_t places = 1024 if self._room == 0 else 2 * self._room, i, home
        cdef LoggedName *names = <LoggedName *>realloc(self._names, places * sizeof(LoggedName))
        if names == NULL:
            raise MemoryError
        self._names = names
        self._room = places
        free(self._by_id)
        free(self._by_name)
        self._by_id = <uint32_t *>malloc(places * sizeof(uint32_t))
        self._by_name = <uint32_t *>malloc(places * sizeof(uint32_t))
        if self._by_id == NULL or self._by_name == NULL:
            raise MemoryError
        memset(self._by_id, 0xFF, places * sizeof(uint32_t))
        memset(self._by_name, 0xFF, places * sizeof(uint32_t))
        self._mask = places - 1
        for i in range(self._count):
            home = self._home(<const uint8_t *>&names[i].object_id, sizeof(uint64_t))
            names[i].next_id = self._by_id[home]
            self._by_id[home] = i
            home = self._home(self._bytes + names[i].at, names[i].bucket_bytes + names[i].key_bytes + 2 * LENGTH_BYTES)
            names[i].next_name = self._by_name[home]
            self._by_name[home] = i
        return 0

    cdef LoggedName *entry(self, uint64_t object_id) noexcept:
        cdef uint32_t i = self._by_id[self._home(<const uint8_t *>&object_id, sizeof(uint64_t))]
        while i != NONE:
            if self._names[i].object_id == object_id and self._names[i].body_bytes:
                return &self._names[i]
            i = self._names[i].next_id
        return NULL

    cdef LoggedName *_of_name(self, const uint8_t *body, uint32_t bytes, uint32_t bucket_bytes) noexcept:
        """Return the entry with the name that a body begins with, of so many bytes with both lengths."""
        cdef uint32_t i = self._by_name[self._home(body, bytes)]
        cdef LoggedName *n
        while i != NONE:
            n = &self._names[i]
            if (n.body_bytes and n.bucket_bytes == bucket_bytes
                    and n.bucket_bytes + n.key_bytes + 2 * LENGTH_BYTES == bytes
                    and memcmp(self._bytes + n.at, body, bytes) == 0):
                return n
            i = n.next_name
        return NULL

    cdef int add(self, uint64_t object_id, uint64_t sequence, const uint8_t *body, uint32_t body_bytes) except -1:
        """Add a plain body; return 0, with nothing changed, where another object has its name."""
        cdef uint32_t bucket_bytes = length_at(body), home
        cdef uint32_t key_bytes = length_at(body + LENGTH_BYTES + bucket_bytes)
        cdef uint32_t bytes = bucket_bytes + key_bytes + 2 * LENGTH_BYTES
        cdef LoggedName *n = self._of_name(body, bytes, bucket_bytes)
        cdef uint8_t *more
        if n != NULL:
            self.contended.append(n.object_id)
            return 0
        if self._count == self._room:
            self._grow()
        if self._used + body_bytes > self._bytes_room:
            self._bytes_room += self._bytes_room // 4 + body_bytes + 65536
            more = <uint8_t *>realloc(self._bytes, self._bytes_room)
            if more == NULL:
                raise MemoryError
            self._bytes = more
        memcpy(self._bytes + self._used, body, body_bytes)
        n = &self._names[self._count]
        n.object_id, n.sequence, n.at = object_id, sequence, self._used
        n.bucket_bytes, n.key_bytes, n.body_bytes = bucket_bytes, key_bytes, body_bytes
        home = self._home(<const uint8_t *>&object_id, sizeof(uint64_t))
        n.next_id = self._by_id[home]
        self._by_id[home] = self._count
        home = self._home(body, bytes)
        n.next_name = self._by_name[home]
        self._by_name[home] = self._count
        self._used += body_bytes
        self._count += 1
        self._there += 1
        return 1

    cdef bytes _piece(self, uint64_t at, uint64_t bytes):
        return PyBytes_FromStringAndSize(<const char *>self._bytes + at, <Py_ssize_t>bytes)

    def get(self, uint64_t object_id):
        cdef LoggedName *n = self.entry(object_id)
        cdef uint64_t key_at, row_at
        if n == NULL:
            return None
        key_at = n.at + 2 * LENGTH_BYTES + n.bucket_bytes
        row_at = key_at + n.key_bytes + LENGTH_BYTES
        return (self._piece(row_at, n.at + n.body_bytes - row_at),
                self._piece(n.at + LENGTH_BYTES, n.bucket_bytes) + b"\0" + self._piece(key_at, n.key_bytes))

    def pop(self, uint64_t object_id):
        cdef LoggedName *n = self.entry(object_id)
        if n == NULL:
            return None
        found = self._piece(n.at, n.body_bytes), n.sequence
        n.body_bytes = 0
        self._there -= 1
        return found

    def sequence(self, uint64_t object_id):
        cdef LoggedName *n = self.entry(object_id)
        return 0 if n == NULL else n.sequence

    def find(self, bytes name not None):
        bucket, _, key = name.partition(b"\0")
        head = len(bucket).to_bytes(4, "little") + bucket + len(key).to_bytes(4, "little") + key
        cdef LoggedName *n = self._of_name(<const uint8_t *>PyBytes_AS_STRING(head), <uint32_t>len(head),
                                           <uint32_t>len(bucket))
        return None if n == NULL else n.object_id

    def ids(self):
        cdef uint32_t i
        return [self._names[i].object_id for i in range(self._count) if self._names[i].body_bytes]

    def __contains__(self, uint64_t object_id):
        return self.entry(object_id) != NULL

    def __len__(self):
        return self._there


cdef bint is_hash(const uint8_t *key) noexcept:
    """Return whether a key may be a block's: those of named objects begin with 8 zeros."""
    cdef uint64_t high
    memcpy(&high, key, sizeof(high))
    return high != 0


cdef int take_data(RecordRows rows, const Header *h, uint16_t segment, uint64_t offset, uint64_t extent_bytes) except -1:
    """Take an object's only extent in; return 0 where it is not plain."""
    cdef uint64_t units = h.record_bytes // KVFS_RECORD_UNIT
    cdef kvfs_record *row
    cdef int i
    if h.extent_number or h.object_bytes > extent_bytes or h.payload_bytes != h.object_bytes:
        return 0
    if h.object_bytes > UINT32_MAX or h.payload_bytes > h.record_bytes or units > UINT16_MAX:
        return 0
    if h.record_bytes % KVFS_RECORD_UNIT or offset % KVFS_RECORD_UNIT or offset // KVFS_RECORD_UNIT > UINT32_MAX:
        return 0
    if h.kind == KIND_OBJECT:
        if not is_object_key(h.key, h.object_id):
            return 0
        for i in range(KEY_BYTES):
            if h.parent[i]:
                return 0
    elif h.kind != KIND_BLOCK or not is_hash(h.key):
        return 0
    row = kvfs_records_insert(&rows._r, h.object_id)
    if row == NULL:
        raise MemoryError
    row.first_sequence, row.writing, row.checksum = h.sequence, h.origin_sequence, h.payload_checksum
    row.sealed_at_ns, row.size_bytes = h.sealed_at_ns, <uint32_t>h.object_bytes
    row.segment, row.record_units = segment, <uint16_t>units
    row.offset_units = <uint32_t>(offset // KVFS_RECORD_UNIT)
    row.bucket_id, row.uid = h.bucket_id, h.uid
    row.flags = KVFS_RECORD_USED | KVFS_RECORD_PLACED
    if h.kind == KIND_BLOCK:
        row.flags = row.flags | KVFS_RECORD_BLOCK
        memcpy(row.key, h.key, KEY_BYTES)
        memcpy(row.parent, h.parent, KEY_BYTES)
    return 1


cdef int take_meta(kvfs_record *row, LoggedNames names, const Header *h, const uint8_t *body, uint16_t segment,
                   uint64_t offset) except -1:
    """Take an object's first name in; return 0 where it is not plain."""
    if h.kind != KIND_OBJECT or row.flags & (KVFS_RECORD_BLOCK | KVFS_RECORD_HAS_META | KVFS_RECORD_NAMED):
        return 0
    if not is_object_key(h.key, h.object_id) or h.object_bytes != row.size_bytes:
        return 0
    if not is_plain_body(body, h.body_bytes) or names.entry(h.object_id) != NULL:
        return 0
    if not names.add(h.object_id, h.origin_sequence or h.sequence, body, h.body_bytes):
        return 0
    row.flags = row.flags | KVFS_RECORD_HAS_META | KVFS_RECORD_NAMED
    row.meta_segment, row.meta_offset = segment, offset
    row.meta_counted = h.record_bytes + HEADER_BYTES + h.body_bytes
    row.bucket_id = h.bucket_id
    return 1


def take_plain(RecordRows rows not None, LoggedNames names not None, dict used not None, set apart not None,
               const uint8_t[::1] headers not None, const uint8_t[::1] bodies not None, tuple place not None,
               uint64_t segment, uint64_t extent_bytes):
    cdef uint64_t number = place[0], offset = place[1], body_at = place[2], writing = 0
    cdef uint64_t count = <uint64_t>len(headers) // HEADER_BYTES, bodies_bytes = <uint64_t>len(bodies)
    cdef const Header *h
    cdef kvfs_record *row
    cdef bint is_any_apart = bool(used) or bool(apart)
    assert sizeof(Header) == HEADER_BYTES
    while number < count and segment <= UINT16_MAX:
        h = <const Header *>&headers[number * HEADER_BYTES]
        if h.type != DATA and h.type != META or h.body_bytes > bodies_bytes - body_at:
            break
        if is_any_apart and (h.object_id in used or h.object_id in apart):
            break
        row = kvfs_records_find(&rows._r, h.object_id)
        if h.type == DATA:
            if row != NULL or h.body_bytes or not take_data(rows, h, <uint16_t>segment, offset, extent_bytes):
                break
            if writing < h.origin_sequence <= <uint64_t>INT64_MAX:
                writing = h.origin_sequence
        elif row == NULL or not h.body_bytes or not take_meta(row, names, h, &bodies[body_at], <uint16_t>segment, offset):
            break
        number += 1
        offset += h.record_bytes
        body_at += h.body_bytes
    return number, offset, body_at, writing


def repeated_blocks(RecordRows rows not None, list others not None):
    cdef uint32_t places = 1024, at, i
    cdef kvfs_record *row
    cdef uint32_t *index
    cdef set taken = set(others)
    cdef set found = set()
    while places < 2 * rows._r.count:
        places *= 2
    index = <uint32_t *>malloc(places * sizeof(uint32_t))
    if index == NULL:
        raise MemoryError
    memset(index, 0xFF, places * sizeof(uint32_t))
    try:
        for i in range(rows._r.used):
            row = &rows._r.rows[i]
            if not row.flags & KVFS_RECORD_BLOCK:
                continue
            if taken and PyBytes_FromStringAndSize(<const char *>row.key, KEY_BYTES) in taken:
                found.add(row.object_id)
            at = <uint32_t>kvfs_xxh3_64(row.key, KEY_BYTES) & (places - 1)
            while index[at] != NONE and memcmp(rows._r.rows[index[at]].key, row.key, KEY_BYTES) != 0:
                at = (at + 1) & (places - 1)
            if index[at] != NONE:
                found.add(row.object_id)
                found.add(rows._r.rows[index[at]].object_id)
            index[at] = i
    finally:
        free(index)
    return sorted(found)


def nameless(RecordRows rows not None):
    cdef uint32_t i, flags
    cdef list found = []
    for i in range(rows._r.used):
        flags = rows._r.rows[i].flags
        if flags & KVFS_RECORD_USED and not flags & (KVFS_RECORD_BLOCK | KVFS_RECORD_HAS_META):
            found.append(rows._r.rows[i].object_id)
    return found


def count_rows(RecordRows rows not None, dict kept not None):
    cdef uint32_t i, bucket_id = 0
    cdef uint64_t highest = 0, counted
    cdef bint is_known = False, is_kept = False
    cdef kvfs_record *row
    cdef list others = []
    cdef int64_t live[65536]
    cdef int64_t moved[65536]
    memset(live, 0, sizeof(live))
    memset(moved, 0, sizeof(moved))
    for i in range(rows._r.used):
        row = &rows._r.rows[i]
        if not row.flags & KVFS_RECORD_USED:
            continue
        if highest < row.object_id <= MAX_OBJECT_ID:
            highest = row.object_id
        if not is_known or row.bucket_id != bucket_id:
            bucket_id, is_known = row.bucket_id, row.bucket_id in kept
            is_kept = is_known and kept[bucket_id]
            if not is_known:
                others.append(row.object_id)
                continue
        if is_kept:
            row.flags = row.flags | KVFS_RECORD_KEPT
        if row.flags & KVFS_RECORD_PLACED:
            counted = row.record_units * KVFS_RECORD_UNIT + HEADER_BYTES
            live[row.segment] += <int64_t>counted
            moved[row.segment] += <int64_t>counted if is_kept else 0
        if row.flags & KVFS_RECORD_HAS_META:
            live[row.meta_segment & UINT16_MAX] += <int64_t>row.meta_counted
            moved[row.meta_segment & UINT16_MAX] += <int64_t>row.meta_counted
    return others, [(i, live[i], moved[i]) for i in range(65536) if live[i]], highest
