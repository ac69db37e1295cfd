"""Drafts of blocks: writable memory, or written in pieces, batches in one call.

Invariants: a draft is closed (descriptor and mapping) before its seal is asked for, since one that is open for
writing cannot be sealed; it cannot be closed while something made from it (a memoryview, an array) is alive.
Concurrency: one draft, one writer at a time, except `save_layer`, which threads may call for different layers.
Writes drop the GIL.
"""

from cpython.buffer cimport PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_AS_STRING
from libc.errno cimport errno
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

import os

from kvfs.errors import InvalidRequest, from_errno

from kvfs._native.blocks.pieces cimport Pieces, iovec, join_keys
from kvfs._native.shared.table cimport Table, kvfs_entry_view, kvfs_table, kvfs_table_lookup

cdef extern from "<sys/mman.h>" nogil:
    int munmap(void *address, size_t length)

cdef extern from "<unistd.h>" nogil:
    int ftruncate(int fd, long size)
    int close(int fd)

cdef extern from "blocks/writer_core.h" nogil:
    int kvfs_write_fd(int fd, uint64_t offset, const iovec *vectors, Py_ssize_t pieces)
    int kvfs_map_draft(int fd, uint64_t size, void **place)
    int KVFS_SEALS_AT_ONCE

    struct kvfs_put:
        int fd
        uint32_t slot
        uint32_t generation
        uint64_t kept_bytes
        Py_ssize_t block
        int status

    int kvfs_put_blocks(int channel, kvfs_put *puts, Py_ssize_t n, const uint8_t *keys, const uint8_t *parents,
                        const iovec *vectors, const Py_ssize_t *starts, int64_t timeout_ns)

PUTS_AT_ONCE = KVFS_SEALS_AT_ONCE


cdef class Draft:
    """A block being written."""

    cdef readonly bytes key
    cdef readonly bytes parent
    cdef readonly uint64_t size_bytes
    cdef readonly int layers
    cdef readonly uint32_t slot
    cdef readonly uint32_t generation
    cdef readonly object session
    cdef int _fd
    cdef void *_place
    cdef Py_ssize_t _exports
    cdef set _missing
    cdef object __weakref__

    def __cinit__(self):
        self._fd = -1
        self._place = NULL

    def __init__(self, bytes key, bytes parent, uint64_t size_bytes, slot, generation, int fd, session, int layers=0):
        self._fd = fd
        self.key = key
        self.parent = parent
        self.size_bytes = size_bytes
        self.slot = slot
        self.generation = generation
        self.session = session
        self.layers = layers
        self._missing = set(range(layers))

    def __dealloc__(self):
        if self._place != NULL:
            munmap(self._place, self.size_bytes)
        if self._fd >= 0:
            close(self._fd)

    @property
    def is_open(self):
        return self._fd >= 0

    @property
    def missing_layers(self):
        return sorted(self._missing)

    cdef int _need_open(self) except -1:
        if self._fd < 0:
            raise InvalidRequest("this draft is closed: sealed, aborted or about to be")
        return 0

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        cdef int rc = 0
        cdef int fd = self._fd
        if fd < 0:
            raise BufferError("this draft is closed")
        if self._place == NULL and self.size_bytes:
            with nogil:
                rc = kvfs_map_draft(fd, self.size_bytes, &self._place)
            if rc < 0:
                raise from_errno(rc, f"mapping a draft of {self.size_bytes} bytes")
        PyBuffer_FillInfo(buffer, self, self._place if self._place != NULL else <void *>b"", self.size_bytes, 0, flags)
        self._exports += 1

    def __releasebuffer__(self, Py_buffer *buffer):
        self._exports -= 1

    def __len__(self):
        return self.size_bytes

    def write(self, buffer, uint64_t offset=0):
        cdef Pieces pieces = Pieces([buffer], 1, False)
        cdef uint64_t size = pieces.size_of(0)
        cdef int fd = self._fd, rc
        self._need_open()
        if offset > self.size_bytes or size > self.size_bytes - offset:
            raise InvalidRequest(f"{size} bytes at {offset} of a draft of {self.size_bytes}")
        with nogil:
            rc = kvfs_write_fd(fd, offset, pieces.vectors, pieces.starts[1])
        if rc < 0:
            raise from_errno(rc, f"writing {size} bytes of a draft")

    def save_layer(self, int layer, buffer):
        if not 0 <= layer < self.layers:
            raise InvalidRequest(f"layer {layer} of a draft of {self.layers} layers")
        layer_bytes = self.size_bytes // self.layers
        cdef Pieces pieces = Pieces([buffer], 1, False)
        if pieces.size_of(0) != layer_bytes:
            raise InvalidRequest(f"layer {layer}: {pieces.size_of(0)} bytes, where a layer has {layer_bytes}")
        self.write(buffer, layer * layer_bytes)
        self._missing.discard(layer)
        return not self._missing

    def close(self):
        if self._exports:
            raise InvalidRequest(f"{self._exports} objects made from this draft are alive: release them first")
        if self._place != NULL:
            place, self._place = self._place, NULL
            munmap(place, self.size_bytes)
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            close(fd)

    def after_fork(self):
        """Close the draft in a forked child, which has no mapping of it."""
        self._place = NULL
        if self._fd >= 0:
            close(self._fd)
            self._fd = -1

    def check_ready(self):
        self._need_open()
        if self._missing:
            raise InvalidRequest(f"layers {sorted(self._missing)[:8]} of this draft are not saved")
        if self._exports:
            raise InvalidRequest(f"{self._exports} objects made from this draft are alive: release them first")

    def finish(self):
        """Close at the full size, since a slot's size is its block's."""
        self.check_ready()
        if ftruncate(self._fd, self.size_bytes) != 0:
            raise from_errno(errno, f"sizing a draft of {self.size_bytes} bytes")
        self.close()


