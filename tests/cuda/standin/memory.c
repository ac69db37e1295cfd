/* Memory of the stand-in: an allocation is a memfd, so that processes share it; an address is one of this process.
 *
 * Invariants: the device's memory is counted in each process for what it created; a range is reserved, mapped whole,
 * or mapped with access, and only the last may be touched by a copy. One lock guards all tables.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "standin.h"

#define MOST 4096

static struct memory {
    int references, fd, device;
    size_t bytes, charged;
} memories[MOST];
static struct range {
    CUdeviceptr address; /* 0: free */
    size_t bytes;
    int memory; /* -1: none is mapped */
    int access, legacy, host;
} ranges[MOST];
static size_t used[DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int add_memory(int fd, int device, size_t bytes, size_t charged) {
    for (int i = 0; i < MOST; i++)
        if (!memories[i].references) {
            memories[i] = (struct memory){1, fd, device, bytes, charged};
            used[device] += charged;
            return i;
        }
    return -1;
}

static void drop_memory(int i) {
    struct memory *m = &memories[i];
    if (--m->references == 0) {
        used[m->device] -= m->charged;
        close(m->fd);
    }
}

static struct range *find_range(CUdeviceptr address) {
    for (int i = 0; i < MOST; i++)
        if (ranges[i].address && address >= ranges[i].address && address < ranges[i].address + ranges[i].bytes)
            return &ranges[i];
    return NULL;
}

static struct range *add_range(struct range range) {
    for (int i = 0; i < MOST; i++)
        if (!ranges[i].address) {
            ranges[i] = range;
            return &ranges[i];
        }
    return NULL;
}

/* What is no range of ours is memory of the host, which any device may touch. */
int standin_accessible(CUdeviceptr address, size_t bytes, int write) {
    pthread_mutex_lock(&lock);
    struct range *r = find_range(address);
    int ok = !r || r->host ||
             (address + bytes <= r->address + r->bytes && (r->access & 1) && (!write || (r->access & 2)));
    pthread_mutex_unlock(&lock);
    return ok;
}

#define LOCKED(name, body)            \
    FAULT(name);                      \
    pthread_mutex_lock(&lock);        \
    CUresult rc = CUDA_SUCCESS;       \
    body pthread_mutex_unlock(&lock); \
    return rc;
#define LOCKED_IN_CONTEXT(name, body) \
    CUresult lost = standin_sticky(); \
    if (lost) return lost;            \
    LOCKED(name, body)

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *prop, int option) {
    (void)prop, (void)option;
    *bytes = GRANULARITY;
    return CUDA_SUCCESS;
}

static CUresult create(int device, size_t bytes, int *out) {
    if (!bytes || bytes % GRANULARITY || device < 0 || device >= DEVICES) return CUDA_ERROR_INVALID_VALUE;
    if (used[device] + bytes > DEVICE_BYTES) return CUDA_ERROR_OUT_OF_MEMORY;
    int fd = memfd_create("kvfs-standin", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, bytes) || (*out = add_memory(fd, device, bytes, bytes)) < 0) {
        close(fd);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop,
                     unsigned long long flags) {
    LOCKED(cuMemCreate, {
        int i = -1;
        rc = flags || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ? CUDA_ERROR_INVALID_VALUE
                                                                  : create(prop->location.id, bytes, &i);
        *handle = i + 1;
    })
}

static struct memory *held(CUmemGenericAllocationHandle handle) {
    return handle && handle <= MOST && memories[handle - 1].references ? &memories[handle - 1] : NULL;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle){LOCKED(cuMemRelease,
                                                                  {
                                                                      if (held(handle))
                                                                          drop_memory(handle - 1);
                                                                      else
                                                                          rc = CUDA_ERROR_INVALID_VALUE;
                                                                  })}

