"""A request's body into a draft, and its checksums, without Python: a thin seam over `receiver_core.c`.

Invariants: the buffer is the process's, and used inside one call only. Concurrency: one thread receives (the event
loop's); the interpreter lock is dropped while bytes move.
"""

from libc.stdint cimport int64_t, uint8_t, uint64_t

from kvfs import limits
from kvfs.errors import InvalidRequest, from_errno

cdef extern from "s3/receiver_core.h" nogil:
    int KVFS_RECEIVE_MOVED, KVFS_RECEIVE_WAIT, KVFS_RECEIVE_END, KVFS_RECEIVE_GONE

    struct kvfs_body:
        uint64_t crc
        int wants_crc

    int kvfs_body_init(kvfs_body *b, int wants_crc)
    void kvfs_body_free(kvfs_body *b)
    void kvfs_body_update(kvfs_body *b, const uint8_t *data, size_t bytes)
    uint64_t kvfs_body_xxh3(const kvfs_body *b)
    int64_t kvfs_receive(kvfs_body *b, int socket, int fd, uint64_t offset, uint64_t most, uint8_t *buffer,
                         size_t room, int *end)
    int kvfs_crc64nvme_engine(int wanted)
    uint64_t kvfs_crc64nvme_ "kvfs_crc64nvme"(uint64_t crc, const uint8_t *data, size_t bytes, int engine)

MOVED = KVFS_RECEIVE_MOVED
WAIT = KVFS_RECEIVE_WAIT
END = KVFS_RECEIVE_END
GONE = KVFS_RECEIVE_GONE

cdef bytearray _memory = bytearray(limits.RECEIVE_BYTES)
cdef uint8_t[::1] _buffer = _memory

cdef class Receiver:
    cdef kvfs_body _body
    cdef bint _ready
    cdef readonly uint64_t size_bytes

    def __init__(self, bint crc64nvme):
        if self._ready:
            raise InvalidRequest("made already")
        if kvfs_body_init(&self._body, crc64nvme) < 0:
            raise MemoryError
        self._ready = True

    def __dealloc__(self):
        if self._ready:
            kvfs_body_free(&self._body)

    def update(self, const uint8_t[::1] data not None):
        if data.shape[0]:
            kvfs_body_update(&self._body, &data[0], data.shape[0])
            self.size_bytes += data.shape[0]

    def receive(self, int socket, int descriptor, uint64_t most):
        cdef int end
        cdef int64_t moved
        cdef uint64_t offset = self.size_bytes
        with nogil:
            moved = kvfs_receive(&self._body, socket, descriptor, offset, most, &_buffer[0], _buffer.shape[0], &end)
        if moved < 0:
            raise from_errno(<int>moved, "write a body")
        self.size_bytes += moved
        return end

    @property
    def xxh3(self):
        return kvfs_body_xxh3(&self._body)

    @property
    def crc64nvme(self):
        return self._body.crc

def engine(int wanted=0):
    return kvfs_crc64nvme_engine(wanted)

def crc64nvme(const uint8_t[::1] data not None, uint64_t crc=0, int engine=0):
    if kvfs_crc64nvme_engine(engine) < 0:
        raise InvalidRequest(f"this processor has no engine {engine}")
    return kvfs_crc64nvme_(crc, &data[0], data.shape[0], engine) if data.shape[0] else crc
