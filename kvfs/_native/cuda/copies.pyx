"""Copies seen from Python: a thin seam over `copies_core.c`.

Invariants: a plan never changes once it is made.
Concurrency: planning and starting run without the GIL; a stream and an event belong to one thread at a time.
"""

from cython cimport no_gc
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

import ctypes
import errno
import mmap

from kvfs import limits
from kvfs._native.cuda.driver cimport (
    Context,
    CUcontext,
    CUdeviceptr,
    CUevent,
    CUfunction,
    CUresult,
    CUstream,
    Event,
    Module,
    Registration,
    Stream,
    kvfs_cuda,
)
from kvfs.errors import InvalidRequest, LimitExceeded

cdef extern from "cuda/copies_core.h" nogil:
    struct kvfs_copy:
        uint64_t to
        uint64_t source "from"
        uint64_t bytes
    struct kvfs_region:
        uint64_t address
        uint64_t bytes
    struct kvfs_regions:
        kvfs_region *items
        size_t count
    struct kvfs_copies:
        kvfs_copy *pieces
        size_t count
        uint64_t bytes
    struct kvfs_places:
        uint64_t *starts
        uint64_t *offsets
        size_t count
        size_t pieces
        uint64_t piece_bytes
    enum kvfs_direction:
        KVFS_INTO_PLACES
        KVFS_OUT_OF_PLACES

    enum:
        KVFS_COPIER_TURNS
        KVFS_COPIER_BYTES
    struct kvfs_copier_turn:
        kvfs_copy *pieces
        CUdeviceptr device
        CUevent read
    struct kvfs_copier:
        CUfunction kernel
        kvfs_copier_turn turns[16]

    int kvfs_regions_sort(kvfs_regions regions)
    int kvfs_copies_plan(kvfs_copy *copies, size_t *count, kvfs_regions to, kvfs_regions source, size_t *bad)
    int kvfs_places_list(const kvfs_places *places, const uint64_t *whole, kvfs_direction direction, kvfs_copy *copies)
    kvfs_copies kvfs_copies_of(kvfs_copy *pieces, size_t count)
    CUresult kvfs_copies_start(const kvfs_cuda *d, CUcontext context, const kvfs_copies *copies, CUstream stream,
                               CUevent after, CUevent done)
    CUresult kvfs_copier_start(const kvfs_cuda *d, CUcontext context, kvfs_copier *copier, const kvfs_copies *copies,
                               unsigned int blocks, CUstream stream, CUevent after, CUevent done)


cdef int take_regions(kvfs_regions *out, given, str side) except -1:
    out.items = <kvfs_region *>calloc(len(given) + 1, sizeof(kvfs_region))
    if not out.items:
        raise MemoryError
    for address, size_bytes in given:
        out.items[out.count].address = address
        out.items[out.count].bytes = size_bytes
        out.count += 1
    if kvfs_regions_sort(out[0]) < 0:
        raise InvalidRequest(f"{side}: a region is empty, or overlaps another")
    return 0


@no_gc
cdef class Plan:
    cdef kvfs_copies _copies

    def __init__(self, pieces not None, destinations not None, sources not None):
        cdef size_t count
        cdef kvfs_copy *copies
        if self._copies.pieces:
            raise TypeError("a Plan is made once")
        copies = take_pieces(pieces, &count)
        self._take(copies, count, destinations, sources)

    cdef int _take(self, kvfs_copy *copies, size_t count, destinations, sources) except -1:
        """Plan these copies, which are this object's from now on."""
        cdef kvfs_regions to, source
        to.items, to.count, source.items, source.count = NULL, 0, NULL, 0
        try:
            take_regions(&to, destinations, "destinations")
            take_regions(&source, sources, "sources")
            plan(copies, &count, to, source)
            self._copies, copies = kvfs_copies_of(copies, count), NULL
        finally:
            free(copies)
            free(to.items)
            free(source.items)
        return 0

    def __dealloc__(self):
        free(self._copies.pieces)

    cdef bint _is_engines(self, bint within_device) noexcept:
        if self._copies.count <= 1:
            return True
        return not within_device and self._copies.bytes >= self._copies.count * <uint64_t>ENGINE_BYTES

    def __len__(self):
        return self._copies.count

    @property
    def total_bytes(self):
        return self._copies.bytes

    def copies(self):
        cdef kvfs_copy *pieces = self._copies.pieces
        return [(pieces[i].to, pieces[i].source, pieces[i].bytes) for i in range(self._copies.count)]

    def start(self, Stream stream not None, Event done not None, Event after=None):
        cdef CUstream side = stream.get()
        cdef CUevent end = done.get()
        cdef CUevent begin = NULL
        cdef CUresult rc
        if after is not None:
            begin = after.get()
        with nogil:
            rc = kvfs_copies_start(&stream._context._driver._d, stream._context._context, &self._copies, side, begin, end)
        stream._context._driver.check(rc, f"{self._copies.count} copies")