CUresult
    cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, int type, unsigned long long flags) {
    (void)flags;
    LOCKED(cuMemExportToShareableHandle, {
        struct memory *m = held(handle);
        /* What was imported is not exported again: as driver 580 says on an H100. */
        if (!m || !m->charged || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
            rc = CUDA_ERROR_INVALID_VALUE;
        else if ((*(int *)out = dup(m->fd)) < 0)
            rc = CUDA_ERROR_OUT_OF_MEMORY;
    })
}

CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable, int type){
    LOCKED(cuMemImportFromShareableHandle,
           {
               struct stat seen;
               int fd = fcntl((int)(uintptr_t)shareable, F_DUPFD_CLOEXEC, 3);
               int i = -1;
               if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || fd < 0 || fstat(fd, &seen) ||
                   !S_ISREG(seen.st_mode) || (i = add_memory(fd, 0, seen.st_size, 0)) < 0) {
                   if (fd >= 0) close(fd);
                   rc = CUDA_ERROR_INVALID_VALUE;
               }
               *handle = i + 1;
           })}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags) {
    (void)alignment, (void)wanted, (void)flags;
    LOCKED(cuMemAddressReserve, {
        void *at = bytes && bytes % GRANULARITY == 0
                       ? mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
                       : MAP_FAILED;
        if (at == MAP_FAILED || !add_range((struct range){(CUdeviceptr)at, bytes, -1, 0, 0, 0}))
            rc = bytes % GRANULARITY ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_OUT_OF_MEMORY;
        *address = (CUdeviceptr)at;
    })
}

static struct range *exact(CUdeviceptr address, size_t bytes) {
    struct range *r = find_range(address);
    return r && r->address == address && r->bytes == bytes && !r->host && !r->legacy ? r : NULL;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes){LOCKED(cuMemAddressFree,
                                                                    {
                                                                        struct range *r = exact(address, bytes);
                                                                        if (!r || r->memory >= 0) {
                                                                            rc = CUDA_ERROR_INVALID_VALUE;
                                                                        } else {
                                                                            munmap((void *)address, bytes);
                                                                            r->address = 0;
                                                                        }
                                                                    })}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags){
    LOCKED(cuMemMap,
           {
               struct range *r = exact(address, bytes);
               struct memory *m = held(handle);
               if (!r || !m || r->memory >= 0 || offset || flags || m->bytes != bytes) {
                   rc = CUDA_ERROR_INVALID_VALUE;
               } else if (mmap((void *)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, m->fd, 0) == MAP_FAILED) {
                   rc = CUDA_ERROR_OUT_OF_MEMORY;
               } else {
                   r->memory = handle - 1;
                   m->references++;
               }
           })}

CUresult cuMemUnmap(CUdeviceptr address,
                    size_t bytes){LOCKED(cuMemUnmap,
                                         {
                                             struct range *r = exact(address, bytes);
                                             if (!r || r->memory < 0) {
                                                 rc = CUDA_ERROR_INVALID_VALUE;
                                             } else {
                                                 mmap((void *)address, bytes, PROT_NONE,
                                                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
                                                 drop_memory(r->memory);
                                                 r->memory = -1;
                                                 r->access = 0;
                                             }
                                         })}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count){
    LOCKED(cuMemSetAccess,
           {
               struct range *r = exact(address, bytes);
               if (!r || r->memory < 0 || count != 1) {
                   rc = CUDA_ERROR_INVALID_VALUE;
               } else {
                   r->access = access->flags;
                   mprotect((void *)address, bytes, access->flags & 2 ? PROT_READ | PROT_WRITE : PROT_READ);
               }
           })}

CUresult cuMemGetInfo(size_t *available, size_t *total) {
    LOCKED_IN_CONTEXT(cuMemGetInfo, {
        *total = DEVICE_BYTES;
        *available = DEVICE_BYTES - used[0];
    })
}

