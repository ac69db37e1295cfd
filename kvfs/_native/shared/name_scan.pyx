"""One level of a path, walked in the name index: the inner loop of listings without attributes.

Responsibility: from a cursor of LMDB's, the names below a prefix, each with what its row says, checked against the
row's checksum (layout and checksum: kvfs.index.rows); common prefixes once each. No transaction of its own.

Concurrency: the caller's thread, with the GIL.
"""

from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memchr, memcmp, memcpy

from kvfs.errors import Corrupt

cdef extern from "hash/xxh3.h" nogil:
    uint64_t kvfs_xxh3_64(const void *data, size_t bytes)

cdef enum:
    ROW_BYTES = 68
    DIGEST_BYTES = 16
    FLAGS_AT = 4
    OBJECT_ID_AT = 20
    INO_AT = 28
    CHECK_BYTES = 4
    DIRECTORY = 2
    LINK = 16
    HEAD_BYTES = 511
    MAX_COMPONENT_BYTES = 255
    ROOM_BYTES = 4096

ENDED, MORE, LONG = 0, 1, 2
"""Why a scan stopped: at the end of the prefix, at its limit, before a name that LMDB has no whole key for."""

cdef uint64_t UNMARKED = <uint64_t> 1 << 63


cdef bint _starts(bytes name, const char *head, Py_ssize_t length) noexcept:
    return len(name) >= length and memcmp(<const char *> name, head, <size_t> length) == 0


cdef bint _is_component(const char *at, Py_ssize_t length) noexcept:
    """Return whether one component without a slash is a path, as kvfs.paths.is_path."""
    if length < 1 or length > MAX_COMPONENT_BYTES:
        return False
    return at[0] != c"." or (length > 1 and (length > 2 or at[1] != c"."))


cdef const char *_row(bytes name, bytes stored) except NULL:
    """Return the row. Raises Corrupt where its checksum differs."""
    cdef char joined[ROOM_BYTES]
    cdef Py_ssize_t size = len(stored) - CHECK_BYTES
    cdef const char *row = stored
    cdef uint64_t checksum
    cdef uint32_t found
    cdef bytes whole
    cdef bint known = size >= ROW_BYTES and row[0] == 1 and row[2] == 0 and row[3] == 0
    if not known or not (row[1] == 0 or (row[1] == DIGEST_BYTES and size >= ROW_BYTES + DIGEST_BYTES)):
        raise Corrupt(f"name row of {size} bytes that begins with {stored[:4].hex()}")
    if len(name) + size <= ROOM_BYTES:
        memcpy(joined, <const char *> name, <size_t> len(name))
        memcpy(joined + len(name), row, <size_t> size)
        checksum = kvfs_xxh3_64(joined, <size_t> (len(name) + size))
    else:
        whole = name + stored[:size]
        checksum = kvfs_xxh3_64(<const char *> whole, <size_t> len(whole))
    memcpy(&found, row + size, CHECK_BYTES)
    if found != <uint32_t> checksum:
        raise Corrupt(f"row {name[:80]!r} of the name index does not match its checksum")
    return row


cdef uint64_t _u64(const char *at) noexcept:
    cdef uint64_t value
    memcpy(&value, at, sizeof(value))
    return value


def scan_level(cursor, bytes prefix not None, Py_ssize_t limit):
    """Return the names directly below `prefix`, as name_scan.pyi says."""
    cdef bytes name = cursor.key(), tail = b"", before, stored
    cdef list entries = []
    cdef Py_ssize_t width = len(prefix), looked = 0, length
    cdef const char *head = prefix
    cdef const char *at
    cdef const char *slash
    cdef const char *row
    cdef uint64_t ino, object_id
    cdef bint found = True, shown, uncertain, link
    if len(name) == width and _starts(name, head, width):  # the marker of the directory that is listed
        found = cursor.next()
        name = cursor.key()
    while found and _starts(name, head, width):
        if len(name) >= HEAD_BYTES:
            return entries, tail, LONG
        if looked == limit:
            return entries, tail, MORE
        looked += 1
        at = <const char *> name + width
        slash = <const char *> memchr(at, c"/", <size_t> (len(name) - width))
        length = len(name) - width if slash == NULL else slash + 1 - at
        tail = at[:length]
        shown = _is_component(at, length - (slash != NULL))
        object_id, uncertain, link = 0, False, False
        if slash != NULL and width + length < len(name):
            ino = kvfs_xxh3_64(at - width, <size_t> (width + length)) | UNMARKED
        else:
            stored = cursor.value()
            row = _row(name, stored)
            ino = _u64(row + INO_AT)
            if slash == NULL:
                object_id = _u64(row + OBJECT_ID_AT)
                link = (row[FLAGS_AT] & LINK) != 0
                shown = shown and not row[FLAGS_AT] & DIRECTORY
        found = cursor.next()
        if found:
            before, name = name, cursor.key()
            if slash != NULL and _starts(name, <const char *> before, width + length):
                found = cursor.set_range(prefix + tail[:length - 1] + b"0")  # what follows all that begin with "tail/"
                name = cursor.key()
            elif slash == NULL and len(name) > len(before) and _starts(name, <const char *> before, len(before)):
                uncertain = name[width + length] < c"/"
                shown = shown and name[width + length] != c"/"
        if shown:
            entries.append((tail, ino, object_id, uncertain, link))
    return entries, tail, ENDED
