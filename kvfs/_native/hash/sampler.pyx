"""Seam of sampler_core.c: a digest of samples of memory, by address.

Invariants: nothing is written. REQUIRES valid addresses (a tensor's `data_ptr`) of memory that stays.
Concurrency: reads without the GIL.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_Calloc, PyMem_Free
from libc.stdint cimport uint8_t, uint64_t, uintptr_t

from kvfs.errors import InvalidRequest


cdef extern from "hash/sampler_core.h" nogil:
    enum:
        KVFS_SAMPLE_LINE_BYTES
        KVFS_SAMPLE_DIGEST_BYTES
    struct kvfs_area:
        const uint8_t *at
        uint64_t bytes
        uint64_t lines
    void kvfs_sample_shares(kvfs_area *areas, size_t count, uint64_t budget)
    uint64_t kvfs_sample_line(uint64_t seed, uint64_t number, uint64_t lines, uint64_t whole)
    void kvfs_sample_digest(const kvfs_area *areas, size_t count, uint8_t *out)

LINE_BYTES = KVFS_SAMPLE_LINE_BYTES


cdef kvfs_area *areas_of(addresses, sizes) except NULL:
    cdef Py_ssize_t count = len(sizes), i
    if addresses is not None and len(addresses) != count:
        raise InvalidRequest(f"{len(addresses)} addresses and {count} sizes")
    cdef kvfs_area *areas = <kvfs_area *>PyMem_Calloc(count if count else 1, sizeof(kvfs_area))
    if areas == NULL:
        raise MemoryError
    try:
        for i in range(count):
            areas[i].bytes = sizes[i]
            if addresses is not None:
                areas[i].at = <const uint8_t *><uintptr_t>addresses[i]
                if areas[i].at == NULL and areas[i].bytes:
                    raise InvalidRequest(f"area {i}: {areas[i].bytes} bytes at no address")
    except BaseException:
        PyMem_Free(areas)
        raise
    return areas


def sample(addresses, sizes, budget):
    cdef kvfs_area *areas = areas_of(addresses, sizes)
    cdef size_t count = len(sizes)
    cdef uint64_t lines = budget
    cdef bytes digest = PyBytes_FromStringAndSize(NULL, KVFS_SAMPLE_DIGEST_BYTES)
    cdef uint8_t *out = <uint8_t *>PyBytes_AS_STRING(digest)
    with nogil:
        kvfs_sample_shares(areas, count, lines)
        kvfs_sample_digest(areas, count, out)
    PyMem_Free(areas)
    return digest


def lines_read(sizes, budget):
    cdef kvfs_area *areas = areas_of(None, sizes)
    cdef size_t count = len(sizes), i
    cdef uint64_t j, whole
    kvfs_sample_shares(areas, count, budget)
    chosen = []
    for i in range(count):
        whole = (areas[i].bytes + KVFS_SAMPLE_LINE_BYTES - 1) // KVFS_SAMPLE_LINE_BYTES
        chosen.append([kvfs_sample_line(i, j, areas[i].lines, whole) for j in range(areas[i].lines)])
    PyMem_Free(areas)
    return chosen
