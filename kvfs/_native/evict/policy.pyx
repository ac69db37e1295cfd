"""Eviction orders seen from Python: a thin seam over `policy_core.c`, and the replay of traces through them.

Invariants: a claimed unit is released when its iteration ends. Concurrency: one thread; `replay` drops the GIL.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

import hashlib

from kvfs.errors import InvalidRequest, NotFound, from_errno

cdef extern from "errno.h":
    int ENOENT

cdef extern from "evict/policy_core.h" nogil:
    const uint32_t KVFS_POLICY_NONE
    enum: KVFS_POLICY_KEY_BYTES
    enum kvfs_policy_kind:
        KVFS_POLICY_LRU_LEAF
        KVFS_POLICY_DEFAULT
    struct kvfs_policy:
        pass
    struct kvfs_replay:
        const uint64_t *start
        const uint32_t *ids
        uint64_t requests
        uint32_t unique
        uint32_t capacity
        uint32_t *prefix_hits
        uint32_t *victims
        uint64_t max_victims
        uint64_t evicted

    kvfs_policy *kvfs_policy_new(kvfs_policy_kind kind)
    void kvfs_policy_free(kvfs_policy *p)
    int kvfs_policy_insert(kvfs_policy *p, const uint8_t *key, uint64_t size_bytes, const uint8_t *parent,
                           const uint8_t *group, int pinned)
    int kvfs_policy_touch(kvfs_policy *p, const uint8_t *key)
    int kvfs_policy_cool(kvfs_policy *p, const uint8_t *key)
    int kvfs_policy_remove(kvfs_policy *p, const uint8_t *key)
    int kvfs_policy_pin(kvfs_policy *p, const uint8_t *key, int pinned)
    int kvfs_policy_has(const kvfs_policy *p, const uint8_t *key)
    int64_t kvfs_policy_claim(kvfs_policy *p)
    int kvfs_policy_release(kvfs_policy *p, uint32_t unit)
    uint32_t kvfs_policy_first(const kvfs_policy *p, uint32_t unit)
    uint32_t kvfs_policy_next(const kvfs_policy *p, uint32_t unit, uint32_t key)
    const uint8_t *kvfs_policy_key(const kvfs_policy *p, uint32_t key)
    uint64_t kvfs_policy_size(const kvfs_policy *p, uint32_t key)
    uint64_t kvfs_policy_total_bytes(const kvfs_policy *p)
    uint32_t kvfs_policy_count(const kvfs_policy *p)
    int kvfs_policy_is_empty(const kvfs_policy *p)
    uint64_t kvfs_policy_state_bytes(const kvfs_policy *p)
    int kvfs_policy_follows_learned(const kvfs_policy *p)
    void kvfs_policy_ranks(const double *chance, const double *edges, int bins, double *ranks)
    int kvfs_replay_policy(kvfs_policy *p, kvfs_replay *r, uint64_t first, uint64_t last)
    int kvfs_replay_s3_fifo(kvfs_replay *r)
    int kvfs_replay_arc(kvfs_replay *r)
    int kvfs_replay_min(kvfs_replay *r)

KINDS = ("lru-leaf", "default")
POLICIES = ("lru-leaf", "s3-fifo", "arc", "min", "default")
MAX_RANK_BINS = 64


cdef int check_key(bytes key) except -1:
    if len(key) != KVFS_POLICY_KEY_BYTES:
        raise InvalidRequest(f"{key!r}: the eviction policy takes keys of {KVFS_POLICY_KEY_BYTES} bytes")
    return 0


cdef const uint8_t *pointer(bytes key):
    return <const uint8_t *>PyBytes_AS_STRING(key)


cdef class Policy:
    cdef kvfs_policy *_p

    def __cinit__(self, str kind):
        if kind not in KINDS:
            raise InvalidRequest(f"no policy of the store is called {kind!r}; there are {', '.join(KINDS)}")
        self._p = kvfs_policy_new(KVFS_POLICY_DEFAULT if kind == "default" else KVFS_POLICY_LRU_LEAF)
        if self._p == NULL:
            raise MemoryError

    def __dealloc__(self):
        kvfs_policy_free(self._p)

    cdef int _check(self, int rc, object key) except -1:
        if rc == -ENOENT:
            raise NotFound(f"the eviction policy does not know {key!r}")
        if rc < 0:
            raise from_errno(rc, f"eviction policy, {key!r}")
        return 0

    def insert(self, bytes key not None, *, object size_bytes, bytes parent, double now, bint pinned=False,
               bytes group=None):
        check_key(key)
        if not 0 <= size_bytes < 1 << 40:
            raise InvalidRequest(f"size of {key!r} is {size_bytes} bytes")
        if parent is not None and group is not None:
            raise InvalidRequest(f"{key!r} has both a parent and a group; blocks have one, files the other")
        cdef const uint8_t *parent_key = NULL
        cdef const uint8_t *group_key = NULL
        if parent is not None:
            check_key(parent)
            parent_key = pointer(parent)
        if group is not None:
            group = hashlib.blake2b(group, digest_size=KVFS_POLICY_KEY_BYTES).digest()
            group_key = pointer(group)
        self._check(kvfs_policy_insert(self._p, pointer(key), size_bytes, parent_key, group_key, pinned), key)

    def touch(self, bytes key not None, double now):
        check_key(key)
        self._check(kvfs_policy_touch(self._p, pointer(key)), key)

    def cool(self, bytes key not None):
        check_key(key)
        self._check(kvfs_policy_cool(self._p, pointer(key)), key)

    def remove(self, bytes key not None):
        check_key(key)
        self._check(kvfs_policy_remove(self._p, pointer(key)), key)

    def pin(self, bytes key not None):
        check_key(key)
        self._check(kvfs_policy_pin(self._p, pointer(key), 1), key)

    def unpin(self, bytes key not None):
        check_key(key)
        self._check(kvfs_policy_pin(self._p, pointer(key), 0), key)

    def victims(self, object bytes_needed, double now):
        cdef int64_t unit
        cdef list claimed = []
        try:
            while bytes_needed > 0:
                unit = kvfs_policy_claim(self._p)
                if unit == KVFS_POLICY_NONE:
                    return
                self._check(<int>unit if unit < 0 else 0, "a victim")
                claimed.append(unit)
                keys, size_bytes = self._members(unit)
                bytes_needed -= size_bytes
                yield keys
        finally:
            for unit in claimed:
                self._check(kvfs_policy_release(self._p, unit), "a victim")

    cdef tuple _members(self, uint32_t unit):
        cdef uint32_t at = kvfs_policy_first(self._p, unit)
        cdef uint64_t size_bytes = 0
        cdef list keys = []
        while at != KVFS_POLICY_NONE:
            keys.append(PyBytes_FromStringAndSize(<const char *>kvfs_policy_key(self._p, at), KVFS_POLICY_KEY_BYTES))
            size_bytes += kvfs_policy_size(self._p, at)
            at = kvfs_policy_next(self._p, unit, at)
        return keys, size_bytes

    def __contains__(self, bytes key not None):
        return len(key) == KVFS_POLICY_KEY_BYTES and kvfs_policy_has(self._p, pointer(key)) != 0

    def __len__(self):
        return kvfs_policy_count(self._p)

    @property
    def total_bytes(self):
        return kvfs_policy_total_bytes(self._p)

    @property
    def is_empty(self):
        return kvfs_policy_is_empty(self._p) != 0

    @property
    def state_bytes(self):
        return kvfs_policy_state_bytes(self._p)

    @property
    def follows_learned(self):
        return kvfs_policy_follows_learned(self._p) != 0


def replay(str policy, const uint64_t[::1] start not None, const uint32_t[::1] ids not None, uint32_t unique,
           uint32_t capacity, uint32_t[::1] prefix_hits not None, uint32_t[::1] victims=None, progress=None):
    cdef kvfs_replay r
    cdef int rc = 0
    cdef uint64_t done = 0, step
    cdef Policy live
    if policy not in POLICIES:
        raise InvalidRequest(f"no policy is called {policy!r}; there are {', '.join(POLICIES)}")
    check_trace(start, ids, unique)
    r.requests = len(start) - 1
    if <uint64_t>len(prefix_hits) != r.requests:
        raise InvalidRequest(f"room for the hits of {len(prefix_hits)} requests; there are {r.requests}")
    r.start = &start[0]
    r.ids = &ids[0] if len(ids) else NULL
    r.unique = unique
    r.capacity = capacity
    r.prefix_hits = &prefix_hits[0] if r.requests else NULL
    r.victims = &victims[0] if victims is not None and len(victims) else NULL
    r.max_victims = len(victims) if victims is not None else 0
    r.evicted = 0
    if policy in KINDS:
        live = Policy(policy)
        while rc == 0 and done < r.requests:
            step = min(r.requests, done + 4096)
            with nogil:
                rc = kvfs_replay_policy(live._p, &r, done, step)
            done = step
            if progress is not None:
                progress(done, r.requests)
    elif policy == "s3-fifo":
        with nogil:
            rc = kvfs_replay_s3_fifo(&r)
    elif policy == "arc":
        with nogil:
            rc = kvfs_replay_arc(&r)
    else:
        with nogil:
            rc = kvfs_replay_min(&r)
    if rc < 0:
        raise from_errno(rc, f"replay of {policy}")
    if progress is not None:
        progress(r.requests, r.requests)
    return r.evicted


cdef int check_trace(const uint64_t[::1] start, const uint32_t[::1] ids, uint32_t unique) except -1:
    cdef Py_ssize_t i
    if len(start) < 1 or start[0] != 0 or start[len(start) - 1] != <uint64_t>len(ids):
        raise InvalidRequest("a trace's starts must begin with 0 and end with the number of its blocks")
    for i in range(1, len(start)):
        if start[i] < start[i - 1]:
            raise InvalidRequest(f"request {i} of a trace starts before the one before it")
    for i in range(len(ids)):
        if ids[i] >= unique:
            raise InvalidRequest(f"block {ids[i]} of a trace of {unique} unique blocks")
    return 0


def ranks(chance, edges):
    cdef double in_chance[64]
    cdef double in_edges[65]
    cdef double out[64]
    cdef int bins = len(chance)
    if not 0 < bins <= MAX_RANK_BINS or len(edges) != bins + 1:
        raise InvalidRequest(f"{bins} bins with {len(edges)} edges: 1 to {MAX_RANK_BINS}, and one edge more")
    for i in range(bins):
        in_chance[i] = chance[i]
    for i in range(bins + 1):
        in_edges[i] = edges[i]
    kvfs_policy_ranks(in_chance, in_edges, bins, out)
    return [out[i] for i in range(bins)]
