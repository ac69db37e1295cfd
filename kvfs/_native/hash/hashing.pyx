# Seam of hashing_core.c: buffers in, hashes out. The arguments' meaning is checked in kvfs/keys.py.

from cpython.buffer cimport (
    PyBUF_C_CONTIGUOUS,
    PyBUF_FORMAT,
    PyBUF_SIMPLE,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.mem cimport PyMem_Free, PyMem_Malloc
from libc.stdint cimport int64_t, uint8_t, uint64_t

from kvfs.errors import InvalidRequest, LimitExceeded, from_errno
from kvfs.limits import MAX_HASH_TOKENS as _MAX_TOKENS


cdef extern from "hash/hashing_core.h":
    enum: KVFS_HASH_BYTES
    enum kvfs_algorithm:
        pass
    enum kvfs_sha_engine:
        pass
    struct kvfs_tokens:
        const void *data
        size_t count
        int item_bytes
        int is_signed
    struct kvfs_extra:
        const void *data
        size_t bytes
    struct kvfs_chain:
        kvfs_algorithm algorithm
        kvfs_sha_engine engine
        const uint8_t *parent
        kvfs_tokens tokens
        const kvfs_extra *extra
    int kvfs_sha_engine_of "kvfs_sha_engine"(kvfs_sha_engine wanted)
    int kvfs_hash_blocks(const kvfs_chain *chain, size_t block_tokens, uint8_t *out, size_t *bad) nogil
    int kvfs_hash_tail(const kvfs_chain *chain, uint8_t *out, size_t *bad) nogil
    void kvfs_sha256(kvfs_sha_engine engine, const void *data, size_t bytes, uint8_t *out) nogil
    uint64_t kvfs_hashing_xxh3_64(const void *data, size_t bytes) nogil

SHA256 = 1
XXH3_128 = 2
AUTO = 0
PORTABLE = 1
SHA_NI = 2

cdef enum:
    # As many take 40 us. Fewer keep the GIL: a thread that gives it away beside one that never pauses waits 5 ms for it
    # (sys.getswitchinterval).
    LONG_BYTES = 65536

cdef bytes SIGNED = b"hilqn"
cdef bytes UNSIGNED = b"HILQN"


cdef int describe(Py_buffer *view, kvfs_tokens *tokens) except -1:
    """Describe the tokens in a buffer: one row of 2-, 4- or 8-byte integers. Raises InvalidRequest, LimitExceeded."""
    cdef bytes code = view.format if view.format != NULL else b"B"
    cdef bytes item = code[1:] if code[:1] in (b"@", b"=", b"<") else code
    cdef bint is_signed = item in SIGNED
    if len(item) != 1 or not (is_signed or item in UNSIGNED) or view.itemsize not in (2, 4, 8):
        raise InvalidRequest(
            f"tokens have item type {code.decode(errors='replace')!r}, not integers of 2, 4 or 8 bytes"
        )
    if view.ndim != 1:
        raise InvalidRequest(f"tokens have {view.ndim} dimensions, not 1")
    if view.len // view.itemsize > _MAX_TOKENS:
        raise LimitExceeded(f"{view.len // view.itemsize} tokens in one call, the limit is {_MAX_TOKENS}")
    tokens.data = view.buf
    tokens.count = view.len // view.itemsize
    tokens.item_bytes = view.itemsize
    tokens.is_signed = is_signed
    return 0


cdef object out_of_range(const kvfs_tokens *tokens, size_t index):
    cdef object value
    if tokens.item_bytes == 8:
        value = (<const int64_t *>tokens.data)[index]
        if not tokens.is_signed:
            value = (<const uint64_t *>tokens.data)[index]
    elif tokens.item_bytes == 4:
        value = (<const int *>tokens.data)[index]
    else:
        value = (<const short *>tokens.data)[index]
    return InvalidRequest(f"token {index} is {value}, outside 0 to {(1 << 32) - 1}")


cdef int hash_all(const kvfs_chain *chain, size_t block_tokens, bint tail, uint8_t *out, size_t *bad) noexcept nogil:
    if tail:
        return kvfs_hash_tail(chain, out, bad)
    return kvfs_hash_blocks(chain, block_tokens, out, bad)


def hash_chain(
    tokens, bytes parent not None, tuple extra, *, int algorithm, size_t block_tokens, bint tail, int engine=0
):
    cdef Py_buffer view
    cdef kvfs_chain chain
    cdef kvfs_extra *extras = NULL
    cdef size_t bad = 0, blocks, i
    cdef int rc
    cdef bytes out
    cdef uint8_t *out_at
    if len(parent) != KVFS_HASH_BYTES:
        raise InvalidRequest(f"parent hash has {len(parent)} bytes, not {KVFS_HASH_BYTES}")
    rc = kvfs_sha_engine_of(<kvfs_sha_engine>engine)
    if rc < 0:
        raise from_errno(rc, f"SHA-256 engine {engine}")
    PyObject_GetBuffer(tokens, &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT)
    try:
        describe(&view, &chain.tokens)
        blocks = 1 if tail else chain.tokens.count // block_tokens
        if extra is not None:
            if <size_t>len(extra) != blocks:
                raise InvalidRequest(f"extra has {len(extra)} entries for {blocks} blocks")
            extras = <kvfs_extra *>PyMem_Malloc((blocks + 1) * sizeof(kvfs_extra))
            if extras == NULL:
                raise MemoryError
            for i in range(blocks):
                extras[i].data = PyBytes_AS_STRING(extra[i])
                extras[i].bytes = len(<bytes?>extra[i])
        chain.algorithm = <kvfs_algorithm>algorithm
        chain.engine = <kvfs_sha_engine>rc
        chain.parent = <const uint8_t *>PyBytes_AS_STRING(parent)
        chain.extra = extras
        out = PyBytes_FromStringAndSize(NULL, blocks * KVFS_HASH_BYTES)
        out_at = <uint8_t *>PyBytes_AS_STRING(out)
        if view.len <= LONG_BYTES:
            rc = hash_all(&chain, block_tokens, tail, out_at, &bad)
        else:
            with nogil:
                rc = hash_all(&chain, block_tokens, tail, out_at, &bad)
        if rc < 0:
            raise out_of_range(&chain.tokens, bad)
        return out
    finally:
        PyMem_Free(extras)
        PyBuffer_Release(&view)


def sha256(data, *, int engine=0):
    cdef Py_buffer view
    cdef uint8_t out[32]
    cdef int rc = kvfs_sha_engine_of(<kvfs_sha_engine>engine)
    if rc < 0:
        raise from_errno(rc, f"SHA-256 engine {engine}")
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    with nogil:
        kvfs_sha256(<kvfs_sha_engine>rc, view.buf, view.len, out)
    PyBuffer_Release(&view)
    return PyBytes_FromStringAndSize(<char *>out, 32)


def sha256_engine():
    return kvfs_sha_engine_of(<kvfs_sha_engine>0)


def xxh3_64(data):
    cdef Py_buffer view
    cdef uint64_t hashed
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    with nogil:
        hashed = kvfs_hashing_xxh3_64(view.buf, view.len)
    PyBuffer_Release(&view)
    return hashed
