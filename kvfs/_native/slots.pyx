"""Slot files seen from Python: a thin seam over `slots_core.c`, which says how holders and writers are found.

Invariants: no call waits for a holder; no descriptor outlives its call, save those that are returned.
Concurrency: no state; every call drops the GIL.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint32_t, uint64_t

from kvfs.errors import from_errno

cdef extern from "xxh3.h" nogil:
    uint64_t kvfs_xxh3_64(const void *data, size_t bytes)

cdef extern from "slots_core.h" nogil:
    struct kvfs_slot_stat:
        uint64_t size_bytes
        uint64_t physical_bytes

    int kvfs_slot_create(int dirfd, uint32_t slot, int64_t gid)
    int kvfs_slot_open(int dirfd, uint32_t slot, int flags)
    int kvfs_slot_check_no_writer(int dirfd, uint32_t slot, kvfs_slot_stat *out)
    int kvfs_slot_is_held(int dirfd, uint32_t slot)
    int kvfs_slot_recycle(int dirfd, uint32_t slot)
    int kvfs_slot_detach(int dirfd, uint32_t slot, kvfs_slot_stat *out)
    int kvfs_fd_is_held(int fd)
    int kvfs_fd_has_writer(int fd)
    int kvfs_fd_stat(int fd, kvfs_slot_stat *out)
    int kvfs_fd_xxh3(int fd, uint64_t *checksum, uint64_t *bytes)
    void kvfs_ignore_sigio()

cdef extern from "errno.h":
    int EAGAIN, EBUSY

kvfs_ignore_sigio()


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


def recycle(int dirfd, uint32_t slot):
    cdef int rc
    with nogil:
        rc = kvfs_slot_recycle(dirfd, slot)
    if rc == -EAGAIN:
        return False
    if rc < 0:
        raise from_errno(rc, f"recycle slot {slot}")
    return True


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
