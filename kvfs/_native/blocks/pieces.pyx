"""Places in a caller's memory: for each block a list of pieces, as the kernel takes them (struct iovec).

Responsibility: turn buffers, torch tensors, lists of them, or one `Scatter` into addresses and lengths, checked once,
so that a whole batch is then copied without the interpreter.

Invariants: every piece lies inside a buffer that is exported while the `Pieces` lives; read-only memory is refused as a
destination. No piece is empty, so that every step over some pieces moves bytes.
Concurrency: made and released with the GIL; read without it.
"""

from cpython.buffer cimport (
    PyBUF_FORMAT, PyBUF_ND, PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_CheckBuffer, PyObject_GetBuffer,
)
from cpython.mem cimport PyMem_Calloc, PyMem_Free, PyMem_Realloc
from libc.stdint cimport int64_t, uintptr_t

from array import array
from typing import Any

from kvfs.errors import InvalidRequest

Memory = Any

class Scatter:
    __slots__ = ("bases", "offsets", "piece_bytes")

    def __init__(self, bases, offsets, piece_bytes):
        self.bases = list(bases) if isinstance(bases, (list, tuple)) else [bases]
        self.offsets = offsets
        self.piece_bytes = piece_bytes
        if not self.bases:
            raise InvalidRequest("a Scatter needs a base")
        if piece_bytes <= 0:
            raise InvalidRequest(f"pieces of {piece_bytes} bytes: at least 1")

    def __len__(self):
        return len(self.offsets)


cdef tensor_place(object tensor):
    """Return (address, bytes) of a torch tensor, also of a type without a buffer format."""
    if not hasattr(tensor, "data_ptr"):
        raise InvalidRequest(f"{type(tensor).__name__} is no buffer and no tensor")
    if tensor.device.type != "cpu":
        raise InvalidRequest(f"a tensor on {tensor.device}: copy it to the CPU first")
    if not tensor.is_contiguous():
        raise InvalidRequest(f"a tensor of strides {tuple(tensor.stride())} is not contiguous: give its pieces")
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


cdef object offset_rows(object offsets, Py_ssize_t *blocks, Py_ssize_t *columns):
    """Return the offsets as one buffer of int64, row by row."""
    cdef Py_buffer view
    if PyObject_CheckBuffer(offsets):
        PyObject_GetBuffer(offsets, &view, PyBUF_ND | PyBUF_FORMAT)
        try:
            if view.itemsize != 8 or view.format[0] not in b"lqLQ" or not 1 <= view.ndim <= 2:
                raise InvalidRequest("offsets: an array of 64-bit integers with one or two dimensions is wanted")
            blocks[0] = view.shape[0]
            columns[0] = view.shape[1] if view.ndim == 2 else 1
        finally:
            PyBuffer_Release(&view)
        return offsets
    rows = [[row] if isinstance(row, int) else list(row) for row in offsets]
    blocks[0] = len(rows)
    columns[0] = len(rows[0]) if rows else 1
    if any(len(row) != columns[0] for row in rows):
        raise InvalidRequest("offsets: every block has the same number of pieces")
    try:
        return array("q", [offset for row in rows for offset in row])
    except (TypeError, OverflowError) as error:
        raise InvalidRequest(f"offsets: {error}") from None


