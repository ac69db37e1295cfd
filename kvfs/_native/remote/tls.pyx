"""TLS between machines, seen from Python: a thin seam over `tls_core.c`, which has the rules.

Invariants: nothing blocks. A session is Python's until it is taken; its socket is never its own.
Concurrency: every method is called from the event loop's thread.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_New
from libc.stdint cimport int64_t, uint64_t
from libc.stddef cimport size_t

import errno
import os

from kvfs import limits
from kvfs.errors import ConfigError, InvalidRequest, NotPermitted, ProtocolError

from kvfs._native.remote.channel cimport KVFS_SESSION_CAPSULE, kvfs_session

cdef extern from "<poll.h>" nogil:
    short POLLOUT

cdef extern from "remote/tls_core.h" nogil:
    enum:
        KVFS_TLS_REASON_BYTES

    ctypedef struct SSL_CTX:
        pass

    struct kvfs_tls:
        kvfs_session session
        char *reason

    int kvfs_tls_context(const char *certificate, const char *key, const char *authorities, SSL_CTX **context,
                         char *reason)
    void kvfs_tls_context_free(SSL_CTX *context)
    int64_t kvfs_tls_ends_s(const SSL_CTX *context)
    kvfs_tls *kvfs_tls_open(SSL_CTX *context, int fd, int serves, uint64_t key_bytes)
    int kvfs_tls_handshake(kvfs_tls *t)
    Py_ssize_t kvfs_tls_send(kvfs_session *s, const void *data, size_t bytes, int flags)
    Py_ssize_t kvfs_tls_receive(kvfs_session *s, void *into, size_t bytes)
    void kvfs_tls_free(kvfs_session *s)

cdef void _free(object capsule) noexcept:
    kvfs_tls_free(<kvfs_session *>PyCapsule_GetPointer(capsule, KVFS_SESSION_CAPSULE))


cdef class Context:
    cdef SSL_CTX *_context
    cdef uint64_t _key_bytes

    def __init__(self, certificate, key, authorities, uint64_t key_bytes=limits.REMOTE_TLS_KEY_BYTES):
        cdef char reason[KVFS_TLS_REASON_BYTES]
        cdef bytes certificate_path = os.fsencode(certificate)
        cdef bytes key_path = os.fsencode(key)
        cdef bytes authorities_path = os.fsencode(authorities)
        if self._context != NULL:
            raise InvalidRequest("this context is made already")
        cdef int wrong = kvfs_tls_context(certificate_path, key_path, authorities_path, &self._context, reason)
        if wrong > 0:
            name, path = (("certificate", certificate), ("key", key), ("authorities", authorities))[wrong - 1]
            raise ConfigError(f"[cluster] {name} = '{path}': {reason.decode(errors='replace')}")
        if wrong < 0:
            raise ConfigError(f"[cluster] certificate: {reason.decode(errors='replace')}")
        self._key_bytes = key_bytes

    def __dealloc__(self):
        kvfs_tls_context_free(self._context)

    @property
    def ends_s(self):
        return kvfs_tls_ends_s(self._context)

    def session(self, int socket, bint serves):
        return Session(self, socket, serves)


cdef class Session:
    cdef kvfs_tls *_t
    cdef object _capsule

    def __init__(self, Context context not None, int socket, bint serves):
        if self._capsule is not None:
            raise InvalidRequest("this session is made already")
        cdef kvfs_tls *made = kvfs_tls_open(context._context, socket, serves, context._key_bytes)
        if made == NULL:
            raise MemoryError
        self._capsule = PyCapsule_New(made, KVFS_SESSION_CAPSULE, _free)
        self._t = made

    cdef int _need(self) except -1:
        if self._t == NULL:
            raise InvalidRequest("the session is taken")
        return 0

    cdef int _check(self, Py_ssize_t rc) except -1:
        """Say whether a call is through; raise where the session failed."""
        if rc == -errno.EAGAIN:
            return 0
        if rc >= 0:
            return 1
        cdef bytes reason = self._t.reason
        said = f"TLS: {reason.decode(errors='replace')}"
        if rc == -errno.EKEYREJECTED:
            raise NotPermitted(said)
        if rc == -errno.EPROTO:
            raise ProtocolError(said)
        raise OSError(-rc, os.strerror(-rc))

    def handshake(self):
        cdef int rc
        self._need()
        with nogil:
            rc = kvfs_tls_handshake(self._t)
        return self._check(rc) == 1

    def send(self, bytes data not None):
        self._need()
        cdef Py_ssize_t put = kvfs_tls_send(&self._t.session, PyBytes_AS_STRING(data), len(data), 0)
        return put if self._check(put) else None

    def receive(self, Py_ssize_t most):
        self._need()
        if most <= 0:
            raise InvalidRequest(f"{most} bytes: at least one is received")
        cdef bytes data = PyBytes_FromStringAndSize(NULL, most)
        cdef Py_ssize_t got = kvfs_tls_receive(&self._t.session, PyBytes_AS_STRING(data), <size_t>most)
        return data[:got] if self._check(got) else None

    @property
    def wants_room(self):
        self._need()
        return self._t.session.wants == POLLOUT

    @property
    def capsule(self):
        self._need()
        return self._capsule

    def take(self):
        self._need()
        self._t = NULL
        self._capsule = None
