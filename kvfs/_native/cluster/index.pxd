"""The cluster's index, for other native modules."""

from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

cdef extern from "shared/mutex.h" nogil:
    struct kvfs_mutex:
        pass

cdef extern from "cluster/index_core.h" nogil:
    enum:
        KVFS_CLUSTER_HASH_BYTES
        KVFS_CLUSTER_SOURCES
        KVFS_CLUSTER_MASK_WORDS
    struct kvfs_cluster:
        pass
    struct kvfs_run:
        uint64_t holders[16]
        uint64_t blocks
        int64_t producer
    struct kvfs_runs:
        kvfs_run *at
        size_t count
        uint32_t room

cdef class ClusterIndex:
    cdef kvfs_cluster *_c
    cdef kvfs_mutex _mutex
    cdef readonly uint64_t detached

    cdef int collect_runs(self, const uint8_t *hashes, size_t count, kvfs_runs *runs) noexcept nogil
