/* Kernels of the package, in C. */
#include <string.h>

#include "cuda/copies_core.h"
#include "cuda/kernels/xxh3_lanes.h"
#include "standin.h"

static void fill(unsigned int grid, const uint64_t *parameters) {
    (void)grid;
    memset((void *)parameters[0], (int)parameters[2], parameters[1]);
}

static uint64_t hash(const uint8_t *data, uint64_t bytes) {
    uint64_t lanes[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        uint64_t value = xxh3_begin[lane];
        for (uint64_t i = 0; i < (bytes - 1) / BLOCK_BYTES; i++)
            value = xxh3_chain(value, xxh3_sum(data + i * BLOCK_BYTES, STRIPES, lane), lane);
        lanes[lane] = xxh3_tail(value, data, bytes, lane);
    }
    return xxh3_merge(lanes, bytes);
}

static void xxh3(unsigned int grid, const uint64_t *parameters) {
    for (unsigned int i = 0; i < grid; i++)
        ((uint64_t *)parameters[2])[i] = hash((const uint8_t *)((uint64_t *)parameters[0])[i],
                                              ((uint64_t *)parameters[1])[i]);
}

static void copy(unsigned int grid, const uint64_t *parameters) {
    const struct kvfs_copy *pieces = (void *)parameters[0];
    (void)grid;
    for (uint64_t i = 0; i < parameters[1]; i++)
        memcpy((void *)pieces[i].to, (const void *)pieces[i].from, pieces[i].bytes);
}

static const struct twin twins[] = {{"standin_fill", 3, fill}, {"kvfs_xxh3", 3, xxh3}, {"kvfs_copy", 2, copy}};

const struct twin *standin_twin(const char *name) {
    for (size_t i = 0; i < sizeof(twins) / sizeof(*twins); i++)
        if (strcmp(twins[i].name, name) == 0) return &twins[i];
    return NULL;
}
