"""Slot files seen from Python: a thin seam over `slots_core.c`, which explains how holders and writers are found.

Invariants: no call waits for a holder; no descriptor outlives its call, but those that are returned.
Concurrency: no state; every call drops the GIL.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.errno cimport EAGAIN, EBUSY
from libc.stdint cimport int64_t, uint32_t, uint64_t

from kvfs.errors import from_errno

cdef extern from "hash/xxh3.h" nogil:
    uint64_t kvfs_xxh3_64(const void *data, size_t bytes)

cdef extern from "shared/slots_core.h" nogil:
    int kvfs_slot_create(int dirfd, uint32_t slot, int64_t gid)
    int kvfs_slot_open(int dirfd, uint32_t slot, int flags)
    int kvfs_slot_check_no_writer(int dirfd, uint32_t slot, kvfs_slot_stat *out)
    int kvfs_slot_is_held(int dirfd, uint32_t slot)
    int kvfs_slot_recycle(int dirfd, uint32_t slot, uint64_t keep_bytes)
    int kvfs_slot_fill(int dirfd, uint32_t slot, uint64_t size)
    int kvfs_slot_detach(int dirfd, uint32_t slot, kvfs_slot_stat *out)
    int kvfs_shows_reads(int dirfd)
    int kvfs_fd_mark_read(int fd)
    int kvfs_fd_is_held(int fd)
    int kvfs_fd_has_writer(int fd)
    int kvfs_fd_stat(int fd, kvfs_slot_stat *out)
    int kvfs_fd_xxh3(int fd, uint64_t *checksum, uint64_t *bytes)
    void kvfs_ignore_sigio()

kvfs_ignore_sigio()


cdef int has_writer(int fd) noexcept nogil:
    return kvfs_fd_has_writer(fd)


cdef int check_slot(int dirfd, uint32_t slot, kvfs_slot_stat *out) noexcept nogil:
    """Look at a slot for writers, for other native modules, which do not link the C side."""
    return kvfs_slot_check_no_writer(dirfd, slot, out)


cdef int hash_descriptor(int fd, uint64_t *checksum, uint64_t *bytes_) noexcept nogil:
    return kvfs_fd_xxh3(fd, checksum, bytes_)


def slot_name(unsigned int slot):
    return f"{slot:08x}"


def create(int dirfd, uint32_t slot, int64_t gid=-1):
    cdef int rc
    with nogil:
        rc = kvfs_slot_create(dirfd, slot, gid)
    if rc < 0:
        raise from_errno(rc, f"create slot {slot}")
    return rc


def open_slot(int dirfd, uint32_t slot, int flags):
    cdef int rc
    with nogil:
        rc = kvfs_slot_open(dirfd, slot, flags)
    if rc < 0:
        if rc == -EAGAIN:
            return -1
        raise from_errno(rc, f"open slot {slot}")
    return rc


def check_no_writer(int dirfd, uint32_t slot):
    cdef int rc
    cdef kvfs_slot_stat out
    with nogil:
        rc = kvfs_slot_check_no_writer(dirfd, slot, &out)
    if rc < 0:
        raise from_errno(rc, f"slot {slot} has a writer" if rc == -EBUSY else f"probe slot {slot} for writers")
    return out.size_bytes, out.physical_bytes


def is_held(int dirfd, uint32_t slot):
    cdef int rc
    with nogil:
        rc = kvfs_slot_is_held(dirfd, slot)
    if rc < 0 and rc != -EAGAIN:
        raise from_errno(rc, f"probe slot {slot} for holders")
    return rc != 0


def recycle(int dirfd, uint32_t slot, uint64_t keep_bytes=0):
    cdef int rc
    with nogil:
        rc = kvfs_slot_recycle(dirfd, slot, keep_bytes)
    if rc == -EAGAIN:
        return None
    if rc < 0:
        raise from_errno(rc, f"recycle slot {slot}")
    return keep_bytes if rc else 0


def shows_reads(int dirfd):
    cdef int rc
    with nogil:
        rc = kvfs_shows_reads(dirfd)
    return rc != 0


def mark_read(int fd):
    cdef int rc
    with nogil:
        rc = kvfs_fd_mark_read(fd)
    if rc < 0:
        raise from_errno(rc, f"mark descriptor {fd} as read")


def fill(int dirfd, list slots, uint64_t size):
    cdef uint32_t slot
    cdef int rc
    for slot in slots:
        with nogil:
            rc = kvfs_slot_fill(dirfd, slot, size)
        if rc < 0:
            raise from_errno(rc, f"fill slot {slot} with {size} bytes")


def detach(int dirfd, uint32_t slot):
    cdef int rc
    cdef kvfs_slot_stat out
    with nogil:
        rc = kvfs_slot_detach(dirfd, slot, &out)
    if rc < 0:
        raise from_errno(rc, f"detach slot {slot}")
    return rc, out.physical_bytes


def fd_is_held(int fd):
    cdef int rc
    with nogil:
        rc = kvfs_fd_is_held(fd)
    if rc < 0:
        raise from_errno(rc, f"probe descriptor {fd} for holders")
    return rc != 0


def fd_has_writer(int fd):
    cdef int rc
    with nogil:
        rc = kvfs_fd_has_writer(fd)
    if rc < 0:
        raise from_errno(rc, f"probe descriptor {fd} for writers")
    return rc != 0


def physical_bytes(int fd):
    cdef int rc
    cdef kvfs_slot_stat out
    with nogil:
        rc = kvfs_fd_stat(fd, &out)
    if rc < 0:
        raise from_errno(rc, f"stat descriptor {fd}")
    return out.physical_bytes


def fd_xxh3_64(int fd):
    cdef int rc
    cdef uint64_t checksum = 0, bytes_ = 0
    with nogil:
        rc = kvfs_fd_xxh3(fd, &checksum, &bytes_)
    if rc < 0:
        raise from_errno(rc, f"checksum descriptor {fd}")
    return checksum


def xxh3_64(data):
    cdef Py_buffer view
    cdef uint64_t checksum
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    with nogil:
        checksum = kvfs_xxh3_64(view.buf, view.len)
    PyBuffer_Release(&view)
    return checksum
