from libc.stdint cimport uintptr_t

cdef extern from "cuda/driver_core.h" nogil:
    ctypedef int CUresult
    ctypedef int CUdevice
    ctypedef unsigned long long CUdeviceptr
    ctypedef unsigned long long CUmemGenericAllocationHandle
    ctypedef void *CUcontext
    ctypedef void *CUstream
    ctypedef void *CUevent
    ctypedef void *CUmodule
    ctypedef void *CUfunction

    ctypedef struct CUuuid:
        unsigned char bytes[16]
    ctypedef struct CUipcMemHandle:
        char reserved[64]

    struct kvfs_cuda:
        CUresult (*cuInit)(unsigned int flags) noexcept nogil
        CUresult (*cuDriverGetVersion)(int *version) noexcept nogil
        CUresult (*cuGetErrorName)(CUresult error, const char **name) noexcept nogil
        CUresult (*cuDeviceGetCount)(int *count) noexcept nogil
        CUresult (*cuDeviceGet)(CUdevice *device, int ordinal) noexcept nogil
        CUresult (*cuDeviceGetName)(char *name, int bytes, CUdevice device) noexcept nogil
        CUresult (*cuDeviceGetUuid)(CUuuid *uuid, CUdevice device) noexcept nogil
        CUresult (*cuDeviceTotalMem)(size_t *bytes, CUdevice device) noexcept nogil
        CUresult (*cuDeviceGetAttribute)(int *value, int attribute, CUdevice device) noexcept nogil
        CUresult (*cuDevicePrimaryCtxRetain)(CUcontext *context, CUdevice device) noexcept nogil
        CUresult (*cuDevicePrimaryCtxRelease)(CUdevice device) noexcept nogil
        CUresult (*cuMemRelease)(CUmemGenericAllocationHandle handle) noexcept nogil
        CUresult (*cuMemExportToShareableHandle)(void *out, CUmemGenericAllocationHandle handle, int type,
                                                 unsigned long long flags) noexcept nogil
        CUresult (*cuMemImportFromShareableHandle)(CUmemGenericAllocationHandle *handle, void *shareable, int type) noexcept nogil
        void *cuMemcpyBatchAsync

    struct kvfs_cuda_grid:
        unsigned int grid
        unsigned int block
        unsigned int shared_bytes
        void **parameters

    enum:
        CUDA_SUCCESS
        CU_STREAM_LEGACY
        CUDA_ERROR_NOT_READY
        CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    int kvfs_cuda_open(kvfs_cuda *out, const char *path, char *why, size_t why_bytes)
    CUresult kvfs_cuda_create(const kvfs_cuda *d, CUdevice device, size_t bytes, CUmemGenericAllocationHandle *handle)
    CUresult kvfs_cuda_granularity(const kvfs_cuda *d, CUdevice device, size_t *bytes)
    CUresult kvfs_cuda_map(const kvfs_cuda *d, CUdevice device, CUmemGenericAllocationHandle handle, size_t bytes,
         int writable, CUdeviceptr *address)
    CUresult kvfs_cuda_unmap(const kvfs_cuda *d, CUdeviceptr address, size_t bytes)
    CUresult kvfs_cuda_memory(const kvfs_cuda *d, CUcontext context, size_t *available, size_t *total)
    CUresult kvfs_cuda_alloc(const kvfs_cuda *d, CUcontext context, size_t bytes, CUdeviceptr *address)
    CUresult kvfs_cuda_free(const kvfs_cuda *d, CUcontext context, CUdeviceptr address)
    CUresult kvfs_cuda_ipc_export(const kvfs_cuda *d, CUcontext context, CUdeviceptr address, CUipcMemHandle *handle,
         size_t *offset)
    CUresult kvfs_cuda_ipc_open(const kvfs_cuda *d, CUcontext context, const CUipcMemHandle *handle,
         CUdeviceptr *address)
    CUresult kvfs_cuda_ipc_close(const kvfs_cuda *d, CUcontext context, CUdeviceptr address)
    CUresult kvfs_cuda_register(const kvfs_cuda *d, CUcontext context, void *host, size_t bytes, int read_only,
         CUdeviceptr *address)
    CUresult kvfs_cuda_unregister(const kvfs_cuda *d, CUcontext context, void *host)
    CUresult kvfs_cuda_stream_create(const kvfs_cuda *d, CUcontext context, CUstream *stream)
    CUresult kvfs_cuda_stream_destroy(const kvfs_cuda *d, CUcontext context, CUstream stream)
    CUresult kvfs_cuda_stream_query(const kvfs_cuda *d, CUcontext context, CUstream stream)
    CUresult kvfs_cuda_stream_synchronize(const kvfs_cuda *d, CUcontext context, CUstream stream)
    CUresult kvfs_cuda_stream_wait(const kvfs_cuda *d, CUcontext context, CUstream stream, CUevent event)
    CUresult kvfs_cuda_event_create(const kvfs_cuda *d, CUcontext context, int sleeps, CUevent *event)
    CUresult kvfs_cuda_event_destroy(const kvfs_cuda *d, CUcontext context, CUevent event)
    CUresult kvfs_cuda_event_record(const kvfs_cuda *d, CUcontext context, CUevent event, CUstream stream)
    CUresult kvfs_cuda_event_query(const kvfs_cuda *d, CUcontext context, CUevent event)
    CUresult kvfs_cuda_event_synchronize(const kvfs_cuda *d, CUcontext context, CUevent event)
    CUresult kvfs_cuda_copy(const kvfs_cuda *d, CUcontext context, CUdeviceptr target, CUdeviceptr source,
         size_t bytes, CUstream stream)
    CUresult kvfs_cuda_module_load(const kvfs_cuda *d, CUcontext context, const void *image, CUmodule *module)
    CUresult kvfs_cuda_module_unload(const kvfs_cuda *d, CUcontext context, CUmodule module)
    CUresult kvfs_cuda_module_function(const kvfs_cuda *d, CUcontext context, CUmodule module, const char *name,
         CUfunction *function)
    CUresult kvfs_cuda_launch(const kvfs_cuda *d, CUcontext context, CUfunction function, CUstream stream,
         const kvfs_cuda_grid *launch)


