"""The shared table seen from Python: a thin seam over `table_core.c` and the readers in `table_core.h`.

Invariants: keys and hashes arrive as bytes and are not copied; every bound (key length, slot number) is checked
here, since the C side trusts its caller.
Concurrency: one writing process, any of its threads; readers anywhere. Batches (`match`) drop the GIL, single
lookups (some 100 ns) keep it.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.errno cimport ENOSPC, EPROTONOSUPPORT, ESTALE
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

import os

from kvfs.errors import Corrupt, FormatMismatch, InvalidRequest, NoSpace, SessionClosed, from_errno

cdef extern from "shared/formats.h":
    enum:
        KVFS_KEY_BYTES
        KVFS_MARK_HAS_CHECKSUM
        KVFS_TIER_DRAM
        KVFS_TIER_HBM
        KVFS_TIER_NVME
        KVFS_TIER_REMOTE
        KVFS_TIER_COLD
        KVFS_TIER_UNVERIFIED
        KVFS_SLOT_FREE
        KVFS_SLOT_DRAFT
        KVFS_SLOT_SEALED
        KVFS_TABLE_MAX_LOAD_PERCENT

cdef extern from "shared/formats_offsets.h":
    struct kvfs_field:
        const char *structure
        const char *name
        size_t offset
        size_t size

    const kvfs_field kvfs_fields[]
    size_t kvfs_field_count

cdef extern from "shared/table_core.h":
    long long KVFS_READER_WAIT_NS

FREE = KVFS_SLOT_FREE
DRAFT = KVFS_SLOT_DRAFT
SEALED = KVFS_SLOT_SEALED

TIER_DRAM = KVFS_TIER_DRAM
TIER_HBM = KVFS_TIER_HBM
TIER_NVME = KVFS_TIER_NVME
TIER_REMOTE = KVFS_TIER_REMOTE
TIER_COLD = KVFS_TIER_COLD
TIER_UNVERIFIED = KVFS_TIER_UNVERIFIED

READER_WAIT_NS = KVFS_READER_WAIT_NS
MAX_LOAD_PERCENT = KVFS_TABLE_MAX_LOAD_PERCENT


def native_fields():
    cdef size_t i
    return [
        (kvfs_fields[i].structure.decode(), kvfs_fields[i].name.decode(), kvfs_fields[i].offset, kvfs_fields[i].size)
        for i in range(kvfs_field_count)
    ]


cdef int put_entry(kvfs_table *t, const uint8_t *key, const kvfs_entry_value *value) noexcept nogil:
    """Put an entry, for other native modules of the writing process, which do not link the C side."""
    return kvfs_table_put(t, key, value)


cdef int publish_slot(kvfs_table *t, uint32_t slot, uint32_t draft, const kvfs_slot_header *header) noexcept nogil:
    return kvfs_slot_publish(t, slot, draft, header)


cdef int write_slot(kvfs_table *t, uint32_t slot, const kvfs_slot_header *header) noexcept nogil:
    return kvfs_slot_header_write(t, slot, header)


cdef int set_slot_generation(kvfs_table *t, uint32_t slot, uint32_t generation) noexcept nogil:
    return kvfs_slot_set_generation(t, slot, generation)


cdef int set_entry_access(kvfs_table *t, const uint8_t *key, uint32_t hits, uint32_t last_access_s) noexcept nogil:
    return kvfs_table_set_access(t, key, hits, last_access_s)


cdef class Entry:
    """A consistent copy of one index entry."""

    cdef readonly int kind
    cdef readonly int tiers
    cdef readonly int flags
    cdef readonly uint32_t slot
    cdef readonly uint32_t generation
    cdef readonly uint64_t size_bytes
    cdef readonly uint64_t location
    cdef readonly uint32_t hits
    cdef readonly uint32_t last_access_s

    def __repr__(self):
        return (f"Entry(kind={self.kind}, slot={self.slot}, generation={self.generation}, size_bytes={self.size_bytes},"
                f" tiers={self.tiers:#x}, hits={self.hits})")


cdef Entry make_entry(const kvfs_entry_view *view):
    cdef Entry entry = Entry.__new__(Entry)
    entry.kind = view.kind
    entry.tiers = view.tiers
    entry.flags = view.flags
    entry.slot = view.slot
    entry.generation = view.generation
    entry.size_bytes = view.size_bytes
    entry.location = view.location
    entry.hits = view.hits
    entry.last_access_s = view.last_access_s
    return entry


cdef class SlotHeader:
    """A consistent copy of one slot header whose own checksum held."""

    cdef readonly int state
    cdef readonly int kind
    cdef readonly uint32_t generation
    cdef readonly uint32_t flags
    cdef readonly bytes key
    cdef readonly uint64_t object_id
    cdef readonly uint64_t sequence
    cdef readonly uint64_t size_bytes
    cdef readonly object checksum
    cdef readonly bytes parent
    cdef readonly uint32_t uid
    cdef readonly uint32_t bucket_id
    cdef readonly int64_t sealed_at_ns


cdef SlotHeader make_header(const kvfs_slot_header *raw):
    cdef SlotHeader header = SlotHeader.__new__(SlotHeader)
    header.state = raw.state
    header.kind = raw.kind
    header.generation = raw.generation
    header.flags = raw.flags
    header.key = PyBytes_FromStringAndSize(<const char *>raw.key, KVFS_KEY_BYTES)
    header.object_id = raw.object_id
    header.sequence = raw.sequence
    header.size_bytes = raw.size_bytes
    header.checksum = raw.checksum if raw.marks & KVFS_MARK_HAS_CHECKSUM else None
    header.parent = PyBytes_FromStringAndSize(<const char *>raw.parent, KVFS_KEY_BYTES)
    header.uid = raw.uid
    header.bucket_id = raw.bucket_id
    header.sealed_at_ns = raw.sealed_at_ns
    return header


cdef const uint8_t *key_pointer(bytes key) except NULL:
    if key is None or PyBytes_GET_SIZE(key) != KVFS_KEY_BYTES:
        raise InvalidRequest(f"a store key has {KVFS_KEY_BYTES} bytes, not {len(key) if key is not None else key}")
    return <const uint8_t *>PyBytes_AS_STRING(key)


cdef int fill_header(kvfs_slot_header *raw, int kind, uint32_t flags, bytes key, uint64_t object_id,
                     uint64_t sequence, uint64_t size, object checksum, bytes parent, uint32_t uid,
                     uint32_t bucket_id, int64_t sealed_at_ns) except -1:
    memset(raw, 0, sizeof(kvfs_slot_header))
    raw.kind = kind
    raw.flags = flags
    memcpy(raw.key, key_pointer(key), KVFS_KEY_BYTES)
    raw.object_id = object_id
    raw.sequence = sequence
    raw.size_bytes = size
    if checksum is not None:
        raw.checksum = checksum
        raw.marks = KVFS_MARK_HAS_CHECKSUM
    memcpy(raw.parent, key_pointer(parent), KVFS_KEY_BYTES)
    raw.uid = uid
    raw.bucket_id = bucket_id
    raw.sealed_at_ns = sealed_at_ns
    return 0


cdef class Table:
    """The shared table: slot headers and index. `create` for the one writer, `attach` for readers."""

    def __cinit__(self):
        self._open = False

    def __dealloc__(self):
        if self._open:
            self._open = False
            kvfs_table_close(&self._table)

    @staticmethod
    def create(path, bytes store_id, slots, entries):
        cdef Table table = Table.__new__(Table)
        cdef bytes name = os.fsencode(path)
        if not 0 < slots < 1 << 31 or not 0 < entries <= 1 << 31 or entries & (entries - 1):
            raise InvalidRequest(f"table of {slots} slots and {entries} entries: both above 0, entries a power of two")
        cdef int rc = kvfs_table_create(&table._table, name, key_pointer(store_id), slots, entries)
        if rc < 0:
            raise from_errno(rc, f"create table {os.fsdecode(path)}")
        table._open = True
        table.path = os.fsdecode(path)
        return table

    @staticmethod
    def attach(path, bytes store_id=None):
        cdef Table table = Table.__new__(Table)
        cdef bytes name = os.fsencode(path)
        cdef const char *why = NULL
        cdef const uint8_t *wanted = NULL
        if store_id is not None:
            wanted = key_pointer(store_id)
        cdef int rc = kvfs_table_attach(&table._table, name, wanted, &why)
        if rc == -EPROTONOSUPPORT and why != NULL:
            raise FormatMismatch(f"{os.fsdecode(path)} is {why.decode()}")
        if rc < 0:
            raise from_errno(rc, f"attach table {os.fsdecode(path)}")
        table._open = True
        table.path = os.fsdecode(path)
        return table

    @staticmethod
    def mark_dead(path):
        cdef bytes name = os.fsencode(path)
        cdef int rc = kvfs_table_mark_dead(name)
        if rc < 0 and rc != -EPROTONOSUPPORT:
            raise from_errno(rc, f"mark table {os.fsdecode(path)} dead")
        return rc == 0

    cdef kvfs_table *pointer(self) except NULL:
        if not self._open:
            raise SessionClosed(f"table {self.path} is closed")
        return &self._table

    cdef kvfs_table *writer(self) except NULL:
        if not self._open:
            raise SessionClosed(f"table {self.path} is closed")
        if not self._table.writable:
            raise InvalidRequest(f"table {self.path} is attached for reading only")
        return &self._table

    def close(self):
        if self._open:
            self._open = False
            kvfs_table_close(&self._table)

    # --- index ---------------------------------------------------------------------------------------------

    def put(self, bytes key, int kind, uint32_t slot, uint32_t generation, uint64_t size, int tiers=1, int flags=0,
            uint64_t location=0):
        cdef kvfs_table *table = self.writer()
        cdef kvfs_entry_value value
        if not 0 <= kind < 256 or not 0 <= tiers < 256 or not 0 <= flags < 256:
            raise InvalidRequest(f"kind {kind}, tiers {tiers}, flags {flags}: each is one byte")
        value.slot = slot
        value.generation = generation
        value.size_bytes = size
        value.location = location
        value.kind = kind
        value.tiers = tiers
        value.flags = flags
        cdef int rc = kvfs_table_put(table, key_pointer(key), &value)
        if rc == -ENOSPC:
            raise NoSpace(f"table {self.path} is full: {len(self)} of {self.max_entries} entries")
        if rc < 0:
            raise from_errno(rc, f"put into table {self.path}")

    def get(self, bytes key):
        cdef kvfs_entry_view view
        cdef int rc = kvfs_table_lookup(self.pointer(), key_pointer(key), &view)
        if rc < 0:
            raise from_errno(rc, f"look up in table {self.path}: its writer stopped in mid-change")
        return make_entry(&view) if rc else None

    def remove(self, bytes key):
        return kvfs_table_remove(self.writer(), key_pointer(key)) == 1

    def touch(self, bytes key):
        return kvfs_table_touch(self.writer(), key_pointer(key)) == 1

    def set_access(self, bytes key, uint32_t hits, uint32_t last_access_s):
        return kvfs_table_set_access(self.writer(), key_pointer(key), hits, last_access_s) == 1

    def match(self, hashes, int kind=2):
        cdef kvfs_table *table = self.pointer()
        cdef Py_buffer keys
        cdef int64_t hit
        cdef uint64_t n
        PyObject_GetBuffer(hashes, &keys, PyBUF_SIMPLE)
        try:
            n = keys.len // KVFS_KEY_BYTES
            if n * KVFS_KEY_BYTES != <uint64_t>keys.len:
                raise InvalidRequest(f"{keys.len} bytes of hashes are no multiple of {KVFS_KEY_BYTES}")
            with nogil:
                hit = kvfs_table_match(table, <const uint8_t *>keys.buf, n, kind)
        finally:
            PyBuffer_Release(&keys)
        if hit < 0:
            raise from_errno(<int>hit, f"match in table {self.path}: its writer stopped in mid-change")
        return hit

    def items(self):
        cdef uint32_t index
        cdef kvfs_entry_view view
        cdef uint8_t key[16]
        cdef int rc
        for index in range(self.pointer().header.entry_count):
            rc = kvfs_entry_at(self.pointer(), index, key, &view)
            if rc < 0:
                raise from_errno(rc, f"walk table {self.path}: its writer stopped in mid-change")
            if rc:
                yield PyBytes_FromStringAndSize(<const char *>key, KVFS_KEY_BYTES), make_entry(&view)

    def __len__(self):
        return self.pointer().header.live_entries

    def __contains__(self, bytes key):
        return self.get(key) is not None

    # --- slot headers --------------------------------------------------------------------------------------

    cdef uint32_t _slot(self, uint32_t slot) except? 0xFFFFFFFF:
        if slot >= self.pointer().slot_count:
            raise InvalidRequest(f"slot {slot} of a table with {self._table.slot_count} slots")
        return slot

    def begin(self, uint32_t slot):
        cdef uint32_t generation = 0
        cdef int rc = kvfs_slot_begin(self.writer(), self._slot(slot), &generation)
        if rc < 0:
            raise from_errno(rc, f"slot {slot} is not free" if rc == -ESTALE else f"room for the header of slot {slot}")
        return generation

    def publish(self, uint32_t slot, uint32_t draft, *, int kind, bytes key, uint64_t size, uint64_t object_id=0,
                uint64_t sequence=0, uint32_t flags=0, checksum=None, bytes parent=bytes(16), uint32_t uid=0,
                uint32_t bucket_id=0, int64_t sealed_at_ns=0):
        cdef kvfs_slot_header raw
        fill_header(&raw, kind, flags, key, object_id, sequence, size, checksum, parent, uid, bucket_id, sealed_at_ns)
        cdef int rc = kvfs_slot_publish(self.writer(), slot, draft, &raw)
        if rc < 0:
            raise from_errno(rc, f"slot {slot} is no longer draft {draft}")
        return <uint32_t>(draft + 1)

    def retire(self, uint32_t slot, uint32_t generation):
        cdef int rc = kvfs_slot_retire(self.writer(), slot, generation)
        if rc < 0:
            raise from_errno(rc, f"slot {slot} is no longer of generation {generation}")

    def read_header(self, uint32_t slot):
        cdef kvfs_slot_header raw
        memset(&raw, 0, sizeof(raw))
        if self._slot(slot) >= self._table.header.slots_used:
            return make_header(&raw)
        cdef int rc = kvfs_slot_header_read(self.pointer(), slot, &raw)
        if rc < 0:
            raise from_errno(rc, f"read the header of slot {slot}: its writer stopped in mid-change")
        if raw.version != 0 and raw.header_checksum != kvfs_slot_header_checksum(&raw):
            raise Corrupt(f"header of slot {slot} in {self.path} does not match its checksum")
        return make_header(&raw)

    def generation(self, uint32_t slot):
        cdef kvfs_table *table = self.pointer()
        if slot >= table.header.slots_used:
            self._slot(slot)
            return 0
        return kvfs_table_generation(table, slot)

    def set_checksum(self, uint32_t slot, uint32_t generation, uint64_t value):
        return kvfs_slot_set_checksum(self.writer(), self._slot(slot), generation, value) == 1

    # --- the life of the table -----------------------------------------------------------------------------

    @property
    def alive(self):
        return kvfs_table_alive(self.pointer()) != 0

    @property
    def clean(self):
        return self.pointer().header.clean != 0

    @clean.setter
    def clean(self, value):
        kvfs_table_set_clean(self.writer(), 1 if value else 0)

    def move(self, path):
        self.writer()
        os.rename(self.path, path)
        self.path = os.fsdecode(path)

    def set_dead(self):
        kvfs_table_set_dead(self.writer())

    def hide(self, uint32_t tiers):
        kvfs_table_hide(self.writer(), tiers)

    @property
    def hidden_tiers(self):
        return self.pointer().header.hidden_tiers

    @property
    def store_id(self):
        return PyBytes_FromStringAndSize(<const char *>self.pointer().header.store_id, 16)

    @property
    def slots(self):
        return self.pointer().slot_count

    @property
    def slots_used(self):
        return self.pointer().header.slots_used

    @property
    def entries(self):
        return self.pointer().header.entry_count

    @property
    def max_entries(self):
        return self.pointer().header.entry_count * KVFS_TABLE_MAX_LOAD_PERCENT // 100

    @property
    def file_bytes(self):
        return self.pointer().header.file_bytes
