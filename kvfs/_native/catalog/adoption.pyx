"""What a start takes over, seen from Python: a thin seam over `adoption_core.c`, and what of it goes into the new table,
the block index and a policy.

Invariants: what is wanted is whole. Concurrency: one thread; `check_files` and `verify` may be called by several at once,
which share the work, and drop the GIL, as `verify_slots` does.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memchr, memcmp, memcpy, memset
from posix.unistd cimport pread

from kvfs.errors import from_errno

from kvfs._native.catalog.block_index cimport BlockIndex, kvfs_block
from kvfs._native.catalog.object_names cimport ObjectName, ObjectNames
from kvfs._native.catalog.records cimport RecordRows, kvfs_records_find
from kvfs._native.shared.name_row cimport (
    KVFS_ROW_DIRECTORY, KVFS_ROW_LINK, KVFS_ROW_PINNED, KVFS_ROW_RETIRED, kvfs_name_row, kvfs_name_row_load,
    kvfs_unit_bytes,
)
from kvfs._native.shared.slots cimport check_slot, has_writer, kvfs_slot_stat
from kvfs._native.shared.table cimport (
    Table, kvfs_entry_value, kvfs_entry_view, kvfs_slot_header, kvfs_slot_header_read, kvfs_table, kvfs_table_header,
    kvfs_table_lookup, put_entry, set_entry_access, set_slot_generation, write_slot,
)

cdef extern from "shared/formats.h":
    enum:
        KVFS_KEY_BYTES
        KVFS_KIND_BLOCK
        KVFS_TIER_DRAM
        KVFS_TIER_UNVERIFIED
        KVFS_ENTRY_PINNED
        KVFS_SLOT_SEALED
        KVFS_MARK_HAS_CHECKSUM

cdef extern from "shared/slots_core.h" nogil:
    enum: KVFS_HASH_CHUNK_BYTES

cdef extern from "catalog/adoption_core.h" nogil:
    enum:
        KVFS_SURVIVOR_WHOLE
        KVFS_SURVIVOR_WANTED
        KVFS_SURVIVOR_PINNED
        KVFS_SURVIVOR_LATER
        KVFS_SURVIVOR_BAD
    struct kvfs_survivor:
        kvfs_slot_header header
        uint32_t slot
        uint32_t hits
        uint32_t last_access_s
        uint32_t blocks
        uint32_t unit
        uint32_t flags
    struct kvfs_adoption:
        kvfs_survivor *survivors
        uint32_t count
        uint32_t *generations
        uint32_t *by_slot
        uint32_t used
        uint32_t *damaged
        uint32_t damaged_count
        uint32_t *order
        uint32_t ordered
        uint32_t slots
        uint32_t next

    int kvfs_adoption_init(kvfs_adoption *a, uint32_t slots)
    void kvfs_adoption_free(kvfs_adoption *a)
    int kvfs_adoption_read(kvfs_adoption *a, int fd, const kvfs_table_header *head)
    void kvfs_adoption_note_file(kvfs_adoption *a, uint32_t slot)
    ctypedef int kvfs_check_slot(int dirfd, uint32_t slot, kvfs_slot_stat *out)
    int kvfs_adoption_check_files(kvfs_adoption *a, int dirfd, kvfs_check_slot *check, uint64_t later_bytes)
    ctypedef int kvfs_probe_fd(int fd)
    int kvfs_adoption_verify(kvfs_adoption *a, int dirfd, kvfs_probe_fd *has_writer)
    int kvfs_adoption_keep_whole(kvfs_adoption *a)
    uint32_t kvfs_adoption_find(const kvfs_adoption *a, const uint8_t *key)
    int kvfs_adoption_sort(kvfs_adoption *a)
    uint32_t kvfs_adoption_fit(kvfs_adoption *a, int64_t room_bytes)
    void kvfs_adoption_drop_bad(kvfs_adoption *a)
    int kvfs_adoption_keeps(const kvfs_adoption *a, uint32_t slot)
    uint32_t kvfs_adoption_take_unkept(kvfs_adoption *a, uint32_t first)
    int kvfs_slot_matches(int dirfd, uint32_t slot, uint64_t size_bytes, uint64_t checksum, kvfs_probe_fd *has_writer,
                          uint8_t *chunk)

cdef extern from "<dirent.h>" nogil:
    struct dirent:
        unsigned char d_type
        char d_name[256]
    ctypedef struct DIR:
        pass
    enum:
        DT_REG
    DIR *fdopendir(int fd)
    dirent *readdir(DIR *directory)
    int closedir(DIR *directory)

cdef extern from "<errno.h>":
    int errno

import os

cdef uint32_t NO_SLOT = 0xFFFFFFFF


cdef int64_t slot_of_name(const char *name) noexcept nogil:
    """Return the slot that a file's name says, -1 for none."""
    cdef int64_t slot = 0
    cdef int i
    cdef char digit
    for i in range(8):
        digit = name[i]
        if 48 <= digit <= 57:
            slot = slot << 4 | (digit - 48)
        elif 97 <= digit <= 102:
            slot = slot << 4 | (digit - 87)
        else:
            return -1
    return slot if name[8] == 0 else -1