cdef class Driver:
    cdef kvfs_cuda _d
    cdef readonly str path
    cdef readonly int version
    cdef int check(self, CUresult rc, str what) except -1


cdef class Device:
    cdef Driver _driver
    cdef CUdevice _number
    cdef readonly int ordinal
    cdef readonly str uuid
    cdef readonly str name
    cdef readonly size_t total_bytes
    cdef readonly size_t granularity_bytes


cdef class Allocation:
    cdef Driver _driver
    cdef CUmemGenericAllocationHandle _handle
    cdef bint _held
    cdef readonly size_t size_bytes
    cdef CUresult _end(self)


cdef class Mapping:
    cdef Driver _driver
    cdef bint _held
    cdef readonly CUdeviceptr address
    cdef readonly size_t size_bytes
    cdef CUresult _end(self)


cdef class Context:
    cdef Driver _driver
    cdef CUcontext _context
    cdef readonly Device device
    cdef CUcontext get(self) except NULL
    cdef CUresult _end(self)


cdef class LegacyMemory:
    cdef Context _context
    cdef bint _held
    cdef readonly CUdeviceptr address
    cdef readonly size_t size_bytes
    cdef CUresult _end(self)


cdef class Registration:
    cdef Context _context
    cdef void *_host
    cdef readonly CUdeviceptr address
    cdef readonly size_t size_bytes
    cdef CUresult _end(self)


cdef class Stream:
    cdef Context _context
    cdef CUstream _stream
    cdef bint _borrowed
    cdef CUstream get(self) except NULL
    cdef CUresult _end(self)


cdef class Event:
    cdef Context _context
    cdef CUevent _event
    cdef CUevent get(self) except NULL
    cdef CUresult _end(self)


cdef class Module:
    cdef Context _context
    cdef CUmodule _module
    cdef dict _functions
    cdef CUresult _end(self)
    cdef uintptr_t _find(self, str name) except 0
