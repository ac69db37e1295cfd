"""Which sources of a cluster hold which blocks, seen from Python: a thin seam over `index_core.c`.

Invariants: sources are below KVFS_CLUSTER_SOURCES, and buffers are whole hashes; both are checked here. No Python object
is made while the mutex is held.
Concurrency: any thread; `_mutex` guards the core. Who holds it never waits for the GIL, so that it may be waited for with
the GIL. Of changes of many blocks it is held for LONG_HASHES each, and those are made without the GIL.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.math cimport isnan
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy

import os

from kvfs.errors import InvalidRequest, from_errno

cdef extern from "shared/mutex.h" nogil:
    int kvfs_mutex_init(kvfs_mutex *m)
    void kvfs_mutex_destroy(kvfs_mutex *m)
    void kvfs_lock(kvfs_mutex *m)
    void kvfs_unlock(kvfs_mutex *m)

cdef extern from "cluster/holder_sets.h" nogil:
    enum kvfs_set_change:
        KVFS_SET_ADD
        KVFS_SET_REMOVE
        KVFS_SET_PRODUCE
        KVFS_SET_PRODUCED
    enum:
        KVFS_NO_PRODUCER
        KVFS_COLUMNS
    struct kvfs_producer:
        int64_t number
        double ends_s
    const kvfs_producer kvfs_no_producer

cdef extern from "cluster/index_core.h" nogil:
    enum:
        KVFS_CLUSTER_SEGMENT_BLOCKS
        KVFS_WINDOWS_OF_SOURCE
        KVFS_WINDOW_STRIDE
    struct kvfs_depth:
        uint32_t source
        uint32_t blocks
    struct kvfs_window:
        uint32_t source
        uint32_t holder
        uint32_t blocks
        uint32_t stride
        uint32_t other
        uint32_t is_chunked
        uint32_t is_alone
    kvfs_cluster *kvfs_cluster_new(uint64_t max_blocks, uint64_t seed)
    void kvfs_cluster_free(kvfs_cluster *c)
    int64_t kvfs_cluster_change(kvfs_cluster *c, kvfs_set_change change, uint32_t source, kvfs_producer producer,
                                const uint8_t *hashes, size_t count)
    void kvfs_cluster_clear(kvfs_cluster *c, uint32_t source)
    void kvfs_cluster_sweep(kvfs_cluster *c, uint64_t segments)
    bint kvfs_cluster_is_swept(const kvfs_cluster *c)
    uint32_t kvfs_cluster_unswept(const kvfs_cluster *c)
    int kvfs_cluster_runs(const kvfs_cluster *c, const uint8_t *hashes, size_t count, kvfs_runs *runs)
    int kvfs_cluster_set_windows(kvfs_cluster *c, uint32_t source, const kvfs_window *windows, size_t count)
    int64_t kvfs_cluster_match(const kvfs_cluster *c, const uint8_t *hashes, size_t count, kvfs_depth *depths)
    int kvfs_cluster_depths(const kvfs_cluster *c, const uint8_t *hashes, size_t count, const uint64_t *masks,
                            size_t mask_count, uint64_t *depths)
    void kvfs_cluster_present(const kvfs_cluster *c, const uint8_t *hashes, size_t count, const uint64_t *masks,
                              size_t mask_count, uint64_t *depths)
    bint kvfs_cluster_holds(const kvfs_cluster *c, uint32_t source, const uint8_t *hash)
    void kvfs_cluster_holders(const kvfs_cluster *c, const uint8_t *hash, uint64_t *holders)
    size_t kvfs_cluster_lacking(const kvfs_cluster *c, const uint8_t *hashes, size_t count, const uint64_t *mask,
                                uint8_t *lacking)
    size_t kvfs_cluster_list(const kvfs_cluster *c, uint32_t source, uint64_t *cursor, uint8_t *hashes)
    uint64_t kvfs_cluster_count(const kvfs_cluster *c)
    uint64_t kvfs_cluster_source_blocks(const kvfs_cluster *c, uint32_t source)
    uint64_t kvfs_cluster_bytes(const kvfs_cluster *c)

MAX_SOURCES = KVFS_CLUSTER_SOURCES
MAX_WINDOWS = KVFS_WINDOWS_OF_SOURCE
MAX_STRIDE = KVFS_WINDOW_STRIDE
SPARE_SOURCES = KVFS_COLUMNS - KVFS_CLUSTER_SOURCES

cdef enum:
    # A walk along as many takes 25 us. Shorter ones keep the GIL: a thread that gives it away beside one that never pauses
    # waits 5 ms for it (sys.getswitchinterval).
    LONG_HASHES = 1024


cdef size_t open_hashes(object hashes, Py_buffer *view) except? 0:
    PyObject_GetBuffer(hashes, view, PyBUF_SIMPLE)
    if view.len % KVFS_CLUSTER_HASH_BYTES:
        PyBuffer_Release(view)
        raise InvalidRequest(f"hashes of {view.len} bytes: must be whole hashes of {KVFS_CLUSTER_HASH_BYTES}")
    return view.len // KVFS_CLUSTER_HASH_BYTES


cdef const uint8_t *one_hash(bytes hash) except NULL:
    if len(hash) != KVFS_CLUSTER_HASH_BYTES:
        raise InvalidRequest(f"a hash of {len(hash)} bytes: must be {KVFS_CLUSTER_HASH_BYTES}")
    return <const uint8_t *>hash


cdef int check_source(uint64_t source) except -1:
    if source >= KVFS_CLUSTER_SOURCES:
        raise InvalidRequest(f"source {source}: must be below {KVFS_CLUSTER_SOURCES}")
    return 0


cdef object mask_of(const uint64_t *words):
    return int.from_bytes(PyBytes_FromStringAndSize(<const char *>words, 8 * KVFS_CLUSTER_MASK_WORDS), "little")


cdef int write_mask(object mask, uint64_t *words) except -1:
    cdef bytes packed
    if mask < 0 or mask.bit_length() > KVFS_CLUSTER_SOURCES:
        raise InvalidRequest(f"a mask of {mask.bit_length()} bits: must be of sources below {KVFS_CLUSTER_SOURCES}")
    packed = mask.to_bytes(8 * KVFS_CLUSTER_MASK_WORDS, "little")
    memcpy(words, <const char *>packed, 8 * KVFS_CLUSTER_MASK_WORDS)
    return 0


cdef int64_t change_part(
    ClusterIndex index, kvfs_set_change change, uint32_t source, kvfs_producer producer, const uint8_t *at, size_t count
) noexcept nogil:
    kvfs_lock(&index._mutex)
    cdef int64_t result = kvfs_cluster_change(index._c, change, source, producer, at, count)
    kvfs_unlock(&index._mutex)
    return result


cdef int64_t change(
    ClusterIndex index, kvfs_set_change change, uint32_t source, kvfs_producer producer, hashes
) except -1:
    cdef Py_buffer view
    cdef size_t count = open_hashes(hashes, &view)
    cdef const uint8_t *at = <const uint8_t *>view.buf
    cdef int64_t result = 0
    cdef size_t part
    if count <= LONG_HASHES:
        result = change_part(index, change, source, producer, at, count)
    else:
        with nogil:
            while count:
                part = min(count, <size_t>LONG_HASHES)
                result += change_part(index, change, source, producer, at, part)
                at += part * KVFS_CLUSTER_HASH_BYTES
                count -= part
    PyBuffer_Release(&view)
    return result


cdef int64_t match_all(ClusterIndex index, const uint8_t *hashes, size_t count, kvfs_depth *depths) noexcept nogil:
    kvfs_lock(&index._mutex)
    cdef int64_t found = kvfs_cluster_match(index._c, hashes, count, depths)
    kvfs_unlock(&index._mutex)
    return found


cdef int find_depths(
    ClusterIndex index, const uint8_t *hashes, size_t count, const uint64_t *masks, size_t mask_count, uint64_t *found,
    bint limited
) noexcept nogil:
    cdef int rc = 0
    kvfs_lock(&index._mutex)
    if limited:
        rc = kvfs_cluster_depths(index._c, hashes, count, masks, mask_count, found)
    else:
        kvfs_cluster_present(index._c, hashes, count, masks, mask_count, found)
    kvfs_unlock(&index._mutex)
    return rc


cdef size_t find_lacking(
    ClusterIndex index, const uint8_t *hashes, size_t count, const uint64_t *mask, uint8_t *lacking
) noexcept nogil:
    kvfs_lock(&index._mutex)
    cdef size_t found = kvfs_cluster_lacking(index._c, hashes, count, mask, lacking)
    kvfs_unlock(&index._mutex)
    return found


cdef class ClusterIndex:
    def __cinit__(self, uint64_t max_blocks):
        cdef int rc
        cdef uint64_t seed = int.from_bytes(os.urandom(8), "little")
        if (rc := kvfs_mutex_init(&self._mutex)) != 0:
            raise from_errno(rc, "mutex of a cluster index")
        self._c = kvfs_cluster_new(max_blocks, seed)
        if self._c == NULL:
            raise MemoryError

    def __dealloc__(self):
        kvfs_cluster_free(self._c)
        kvfs_mutex_destroy(&self._mutex)

    # --- changes ------------------------------------------------------------------------------------------
    def add(self, uint64_t source, hashes, bytes parent=None):
        cdef const uint8_t *before
        cdef bint held
        check_source(source)
        if parent is not None:
            before = one_hash(parent)
            kvfs_lock(&self._mutex)
            held = kvfs_cluster_holds(self._c, source, before)
            kvfs_unlock(&self._mutex)
            self.detached += 0 if held else memoryview(hashes).nbytes // KVFS_CLUSTER_HASH_BYTES
        return change(self, KVFS_SET_ADD, source, kvfs_no_producer, hashes)

    def remove(self, uint64_t source, hashes):
        check_source(source)
        return change(self, KVFS_SET_REMOVE, source, kvfs_no_producer, hashes)

    def produce(self, uint64_t source, int64_t producer, double ends_s, hashes):
        check_source(source)
        if producer < 0:
            raise InvalidRequest(f"producer {producer}: must not be negative")
        if isnan(ends_s):
            raise InvalidRequest(f"producer {producer}: must end at a time, not {ends_s}")
        return change(self, KVFS_SET_PRODUCE, source, kvfs_producer(producer, ends_s), hashes)

    def produced(self, int64_t producer, hashes):
        if producer >= 0:
            change(self, KVFS_SET_PRODUCED, 0, kvfs_producer(producer, 0.0), hashes)

    def clear(self, uint64_t source):
        check_source(source)
        with nogil:
            kvfs_lock(&self._mutex)
            kvfs_cluster_clear(self._c, source)
            kvfs_unlock(&self._mutex)

    def sweep(self, uint64_t segments=1):
        cdef bint swept = False
        with nogil:
            while segments and not swept:
                kvfs_lock(&self._mutex)
                kvfs_cluster_sweep(self._c, 1)
                swept = kvfs_cluster_is_swept(self._c)
                kvfs_unlock(&self._mutex)
                segments -= 1
        return not swept

    def set_windows(self, uint64_t source, windows, other=None, *, bint alone=False):
        cdef kvfs_window given[8]
        cdef size_t count = len(windows), place
        cdef uint64_t beside = source if other is None else other
        cdef int rc
        check_source(source)
        check_source(beside)
        if count > KVFS_WINDOWS_OF_SOURCE:
            raise InvalidRequest(f"source {source}: {count} windows: the limit is {KVFS_WINDOWS_OF_SOURCE}")
        if alone and not count:
            raise InvalidRequest(f"source {source}: alone without a window it would hold every prompt")
        if alone and other is not None:
            raise InvalidRequest(f"source {source}: alone it lacks nothing that source {other} may have")
        for place in range(count):
            given[place].holder, given[place].blocks, given[place].stride, is_chunked = windows[place]
            given[place].is_chunked = <bint>is_chunked
            check_source(given[place].holder)
            if not given[place].blocks:
                raise InvalidRequest(f"a window of 0 blocks beside source {source}: must be 1 at least")
            if not 1 <= given[place].stride <= KVFS_WINDOW_STRIDE:
                raise InvalidRequest(f"stride {given[place].stride}: must be from 1 to {KVFS_WINDOW_STRIDE}")
            given[place].other = <uint32_t>beside
            given[place].is_alone = alone
        kvfs_lock(&self._mutex)
        rc = kvfs_cluster_set_windows(self._c, source, given, count)
        kvfs_unlock(&self._mutex)
        if rc < 0:
            raise MemoryError

    # --- questions ----------------------------------------------------------------------------------------
    cdef int collect_runs(self, const uint8_t *hashes, size_t count, kvfs_runs *runs) noexcept nogil:
        kvfs_lock(&self._mutex)
        cdef int rc = kvfs_cluster_runs(self._c, hashes, count, runs)
        kvfs_unlock(&self._mutex)
        return rc

    def runs(self, hashes):
        cdef Py_buffer view
        cdef size_t count = open_hashes(hashes, &view)
        cdef kvfs_runs runs = kvfs_runs(at=NULL, count=0, room=0)
        cdef int rc
        cdef kvfs_run *run
        if count <= LONG_HASHES:
            rc = self.collect_runs(<const uint8_t *>view.buf, count, &runs)
        else:
            with nogil:
                rc = self.collect_runs(<const uint8_t *>view.buf, count, &runs)
        PyBuffer_Release(&view)
        try:
            if rc < 0:
                raise MemoryError
            found = []
            for place in range(runs.count):
                run = &runs.at[place]
                found.append(
                    (mask_of(run.holders), run.blocks, None if run.producer == KVFS_NO_PRODUCER else run.producer)
                )
            return tuple(found)
        finally:
            free(runs.at)

    def match(self, hashes):
        cdef kvfs_depth depths[1024]
        cdef Py_buffer view
        cdef size_t count = open_hashes(hashes, &view)
        cdef int64_t found
        if count <= LONG_HASHES:
            found = match_all(self, <const uint8_t *>view.buf, count, depths)
        else:
            with nogil:
                found = match_all(self, <const uint8_t *>view.buf, count, depths)
        PyBuffer_Release(&view)
        if found < 0:
            raise MemoryError
        return sorted(
            [(depths[place].source, depths[place].blocks) for place in range(found)],
            key=lambda reached: (-reached[1], reached[0]),
        )

    def depths(self, hashes, masks, bint limited=True):
        cdef size_t mask_count = len(masks), count, place
        cdef uint64_t *room = <uint64_t *>calloc(mask_count + 1, 8 * (KVFS_CLUSTER_MASK_WORDS + 1))
        cdef uint64_t *found = room + mask_count * KVFS_CLUSTER_MASK_WORDS
        cdef Py_buffer view
        cdef int rc
        if room == NULL:
            raise MemoryError
        try:
            for place in range(mask_count):
                write_mask(masks[place], room + place * KVFS_CLUSTER_MASK_WORDS)
            count = open_hashes(hashes, &view)
            if count <= LONG_HASHES:
                rc = find_depths(self, <const uint8_t *>view.buf, count, room, mask_count, found, limited)
            else:
                with nogil:
                    rc = find_depths(self, <const uint8_t *>view.buf, count, room, mask_count, found, limited)
            PyBuffer_Release(&view)
            if rc < 0:
                raise MemoryError
            return [found[place] for place in range(mask_count)]
        finally:
            free(room)

    def holders(self, bytes hash not None):
        cdef uint64_t words[16]
        cdef const uint8_t *key = one_hash(hash)
        kvfs_lock(&self._mutex)
        kvfs_cluster_holders(self._c, key, words)
        kvfs_unlock(&self._mutex)
        return mask_of(words)

    def lacking(self, hashes, mask):
        cdef uint64_t words[16]
        cdef Py_buffer view
        cdef size_t count, found
        cdef uint8_t *room
        write_mask(mask, words)
        count = open_hashes(hashes, &view)
        room = <uint8_t *>malloc(view.len + 1)
        if room == NULL:
            PyBuffer_Release(&view)
            raise MemoryError
        if count <= LONG_HASHES:
            found = find_lacking(self, <const uint8_t *>view.buf, count, words, room)
        else:
            with nogil:
                found = find_lacking(self, <const uint8_t *>view.buf, count, words, room)
        PyBuffer_Release(&view)
        try:
            return PyBytes_FromStringAndSize(<const char *>room, found * KVFS_CLUSTER_HASH_BYTES)
        finally:
            free(room)

    def manifest(self, uint64_t source):
        cdef uint64_t cursor = 0
        cdef size_t count = 0, room = 0
        cdef uint8_t *keys = NULL
        cdef uint8_t *grown
        check_source(source)
        try:
            with nogil:
                while True:
                    if room - count < KVFS_CLUSTER_SEGMENT_BLOCKS:
                        room = 2 * room + KVFS_CLUSTER_SEGMENT_BLOCKS
                        grown = <uint8_t *>realloc(keys, room * KVFS_CLUSTER_HASH_BYTES)
                        if grown == NULL:
                            with gil:
                                raise MemoryError
                        keys = grown
                    kvfs_lock(&self._mutex)
                    count += kvfs_cluster_list(self._c, source, &cursor, keys + count * KVFS_CLUSTER_HASH_BYTES)
                    kvfs_unlock(&self._mutex)
                    if not cursor:
                        break
            return PyBytes_FromStringAndSize(<const char *>keys, count * KVFS_CLUSTER_HASH_BYTES)
        finally:
            free(keys)

    def source_blocks(self, uint64_t source):
        check_source(source)
        kvfs_lock(&self._mutex)
        cdef uint64_t count = kvfs_cluster_source_blocks(self._c, source)
        kvfs_unlock(&self._mutex)
        return count

    @property
    def unswept_sources(self):
        kvfs_lock(&self._mutex)
        cdef uint32_t count = kvfs_cluster_unswept(self._c)
        kvfs_unlock(&self._mutex)
        return count

    @property
    def size_bytes(self):
        kvfs_lock(&self._mutex)
        cdef uint64_t size_bytes = kvfs_cluster_bytes(self._c)
        kvfs_unlock(&self._mutex)
        return size_bytes

    def __len__(self):
        kvfs_lock(&self._mutex)
        cdef uint64_t count = kvfs_cluster_count(self._c)
        kvfs_unlock(&self._mutex)
        return count
