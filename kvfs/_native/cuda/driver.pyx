"""The CUDA driver seen from Python: a thin seam over `driver_core.c`, which makes the calls.

Invariants: an object gives its handle back once: at its own call, or when it is collected, where errors have nobody to
go to; what was given back is refused before the driver sees it. Each object holds those that it was made from, so that
no cycle is possible, and none of them is collected before it (no_gc).
Concurrency: any thread calls; every call of the driver runs without the GIL. Two threads must not give back and use
the same object at once.
"""

from cython cimport no_gc
from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport uint64_t, uintptr_t
from libc.string cimport memcpy

import os
import uuid

from kvfs.errors import DeviceMissing, InvalidRequest, from_cuda

VIRTUAL_MEMORY = 102
POSIX_DESCRIPTORS = 103
READ_ONLY_REGISTRATION = 113


def open_driver(path=None):
    cdef Driver driver = Driver.__new__(Driver)
    cdef char why[512]
    cdef int rc
    where = path or os.environ.get("KVFS_LIBCUDA") or "libcuda.so.1"
    name = os.fsencode(where)
    cdef const char *c_name = name
    with nogil:
        rc = kvfs_cuda_open(&driver._d, c_name, why, sizeof(why))
    if rc < 0:
        raise DeviceMissing(f"the CUDA driver: {why.decode(errors='replace')}")
    driver.path = where
    with nogil:
        rc = driver._d.cuInit(0)
    driver.check(rc, "cuInit")
    driver.check(driver._d.cuDriverGetVersion(&driver.version), "cuDriverGetVersion")
    return driver