def write_drafts(drafts not None, Pieces pieces not None, Py_ssize_t first=0):
    cdef Py_ssize_t i, at
    cdef Draft draft
    cdef int rc, fd, failed = 0
    if first < 0 or first + len(drafts) > pieces.blocks:
        raise InvalidRequest(f"{len(drafts)} drafts from {first} on, and pieces for {pieces.blocks}")
    for i in range(len(drafts)):
        if drafts[i] is None:
            continue
        draft = <Draft?>drafts[i]
        draft._need_open()
        fd, draft._fd = draft._fd, -1
        at = first + i
        with nogil:
            rc = kvfs_write_fd(fd, 0, pieces.vectors + pieces.starts[at], pieces.starts[at + 1] - pieces.starts[at])
            close(fd)
        if rc < 0 and failed == 0:
            failed = rc
    if failed:
        raise from_errno(failed, f"writing {len(drafts)} blocks")


def put_blocks(int channel, list drafts not None, list blocks not None, bytes keys not None, bytes parents not None,
               Pieces pieces not None, double timeout_s):
    cdef kvfs_put puts[64]
    cdef Py_ssize_t n = len(drafts), i
    cdef const uint8_t *first_key = <const uint8_t *>PyBytes_AS_STRING(keys)
    cdef const uint8_t *first_parent = <const uint8_t *>PyBytes_AS_STRING(parents)
    cdef int64_t timeout_ns = <int64_t>(timeout_s * 1e9)
    cdef int rc
    if n > KVFS_SEALS_AT_ONCE or n != len(blocks) or len(keys) != pieces.blocks * 16 or len(parents) != len(keys):
        raise InvalidRequest(f"{n} drafts for {len(blocks)} blocks of {pieces.blocks}, {len(keys)} bytes of keys")
    for i in range(n):
        puts[i].slot, puts[i].generation, puts[i].fd, puts[i].kept_bytes = drafts[i]
        puts[i].block = blocks[i]
        if not 0 <= puts[i].block < pieces.blocks:
            raise InvalidRequest(f"block {blocks[i]} of {pieces.blocks}")
    with nogil:
        rc = kvfs_put_blocks(channel, puts, n, first_key, first_parent, pieces.vectors, pieces.starts, timeout_ns)
    return None if rc < 0 else [puts[i].status for i in range(n)]


cdef bytes join_parents(parents, Py_ssize_t n):
    if parents is None:
        return bytes(16 * n)
    if len(parents) != n:
        raise InvalidRequest(f"{n} keys and {len(parents)} parents")
    for parent in parents:
        if parent is not None and (not isinstance(parent, bytes) or len(<bytes>parent) != 16):
            raise InvalidRequest(f"a parent is a prefix hash of 16 bytes, not {parent!r:.80}")
    return b"".join([parent or bytes(16) for parent in parents])


cdef bint is_any_there(Table table, bytes keys, Py_ssize_t n) except -1:
    """Return whether any of the blocks is in the table, or may be."""
    cdef kvfs_entry_view view
    cdef const kvfs_table *pointer = table.pointer()
    cdef const uint8_t *first = <const uint8_t *>PyBytes_AS_STRING(keys)
    cdef Py_ssize_t i
    for i in range(n):
        if kvfs_table_lookup(pointer, first + 16 * i, &view) != 0:
            return True
    return False


cdef class Put:
    """The checked arguments of a put, and its progress."""

    cdef readonly bytes keys
    cdef readonly bytes parents
    cdef readonly Pieces pieces
    cdef readonly Py_ssize_t count
    cdef readonly list drafts
    cdef readonly list statuses

    def __init__(self, keys, buffers, parents):
        self.keys = join_keys(keys)
        self.count = len(self.keys) // 16
        self.parents = join_parents(parents, self.count)
        self.pieces = Pieces(buffers, self.count, False)

    @property
    def size_bytes(self):
        return self.pieces.size_of(0) if self.count else 0

    def at_once(self, int channel, spares not None, Table table, double timeout_s):
        cdef kvfs_put puts[64]
        cdef Py_ssize_t n = self.count, i
        cdef const uint8_t *keys = <const uint8_t *>PyBytes_AS_STRING(self.keys)
        cdef const uint8_t *parents = <const uint8_t *>PyBytes_AS_STRING(self.parents)
        cdef int64_t timeout_ns = <int64_t>(timeout_s * 1e9)
        cdef Pieces pieces = self.pieces
        cdef bint all_new = True
        cdef int rc
        if not 0 < n <= KVFS_SEALS_AT_ONCE or len(spares) < n or (table is not None and is_any_there(table, self.keys, n)):
            return None
        self.drafts = [spares.pop() for i in range(n)]
        for i in range(n):
            puts[i].slot, puts[i].generation, puts[i].fd, puts[i].kept_bytes = self.drafts[i]
            puts[i].block = i
        with nogil:
            rc = kvfs_put_blocks(channel, puts, n, keys, parents, pieces.vectors, pieces.starts, timeout_ns)
        if rc < 0:
            return False
        for i in range(n):
            all_new = all_new and puts[i].status == 0
        if not all_new:
            self.statuses = [puts[i].status for i in range(n)]
        return all_new
