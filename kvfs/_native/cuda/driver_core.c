/* The CUDA driver, opened at run time, and the calls of it that kvfs makes.
 *
 * Responsibility: find every entry point by name and version, undo a sequence of calls that fails halfway, and run what
 * needs a context in the right one.
 *
 * Invariants: an entry point is asked for by the version of the signature in api.h, so that a newer driver answers with
 * that one. A call that fails leaves nothing of its own behind. The context of the calling thread, which belongs to the
 * engine, is after a call what it was before.
 *
 * Concurrency: the driver's functions may be called by any thread; nothing here has state.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "cuda/driver_core.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <string.h>

typedef CUresult (*get_proc_address)(const char *name, void **out, int version, uint64_t flags, int *found);

static int find(get_proc_address get, const char *name, int version, void **out) {
    int found = 0;
    *out = NULL;
    return get(name, out, version, CU_GET_PROC_ADDRESS_DEFAULT, &found) == CUDA_SUCCESS && *out;
}

int kvfs_cuda_open(struct kvfs_cuda *out, const char *path, char *why, size_t why_bytes) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(why, why_bytes, "%s", dlerror());
        return -ENOENT;
    }
    get_proc_address get = (get_proc_address)dlsym(library, "cuGetProcAddress_v2");
    if (!get) {
        snprintf(why, why_bytes, "%s has no cuGetProcAddress_v2: it is older than CUDA 12.0", path);
        dlclose(library);
        return -ENOSYS;
    }
#define X(name, version, parameters)                                                  \
    if (!find(get, #name, version, (void **)&out->name)) {                            \
        snprintf(why, why_bytes, "%s has no %s of version %d", path, #name, version); \
        return -ENOSYS;                                                               \
    }
    KVFS_CUDA_REQUIRED(X)
#undef X
#define X(name, version, parameters) (void)find(get, #name, version, (void **)&out->name);
    KVFS_CUDA_OPTIONAL(X)
#undef X
    return 0;
}

static CUmemAllocationProp properties(CUdevice device) {
    return (CUmemAllocationProp){
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        .location = {CU_MEM_LOCATION_TYPE_DEVICE, device},
    };
}

CUresult kvfs_cuda_create(const struct kvfs_cuda *d, CUdevice device, size_t bytes,
                          CUmemGenericAllocationHandle *handle) {
    CUmemAllocationProp prop = properties(device);
    return d->cuMemCreate(handle, bytes, &prop, 0);
}

CUresult kvfs_cuda_granularity(const struct kvfs_cuda *d, CUdevice device, size_t *bytes) {
    CUmemAllocationProp prop = properties(device);
    return d->cuMemGetAllocationGranularity(bytes, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
}

CUresult kvfs_cuda_map(const struct kvfs_cuda *d, CUdevice device, CUmemGenericAllocationHandle handle, size_t bytes,
                       int writable, CUdeviceptr *address) {
    CUmemAccessDesc access = {
        .location = {CU_MEM_LOCATION_TYPE_DEVICE, device},
        .flags = writable ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_READ,
    };
    CUresult rc = d->cuMemAddressReserve(address, bytes, 0, 0, 0);
    if (rc) return rc;
    rc = d->cuMemMap(*address, bytes, 0, handle, 0);
    if (rc == 0) {
        rc = d->cuMemSetAccess(*address, bytes, &access, 1);
        if (rc) (void)d->cuMemUnmap(*address, bytes);
    }
    if (rc) (void)d->cuMemAddressFree(*address, bytes);
    return rc;
}

CUresult kvfs_cuda_unmap(const struct kvfs_cuda *d, CUdeviceptr address, size_t bytes) {
    CUresult rc = d->cuMemUnmap(address, bytes);
    return rc ? rc : d->cuMemAddressFree(address, bytes);
}

CUresult kvfs_cuda_memory(const struct kvfs_cuda *d, CUcontext context, size_t *available, size_t *total) {
    IN_CONTEXT(d->cuMemGetInfo(available, total));
}

CUresult kvfs_cuda_alloc(const struct kvfs_cuda *d, CUcontext context, size_t bytes, CUdeviceptr *address) {
    IN_CONTEXT(d->cuMemAlloc(address, bytes));
}

CUresult kvfs_cuda_free(const struct kvfs_cuda *d, CUcontext context, CUdeviceptr address) {
    IN_CONTEXT(d->cuMemFree(address));
}

static CUresult ipc_export(const struct kvfs_cuda *d, CUdeviceptr address, CUipcMemHandle *handle, size_t *offset) {
    CUdeviceptr base = 0;
    size_t bytes = 0;
    CUresult rc = d->cuMemGetAddressRange(&base, &bytes, address);
    if (rc) return rc;
    *offset = address - base;
    return d->cuIpcGetMemHandle(handle, base);
}

CUresult kvfs_cuda_ipc_export(const struct kvfs_cuda *d, CUcontext context, CUdeviceptr address, CUipcMemHandle *handle,
                              size_t *offset) {
    IN_CONTEXT(ipc_export(d, address, handle, offset));
}

CUresult kvfs_cuda_ipc_open(const struct kvfs_cuda *d, CUcontext context, const CUipcMemHandle *handle,
                            CUdeviceptr *address) {
    IN_CONTEXT(d->cuIpcOpenMemHandle(address, *handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
}

CUresult kvfs_cuda_ipc_close(const struct kvfs_cuda *d, CUcontext context, CUdeviceptr address) {
    IN_CONTEXT(d->cuIpcCloseMemHandle(address));
}

static CUresult host_register(const struct kvfs_cuda *d, void *host, size_t bytes, int read_only,
                              CUdeviceptr *address) {
    unsigned int flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
    CUresult rc = d->cuMemHostRegister(host, bytes, read_only ? flags | CU_MEMHOSTREGISTER_READ_ONLY : flags);
    if (rc) return rc;
    rc = d->cuMemHostGetDevicePointer(address, host, 0);
    if (rc) (void)d->cuMemHostUnregister(host);
    return rc;
}

CUresult kvfs_cuda_register(const struct kvfs_cuda *d, CUcontext context, void *host, size_t bytes, int read_only,
                            CUdeviceptr *address) {
    IN_CONTEXT(host_register(d, host, bytes, read_only, address));
}

CUresult kvfs_cuda_unregister(const struct kvfs_cuda *d, CUcontext context, void *host) {
    IN_CONTEXT(d->cuMemHostUnregister(host));
}

CUresult kvfs_cuda_stream_create(const struct kvfs_cuda *d, CUcontext context, CUstream *stream) {
    IN_CONTEXT(d->cuStreamCreate(stream, CU_STREAM_NON_BLOCKING));
}

CUresult kvfs_cuda_stream_destroy(const struct kvfs_cuda *d, CUcontext context, CUstream stream) {
    IN_CONTEXT(d->cuStreamDestroy(stream));
}

CUresult kvfs_cuda_stream_query(const struct kvfs_cuda *d, CUcontext context, CUstream stream) {
    IN_CONTEXT(d->cuStreamQuery(stream));
}

CUresult kvfs_cuda_stream_synchronize(const struct kvfs_cuda *d, CUcontext context, CUstream stream) {
    IN_CONTEXT(d->cuStreamSynchronize(stream));
}

CUresult kvfs_cuda_stream_wait(const struct kvfs_cuda *d, CUcontext context, CUstream stream, CUevent event) {
    IN_CONTEXT(d->cuStreamWaitEvent(stream, event, 0));
}

CUresult kvfs_cuda_event_create(const struct kvfs_cuda *d, CUcontext context, int sleeps, CUevent *event) {
    unsigned int flags = CU_EVENT_DISABLE_TIMING | (sleeps ? CU_EVENT_BLOCKING_SYNC : 0);
    IN_CONTEXT(d->cuEventCreate(event, flags));
}

CUresult kvfs_cuda_event_destroy(const struct kvfs_cuda *d, CUcontext context, CUevent event) {
    IN_CONTEXT(d->cuEventDestroy(event));
}

CUresult kvfs_cuda_event_record(const struct kvfs_cuda *d, CUcontext context, CUevent event, CUstream stream) {
    IN_CONTEXT(d->cuEventRecord(event, stream));
}

CUresult kvfs_cuda_event_query(const struct kvfs_cuda *d, CUcontext context, CUevent event) {
    IN_CONTEXT(d->cuEventQuery(event));
}

CUresult kvfs_cuda_event_synchronize(const struct kvfs_cuda *d, CUcontext context, CUevent event) {
    IN_CONTEXT(d->cuEventSynchronize(event));
}

CUresult kvfs_cuda_copy(const struct kvfs_cuda *d, CUcontext context, CUdeviceptr to, CUdeviceptr from, size_t bytes,
                        CUstream stream) {
    IN_CONTEXT(d->cuMemcpyAsync(to, from, bytes, stream));
}

CUresult kvfs_cuda_module_load(const struct kvfs_cuda *d, CUcontext context, const void *image, CUmodule *module) {
    IN_CONTEXT(d->cuModuleLoadData(module, image));
}

CUresult kvfs_cuda_module_unload(const struct kvfs_cuda *d, CUcontext context, CUmodule module) {
    IN_CONTEXT(d->cuModuleUnload(module));
}

CUresult kvfs_cuda_module_function(const struct kvfs_cuda *d, CUcontext context, CUmodule module, const char *name,
                                   CUfunction *function) {
    IN_CONTEXT(d->cuModuleGetFunction(function, module, name));
}

CUresult kvfs_cuda_launch(const struct kvfs_cuda *d, CUcontext context, CUfunction function, CUstream stream,
                          const struct kvfs_cuda_grid *launch) {
    IN_CONTEXT(d->cuLaunchKernel(function, launch->grid, 1, 1, launch->block, 1, 1, launch->shared_bytes, stream,
                                 launch->parameters, NULL));
}
