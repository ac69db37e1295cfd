/* The CUDA driver, opened at run time. See driver_core.c. */
#ifndef KVFS_CUDA_DRIVER_CORE_H
#define KVFS_CUDA_DRIVER_CORE_H

#include "cuda/api.h"

/* The driver's entry points, under their own names. */
struct kvfs_cuda {
#define X(name, version, parameters) CUresult(*name) parameters;
    KVFS_CUDA_REQUIRED(X)
    KVFS_CUDA_OPTIONAL(X)
#undef X
};

struct kvfs_cuda_grid {
    unsigned int grid, block, shared_bytes;
    void **parameters;
};

/* Opens `path` and finds every entry point. 0, or -ENOENT: the library does not open, -ENOSYS: a symbol is missing, or
 * another one's version; `why` names it. The library stays open: its threads outlive every handle. */
int kvfs_cuda_open(struct kvfs_cuda *out, const char *path, char *why, size_t why_bytes);

/* All return the driver's CUresult. Those below take no context. */
CUresult kvfs_cuda_create(const struct kvfs_cuda *d, CUdevice device, size_t bytes,
                          CUmemGenericAllocationHandle *handle);
CUresult kvfs_cuda_granularity(const struct kvfs_cuda *d, CUdevice device, size_t *bytes);
CUresult kvfs_cuda_map(const struct kvfs_cuda *d, CUdevice device, CUmemGenericAllocationHandle handle, size_t bytes,
                       int writable, CUdeviceptr *address);
CUresult kvfs_cuda_unmap(const struct kvfs_cuda *d, CUdeviceptr address, size_t bytes);

/* Those below run in `context`, and leave the thread the context that it had. */
CUresult kvfs_cuda_memory(const struct kvfs_cuda *d, CUcontext context, size_t *available, size_t *total);
CUresult kvfs_cuda_alloc(const struct kvfs_cuda *d, CUcontext context, size_t bytes, CUdeviceptr *address);
CUresult kvfs_cuda_free(const struct kvfs_cuda *d, CUcontext context, CUdeviceptr address);
/* Exports the allocation that holds `address`, `offset` bytes behind its begin. */
CUresult kvfs_cuda_ipc_export(const struct kvfs_cuda *d, CUcontext context, CUdeviceptr address, CUipcMemHandle *handle,
                              size_t *offset);
CUresult kvfs_cuda_ipc_open(const struct kvfs_cuda *d, CUcontext context, const CUipcMemHandle *handle,
                            CUdeviceptr *address);
CUresult kvfs_cuda_ipc_close(const struct kvfs_cuda *d, CUcontext context, CUdeviceptr address);
CUresult kvfs_cuda_register(const struct kvfs_cuda *d, CUcontext context, void *host, size_t bytes, int read_only,
                            CUdeviceptr *address);
CUresult kvfs_cuda_unregister(const struct kvfs_cuda *d, CUcontext context, void *host);
CUresult kvfs_cuda_stream_create(const struct kvfs_cuda *d, CUcontext context, CUstream *stream);
CUresult kvfs_cuda_stream_destroy(const struct kvfs_cuda *d, CUcontext context, CUstream stream);
CUresult kvfs_cuda_stream_query(const struct kvfs_cuda *d, CUcontext context, CUstream stream);
CUresult kvfs_cuda_stream_synchronize(const struct kvfs_cuda *d, CUcontext context, CUstream stream);
CUresult kvfs_cuda_stream_wait(const struct kvfs_cuda *d, CUcontext context, CUstream stream, CUevent event);
CUresult kvfs_cuda_event_create(const struct kvfs_cuda *d, CUcontext context, int sleeps, CUevent *event);
CUresult kvfs_cuda_event_destroy(const struct kvfs_cuda *d, CUcontext context, CUevent event);
CUresult kvfs_cuda_event_record(const struct kvfs_cuda *d, CUcontext context, CUevent event, CUstream stream);
CUresult kvfs_cuda_event_query(const struct kvfs_cuda *d, CUcontext context, CUevent event);
CUresult kvfs_cuda_event_synchronize(const struct kvfs_cuda *d, CUcontext context, CUevent event);
CUresult kvfs_cuda_copy(const struct kvfs_cuda *d, CUcontext context, CUdeviceptr to, CUdeviceptr from, size_t bytes,
                        CUstream stream);
CUresult kvfs_cuda_module_load(const struct kvfs_cuda *d, CUcontext context, const void *image, CUmodule *module);
CUresult kvfs_cuda_module_unload(const struct kvfs_cuda *d, CUcontext context, CUmodule module);
CUresult kvfs_cuda_module_function(const struct kvfs_cuda *d, CUcontext context, CUmodule module, const char *name,
                                   CUfunction *function);
CUresult kvfs_cuda_launch(const struct kvfs_cuda *d, CUcontext context, CUfunction function, CUstream stream,
                          const struct kvfs_cuda_grid *launch);

/* Returns what `call` of the driver `d` gives in the `context`, with the thread's own put back. */
#define IN_CONTEXT(call)                             \
    do {                                             \
        CUcontext before_;                           \
        CUresult rc_ = d->cuCtxPushCurrent(context); \
        if (rc_) return rc_;                         \
        rc_ = (call);                                \
        (void)d->cuCtxPopCurrent(&before_);          \
        return rc_;                                  \
    } while (0)

#endif