@no_gc
cdef class DevicePlaces:
    cdef kvfs_places _places
    cdef readonly list regions

    def __init__(self, starts not None, offsets not None, uint64_t piece_bytes, regions not None):
        if self._places.starts:
            raise TypeError("DevicePlaces are made once")
        self._places.count, self._places.pieces, self._places.piece_bytes = len(starts), len(offsets), piece_bytes
        self._places.starts, self._places.offsets = take_numbers(starts), take_numbers(offsets)
        self.regions = list(regions)

    def __dealloc__(self):
        free(self._places.starts)
        free(self._places.offsets)

    def __len__(self):
        return self._places.count

    @property
    def block_bytes(self):
        return self._places.pieces * self._places.piece_bytes

    @property
    def block_pieces(self):
        return self._places.pieces

    def choose(self, which not None):
        cdef list starts = [self._places.starts[self._check(row)] for row in which]
        cdef list offsets = [self._places.offsets[piece] for piece in range(self._places.pieces)]
        return DevicePlaces(starts, offsets, self._places.piece_bytes, self.regions)

    cdef size_t _check(self, row) except? 0:
        if not 0 <= row < self._places.count:
            raise InvalidRequest(f"block {row} of {self._places.count}")
        return row

    def load_plan(self, whole not None, sources not None):
        return self._plan(whole, KVFS_INTO_PLACES, self.regions, sources)

    def store_plan(self, whole not None, destinations not None):
        return self._plan(whole, KVFS_OUT_OF_PLACES, destinations, self.regions)

    cdef Plan _plan(self, whole, kvfs_direction direction, destinations, sources):
        cdef Plan made = Plan.__new__(Plan)
        cdef size_t count = self._places.count * self._places.pieces
        cdef uint64_t *starts
        cdef kvfs_copy *copies
        cdef int rc
        if <size_t>len(whole) != self._places.count:
            raise InvalidRequest(f"{len(whole)} blocks for {self._places.count} places")
        copies, starts = new_copies(count), NULL
        try:
            starts = take_numbers(whole)
            rc = kvfs_places_list(&self._places, starts, direction, copies)
            if rc < 0:
                raise MemoryError
        except BaseException:
            free(copies)
            raise
        finally:
            free(starts)
        made._take(copies, count, destinations, sources)
        return made


LINK_BLOCKS = 2
DEVICE_BLOCKS = 264
ENGINE_BYTES = 1 << 20


@no_gc
cdef class Copier:
    cdef kvfs_copier _copier
    cdef Module _module
    cdef list _events
    cdef list _lists

    def __init__(self, Context context not None, bytes image not None):
        cdef Registration registration
        cdef Event read
        cdef size_t i
        if self._module is not None:
            raise TypeError("a Copier is made once")
        self._module = context.load_module(image)
        self._copier.kernel = <CUfunction><void *>self._module._find("kvfs_copy")
        self._events, self._lists = [], []
        for i in range(<size_t>KVFS_COPIER_TURNS):
            pages = mmap.mmap(-1, KVFS_COPIER_BYTES)
            host = ctypes.addressof(ctypes.c_char.from_buffer(pages))
            registration, read = context.register(host, KVFS_COPIER_BYTES), context.event()
            self._copier.turns[i].pieces = <kvfs_copy *><uintptr_t>host
            self._copier.turns[i].device, self._copier.turns[i].read = registration.address, read._event
            self._events.append(read)
            self._lists.append((pages, registration))  # a tuple's last item goes first

    def start(self, Plan plan not None, Stream stream not None, Event done not None, Event after=None, *,
              bint within_device=False):
        cdef CUstream side = stream.get()
        cdef CUevent end = done.get()
        cdef CUevent begin = NULL
        cdef unsigned int blocks = DEVICE_BLOCKS if within_device else LINK_BLOCKS
        cdef CUresult rc
        if not self._lists:
            raise InvalidRequest("the copier was closed")
        if after is not None:
            begin = after.get()
        if plan._is_engines(within_device):
            plan.start(stream, done, after)
            return
        with nogil:
            rc = kvfs_copier_start(&stream._context._driver._d, stream._context._context, &self._copier, &plan._copies,
                                   blocks, side, begin, end)
        stream._context._driver.check(rc, f"{plan._copies.count} copies")

    def close(self):
        while self._lists:
            read = self._events.pop()
            read.synchronize()
            read.destroy()
            self._lists.pop()[1].unregister()
        self._module.unload()


cdef kvfs_copy *take_pieces(object pieces, size_t *count) except NULL:
    cdef Py_buffer view
    cdef kvfs_copy *copies
    PyObject_GetBuffer(pieces, &view, PyBUF_SIMPLE)
    try:
        if view.len % sizeof(kvfs_copy):
            raise InvalidRequest(f"pieces of {view.len} bytes: a piece has {sizeof(kvfs_copy)}")
        count[0] = view.len // sizeof(kvfs_copy)
        copies = new_copies(count[0])
        memcpy(copies, view.buf, view.len)
    finally:
        PyBuffer_Release(&view)
    return copies


cdef kvfs_copy *new_copies(size_t count) except NULL:
    cdef kvfs_copy *copies
    if count > <size_t>limits.MAX_COPY_PIECES:
        raise LimitExceeded(f"{count} pieces: a plan has at most {limits.MAX_COPY_PIECES}")
    copies = <kvfs_copy *>calloc(count + 1, sizeof(kvfs_copy))
    if not copies:
        raise MemoryError
    return copies


cdef uint64_t *take_numbers(numbers) except NULL:
    cdef uint64_t *taken = <uint64_t *>calloc(len(numbers) + 1, sizeof(uint64_t))
    cdef size_t count = 0
    if not taken:
        raise MemoryError
    try:
        for number in numbers:
            taken[count] = number
            count += 1
    except BaseException:
        free(taken)
        raise
    return taken


cdef int plan(kvfs_copy *copies, size_t *count, kvfs_regions to, kvfs_regions source) except -1:
    cdef size_t bad = 0
    cdef int rc
    with nogil:
        rc = kvfs_copies_plan(copies, count, to, source, &bad)
    if rc < 0:
        why = "lies outside the regions" if rc == -errno.ERANGE else "overlaps another copy"
        raise InvalidRequest(
            f"a copy of {copies[bad].bytes} bytes from {copies[bad].source:#x} to {copies[bad].to:#x} {why}"
        )
    return 0
