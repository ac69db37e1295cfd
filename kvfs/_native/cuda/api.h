/* What kvfs uses of the CUDA driver: types, constants and entry points, so that no toolkit is needed to build.
 *
 * The names, values and layouts are those of cuda.h, and the versions those of cudaTypedefs.h (CUDA 12.9, in NVIDIA's
 * package cuda-cudart-dev, or the wheel nvidia-cuda-runtime-cu12): part of the driver's ABI, which never changes for a
 * symbol asked for with its version.
 */
#ifndef KVFS_CUDA_API_H
#define KVFS_CUDA_API_H

#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;

typedef struct {
    unsigned char bytes[16];
} CUuuid;

typedef struct {
    char reserved[64];
} CUipcMemHandle;

typedef struct {
    int type; /* CU_MEM_LOCATION_TYPE_* */
    int id;
} CUmemLocation;

typedef struct {
    int type;                 /* CU_MEM_ALLOCATION_TYPE_PINNED */
    int requestedHandleTypes; /* CU_MEM_HANDLE_TYPE_* */
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType, gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;

typedef struct {
    CUmemLocation location;
    int flags; /* CU_MEM_ACCESS_FLAGS_* */
} CUmemAccessDesc;

typedef struct {
    int srcAccessOrder; /* CU_MEMCPY_SRC_ACCESS_ORDER_* */
    CUmemLocation srcLocHint, dstLocHint;
    unsigned int flags;
} CUmemcpyAttributes;

_Static_assert(sizeof(CUmemAllocationProp) == 32 && sizeof(CUmemAccessDesc) == 12, "cuda.h");
_Static_assert(sizeof(CUmemcpyAttributes) == 24 && sizeof(CUuuid) == 16, "cuda.h");

enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_INVALID_IMAGE = 200,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
    CUDA_ERROR_NOT_SUPPORTED = 801,
};

enum {
    CU_GET_PROC_ADDRESS_DEFAULT = 0,
    CU_MEM_ALLOCATION_TYPE_PINNED = 1,
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
    CU_MEM_LOCATION_TYPE_DEVICE = 1,
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0,
    CU_MEM_ACCESS_FLAGS_PROT_READ = 1,
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
    CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1,
    CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1,
    CU_STREAM_NON_BLOCKING = 1,
    CU_STREAM_LEGACY = 1, /* as a handle: the default stream */
    CU_EVENT_BLOCKING_SYNC = 1,
    CU_EVENT_DISABLE_TIMING = 2,
    CU_MEMHOSTREGISTER_PORTABLE = 1,
    CU_MEMHOSTREGISTER_DEVICEMAP = 2,
    CU_MEMHOSTREGISTER_READ_ONLY = 8,
};