cdef class Adoption:
    cdef kvfs_adoption _a

    def __cinit__(self, uint32_t slots):
        if kvfs_adoption_init(&self._a, slots) < 0:
            raise MemoryError

    def __dealloc__(self):
        kvfs_adoption_free(&self._a)

    cdef int _check(self, int rc, str what) except -1:
        if rc < 0:
            raise from_errno(rc, what)
        return 0

    # --- what is there -----------------------------------------------------------------------------------------

    def list_files(self, int dirfd):
        cdef dirent *entry
        cdef int64_t slot
        cdef list others = []
        cdef int fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=dirfd)
        cdef DIR *directory = fdopendir(fd)
        if directory == NULL:
            os.close(fd)
            raise MemoryError
        while True:
            entry = readdir(directory)
            if entry == NULL:
                break
            slot = slot_of_name(entry.d_name)
            if entry.d_type == DT_REG and 0 <= slot < self._a.slots:
                kvfs_adoption_note_file(&self._a, <uint32_t>slot)
            elif memcmp(entry.d_name, b".\0", 2) != 0 and memcmp(entry.d_name, b"..\0", 3) != 0:
                others.append((<bytes>entry.d_name, slot if entry.d_type == DT_REG else -1))
        closedir(directory)
        return others

    def read(self, int fd):
        cdef kvfs_table_header head
        cdef int rc
        if pread(fd, &head, sizeof(head), 0) != sizeof(head):
            return []
        with nogil:
            rc = kvfs_adoption_read(&self._a, fd, &head)
        self._check(rc, "read the table of an earlier service")
        return [self._a.damaged[i] for i in range(self._a.damaged_count)]

    def check_files(self, int dirfd, uint64_t later_bytes):
        cdef int rc
        with nogil:
            rc = kvfs_adoption_check_files(&self._a, dirfd, check_slot, later_bytes)
        self._check(rc, "look at the slots of an earlier service")

    def keep_whole(self):
        cdef int rc
        with nogil:
            rc = kvfs_adoption_keep_whole(&self._a)
        self._a.next = 0
        self._check(rc, "sort out the slots of an earlier service")

    # --- what is wanted ----------------------------------------------------------------------------------------

    def objects(self):
        cdef kvfs_survivor *s
        cdef uint32_t i
        for i in range(self._a.count):
            s = &self._a.survivors[i]
            if s.flags & KVFS_SURVIVOR_WHOLE and s.header.kind != KVFS_KIND_BLOCK:
                yield i, s.header.object_id, s.header.sequence, s.header.size_bytes

    @property
    def has_objects(self):
        cdef uint32_t i
        for i in range(self._a.count):
            if self._a.survivors[i].flags & KVFS_SURVIVOR_WHOLE and self._a.survivors[i].header.kind != KVFS_KIND_BLOCK:
                return True
        return False

    cdef kvfs_survivor *_object(self, uint64_t object_id):
        cdef uint8_t key[16]
        cdef uint32_t found
        cdef int i
        for i in range(8):
            key[i], key[15 - i] = 0, <uint8_t>(object_id >> 8 * i)
        found = kvfs_adoption_find(&self._a, key)
        return NULL if found == NO_SLOT else &self._a.survivors[found]

    def want_rows(self, list page not None, dict buckets not None, dict replaceable not None, ObjectNames names not None,
                  dict units not None):
        cdef bytes name, stored, bucket = b""
        cdef const char *at
        cdef const char *end
        cdef uint64_t key_bytes, unit_bytes
        cdef kvfs_name_row row
        cdef kvfs_survivor *s
        cdef object is_durable = None
        for name, stored in page:
            at = PyBytes_AS_STRING(name)
            if not kvfs_name_row_load(at, PyBytes_GET_SIZE(name), PyBytes_AS_STRING(stored), PyBytes_GET_SIZE(stored), &row):
                continue
            s = self._object(row.object_id)
            if s == NULL or not s.flags & KVFS_SURVIVOR_WHOLE or s.flags & KVFS_SURVIVOR_WANTED:
                continue
            end = <const char *>memchr(at, 0, PyBytes_GET_SIZE(name))
            if end == NULL or row.flags & (KVFS_ROW_DIRECTORY | KVFS_ROW_LINK | KVFS_ROW_RETIRED):
                continue
            if row.sequence != s.header.sequence or row.size_bytes != s.header.size_bytes:
                continue
            if end - at != PyBytes_GET_SIZE(bucket) or memcmp(at, PyBytes_AS_STRING(bucket), end - at) != 0 or not bucket:
                bucket = at[:end - at]
                is_durable = buckets.get(bucket)
            if is_durable is None:
                continue
            key_bytes = PyBytes_GET_SIZE(name) - (end - at) - 1
            s.flags |= KVFS_SURVIVOR_WANTED
            if is_durable or (replaceable and row.object_id in replaceable):
                s.flags &= ~<uint32_t>KVFS_SURVIVOR_LATER
            if row.flags & KVFS_ROW_PINNED:
                s.flags |= KVFS_SURVIVOR_PINNED
            unit_bytes = kvfs_unit_bytes(end + 1, key_bytes)
            s.unit = units.setdefault(at[:<uint64_t>(end - at) + 1 + unit_bytes], len(units) + 1) if unit_bytes else 0
            names.put(row.object_id, bucket, end + 1, key_bytes)

    def lost_rows(self, list page not None, ObjectNames names not None, RecordRows below, dict apart not None):
        cdef bytes name, stored
        cdef kvfs_name_row row
        cdef kvfs_survivor *s
        cdef list found = []
        for each in page:
            name, stored = each
            if (not kvfs_name_row_load(PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name), PyBytes_AS_STRING(stored),
                                       PyBytes_GET_SIZE(stored), &row)
                    or row.flags & (KVFS_ROW_DIRECTORY | KVFS_ROW_LINK | KVFS_ROW_RETIRED)
                    or (apart and row.object_id in apart)):
                found.append(each)
                continue
            if below is not None and kvfs_records_find(&below._r, row.object_id) != NULL:
                continue
            s = self._object(row.object_id)
            if s == NULL or not s.flags & KVFS_SURVIVOR_WANTED:
                found.append(each)
            elif not names.has(row.object_id, PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name)):
                found.append(each)
        return found

    def drop_names(self, ObjectNames names not None):
        cdef kvfs_survivor *s
        cdef uint32_t i
        for i in range(self._a.count):
            s = &self._a.survivors[i]
            if s.header.kind != KVFS_KIND_BLOCK and not s.flags & KVFS_SURVIVOR_WANTED and s.flags & KVFS_SURVIVOR_WHOLE:
                names.drop(s.header.object_id)

    def want_blocks(self, set buckets):
        cdef kvfs_survivor *s
        cdef uint32_t i, known = 0
        cdef bint any_known = False
        for i in range(self._a.count):
            s = &self._a.survivors[i]
            if not s.flags & KVFS_SURVIVOR_WHOLE or s.header.kind != KVFS_KIND_BLOCK:
                continue
            if not any_known or s.header.bucket_id != known:
                if s.header.bucket_id not in buckets:
                    continue
                known, any_known = s.header.bucket_id, True
            s.flags |= KVFS_SURVIVOR_WANTED

    def sort(self):
        cdef int rc
        with nogil:
            rc = kvfs_adoption_sort(&self._a)
        self._check(rc, "order the slots of an earlier service")

    def fit(self, int64_t room_bytes):
        return kvfs_adoption_fit(&self._a, room_bytes)

    def verify(self, int dirfd):
        cdef int rc
        with nogil:
            rc = kvfs_adoption_verify(&self._a, dirfd, has_writer)
        self._check(rc, "verify the slots of an earlier service")

    def drop_bad(self):
        cdef uint32_t i
        cdef list bad = []
        for i in range(self._a.ordered):
            if self._a.survivors[self._a.order[i]].flags & KVFS_SURVIVOR_BAD:
                bad.append(self._a.survivors[self._a.order[i]].slot)
        kvfs_adoption_drop_bad(&self._a)
        return bad

    def take_unkept(self):
        cdef uint32_t slot = kvfs_adoption_take_unkept(&self._a, 0), i
        cdef list found = []
        while slot != NO_SLOT:
            i = self._a.by_slot[slot] if slot < self._a.used else NO_SLOT
            found.append((slot, 0 if i == NO_SLOT else self._a.survivors[i].header.uid))
            slot = kvfs_adoption_take_unkept(&self._a, slot + 1)
        return found

    # --- what is kept ------------------------------------------------------------------------------------------

    def __len__(self):
        return self._a.ordered

    @property
    def slots_used(self):
        return self._a.used

    @property
    def size_bytes(self):
        cdef uint64_t total = 0
        cdef uint32_t i
        for i in range(self._a.ordered):
            total += self._a.survivors[self._a.order[i]].header.size_bytes
        return total

    @property
    def unverified(self):
        cdef uint32_t count = 0, i
        for i in range(self._a.ordered):
            count += (self._a.survivors[self._a.order[i]].flags & KVFS_SURVIVOR_LATER) != 0
        return count

    def keeps(self, uint64_t object_id):
        cdef kvfs_survivor *s = self._object(object_id)
        return s != NULL and (s.flags & KVFS_SURVIVOR_WANTED) != 0

    def highest_sequence(self, uint64_t limit):
        cdef uint64_t highest = 0, sequence
        cdef uint32_t i
        for i in range(self._a.ordered):
            sequence = self._a.survivors[self._a.order[i]].header.sequence
            if highest < sequence <= limit:
                highest = sequence
        return highest

    def bucket_ids(self):
        cdef kvfs_slot_header *h
        cdef uint32_t i, last = 0
        cdef set found = set()
        for i in range(self._a.ordered):
            h = &self._a.survivors[self._a.order[i]].header
            if h.kind == KVFS_KIND_BLOCK and (h.bucket_id != last or not found):
                last = h.bucket_id
                found.add(last)
        return found

    def fill_sealed(self, uint32_t[::1] counts not None):
        cdef kvfs_survivor *s
        cdef uint64_t total = 0
        cdef uint32_t i
        for i in range(self._a.ordered):
            s = &self._a.survivors[self._a.order[i]]
            if s.slot < <uint32_t>len(counts):
                counts[s.slot] = s.blocks + 1
                total += s.blocks
        return total * 512

    def write_headers(self, Table table not None):
        cdef kvfs_table *to = table.writer()
        cdef kvfs_slot_header header
        cdef uint32_t slot, generation, end = min(self._a.used, to.slot_count)
        cdef int rc = 0
        with nogil:
            for slot in range(end):
                generation = self._a.generations[slot]
                if kvfs_adoption_keeps(&self._a, slot):
                    header = self._a.survivors[self._a.by_slot[slot]].header
                    rc = write_slot(to, slot, &header)
                elif generation:
                    rc = set_slot_generation(to, slot, (generation + 1) | 1)
                if rc < 0:
                    break
        self._check(rc, "write the headers of slots that are taken over")

    def restore(self, Table table not None, BlockIndex blocks not None, dict numbers not None,
                ObjectNames names not None, insert, double now):
        cdef kvfs_table *to = table.writer()
        cdef kvfs_survivor *s
        cdef uint32_t i
        for i in range(self._a.ordered, 0, -1):
            s = &self._a.survivors[self._a.order[i - 1]]
            self._put(to, s)
            parent = group = None
            if s.header.kind == KVFS_KIND_BLOCK:
                parent = self._enter(blocks, numbers[s.header.bucket_id], s)
            elif s.unit:
                group = self._unit(names, s.header.object_id)
            insert(
                PyBytes_FromStringAndSize(<const char *>s.header.key, KVFS_KEY_BYTES),
                size_bytes=s.header.size_bytes,
                parent=parent,
                now=now,
                pinned=(s.flags & KVFS_SURVIVOR_PINNED) != 0,
                group=group,
            )

    cdef bytes _unit(self, ObjectNames names, uint64_t object_id):
        """Return the unit that an object's name is in."""
        cdef ObjectName *name = names.find(object_id)
        if name == NULL:
            return None
        return names._buckets[name.bucket] + b"\0" + name.key[:kvfs_unit_bytes(name.key, name.key_bytes)]

    cdef int _put(self, kvfs_table *table, const kvfs_survivor *s) except -1:
        cdef kvfs_entry_value value
        memset(&value, 0, sizeof(value))
        value.slot = s.slot
        value.generation = s.header.generation
        value.size_bytes = s.header.size_bytes
        value.kind = s.header.kind
        value.tiers = KVFS_TIER_UNVERIFIED if s.flags & KVFS_SURVIVOR_LATER else KVFS_TIER_DRAM
        if s.header.kind == KVFS_KIND_BLOCK and s.flags & KVFS_SURVIVOR_PINNED:
            value.flags = KVFS_ENTRY_PINNED
        self._check(put_entry(table, s.header.key, &value), "enter what is taken over in the table")
        set_entry_access(table, s.header.key, s.hits, s.last_access_s)
        return 0

    cdef bytes _enter(self, BlockIndex blocks, uint32_t bucket, const kvfs_survivor *s):
        """Enter a block in the index; return its parent."""
        cdef kvfs_block block
        cdef const uint64_t *parent = <const uint64_t *>s.header.parent
        memcpy(block.key, s.header.key, KVFS_KEY_BYTES)
        memcpy(block.parent, s.header.parent, KVFS_KEY_BYTES)
        block.has_parent = parent[0] != 0 or parent[1] != 0
        block.sequence = s.header.sequence
        block.size_bytes = s.header.size_bytes
        block.sealed_ns = s.header.sealed_at_ns
        block.uid = s.header.uid
        block.bucket = bucket
        block.pinned = (s.flags & KVFS_SURVIVOR_PINNED) != 0
        blocks.add_block(&block)
        if not block.has_parent:
            return None
        return PyBytes_FromStringAndSize(<const char *>s.header.parent, KVFS_KEY_BYTES)


