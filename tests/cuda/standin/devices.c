/* Devices, contexts and entry points of the stand-in. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "standin.h"

#define DEPTH 16

static __thread CUcontext stack[DEPTH];
static __thread int depth;
static int retained[DEVICES];

static const struct {
    CUresult result;
    const char *name;
} names[] = {
    {1, "CUDA_ERROR_INVALID_VALUE"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY"},
    {100, "CUDA_ERROR_NO_DEVICE"},
    {101, "CUDA_ERROR_INVALID_DEVICE"},
    {200, "CUDA_ERROR_INVALID_IMAGE"},
    {201, "CUDA_ERROR_INVALID_CONTEXT"},
    {400, "CUDA_ERROR_INVALID_HANDLE"},
    {500, "CUDA_ERROR_NOT_FOUND"},
    {600, "CUDA_ERROR_NOT_READY"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
    {712, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
    {713, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
    {719, "CUDA_ERROR_LAUNCH_FAILED"},
    {801, "CUDA_ERROR_NOT_SUPPORTED"},
};

CUresult cuInit(unsigned int flags) {
    FAULT(cuInit);
    return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
    *version = 13000;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **name) {
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++)
        if (names[i].result == error) {
            *name = names[i].name;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}

CUresult cuDeviceGetCount(int *count) {
    FAULT(cuDeviceGetCount);
    *count = DEVICES;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int ordinal) {
    *device = ordinal;
    return ordinal >= 0 && ordinal < DEVICES ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDeviceGetName(char *name, int bytes, CUdevice device) {
    const char *given = getenv("KVFS_STANDIN_NAME");
    snprintf(name, bytes, "%s %d", given ? given : "stand-in", device);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    memset(uuid, 0xab, sizeof(*uuid));
    uuid->bytes[15] = device;
    return CUDA_SUCCESS;
}

CUresult cuDeviceTotalMem(size_t *bytes, CUdevice device) {
    (void)device;
    *bytes = DEVICE_BYTES;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, int attribute, CUdevice device) {
    (void)device;
    *value = standin_attribute(attribute, attribute == 75 ? 9 : attribute == 41 || attribute >= 102);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    FAULT_IN_CONTEXT(cuDevicePrimaryCtxRetain);
    __atomic_add_fetch(&retained[device], 1, __ATOMIC_SEQ_CST);
    *context = (CUcontext)(uintptr_t)(device + 1);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) {
    FAULT(cuDevicePrimaryCtxRelease);
    if (__atomic_fetch_sub(&retained[device], 1, __ATOMIC_SEQ_CST) > 0) return CUDA_SUCCESS;
    __atomic_add_fetch(&retained[device], 1, __ATOMIC_SEQ_CST);
    return CUDA_ERROR_INVALID_CONTEXT;
}

__attribute__((visibility("default"))) int standin_retained(int device) { return retained[device]; }
__attribute__((visibility("default"))) int standin_depth(void) { return depth; } /* of this thread's stack */

CUresult cuCtxPushCurrent(CUcontext context) {
    FAULT(cuCtxPushCurrent);
    if (!context || depth == DEPTH || retained[(uintptr_t)context - 1] <= 0) return CUDA_ERROR_INVALID_CONTEXT;
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext *context) {
    if (!depth) return CUDA_ERROR_INVALID_CONTEXT;
    *context = stack[--depth];
    return CUDA_SUCCESS;
}

#define X(name, version, parameters) CUresult name parameters;
KVFS_CUDA_REQUIRED(X)
KVFS_CUDA_OPTIONAL(X)
#undef X

/* Another version than the one this was written for is another function. */
__attribute__((visibility("default"))) CUresult cuGetProcAddress_v2(const char *name, void **out, int version,
                                                                    uint64_t flags, int *found) {
    static const struct {
        const char *name;
        int version;
        void *address;
    } entries[] = {
#define X(name, version, parameters) {#name, version, (void *)name},
        KVFS_CUDA_REQUIRED(X) KVFS_CUDA_OPTIONAL(X)
#undef X
    };
    *found = 1;
    for (size_t i = 0; !flags && i < sizeof(entries) / sizeof(*entries); i++)
        if (strcmp(entries[i].name, name) == 0 && entries[i].version == version && !standin_is_missing(name)) {
            *out = entries[i].address;
            *found = 0;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_NOT_FOUND;
}