@no_gc
cdef class Driver:
    def __init__(self):
        raise TypeError("a Driver comes from open_driver()")

    cdef int check(self, CUresult rc, str what) except -1:
        cdef const char *name = NULL
        if rc == CUDA_SUCCESS:
            return 0
        known = self._d.cuGetErrorName(rc, &name) == CUDA_SUCCESS and name != NULL
        raise from_cuda(rc, (<bytes>name).decode() if known else f"CUDA error {rc}", what)

    @property
    def copies_in_batches(self):
        return self._d.cuMemcpyBatchAsync != NULL

    def devices(self):
        cdef int count = 0
        self.check(self._d.cuDeviceGetCount(&count), "cuDeviceGetCount")
        return [make_device(self, ordinal) for ordinal in range(count)]

    def import_allocation(self, int fd, size_t size_bytes):
        cdef CUmemGenericAllocationHandle handle = 0
        cdef CUresult rc
        with nogil:
            rc = self._d.cuMemImportFromShareableHandle(&handle, <void *><uintptr_t>fd,
                                                        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        self.check(rc, f"cuMemImportFromShareableHandle(fd {fd})")
        return own(self, handle, size_bytes)


cdef Device make_device(Driver driver, int ordinal):
    cdef Device device = Device.__new__(Device)
    cdef CUuuid raw
    cdef char name[256]
    cdef CUresult rc
    device._driver = driver
    device.ordinal = ordinal
    driver.check(driver._d.cuDeviceGet(&device._number, ordinal), "cuDeviceGet")
    driver.check(driver._d.cuDeviceGetUuid(&raw, device._number), "cuDeviceGetUuid")
    driver.check(driver._d.cuDeviceGetName(name, sizeof(name), device._number), "cuDeviceGetName")
    driver.check(driver._d.cuDeviceTotalMem(&device.total_bytes, device._number), "cuDeviceTotalMem")
    device.uuid = f"GPU-{uuid.UUID(bytes=(<const char *>raw.bytes)[:16])}"
    device.name = (<bytes>name).decode(errors="replace")
    with nogil:
        rc = kvfs_cuda_granularity(&driver._d, device._number, &device.granularity_bytes)
    driver.check(rc, "cuMemGetAllocationGranularity")
    return device


@no_gc
cdef class Device:
    def __init__(self):
        raise TypeError("a Device comes from Driver.devices()")

    @property
    def shares_memory(self):
        return bool(self.attribute(VIRTUAL_MEMORY) and self.attribute(POSIX_DESCRIPTORS))

    def attribute(self, int number):
        cdef int value = 0
        self._driver.check(self._driver._d.cuDeviceGetAttribute(&value, number, self._number),
                           f"cuDeviceGetAttribute({number})")
        return value

    def create(self, size_t size_bytes):
        cdef CUmemGenericAllocationHandle handle = 0
        cdef CUresult rc
        with nogil:
            rc = kvfs_cuda_create(&self._driver._d, self._number, size_bytes, &handle)
        self._driver.check(rc, f"cuMemCreate({size_bytes} bytes on {self.uuid})")
        return own(self._driver, handle, size_bytes)

    def map(self, Allocation allocation not None, *, bint writable=True):
        cdef Mapping mapping = Mapping.__new__(Mapping)
        cdef CUresult rc
        if not allocation._held:
            raise InvalidRequest("the allocation was released")
        mapping._driver = self._driver
        mapping.size_bytes = allocation.size_bytes
        with nogil:
            rc = kvfs_cuda_map(&self._driver._d, self._number, allocation._handle, mapping.size_bytes, writable,
                               &mapping.address)
        self._driver.check(rc, f"cuMemMap({mapping.size_bytes} bytes on {self.uuid})")
        mapping._held = True
        return mapping

    def retain_context(self):
        cdef Context context = Context.__new__(Context)
        cdef CUresult rc
        context._driver = self._driver
        context.device = self
        with nogil:
            rc = self._driver._d.cuDevicePrimaryCtxRetain(&context._context, self._number)
        self._driver.check(rc, f"cuDevicePrimaryCtxRetain({self.uuid})")
        return context


cdef Allocation own(Driver driver, CUmemGenericAllocationHandle handle, size_t size_bytes):
    cdef Allocation allocation = Allocation.__new__(Allocation)
    allocation._driver = driver
    allocation._handle = handle
    allocation._held = True
    allocation.size_bytes = size_bytes
    return allocation


@no_gc
cdef class Allocation:
    def __init__(self):
        raise TypeError("an Allocation comes from Device.create() or Driver.import_allocation()")

    def __dealloc__(self):
        if self._held:
            self._end()

    cdef CUresult _end(self):
        cdef CUresult rc
        self._held = False
        with nogil:
            rc = self._driver._d.cuMemRelease(self._handle)
        return rc

    def export(self):
        cdef int fd = -1
        cdef CUresult rc
        if not self._held:
            raise InvalidRequest("the allocation was released")
        with nogil:
            rc = self._driver._d.cuMemExportToShareableHandle(&fd, self._handle,
                                                              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0)
        self._driver.check(rc, "cuMemExportToShareableHandle")
        os.set_inheritable(fd, False)
        return fd

    def release(self):
        if self._held:
            self._driver.check(self._end(), "cuMemRelease")

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.release()


@no_gc
cdef class Mapping:
    def __init__(self):
        raise TypeError("a Mapping comes from Device.map()")

    def __dealloc__(self):
        if self._held:
            self._end()

    cdef CUresult _end(self):
        cdef CUresult rc
        self._held = False
        with nogil:
            rc = kvfs_cuda_unmap(&self._driver._d, self.address, self.size_bytes)
        return rc

    def unmap(self):
        if self._held:
            self._driver.check(self._end(), "cuMemUnmap")

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.unmap()


@no_gc
cdef class Context:
    def __init__(self):
        raise TypeError("a Context comes from Device.retain_context()")

    def __dealloc__(self):
        if self._context:
            self._end()

    cdef CUresult _end(self):
        cdef CUresult rc
        self._context = NULL
        with nogil:
            rc = self._driver._d.cuDevicePrimaryCtxRelease(self.device._number)
        return rc

    cdef CUcontext get(self) except NULL:
        if not self._context:
            raise InvalidRequest("the context was released")
        return self._context

    @property
    def memory_bytes(self):
        cdef size_t available = 0, total = 0
        cdef CUcontext context = self.get()
        cdef CUresult rc
        with nogil:
            rc = kvfs_cuda_memory(&self._driver._d, context, &available, &total)
        self._driver.check(rc, "cuMemGetInfo")
        return available, total

    def stream(self):
        cdef Stream stream = Stream.__new__(Stream)
        cdef CUcontext context = self.get()
        cdef CUresult rc
        stream._context = self
        with nogil:
            rc = kvfs_cuda_stream_create(&self._driver._d, context, &stream._stream)
        self._driver.check(rc, "cuStreamCreate")
        return stream

    def borrow_stream(self, uintptr_t handle):
        cdef Stream stream = Stream.__new__(Stream)
        self.get()
        stream._context = self
        stream._stream = <CUstream><void *>(handle or <uintptr_t>CU_STREAM_LEGACY)
        stream._borrowed = True
        return stream

    def event(self, *, bint sleeps=False):
        cdef Event event = Event.__new__(Event)
        cdef CUcontext context = self.get()
        cdef CUresult rc
        event._context = self
        with nogil:
            rc = kvfs_cuda_event_create(&self._driver._d, context, sleeps, &event._event)
        self._driver.check(rc, "cuEventCreate")
        return event

    def register(self, uintptr_t address, size_t size_bytes, *, bint read_only=False):
        cdef Registration registration = Registration.__new__(Registration)
        cdef CUcontext context = self.get()
        cdef void *host = <void *>address
        cdef CUresult rc
        registration._context = self
        registration.size_bytes = size_bytes
        with nogil:
            rc = kvfs_cuda_register(&self._driver._d, context, host, size_bytes, read_only, &registration.address)
        self._driver.check(rc, f"cuMemHostRegister({size_bytes} bytes)")
        registration._host = host
        return registration

    def load_module(self, bytes image not None):
        cdef Module module = Module.__new__(Module)
        cdef CUcontext context = self.get()
        cdef const char *data = image
        cdef CUresult rc
        module._context = self
        module._functions = {}
        with nogil:
            rc = kvfs_cuda_module_load(&self._driver._d, context, data, &module._module)
        self._driver.check(rc, "cuModuleLoadData")
        return module

    def allocate(self, size_t size_bytes):
        cdef LegacyMemory memory = LegacyMemory.__new__(LegacyMemory)
        cdef CUcontext context = self.get()
        cdef CUresult rc
        memory._context = self
        memory.size_bytes = size_bytes
        with nogil:
            rc = kvfs_cuda_alloc(&self._driver._d, context, size_bytes, &memory.address)
        self._driver.check(rc, f"cuMemAlloc({size_bytes} bytes)")
        memory._held = True
        return memory

    def open_handle(self, bytes handle not None):
        cdef LegacyMemory memory = LegacyMemory.__new__(LegacyMemory)
        cdef CUcontext context = self.get()
        cdef CUipcMemHandle raw
        cdef CUresult rc
        if len(handle) != sizeof(raw):
            raise InvalidRequest(f"an IPC handle of {len(handle)} bytes: it has {sizeof(raw)}")
        memcpy(&raw, PyBytes_AS_STRING(handle), sizeof(raw))
        memory._context = self
        with nogil:
            rc = kvfs_cuda_ipc_open(&self._driver._d, context, &raw, &memory.address)
        self._driver.check(rc, "cuIpcOpenMemHandle")
        memory._held = True
        return memory

    def export_handle(self, CUdeviceptr address):
        cdef CUipcMemHandle raw
        cdef CUcontext context = self.get()
        cdef size_t offset = 0
        cdef CUresult rc
        with nogil:
            rc = kvfs_cuda_ipc_export(&self._driver._d, context, address, &raw, &offset)
        self._driver.check(rc, "cuIpcGetMemHandle")
        return raw.reserved[:64], offset

    def release(self):
        if self._context:
            self._driver.check(self._end(), "cuDevicePrimaryCtxRelease")


@no_gc
cdef class LegacyMemory:
    def __init__(self):
        raise TypeError("a LegacyMemory comes from Context.allocate() or Context.open_handle()")

    def __dealloc__(self):
        if self._held and self._context._context:
            self._end()

    cdef CUresult _end(self):
        cdef Driver driver = self._context._driver
        cdef CUcontext context = self._context._context
        cdef CUresult rc
        self._held = False
        with nogil:
            if self.size_bytes:
                rc = kvfs_cuda_free(&driver._d, context, self.address)
            else:
                rc = kvfs_cuda_ipc_close(&driver._d, context, self.address)
        return rc

    def free(self):
        if self._held:
            self._context.get()
            self._context._driver.check(self._end(), "cuMemFree" if self.size_bytes else "cuIpcCloseMemHandle")


@no_gc
cdef class Registration:
    def __init__(self):
        raise TypeError("a Registration comes from Context.register()")

    def __dealloc__(self):
        if self._host and self._context._context:
            self._end()

    cdef CUresult _end(self):
        cdef Driver driver = self._context._driver
        cdef CUcontext context = self._context._context
        cdef void *host = self._host
        cdef CUresult rc
        self._host = NULL
        with nogil:
            rc = kvfs_cuda_unregister(&driver._d, context, host)
        return rc

    def unregister(self):
        if self._host:
            self._context.get()
            self._context._driver.check(self._end(), "cuMemHostUnregister")


@no_gc
cdef class Stream:
    def __init__(self):
        raise TypeError("a Stream comes from Context.stream()")

    def __dealloc__(self):
        if self._stream and not self._borrowed and self._context._context:
            self._end()

    cdef CUresult _end(self):
        cdef Driver driver = self._context._driver
        cdef CUcontext context = self._context._context
        cdef CUstream stream = self._stream
        cdef CUresult rc
        self._stream = NULL
        with nogil:
            rc = kvfs_cuda_stream_destroy(&driver._d, context, stream)
        return rc

    cdef CUstream get(self) except NULL:
        self._context.get()
        if not self._stream:
            raise InvalidRequest("the stream was destroyed")
        return self._stream

    @property
    def handle(self):
        return <uintptr_t>self.get()

    def copy(self, CUdeviceptr destination, CUdeviceptr source, size_t size_bytes):
        cdef CUstream stream = self.get()
        cdef CUresult rc
        with nogil:
            rc = kvfs_cuda_copy(&self._context._driver._d, self._context._context, destination, source, size_bytes,
                                stream)
        self._context._driver.check(rc, f"cuMemcpyAsync({size_bytes} bytes)")

    def wait(self, Event event not None):
        cdef CUstream stream = self.get()
        cdef CUevent awaited = event.get()
        cdef CUresult rc
        with nogil:
            rc = kvfs_cuda_stream_wait(&self._context._driver._d, self._context._context, stream, awaited)
        self._context._driver.check(rc, "cuStreamWaitEvent")

    def query(self):
        cdef CUstream stream = self.get()
        cdef CUresult rc
        with nogil:
            rc = kvfs_cuda_stream_query(&self._context._driver._d, self._context._context, stream)
        if rc == CUDA_ERROR_NOT_READY:
            return False
        self._context._driver.check(rc, "cuStreamQuery")
        return True

    def synchronize(self):
        cdef CUstream stream = self.get()
        cdef CUresult rc
        with nogil:
            rc = kvfs_cuda_stream_synchronize(&self._context._driver._d, self._context._context, stream)
        self._context._driver.check(rc, "cuStreamSynchronize")

    def destroy(self):
        if self._borrowed:
            self._stream = NULL
        if self._stream:
            self._context.get()
            self._context._driver.check(self._end(), "cuStreamDestroy")


@no_gc
cdef class Event:
    def __init__(self):
        raise TypeError("an Event comes from Context.event()")

    def __dealloc__(self):
        if self._event and self._context._context:
            self._end()

    cdef CUresult _end(self):
        cdef Driver driver = self._context._driver
        cdef CUcontext context = self._context._context
        cdef CUevent event = self._event
        cdef CUresult rc
        self._event = NULL
        with nogil:
            rc = kvfs_cuda_event_destroy(&driver._d, context, event)
        return rc

    cdef CUevent get(self) except NULL:
        self._context.get()
        if not self._event:
            raise InvalidRequest("the event was destroyed")
        return self._event

    def record(self, Stream stream not None):
        cdef CUevent event = self.get()
        cdef CUstream point = stream.get()
        cdef CUresult rc
        with nogil:
            rc = kvfs_cuda_event_record(&self._context._driver._d, self._context._context, event, point)
        self._context._driver.check(rc, "cuEventRecord")

    def query(self):
        cdef CUevent event = self.get()
        cdef CUresult rc
        with nogil:
            rc = kvfs_cuda_event_query(&self._context._driver._d, self._context._context, event)
        if rc == CUDA_ERROR_NOT_READY:
            return False
        self._context._driver.check(rc, "cuEventQuery")
        return True

    def synchronize(self):
        cdef CUevent event = self.get()
        cdef CUresult rc
        with nogil:
            rc = kvfs_cuda_event_synchronize(&self._context._driver._d, self._context._context, event)
        self._context._driver.check(rc, "cuEventSynchronize")

    def destroy(self):
        if self._event:
            self._context.get()
            self._context._driver.check(self._end(), "cuEventDestroy")


@no_gc
cdef class Module:
    def __init__(self):
        raise TypeError("a Module comes from Context.load_module()")

    def __dealloc__(self):
        if self._module and self._context._context:
            self._end()

    cdef CUresult _end(self):
        cdef Driver driver = self._context._driver
        cdef CUcontext context = self._context._context
        cdef CUmodule module = self._module
        cdef CUresult rc
        self._module = NULL
        with nogil:
            rc = kvfs_cuda_module_unload(&driver._d, context, module)
        return rc

    cdef uintptr_t _find(self, str name) except 0:
        cdef CUfunction function = NULL
        cdef CUcontext context = self._context.get()
        cdef bytes encoded = name.encode()
        cdef const char *c_name = encoded
        cdef CUresult rc
        if not self._module:
            raise InvalidRequest("the module was unloaded")
        if name not in self._functions:
            with nogil:
                rc = kvfs_cuda_module_function(&self._context._driver._d, context, self._module, c_name, &function)
            self._context._driver.check(rc, f"cuModuleGetFunction({name})")
            self._functions[name] = <uintptr_t>function
        return self._functions[name]

    def launch(self, str name not None, Stream stream not None, unsigned int grid, unsigned int block, arguments, *,
               unsigned int shared_bytes=0):
        cdef uint64_t values[16]
        cdef void *parameters[16]
        cdef kvfs_cuda_grid launch
        cdef CUfunction function = <CUfunction><void *>self._find(name)
        cdef CUstream queue = stream.get()
        cdef CUresult rc
        if len(arguments) > 16:
            raise InvalidRequest(f"{name}: {len(arguments)} arguments, and at most 16 are passed")
        for i, value in enumerate(arguments):
            values[i] = value
            parameters[i] = &values[i]
        launch.grid, launch.block, launch.shared_bytes, launch.parameters = grid, block, shared_bytes, parameters
        with nogil:
            rc = kvfs_cuda_launch(&self._context._driver._d, self._context._context, function, queue, &launch)
        self._context._driver.check(rc, f"cuLaunchKernel({name})")

    def unload(self):
        if self._module:
            self._context.get()
            self._context._driver.check(self._end(), "cuModuleUnload")
