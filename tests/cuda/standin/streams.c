/* Streams of the stand-in: a thread each, which does later, in order, what was started.
 *
 * Invariants: an operation that touches memory it may not is error 700, which stays; after it nothing more is moved, and
 * every wait ends. One lock guards all; it is not held while bytes move.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "standin.h"

enum kind { COPY, RECORD, WAIT, KERNEL };

struct CUevent_st {
    uint64_t recorded, reached;
    unsigned int flags;
};
struct CUstream_st {
    struct operation *first, **last;
    int running, ended;
};
struct CUfunc_st {
    const struct twin *twin;
};
struct CUmod_st {
    struct CUfunc_st functions[4];
    int count;
};

struct operation {
    struct operation *next;
    enum kind kind;
    CUdeviceptr to, from;
    size_t bytes;
    CUevent event;
    uint64_t point;
    long life;
    const struct twin *twin;
    unsigned int grid;
    uint64_t parameters[16];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static int held, runs;  /* `runs`: operations that are being run */
static CUresult broken; /* as standin_break was told, for those that wait */
static int spins;       /* waits of the host for an event that was not reached, and does not let it sleep */

static void fail(CUresult result) {
    standin_break(result);
    pthread_mutex_lock(&lock);
    broken = result;
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
}

__attribute__((visibility("default"))) void standin_hold(int on) {
    pthread_mutex_lock(&lock);
    held = on;
    broken = 0;
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
}

__attribute__((visibility("default"))) int standin_spins(void) {
    pthread_mutex_lock(&lock);
    int count = spins;
    pthread_mutex_unlock(&lock);
    return count;
}

void standin_await_runs(void) {
    pthread_mutex_lock(&lock);
    while (runs) pthread_cond_wait(&moved, &lock);
    pthread_mutex_unlock(&lock);
}

static void run(const struct operation *o) {
    if (standin_sticky() || o->life != standin_life()) return;
    if (o->kind == KERNEL)
        o->twin->run(o->grid, o->parameters);
    else if (o->kind != COPY)
        return;
    else if (!standin_accessible(o->from, o->bytes, 0) || !standin_accessible(o->to, o->bytes, 1))
        fail(CUDA_ERROR_ILLEGAL_ADDRESS);
    else
        memmove((void *)o->to, (void *)o->from, o->bytes);
}

static void *work(void *argument) {
    CUstream s = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (held || (!s->first && !s->ended)) pthread_cond_wait(&moved, &lock);
        struct operation *o = s->first;
        if (!o) break;
        while (o->kind == WAIT && o->event->reached < o->point && !broken) pthread_cond_wait(&moved, &lock);
        s->running = 1;
        runs++;
        if (!(s->first = o->next)) s->last = &s->first;
        pthread_mutex_unlock(&lock);
        run(o);
        pthread_mutex_lock(&lock);
        s->running = 0;
        runs--;
        if (o->kind == RECORD && o->point > o->event->reached) o->event->reached = o->point;
        free(o);
        pthread_cond_broadcast(&moved);
    }
    pthread_mutex_unlock(&lock);
    free(s);
    return NULL;
}

static CUresult start(CUstream s, struct operation operation) {
    struct operation *o = malloc(sizeof(*o));
    *o = operation;
    o->next = NULL;
    o->life = standin_life();
    pthread_mutex_lock(&lock);
    if (o->kind == RECORD)
        o->point = ++o->event->recorded;
    else if (o->kind == WAIT)
        o->point = o->event->recorded;
    *s->last = o;
    s->last = &o->next;
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream *out, unsigned int flags) {
    pthread_t thread;
    (void)flags;
    FAULT_IN_CONTEXT(cuStreamCreate);
    CUstream s = calloc(1, sizeof(*s));
    s->last = &s->first;
    if (pthread_create(&thread, NULL, work, s)) return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_detach(thread);
    *out = s;
    return CUDA_SUCCESS;
}

CUresult cuStreamDestroy(CUstream s) {
    FAULT_IN_CONTEXT(cuStreamDestroy);
    pthread_mutex_lock(&lock);
    s->ended = 1;
    pthread_cond_broadcast(&moved);
    pthread_mutex_unlock(&lock);
    return CUDA_SUCCESS;
}

CUresult cuStreamQuery(CUstream s) {
    FAULT_IN_CONTEXT(cuStreamQuery);
    pthread_mutex_lock(&lock);
    int idle = !s->first && !s->running;
    pthread_mutex_unlock(&lock);
    return idle ? standin_sticky() : CUDA_ERROR_NOT_READY;
}

