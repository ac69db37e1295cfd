"""What a start enters natively of what the NVMe tier has: names that index and log agree on, and blocks.

Invariants: what is unusual is left to the caller (`tiers.recovery.index_rebuild`). Concurrency: one thread, with the GIL,
before the store serves.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.stdint cimport UINT32_MAX, uint32_t, uint64_t
from libc.string cimport memchr, memcmp, memcpy, memset

from kvfs.errors import NoSpace, from_errno

from kvfs._native.catalog.block_index cimport BlockIndex, kvfs_block
from kvfs._native.catalog.logged_names cimport LoggedName, LoggedNames
from kvfs._native.catalog.object_names cimport ObjectNames
from kvfs._native.catalog.records cimport (
    KVFS_RECORD_BLOCK, KVFS_RECORD_PLACED, KVFS_RECORD_RESTORED, KVFS_RECORD_UNIT, KVFS_RECORD_USED, RecordRows,
    kvfs_record, kvfs_records_find,
)
from kvfs._native.shared.name_row cimport (
    KVFS_ROW_CHECK_BYTES, KVFS_ROW_DIRECTORY, KVFS_ROW_LINK, KVFS_ROW_RETIRED, kvfs_name_row, kvfs_name_row_load,
)
from kvfs._native.shared.table cimport (
    Table, kvfs_entry_value, kvfs_entry_view, kvfs_table, kvfs_table_lookup, put_entry,
)

cdef extern from "<errno.h>":
    int ENOSPC

cdef extern from "shared/formats.h":
    enum:
        KVFS_KEY_BYTES
        KVFS_KIND_OBJECT
        KVFS_KIND_BLOCK
        KVFS_TIER_NVME

cdef enum:
    LENGTH_BYTES = 4
    OFFSET_BITS = 32  # limits.SEGMENT_OFFSET_BITS


cdef int note_place(kvfs_table *table, const unsigned char *key, const kvfs_record *row) except -1:
    """Note in the table that NVMe has an object, beside its other copies."""
    cdef kvfs_entry_view known
    cdef kvfs_entry_value value
    cdef int rc = kvfs_table_lookup(table, key, &known)
    memset(&value, 0, sizeof(value))
    value.slot, value.kind = UINT32_MAX, KVFS_KIND_BLOCK if row.flags & KVFS_RECORD_BLOCK else KVFS_KIND_OBJECT
    value.size_bytes = row.size_bytes
    if rc == 1:
        value.slot, value.generation, value.size_bytes = known.slot, known.generation, known.size_bytes
        value.kind, value.tiers, value.flags = known.kind, known.tiers, known.flags
    value.tiers |= KVFS_TIER_NVME
    value.location = <uint64_t>row.segment << OFFSET_BITS | row.offset_units * <uint64_t>KVFS_RECORD_UNIT
    rc = put_entry(table, key, &value)
    if rc == -ENOSPC:
        raise NoSpace("the table has no room for what NVMe has")
    if rc < 0:
        raise from_errno(rc, "enter what NVMe has in the table")
    return 0


cdef bint is_logged(LoggedNames logged, LoggedName *entry, const char *name, uint64_t name_bytes, const char *row,
                    uint64_t row_bytes):
    """Return whether the log says the same name and row."""
    cdef const unsigned char *at = logged._bytes + entry.at + LENGTH_BYTES
    cdef const unsigned char *key = at + entry.bucket_bytes + LENGTH_BYTES
    cdef const unsigned char *last = key + entry.key_bytes + LENGTH_BYTES
    return (name_bytes == entry.bucket_bytes + 1 + entry.key_bytes
            and memcmp(name, at, entry.bucket_bytes) == 0 and name[entry.bucket_bytes] == 0
            and memcmp(name + entry.bucket_bytes + 1, key, entry.key_bytes) == 0
            and row_bytes == entry.body_bytes - <uint64_t>(last - logged._bytes - entry.at)
            and memcmp(row, last, row_bytes) == 0)


def restore_rows(list page not None, RecordRows rows not None, LoggedNames logged not None, set apart not None,
                 Table table not None, ObjectNames names not None, bint compare):
    cdef kvfs_table *to = table.writer()
    cdef bytes name, stored, bucket = b""
    cdef kvfs_name_row found
    cdef kvfs_record *row
    cdef LoggedName *entry
    cdef const char *at
    cdef const char *end
    cdef unsigned char key[16]
    cdef int i
    cdef list others = []
    for each in page:
        name, stored = each
        at = PyBytes_AS_STRING(name)
        row, entry = NULL, NULL
        if kvfs_name_row_load(at, PyBytes_GET_SIZE(name), PyBytes_AS_STRING(stored), PyBytes_GET_SIZE(stored), &found):
            if not found.flags & (KVFS_ROW_DIRECTORY | KVFS_ROW_LINK | KVFS_ROW_RETIRED):
                row = kvfs_records_find(&rows._r, found.object_id)
                entry = logged.entry(found.object_id)
        end = <const char *>memchr(at, 0, PyBytes_GET_SIZE(name))
        if row == NULL or entry == NULL or end == NULL or not row.flags & KVFS_RECORD_PLACED:
            others.append(each)
            continue
        if (apart and found.object_id in apart) or (compare and not is_logged(
                logged, entry, at, PyBytes_GET_SIZE(name), PyBytes_AS_STRING(stored),
                PyBytes_GET_SIZE(stored) - KVFS_ROW_CHECK_BYTES)):
            others.append(each)
            continue
        if end - at != PyBytes_GET_SIZE(bucket) or memcmp(at, PyBytes_AS_STRING(bucket), end - at) != 0:
            bucket = at[:end - at]
        for i in range(8):
            key[i], key[15 - i] = 0, <unsigned char>(found.object_id >> 8 * i)
        note_place(to, key, row)
        names.put(found.object_id, bucket, end + 1, PyBytes_GET_SIZE(name) - (end - at) - 1)
        row.flags = row.flags | KVFS_RECORD_RESTORED
    return others


def unrestored(RecordRows rows not None):
    cdef uint32_t i, flags
    cdef list found = []
    for i in range(rows._r.used):
        flags = rows._r.rows[i].flags
        if flags & KVFS_RECORD_USED and not flags & (KVFS_RECORD_BLOCK | KVFS_RECORD_RESTORED):
            found.append(rows._r.rows[i].object_id)
        rows._r.rows[i].flags = flags & ~<uint32_t>KVFS_RECORD_RESTORED
    return found


def restore_blocks(RecordRows rows not None, Table table not None, BlockIndex blocks not None, dict numbers not None):
    cdef kvfs_table *to = table.writer()
    cdef kvfs_block block, known
    cdef kvfs_record *row
    cdef const uint64_t *parent
    cdef uint32_t i, bucket_id = 0
    cdef object number = None
    cdef list others = []
    for i in range(rows._r.used):
        row = &rows._r.rows[i]
        if not row.flags & KVFS_RECORD_BLOCK:
            continue
        if number is None or row.bucket_id != bucket_id:
            bucket_id, number = row.bucket_id, numbers.get(row.bucket_id)
        if number is None or not row.flags & KVFS_RECORD_PLACED:
            others.append(row.object_id)
            continue
        if blocks.find_block(row.key, &known):
            if known.sequence != row.object_id:
                others.append(row.object_id)
                continue
            note_place(to, row.key, row)
            continue
        note_place(to, row.key, row)
        parent = <const uint64_t *>row.parent
        memcpy(block.key, row.key, KVFS_KEY_BYTES)
        memcpy(block.parent, row.parent, KVFS_KEY_BYTES)
        block.has_parent = parent[0] != 0 or parent[1] != 0
        block.sequence, block.size_bytes, block.sealed_ns = row.object_id, row.size_bytes, row.sealed_at_ns
        block.uid, block.bucket, block.pinned = row.uid, number, 0
        blocks.add_block(&block)
    return others