cdef bint is_unverified(const kvfs_table *table, uint32_t slot, kvfs_slot_header *header) noexcept nogil:
    """Return whether a slot has an object whose payload is still to be hashed; its header is then in `header`."""
    cdef kvfs_entry_view entry
    if kvfs_slot_header_read(table, slot, header) < 0 or header.state != KVFS_SLOT_SEALED:
        return False
    if kvfs_table_lookup(table, header.key, &entry) != 1:
        return False
    return entry.tiers & KVFS_TIER_UNVERIFIED and entry.slot == slot and entry.generation == header.generation


def slot_matches(int dirfd, uint32_t slot, uint64_t size_bytes, uint64_t checksum):
    cdef uint8_t *chunk = <uint8_t *>malloc(KVFS_HASH_CHUNK_BYTES)
    cdef int rc = -1
    if chunk == NULL:
        raise MemoryError
    with nogil:
        rc = kvfs_slot_matches(dirfd, slot, size_bytes, checksum, has_writer, chunk)
    free(chunk)
    if rc < 0:
        raise from_errno(rc, f"verify slot {slot}")
    return rc == 1


def verify_slots(Table table not None, int dirfd, uint32_t first, uint32_t most, uint64_t most_bytes):
    cdef kvfs_table *of = table.pointer()
    cdef uint8_t *chunk = <uint8_t *>malloc(KVFS_HASH_CHUNK_BYTES)
    cdef kvfs_slot_header header
    cdef list found = []
    cdef uint32_t slot = first, end = of.header.slots_used, looked = 0
    cdef uint64_t hashed = 0
    cdef int rc = 0
    if chunk == NULL:
        raise MemoryError
    try:
        while slot < end and looked < most and hashed < most_bytes:
            with nogil:
                rc = -1
                while rc < 0 and slot < end and looked < most:
                    if is_unverified(of, slot, &header):
                        rc = kvfs_slot_matches(dirfd, slot, header.size_bytes, header.checksum, has_writer, chunk)
                        if rc < 0:
                            break
                    slot += 1
                    looked += 1
            if rc < -1:
                raise from_errno(rc, f"verify slot {slot}")
            if rc >= 0:
                hashed += header.size_bytes
                key = PyBytes_FromStringAndSize(<const char *>header.key, KVFS_KEY_BYTES)
                found.append((key, slot - 1, header.generation, rc == 1))
    finally:
        free(chunk)
    return slot, found