/* X(name, version, parameters): the version that brought this signature. */
#define KVFS_CUDA_REQUIRED(X)                                                                                     \
    X(cuInit, 2000, (unsigned int flags))                                                                         \
    X(cuDriverGetVersion, 2020, (int *version))                                                                   \
    X(cuGetErrorName, 6000, (CUresult error, const char **name))                                                  \
    X(cuDeviceGetCount, 2000, (int *count))                                                                       \
    X(cuDeviceGet, 2000, (CUdevice * device, int ordinal))                                                        \
    X(cuDeviceGetName, 2000, (char *name, int bytes, CUdevice device))                                            \
    X(cuDeviceGetUuid, 11040, (CUuuid * uuid, CUdevice device))                                                   \
    X(cuDeviceTotalMem, 3020, (size_t * bytes, CUdevice device))                                                  \
    X(cuDeviceGetAttribute, 2000, (int *value, int attribute, CUdevice device))                                   \
    X(cuDevicePrimaryCtxRetain, 7000, (CUcontext * context, CUdevice device))                                     \
    X(cuDevicePrimaryCtxRelease, 11000, (CUdevice device))                                                        \
    X(cuCtxPushCurrent, 4000, (CUcontext context))                                                                \
    X(cuCtxPopCurrent, 4000, (CUcontext * context))                                                               \
    X(cuMemGetAllocationGranularity, 10020, (size_t * bytes, const CUmemAllocationProp *prop, int option))        \
    X(cuMemCreate, 10020,                                                                                         \
      (CUmemGenericAllocationHandle * handle, size_t bytes, const CUmemAllocationProp *prop,                      \
       unsigned long long flags))                                                                                 \
    X(cuMemRelease, 10020, (CUmemGenericAllocationHandle handle))                                                 \
    X(cuMemExportToShareableHandle, 10020,                                                                        \
      (void *shareable, CUmemGenericAllocationHandle handle, int type, unsigned long long flags))                 \
    X(cuMemImportFromShareableHandle, 10020, (CUmemGenericAllocationHandle * handle, void *shareable, int type))  \
    X(cuMemAddressReserve, 10020,                                                                                 \
      (CUdeviceptr * address, size_t bytes, size_t alignment, CUdeviceptr wanted, unsigned long long flags))      \
    X(cuMemAddressFree, 10020, (CUdeviceptr address, size_t bytes))                                               \
    X(cuMemMap, 10020,                                                                                            \
      (CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,                     \
       unsigned long long flags))                                                                                 \
    X(cuMemUnmap, 10020, (CUdeviceptr address, size_t bytes))                                                     \
    X(cuMemSetAccess, 10020, (CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count))    \
    X(cuMemAlloc, 3020, (CUdeviceptr * address, size_t bytes))                                                    \
    X(cuMemFree, 3020, (CUdeviceptr address))                                                                     \
    X(cuMemGetInfo, 3020, (size_t * available, size_t * total))                                                   \
    X(cuMemGetAddressRange, 3020, (CUdeviceptr * base, size_t * bytes, CUdeviceptr address))                      \
    X(cuIpcGetMemHandle, 4010, (CUipcMemHandle * handle, CUdeviceptr address))                                    \
    X(cuIpcOpenMemHandle, 11000, (CUdeviceptr * address, CUipcMemHandle handle, unsigned int flags))              \
    X(cuIpcCloseMemHandle, 4010, (CUdeviceptr address))                                                           \
    X(cuMemHostRegister, 6050, (void *address, size_t bytes, unsigned int flags))                                 \
    X(cuMemHostUnregister, 4000, (void *address))                                                                 \
    X(cuMemHostGetDevicePointer, 3020, (CUdeviceptr * address, void *host, unsigned int flags))                   \
    X(cuStreamCreate, 2000, (CUstream * stream, unsigned int flags))                                              \
    X(cuStreamDestroy, 4000, (CUstream stream))                                                                   \
    X(cuStreamQuery, 2000, (CUstream stream))                                                                     \
    X(cuStreamSynchronize, 2000, (CUstream stream))                                                               \
    X(cuStreamWaitEvent, 3020, (CUstream stream, CUevent event, unsigned int flags))                              \
    X(cuEventCreate, 2000, (CUevent * event, unsigned int flags))                                                 \
    X(cuEventDestroy, 4000, (CUevent event))                                                                      \
    X(cuEventRecord, 2000, (CUevent event, CUstream stream))                                                      \
    X(cuEventQuery, 2000, (CUevent event))                                                                        \
    X(cuEventSynchronize, 2000, (CUevent event))                                                                  \
    X(cuMemcpyAsync, 4000, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream))                     \
    X(cuModuleLoadData, 2000, (CUmodule * module, const void *image))                                             \
    X(cuModuleUnload, 2000, (CUmodule module))                                                                    \
    X(cuModuleGetFunction, 2000, (CUfunction * function, CUmodule module, const char *name))                      \
    X(cuLaunchKernel, 4000,                                                                                       \
      (CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, unsigned int block_x,  \
       unsigned int block_y, unsigned int block_z, unsigned int shared_bytes, CUstream stream, void **parameters, \
       void **extra))

/* NULL where the driver is older. */
#define KVFS_CUDA_OPTIONAL(X)                                                                               \
    X(cuMemcpyBatchAsync, 12080,                                                                            \
      (CUdeviceptr * to, CUdeviceptr * from, size_t * bytes, size_t count, CUmemcpyAttributes * attributes, \
       size_t * attribute_begins, size_t attribute_count, size_t * failed, CUstream stream))

#endif
