"""Plain S3 reads answered from Python's event loop without Python: a thin seam over `fast_path.h`, which has the
rules.

Invariants: a watched connection has no input in Python's memory and no answer under way; any request but a plain read
of bytes in DRAM goes to Python with all input and all that is left to send. Learned hosts, signers and objects are
bounded, and an object is used only while its row is, byte for byte, the one in the index.
Concurrency: the event loop's thread; the interpreter lock is dropped while an answer is sent.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.errno cimport EAGAIN, EINTR, errno
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec
from posix.unistd cimport close

import os

from kvfs import limits
from kvfs.errors import InvalidRequest, from_errno

from kvfs._native.shared.table cimport Table, kvfs_table

cdef extern from "<sys/epoll.h>" nogil:
    int EPOLLIN, EPOLL_CTL_ADD, EPOLL_CTL_DEL, EPOLL_CLOEXEC

    union epoll_data:
        int fd

    struct epoll_event:
        uint32_t events
        epoll_data data

    int epoll_create1(int flags)
    int epoll_ctl(int epoll, int op, int fd, epoll_event *event)
    int epoll_wait(int epoll, epoll_event *events, int most, int timeout_ms)

cdef extern from "<sys/socket.h>" nogil:
    int MSG_DONTWAIT
    ssize_t recv(int fd, void *into, size_t bytes, int flags)

cdef extern from "s3/fast_path.h" nogil:
    int KVFS_S3_HOST, KVFS_S3_EXPECT, KVFS_S3_CRC64, KVFS_S3_SIGNED_MOST
    int KVFS_S3_HEAD, KVFS_S3_PUT
    int KVFS_S3_NOT_OURS, KVFS_S3_SENT, KVFS_S3_PART, KVFS_S3_GONE

    struct kvfs_text:
        const uint8_t *at
        size_t size

    struct kvfs_s3_head:
        size_t bytes
        int method
        uint64_t length
        kvfs_text target
        kvfs_text *value
        kvfs_text signer

    struct kvfs_s3_signer:
        kvfs_text scope
        kvfs_text signed_headers
        uint32_t *names
        uint32_t count

    struct kvfs_s3_object:
        uint8_t *key
        uint64_t size_bytes
        kvfs_text headers
        kvfs_text checksum

    struct kvfs_s3_answering:
        const kvfs_table *table
        int dirfd
        int socket
        uint64_t request_id
        kvfs_text date
        uint64_t small_bytes
        uint64_t chunk_bytes
        uint8_t *out
        size_t room

    struct kvfs_s3_rest:
        size_t begin "from"
        size_t end "to"
        int fd
        uint64_t offset
        uint64_t left

    int kvfs_s3_field(const uint8_t *name, size_t size)
    int kvfs_s3_parse(const uint8_t *data, size_t size, kvfs_s3_head *head)
    size_t kvfs_s3_name(kvfs_text target, kvfs_text host_bucket, uint8_t *name, size_t room)
    int kvfs_s3_signer_key(kvfs_s3_signer *signer, const uint8_t *key)
    void kvfs_s3_signer_free(kvfs_s3_signer *signer)
    int kvfs_s3_verify(const kvfs_s3_head *head, const kvfs_s3_signer *signer, double now_s, double skew_s,
                       uint8_t *scratch, size_t room)
    int kvfs_s3_answer(const kvfs_s3_answering *a, const kvfs_s3_head *head, const kvfs_s3_object *item,
                       kvfs_s3_rest *rest)

cdef enum:
    NAME_BYTES = 2048
    EVENTS = 64

assert limits.MAX_KEY_BYTES + limits.MAX_BUCKET_NAME_BYTES < NAME_BYTES


cdef kvfs_text text_of(bytes data):
    cdef kvfs_text text
    text.at = <const uint8_t *>PyBytes_AS_STRING(data)
    text.size = PyBytes_GET_SIZE(data)
    return text


cdef bytes bytes_of(kvfs_text text):
    return PyBytes_FromStringAndSize(<const char *>text.at, text.size)


cdef double monotonic_s() noexcept nogil:
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec + now.tv_nsec * 1e-9


cdef class Idle:
    cdef readonly int descriptor
    cdef readonly object task
    cdef readonly double served_s
    cdef readonly bytes data
    cdef readonly bytes rest
    cdef readonly int file
    cdef readonly uint64_t offset
    cdef readonly uint64_t left
    cdef readonly bint gone
    cdef readonly tuple write

    def __init__(self, int descriptor):
        self.descriptor = descriptor
        self.file = -1

    def __dealloc__(self):
        if self.file >= 0:
            close(self.file)

    def take_file(self):
        file, self.file = self.file, -1
        return file


cdef class _Signer:
    cdef kvfs_s3_signer raw
    cdef bytes scope
    cdef bytes signed_headers
    cdef object credential
    cdef object may

    def __dealloc__(self):
        kvfs_s3_signer_free(&self.raw)


cdef class _Object:
    cdef kvfs_s3_object raw
    cdef bytes row
    cdef bytes key
    cdef bytes headers
    cdef bytes checksum


cdef class Reads:
    cdef int _epoll
    cdef dict _watched
    cdef dict _hosts
    cdef dict _signers
    cdef dict _objects
    cdef Table _table
    cdef object _find
    cdef object _describe
    cdef object _touch
    cdef uint8_t *_memory
    cdef uint8_t *_input
    cdef uint8_t *_scratch
    cdef kvfs_s3_answering _answering
    cdef readonly uint64_t gets
    cdef readonly uint64_t heads
    cdef readonly uint64_t sent_bytes

    def __cinit__(self):
        self._epoll = -1

    def __init__(self, uint64_t first_request_id):
        cdef size_t input_bytes = limits.MAX_HEAD_BYTES, out_bytes = limits.SMALL_BODY_BYTES + limits.MAX_HEAD_BYTES
        if self._epoll >= 0:
            raise InvalidRequest("made already")
        self._epoll = epoll_create1(EPOLL_CLOEXEC)
        if self._epoll < 0:
            raise from_errno(-errno, "epoll")
        self._memory = <uint8_t *>PyMem_Malloc(2 * input_bytes + out_bytes)
        if self._memory == NULL:
            raise MemoryError
        self._input = self._memory
        self._scratch = self._memory + input_bytes
        memset(&self._answering, 0, sizeof(self._answering))
        self._answering.out = self._memory + 2 * input_bytes
        self._answering.room = out_bytes
        self._answering.small_bytes = limits.SMALL_BODY_BYTES
        self._answering.chunk_bytes = limits.SEND_CHUNK_BYTES
        self._answering.request_id = first_request_id
        self._watched = {}
        self._hosts = {}
        self._signers = {}
        self._objects = {}

    def __dealloc__(self):
        if self._epoll >= 0:
            close(self._epoll)
        PyMem_Free(self._memory)

    def fileno(self):
        return self._epoll

    # --- what is known -----------------------------------------------------------------------------------
    def attach(self, Table table not None, int slots, find, describe, touch):
        table.pointer()
        self._objects.clear()
        self._answering.dirfd = slots
        self._find, self._describe, self._touch = find, describe, touch
        self._table = table

    def detach(self):
        self._table = None
        self._find = self._describe = self._touch = None
        self._objects.clear()

    @property
    def attached(self):
        return self._table is not None

    def forget(self):
        self._hosts.clear()
        self._signers.clear()

    def knows(self, bytes host not None, bytes signer not None):
        return host in self._hosts and signer in self._signers

    def learn_host(self, bytes host not None, bytes bucket not None):
        if len(self._hosts) >= limits.MAX_SIGNERS:
            self._hosts.clear()
        self._hosts[host] = bucket

    def learn_signer(self, bytes signer not None, bytes signing_key not None, bytes scope not None,
                     bytes signed_headers not None, credential, may):
        cdef _Signer found = _Signer.__new__(_Signer)
        cdef int field
        names = signed_headers.split(b";")
        if PyBytes_GET_SIZE(signing_key) != 32:
            raise InvalidRequest(f"a signing key of {len(signing_key)} bytes")
        if len(names) > KVFS_S3_SIGNED_MOST:
            return False
        for name in names:
            field = kvfs_s3_field(<const uint8_t *>PyBytes_AS_STRING(name), PyBytes_GET_SIZE(name))
            if field < 0 or name != name.lower():
                return False
            found.raw.names[found.raw.count] = field
            found.raw.count += 1
        if len(set(names)) != len(names):
            return False
        found.scope, found.signed_headers, found.may = scope, signed_headers, may
        found.credential = credential
        found.raw.scope = text_of(scope)
        found.raw.signed_headers = text_of(signed_headers)
        field = kvfs_s3_signer_key(&found.raw, <const uint8_t *>PyBytes_AS_STRING(signing_key))
        if field < 0:
            raise from_errno(field, "HMAC-SHA-256 of libcrypto")
        if len(self._signers) >= limits.MAX_SIGNERS:
            self._signers.clear()
        self._signers[signer] = found
        return True

    # --- one request -------------------------------------------------------------------------------------
    cdef tuple _recognise(self, const uint8_t *data, size_t size, double now_s, kvfs_s3_head *head):
        """Return the name and the credential of a plain, rightly signed and allowed request; None for another."""
        cdef uint8_t name[NAME_BYTES]
        cdef size_t name_bytes, bucket_bytes
        cdef _Signer signer
        cdef int right
        if not kvfs_s3_parse(data, size, head):
            return None
        host_bucket = self._hosts.get(bytes_of(head.value[KVFS_S3_HOST]))
        signer = self._signers.get(bytes_of(head.signer))
        if host_bucket is None or signer is None:
            return None
        name_bytes = kvfs_s3_name(head.target, text_of(host_bucket), name, NAME_BYTES)
        if name_bytes == 0:
            return None
        with nogil:
            right = kvfs_s3_verify(head, &signer.raw, now_s, limits_skew_s, self._scratch, limits_head_bytes)
        if not right:
            return None
        found = PyBytes_FromStringAndSize(<const char *>name, name_bytes)
        bucket = found[:found.index(0)]
        if name_bytes - len(bucket) - 1 > limits_key_bytes or not signer.may(bucket, head.method == KVFS_S3_PUT):
            return None
        return found, signer.credential

    def recognise(self, bytes data not None, double now_s):
        cdef kvfs_s3_head head
        found = self._recognise(<const uint8_t *>PyBytes_AS_STRING(data), PyBytes_GET_SIZE(data), now_s, &head)
        return None if found is None else ((b"GET", b"HEAD", b"PUT")[head.method], found[0], head.bytes)

    cdef _Object _object(self, bytes name):
        cdef _Object found
        row = self._find(name)
        if row is None:
            return None
        found = self._objects.get(name)
        if found is not None and found.row == row:
            return found
        said = self._describe(name, row)
        if said is None:
            return None
        found = _Object.__new__(_Object)
        found.row = row
        found.key, found.raw.size_bytes, found.headers, found.checksum = said
        if PyBytes_GET_SIZE(found.key) != 16:
            raise InvalidRequest(f"a store key of {len(found.key)} bytes")
        memcpy(found.raw.key, PyBytes_AS_STRING(found.key), 16)
        found.raw.headers = text_of(found.headers)
        found.raw.checksum = text_of(found.checksum)
        if len(self._objects) >= limits.REMEMBERED_OBJECTS:
            self._objects.clear()
        self._objects[name] = found
        return found

    cdef int _answer(self, Idle idle, const uint8_t *data, size_t size, double now_s, kvfs_s3_head *head,
                     kvfs_s3_rest *rest) except -1:
        cdef _Object found
        cdef int outcome
        if self._table is None:
            return KVFS_S3_NOT_OURS
        known = self._recognise(data, size, now_s, head)
        if known is None:
            return KVFS_S3_NOT_OURS
        name, credential = known
        if head.method == KVFS_S3_PUT:
            crc = head.value[KVFS_S3_CRC64]
            idle.write = (name, credential, head.bytes, bytes_of(head.target), head.length,
                          bytes_of(crc) if crc.at != NULL else None, head.value[KVFS_S3_EXPECT].at != NULL)
            return KVFS_S3_NOT_OURS
        found = self._object(name)
        if found is None:
            return KVFS_S3_NOT_OURS
        self._answering.table = self._table.pointer()
        self._answering.socket = idle.descriptor
        self._answering.request_id += 1
        with nogil:
            outcome = kvfs_s3_answer(&self._answering, head, &found.raw, rest)
        if outcome == KVFS_S3_NOT_OURS:
            return outcome
        if head.method == KVFS_S3_HEAD:
            self.heads += 1
        else:
            self.gets += 1
            self.sent_bytes += found.raw.size_bytes
            self._touch(found.key)
        return outcome

    # --- connections -------------------------------------------------------------------------------------
    def watch(self, Idle idle not None, task):
        cdef epoll_event event
        event.events = EPOLLIN
        event.data.fd = idle.descriptor
        idle.task = task
        idle.data = idle.rest = b""
        idle.write = None
        idle.offset = idle.left = 0
        if epoll_ctl(self._epoll, EPOLL_CTL_ADD, idle.descriptor, &event) < 0:
            raise from_errno(-errno, "watch a connection")
        self._watched[idle.descriptor] = idle

    def unwatch(self, Idle idle not None):
        if self._watched.pop(idle.descriptor, None) is not None:
            epoll_ctl(self._epoll, EPOLL_CTL_DEL, idle.descriptor, NULL)
        idle.task = None

    def serve(self, double now_s, double clock_s, bytes date not None, double turn_s):
        cdef epoll_event events[EVENTS]
        cdef double end_s = monotonic_s() + turn_s
        cdef int n, i
        cdef Idle idle
        self._answering.date = text_of(date)
        done = []
        while True:
            n = epoll_wait(self._epoll, events, EVENTS, 0)
            for i in range(n):
                idle = self._watched.get(events[i].data.fd)
                if idle is None or self._serve(idle, now_s, clock_s):
                    continue
                done.append(idle.task)
                self.unwatch(idle)
            if n <= 0 or monotonic_s() >= end_s:
                return done

    cdef bint _serve(self, Idle idle, double now_s, double clock_s) except -1:
        """Answer the input; return whether the connection stays watched."""
        cdef kvfs_s3_head head
        cdef kvfs_s3_rest rest
        cdef ssize_t size = recv(idle.descriptor, self._input, limits_head_bytes, MSG_DONTWAIT)
        cdef ssize_t at = 0
        cdef int outcome = KVFS_S3_SENT
        if size < 0 and (errno == EAGAIN or errno == EINTR):
            return True
        if size <= 0:
            idle.gone = size < 0
            return False
        while at < size and outcome == KVFS_S3_SENT:
            outcome = self._answer(idle, self._input + at, size - at, now_s, &head, &rest)
            if outcome != KVFS_S3_NOT_OURS:
                at += head.bytes
                idle.served_s = clock_s
        if outcome == KVFS_S3_SENT:
            return True
        idle.data = PyBytes_FromStringAndSize(<const char *>self._input + at, size - at)
        idle.gone = outcome == KVFS_S3_GONE
        if outcome == KVFS_S3_PART:
            idle.rest = PyBytes_FromStringAndSize(<const char *>self._answering.out + rest.begin,
                                                  rest.end - rest.begin)
            idle.file, idle.offset, idle.left = rest.fd, rest.offset, rest.left
        return False


cdef double limits_skew_s = limits.MAX_CLOCK_SKEW_S
cdef size_t limits_head_bytes = limits.MAX_HEAD_BYTES
cdef size_t limits_key_bytes = limits.MAX_KEY_BYTES