CUresult cuStreamSynchronize(CUstream s) {
    FAULT_IN_CONTEXT(cuStreamSynchronize);
    pthread_mutex_lock(&lock);
    while (s->first || s->running) pthread_cond_wait(&moved, &lock);
    pthread_mutex_unlock(&lock);
    return standin_sticky();
}

CUresult cuStreamWaitEvent(CUstream s, CUevent event, unsigned int flags) {
    (void)flags;
    FAULT_IN_CONTEXT(cuStreamWaitEvent);
    return start(s, (struct operation){.kind = WAIT, .event = event});
}

CUresult cuEventCreate(CUevent *out, unsigned int flags) {
    FAULT_IN_CONTEXT(cuEventCreate);
    *out = calloc(1, sizeof(**out));
    (*out)->flags = flags;
    return CUDA_SUCCESS;
}

/* Its memory stays: an operation may still name it. */
CUresult cuEventDestroy(CUevent event) {
    (void)event;
    FAULT_IN_CONTEXT(cuEventDestroy);
    return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream s) {
    FAULT_IN_CONTEXT(cuEventRecord);
    return start(s, (struct operation){.kind = RECORD, .event = event});
}

CUresult cuEventQuery(CUevent event) {
    FAULT_IN_CONTEXT(cuEventQuery);
    pthread_mutex_lock(&lock);
    int reached = event->reached >= event->recorded;
    pthread_mutex_unlock(&lock);
    return reached ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CUresult cuEventSynchronize(CUevent event) {
    FAULT_IN_CONTEXT(cuEventSynchronize);
    pthread_mutex_lock(&lock);
    spins += event->reached < event->recorded && !(event->flags & CU_EVENT_BLOCKING_SYNC);
    for (uint64_t point = event->recorded; event->reached < point && !broken;) pthread_cond_wait(&moved, &lock);
    pthread_mutex_unlock(&lock);
    return standin_sticky();
}

CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream s) {
    FAULT_IN_CONTEXT(cuMemcpyAsync);
    return start(s, (struct operation){.kind = COPY, .to = to, .from = from, .bytes = bytes});
}

/* A batch has no order: the stand-in goes backwards. */
CUresult cuMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *bytes, size_t count,
                            CUmemcpyAttributes *attributes, size_t *attribute_begins, size_t attribute_count,
                            size_t *failed, CUstream s) {
    FAULT_IN_CONTEXT(cuMemcpyBatchAsync);
    *failed = (size_t)-1;
    if (!count || !s || attribute_count != 1 || attribute_begins[0] != 0 || !attributes->srcAccessOrder)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = count; i-- > 0;) {
        CUresult rc = standin_fault("batched copy");
        if (rc) {
            *failed = i;
            return rc;
        }
        start(s, (struct operation){.kind = COPY, .to = to[i], .from = from[i], .bytes = bytes[i]});
    }
    return CUDA_SUCCESS;
}

/* An image of the stand-in is any text that names twins. */
CUresult cuModuleLoadData(CUmodule *out, const void *image) {
    FAULT_IN_CONTEXT(cuModuleLoadData);
    if (!strstr(image, ".entry")) return CUDA_ERROR_INVALID_IMAGE;
    *out = calloc(1, sizeof(**out));
    return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule module) {
    FAULT_IN_CONTEXT(cuModuleUnload);
    free(module);
    return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *out, CUmodule module, const char *name) {
    FAULT_IN_CONTEXT(cuModuleGetFunction);
    const struct twin *twin = standin_twin(name);
    if (!twin || module->count == 4) return CUDA_ERROR_NOT_FOUND;
    *out = &module->functions[module->count++];
    (*out)->twin = twin;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction f, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                        unsigned int block_x, unsigned int block_y, unsigned int block_z, unsigned int shared_bytes,
                        CUstream s, void **parameters, void **extra) {
    (void)shared_bytes, (void)extra;
    FAULT_IN_CONTEXT(cuLaunchKernel);
    struct operation o = {.kind = KERNEL, .twin = f->twin, .grid = grid_x};
    if (!grid_x || grid_y != 1 || grid_z != 1 || !block_x || block_x > 1024 || block_y != 1 || block_z != 1)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned int i = 0; i < f->twin->parameters; i++) o.parameters[i] = *(uint64_t *)parameters[i];
    return start(s, o);
}
