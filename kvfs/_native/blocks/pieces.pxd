"""Places in memory, for the other native modules."""

cdef extern from "<sys/uio.h>" nogil:
    struct iovec:
        void *iov_base
        size_t iov_len


cdef class Pieces:
    cdef Py_ssize_t blocks
    cdef iovec *vectors
    cdef Py_ssize_t *starts
    cdef Py_buffer *_views
    cdef Py_ssize_t _view_count
    cdef Py_ssize_t _vector_room
    cdef object _owner
    cdef int _allocate(self, object owner, Py_ssize_t blocks) except -1
    cdef size_t size_of(self, Py_ssize_t block) noexcept
    cdef int _room(self, Py_ssize_t vectors) except -1
    cdef Py_ssize_t _append(self, Py_ssize_t at, object buffer, bint writable) except -1
    cdef int _hold(self, object buffer, bint writable, char **base, size_t *size) except -1
    cdef int _fill_list(self, object buffers, bint writable) except -1
    cdef int _fill_scatter(self, object scatter, bint writable) except -1


cpdef bytes join_keys(keys)
