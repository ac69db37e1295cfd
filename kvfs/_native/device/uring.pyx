"""io_uring seen from Python: a thin seam over `uring_core.c`, which says which thread does what.

Invariants: the memory of a request stays exported from its submit until it is reaped, so nothing can unmap it
under the kernel; memory that the kernel still owns after `close` is exported for ever.
Concurrency: one thread calls. `submit_*`, `add_buffer` and `reap` never wait; `close` waits without the GIL.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

import errno
import os

from kvfs.errors import DeviceFailed, DeviceMissing

cdef extern from *:
    """
    #ifdef KVFS_HAVE_URING
    #define KVFS_URING_BUILT 1
    #else
    #define KVFS_URING_BUILT 0
    #endif
    """
    int KVFS_URING_BUILT

cdef extern from "device/uring_core.h" nogil:
    enum kvfs_device_op:
        KVFS_DEVICE_READ
        KVFS_DEVICE_WRITE
        KVFS_DEVICE_SYNC

    struct kvfs_device_result:
        uint32_t request
        int error
        uint64_t moved
        uint64_t checksum

    struct kvfs_device:
        pass

    int kvfs_device_start(kvfs_device **out, uint32_t depth, uint32_t max_buffers)
    int kvfs_device_submit(kvfs_device *d, kvfs_device_op op, int fd, uint64_t offset, void *data, size_t bytes,
                           size_t payload_bytes)
    int kvfs_device_add_buffer(kvfs_device *d, void *data, size_t bytes)
    uint32_t kvfs_device_reap(kvfs_device *d, kvfs_device_result *out)
    int kvfs_device_done_fd(kvfs_device *d)
    uint32_t kvfs_device_registered(kvfs_device *d)
    int kvfs_device_deferred(kvfs_device *d)
    int kvfs_device_stop(kvfs_device *d, int64_t timeout_ns)
    void kvfs_device_free(kvfs_device *d)

BUILT = bool(KVFS_URING_BUILT)


cdef class Ring:
    cdef kvfs_device *_d
    cdef kvfs_device_result *_results
    cdef Py_buffer *_views
    cdef uint32_t _depth
    cdef list _buffers

    def __init__(self, uint32_t depth, uint32_t max_buffers):
        cdef int rc
        if self._results:
            raise TypeError("a Ring is made once")
        self._depth = depth
        self._buffers = []
        self._results = <kvfs_device_result *>calloc(depth, sizeof(kvfs_device_result))
        self._views = <Py_buffer *>calloc(depth, sizeof(Py_buffer))
        if not self._results or not self._views:
            raise MemoryError
        if not BUILT:
            raise DeviceMissing("io_uring: this build has none, as liburing (2.3 or newer) was missing")
        with nogil:
            rc = kvfs_device_start(&self._d, depth, max_buffers)
        if rc < 0:
            why = " (seccomp or kernel.io_uring_disabled)" if rc == -errno.EPERM else ""
            raise DeviceMissing(f"io_uring: {os.strerror(-rc)}{why}")

    def __dealloc__(self):
        if self._d:
            self._close(1_000_000_000)
        free(self._results)
        free(self._views)

    cdef int _submit(self, kvfs_device_op op, int fd, uint64_t offset, object data, int flags, object payload) except -1:
        cdef Py_buffer view
        cdef int rc
        if not self._d:
            raise DeviceFailed("the device is closed")
        PyObject_GetBuffer(data, &view, flags)
        rc = kvfs_device_submit(self._d, op, fd, offset, view.buf, view.len, payload)
        if rc < 0:
            PyBuffer_Release(&view)
            raise DeviceFailed(f"io_uring: {os.strerror(-rc)}: {self._depth} requests are in flight")
        self._views[rc] = view
        return rc

    def submit_read(self, int fd, uint64_t offset, into not None, size_t payload_bytes):
        return self._submit(KVFS_DEVICE_READ, fd, offset, into, PyBUF_SIMPLE | PyBUF_WRITABLE, payload_bytes)

    def submit_write(self, int fd, uint64_t offset, data not None):
        return self._submit(KVFS_DEVICE_WRITE, fd, offset, data, PyBUF_SIMPLE, 0)

    def submit_sync(self, int fd):
        return self._submit(KVFS_DEVICE_SYNC, fd, 0, b"", PyBUF_SIMPLE, 0)

    def add_buffer(self, data not None):
        cdef Py_buffer view
        if not self._d:
            raise DeviceFailed("the device is closed")
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE | PyBUF_WRITABLE)
        cdef int rc = kvfs_device_add_buffer(self._d, view.buf, view.len)
        PyBuffer_Release(&view)
        if rc < 0:
            raise DeviceFailed(f"io_uring: no room to register another buffer beside {len(self._buffers)}")
        self._buffers.append(data)

    def fileno(self):
        return kvfs_device_done_fd(self._d) if self._d else -1

    def reap(self):
        cdef uint32_t i, count
        found = []
        if self._d:
            count = kvfs_device_reap(self._d, self._results)
            for i in range(count):
                found.append(self._take(self._results[i]))
        return found

    cdef tuple _take(self, kvfs_device_result result):
        PyBuffer_Release(&self._views[result.request])
        return result.request, -result.error, result.moved, result.checksum

    cdef list _close(self, int64_t timeout_ns):
        cdef int rc
        with nogil:
            rc = kvfs_device_stop(self._d, timeout_ns)
        last = self.reap()
        if rc == 0:
            kvfs_device_free(self._d)
        self._d = NULL
        return last

    def close(self, double timeout_s):
        return self._close(<int64_t>(timeout_s * 1e9)) if self._d else []

    @property
    def registered_buffers(self):
        return kvfs_device_registered(self._d) if self._d else 0

    @property
    def deferred(self):
        return self._d != NULL and kvfs_device_deferred(self._d) != 0
