"""UCX between machines, seen from Python: a thin seam over `ucx_core.c`, which has the rules.

Invariants: a worker is Python's until it is taken. A context lives as long as a worker of it.
Concurrency: any thread; one at a time for each worker. Both makers wait for devices, without the interpreter's lock.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from libc.stddef cimport size_t
from libc.stdint cimport int64_t, uint64_t

import os

from kvfs.errors import InvalidRequest, TierUnreachable, Unsupported

from kvfs._native.remote.channel cimport KVFS_FABRIC_CAPSULE, kvfs_fabric, note_taken

cdef extern from "<ucp/api/ucp.h>" nogil:
    void ucp_get_version(unsigned *major, unsigned *minor, unsigned *release)

cdef extern from "remote/ucx_core.h" nogil:
    unsigned int KVFS_UCX_ADDRESS_BYTES

    struct kvfs_ucx_context:
        pass

    struct kvfs_ucx:
        kvfs_fabric fabric
        const void *address
        size_t address_bytes

    int kvfs_ucx_open(kvfs_ucx_context **into, const char **reason)
    void kvfs_ucx_release(kvfs_ucx_context *c)
    int kvfs_ucx_make(kvfs_ucx_context *c, kvfs_ucx **into, const char **reason)
    int kvfs_ucx_connect(kvfs_ucx *u, const void *address, size_t bytes, uint64_t tag, const char **reason)
    int kvfs_ucx_greet(kvfs_ucx *u, const char **reason)
    int kvfs_ucx_await_greeting(kvfs_ucx *u, int64_t wait_ns, const char **reason)
    void kvfs_ucx_free(kvfs_fabric *f)

MAX_ADDRESS_BYTES = KVFS_UCX_ADDRESS_BYTES

cdef void _free(object capsule) noexcept:
    cdef kvfs_fabric *fabric = <kvfs_fabric *>PyCapsule_GetPointer(capsule, KVFS_FABRIC_CAPSULE)
    with nogil:
        kvfs_ucx_free(fabric)

cdef int _check(int rc, const char *reason) except -1:
    if rc < 0:
        raise TierUnreachable(f"UCX: {reason.decode(errors='replace')}")
    return 0


def version():
    """Return the version of the library, major and minor."""
    cdef unsigned major, minor, release
    ucp_get_version(&major, &minor, &release)
    return major, minor


cdef class Context:
    cdef kvfs_ucx_context *_context

    def __init__(self):
        cdef const char *reason = ""
        cdef int rc
        if self._context != NULL:
            raise InvalidRequest("this context is made already")
        with nogil:
            rc = kvfs_ucx_open(&self._context, &reason)
        if rc < 0:
            raise Unsupported(f"UCX cannot be used here: {reason.decode(errors='replace')}")

    def __dealloc__(self):
        kvfs_ucx_release(self._context)

    def worker(self):
        cdef kvfs_ucx *made = NULL
        cdef const char *reason = ""
        cdef int rc
        cdef Worker worker = Worker.__new__(Worker)
        with nogil:
            rc = kvfs_ucx_make(self._context, &made, &reason)
        _check(rc, reason)
        try:
            worker._capsule = PyCapsule_New(made, KVFS_FABRIC_CAPSULE, _free)
        except BaseException:
            kvfs_ucx_free(&made.fabric)
            raise
        worker._u = made
        return worker


cdef class Worker:
    cdef kvfs_ucx *_u
    cdef object _capsule

    def __init__(self):
        raise TypeError("a context makes workers")

    cdef int _need(self) except -1:
        if self._u == NULL:
            raise InvalidRequest("the worker is taken")
        return 0

    @property
    def address(self):
        self._need()
        return PyBytes_FromStringAndSize(<const char *>self._u.address, <Py_ssize_t>self._u.address_bytes)

    def greet(self, bytes address not None, uint64_t tag):
        cdef const char *reason = ""
        cdef int rc
        self.connect(address, tag)
        with nogil:
            rc = kvfs_ucx_greet(self._u, &reason)
        _check(rc, reason)

    def connect(self, bytes address not None, uint64_t tag):
        cdef const char *reason = ""
        cdef const char *data = PyBytes_AS_STRING(address)
        cdef size_t count = <size_t>PyBytes_GET_SIZE(address)
        cdef int rc
        self._need()
        with nogil:
            rc = kvfs_ucx_connect(self._u, data, count, tag, &reason)
        _check(rc, reason)

    def await_greeting(self, double wait_s):
        cdef const char *reason = ""
        cdef int64_t wait_ns = <int64_t>(wait_s * 1e9)
        cdef int rc
        self._need()
        with nogil:
            rc = kvfs_ucx_await_greeting(self._u, wait_ns, &reason)
        _check(rc, reason)

    @property
    def capsule(self):
        self._need()
        return self._capsule

    def take(self):
        self._need()
        self._u = NULL
        self._capsule = None

    def close(self):
        cdef kvfs_ucx *made = self._u
        if made == NULL:
            return
        note_taken(self._capsule)
        self._u = NULL
        self._capsule = None
        with nogil:
            kvfs_ucx_free(&made.fabric)