cdef class Pieces:
    """Check `buffers` for `blocks` blocks. Raises InvalidRequest naming one that cannot be used."""

    def __init__(self, buffers, Py_ssize_t blocks, bint writable):
        self._allocate(buffers, blocks)
        if isinstance(buffers, Scatter):
            self._fill_scatter(buffers, writable)
        else:
            self._fill_list(buffers, writable)

    cdef int _allocate(self, object owner, Py_ssize_t blocks) except -1:
        if self.starts != NULL or blocks < 0:
            raise InvalidRequest("pieces are made once, for 0 blocks or more")
        self.blocks = self._vector_room = blocks
        self._owner = owner
        self.starts = <Py_ssize_t *>PyMem_Calloc(blocks + 1, sizeof(Py_ssize_t))
        self.vectors = <iovec *>PyMem_Calloc(blocks if blocks else 1, sizeof(iovec))
        if self.starts == NULL or self.vectors == NULL:
            raise MemoryError
        return 0

    def __dealloc__(self):
        cdef Py_ssize_t i
        for i in range(self._view_count):
            PyBuffer_Release(&self._views[i])
        PyMem_Free(self._views)
        PyMem_Free(self.vectors)
        PyMem_Free(self.starts)

    def sizes(self):
        return [self.size_of(i) for i in range(self.blocks)]

    def choose(self, which):
        """Return the places of some blocks, in this order."""
        cdef Pieces chosen = Pieces.__new__(Pieces)
        cdef Py_ssize_t block = 0, i, piece, at = 0
        chosen._allocate(self, len(which))
        for i in which:
            if not 0 <= i < self.blocks:
                raise InvalidRequest(f"block {i} of {self.blocks}")
            chosen._room(at + self.starts[i + 1] - self.starts[i])
            for piece in range(self.starts[i], self.starts[i + 1]):
                chosen.vectors[at] = self.vectors[piece]
                at += 1
            block += 1
            chosen.starts[block] = at
        return chosen

    cdef size_t size_of(self, Py_ssize_t block) noexcept:
        cdef size_t size = 0
        cdef Py_ssize_t i
        for i in range(self.starts[block], self.starts[block + 1]):
            size += self.vectors[i].iov_len
        return size

    cdef int _room(self, Py_ssize_t vectors) except -1:
        if vectors > self._vector_room:
            grown = max(vectors, 2 * self._vector_room)
            moved = <iovec *>PyMem_Realloc(self.vectors, grown * sizeof(iovec))
            if moved == NULL:
                raise MemoryError
            self.vectors = moved
            self._vector_room = grown
        return 0

    cdef int _hold(self, object buffer, bint writable, char **base, size_t *size) except -1:
        cdef Py_buffer *views
        if not PyObject_CheckBuffer(buffer):
            address, length = tensor_place(buffer)
            base[0] = <char *><uintptr_t>address
            size[0] = length
            return 0
        if self._view_count % 16 == 0:
            views = <Py_buffer *>PyMem_Realloc(self._views, (self._view_count + 16) * sizeof(Py_buffer))
            if views == NULL:
                raise MemoryError
            self._views = views
        try:
            PyObject_GetBuffer(buffer, &self._views[self._view_count], PyBUF_WRITABLE if writable else PyBUF_SIMPLE)
        except (BufferError, ValueError) as error:
            raise InvalidRequest(f"{type(buffer).__name__}: {error}") from None
        base[0] = <char *>self._views[self._view_count].buf
        size[0] = self._views[self._view_count].len
        self._view_count += 1
        return 0

    cdef Py_ssize_t _append(self, Py_ssize_t at, object buffer, bint writable) except -1:
        """Append pieces; return the index of the next one."""
        cdef char *base
        cdef size_t size
        self._hold(buffer, writable, &base, &size)
        if size == 0:
            return at
        self._room(at + 1)
        self.vectors[at].iov_base = base
        self.vectors[at].iov_len = size
        return at + 1

    cdef int _fill_list(self, object buffers, bint writable) except -1:
        cdef Py_ssize_t block = 0, at = 0
        if not isinstance(buffers, (list, tuple)) or len(buffers) != self.blocks:
            raise InvalidRequest(f"{self.blocks} keys need a list of {self.blocks} buffers, or a Scatter of as many rows")
        for buffer in buffers:
            if isinstance(buffer, (list, tuple)):
                for piece in buffer:
                    at = self._append(at, piece, writable)
            else:
                at = self._append(at, buffer, writable)
            block += 1
            self.starts[block] = at
        return 0

    cdef int _fill_scatter(self, object scatter, bint writable) except -1:
        cdef Py_ssize_t blocks = 0, columns = 0, block, base, column, at = 0, bases = len(scatter.bases)
        cdef size_t piece = scatter.piece_bytes
        cdef const int64_t[::1] offsets
        cdef int64_t offset
        cdef char *start
        cdef size_t size
        rows = offset_rows(scatter.offsets, &blocks, &columns)
        if blocks != self.blocks:
            raise InvalidRequest(f"{self.blocks} keys need as many rows of offsets, not {blocks}")
        if blocks * columns == 0:
            return 0
        offsets = memoryview(rows).cast("B").cast("q")
        self._room(blocks * columns * bases)
        for block in range(blocks + 1):
            self.starts[block] = block * columns * bases
        for base in range(bases):
            self._hold(scatter.bases[base], writable, &start, &size)
            for block in range(blocks):
                for column in range(columns):
                    offset = offsets[block * columns + column]
                    if offset < 0 or piece > size or <size_t>offset > size - piece:
                        raise InvalidRequest(
                            f"block {block}: {piece} bytes at {offset} lie outside of base {base} of {size} bytes")
                    at = (block * bases + base) * columns + column
                    self.vectors[at].iov_base = start + offset
                    self.vectors[at].iov_len = piece
        return 0


cpdef bytes join_keys(keys):
    """Join prefix hashes (16 bytes each) to one bytes object."""
    cdef Py_ssize_t i = 0
    if isinstance(keys, (bytes, bytearray, memoryview)):
        joined = keys if isinstance(keys, bytes) else bytes(keys)
        if len(joined) % 16:
            raise InvalidRequest(f"{len(joined)} bytes of keys are no multiple of 16")
        return joined
    for key in keys:
        if not isinstance(key, bytes) or len(<bytes>key) != 16:
            raise InvalidRequest(f"key {i}: a prefix hash is 16 bytes, not {key!r:.80}")
        i += 1
    return b"".join(keys)
