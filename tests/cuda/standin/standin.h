/* A stand-in for the CUDA driver, for tests alone: no GPU, no speed, no order that a GPU does not promise. */
#ifndef STANDIN_H
#define STANDIN_H

#include "cuda/api.h"

#define DEVICES 2
#define GRANULARITY (2ull << 20)
#define DEVICE_BYTES (1ull << 30)

/* --- faults.c: `NAME:RESULT:NTH,...`, from the environment's KVFS_STANDIN_FAULTS or by `standin_faults` ---------------
 * RESULT at the NTH call of NAME (0: at each); `sticky:RESULT:NTH` at the NTH call in a context and ever after;
 * `missing:NAME:0`; `attribute:NUMBER:VALUE`. */
void standin_faults(const char *spec);
CUresult standin_fault(const char *name);
CUresult standin_sticky(void);
void standin_break(CUresult result); /* as a fault on the device does: sticky */
int standin_is_missing(const char *name);
int standin_attribute(int number, int value);
/* Changes where `standin_faults` ends a sticky error: what was started before is not run. */
long standin_life(void);

/* --- memory.c -------------------------------------------------------------------------------------------------------*/
int standin_accessible(CUdeviceptr address, size_t bytes, int write);

/* --- streams.c ------------------------------------------------------------------------------------------------------*/
void standin_await_runs(void); /* until nothing is being run */
void standin_hold(int held);   /* while 1, nothing that streams were given starts */

/* --- twins.c: kernels in C, by name; a parameter is 64 bits -----------------------------------------------------------*/
struct twin {
    const char *name;
    unsigned int parameters;
    void (*run)(unsigned int grid, const uint64_t *parameters);
};
const struct twin *standin_twin(const char *name);

#define FAULT(name)                          \
    do {                                     \
        CUresult rc_ = standin_fault(#name); \
        if (rc_) return rc_;                 \
    } while (0)
#define FAULT_IN_CONTEXT(name)               \
    do {                                     \
        CUresult rc_ = standin_fault(#name); \
        if (!rc_) rc_ = standin_sticky();    \
        if (rc_) return rc_;                 \
    } while (0)

#endif