/* --- legacy memory: a handle is the process and descriptor that /proc opens ----------------------------------------- */
static CUresult map_legacy(int fd, int device, size_t bytes, size_t charged, int opened, CUdeviceptr *address) {
    int i = add_memory(fd, device, bytes, charged);
    void *at = i < 0 ? MAP_FAILED : mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED || !add_range((struct range){(CUdeviceptr)at, bytes, i, 3, 1 + opened, 0}))
        return CUDA_ERROR_OUT_OF_MEMORY;
    *address = (CUdeviceptr)at;
    return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr *address, size_t bytes) {
    LOCKED_IN_CONTEXT(cuMemAlloc, {
        int fd = bytes && used[0] + bytes <= DEVICE_BYTES ? memfd_create("kvfs-standin", MFD_CLOEXEC) : -1;
        rc = fd < 0 || ftruncate(fd, bytes) ? CUDA_ERROR_OUT_OF_MEMORY : map_legacy(fd, 0, bytes, bytes, 0, address);
    })
}

static CUresult free_legacy(CUdeviceptr address, int opened) {
    struct range *r = find_range(address);
    if (!r || r->legacy != 1 + opened || r->address != address) return CUDA_ERROR_INVALID_VALUE;
    munmap((void *)address, r->bytes);
    drop_memory(r->memory);
    r->address = 0;
    return CUDA_SUCCESS;
}

CUresult cuMemFree(CUdeviceptr address){LOCKED_IN_CONTEXT(cuMemFree, { rc = free_legacy(address, 0); })}

CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *bytes,
                              CUdeviceptr address){LOCKED_IN_CONTEXT(cuMemGetAddressRange,
                                                                     {
                                                                         struct range *r = find_range(address);
                                                                         if (r) {
                                                                             *base = r->address;
                                                                             *bytes = r->bytes;
                                                                         } else {
                                                                             rc = CUDA_ERROR_NOT_FOUND;
                                                                         }
                                                                     })}

CUresult cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr address){
    LOCKED_IN_CONTEXT(cuIpcGetMemHandle,
                      {
                          struct range *r = find_range(address);
                          memset(handle, 0, sizeof(*handle));
                          if (r && r->legacy == 1)
                              snprintf(handle->reserved, sizeof(handle->reserved), "/proc/%d/fd/%d", getpid(),
                                       memories[r->memory].fd);
                          else
                              rc = CUDA_ERROR_INVALID_VALUE;
                      })}

CUresult cuIpcOpenMemHandle(CUdeviceptr *address, CUipcMemHandle handle, unsigned int flags) {
    (void)flags;
    LOCKED_IN_CONTEXT(cuIpcOpenMemHandle, {
        struct stat seen;
        handle.reserved[63] = 0;
        int fd = open(handle.reserved, O_RDWR | O_CLOEXEC);
        rc = fd < 0 || fstat(fd, &seen) ? CUDA_ERROR_INVALID_HANDLE : map_legacy(fd, 0, seen.st_size, 0, 1, address);
    })
}

CUresult cuIpcCloseMemHandle(CUdeviceptr address){
    LOCKED_IN_CONTEXT(cuIpcCloseMemHandle, { rc = free_legacy(address, 1); })}

CUresult cuMemHostRegister(void *address, size_t bytes, unsigned int flags) {
    (void)flags;
    LOCKED_IN_CONTEXT(cuMemHostRegister, {
        if (!bytes)
            rc = CUDA_ERROR_INVALID_VALUE;
        else if (find_range((CUdeviceptr)address))
            rc = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
        else
            add_range((struct range){(CUdeviceptr)address, bytes, -1, 3, 0, 1});
    })
}

CUresult cuMemHostUnregister(void *address){LOCKED_IN_CONTEXT(cuMemHostUnregister,
                                                              {
                                                                  struct range *r = find_range((CUdeviceptr)address);
                                                                  if (r && r->host)
                                                                      r->address = 0;
                                                                  else
                                                                      rc = CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
                                                              })}

CUresult cuMemHostGetDevicePointer(CUdeviceptr *out, void *host, unsigned int flags) {
    (void)flags;
    LOCKED_IN_CONTEXT(cuMemHostGetDevicePointer, {
        struct range *r = find_range((CUdeviceptr)host);
        *out = (CUdeviceptr)host;
        if (!r || !r->host) rc = CUDA_ERROR_INVALID_VALUE;
    })
}
