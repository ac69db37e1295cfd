/* Copies between a device's memory and another: coalesced, bounded, started as one. See copies_core.c. */
#ifndef KVFS_CUDA_COPIES_CORE_H
#define KVFS_CUDA_COPIES_CORE_H

#include "cuda/driver_core.h"

struct kvfs_copy {
    uint64_t to, from, bytes;
};

/* One mapping, allocation or registration: a copy that spans two fails. */
struct kvfs_region {
    uint64_t address, bytes;
};

struct kvfs_regions {
    struct kvfs_region *items;
    size_t count;
};

/* Sorts the regions. 0; -EINVAL: one is empty, passes the end of the address space, or overlaps another. */
int kvfs_regions_sort(struct kvfs_regions regions);

/* Checks, sorts by destination and coalesces `copies` in place, over sorted regions; `*count` becomes how many are left.
 * 0, or with `*bad` an index into the copies as they are then: -ERANGE: a side is not inside one region, -EINVAL: a
 * destination overlaps another destination or a source, so that the order would matter. */
int kvfs_copies_plan(struct kvfs_copy *copies, size_t *count, struct kvfs_regions to, struct kvfs_regions from,
                     size_t *bad);

/* Blocks that lie in pieces: block i has `piece_bytes` at starts[i] + offsets[j] for each j, in the order of its bytes. */
struct kvfs_places {
    uint64_t *starts, *offsets;
    size_t count, pieces;
    uint64_t piece_bytes;
};

enum kvfs_direction { KVFS_INTO_PLACES, KVFS_OUT_OF_PLACES };

/* Lists the copies between the places and where each block lies whole, from whole[i] on: by destination, where each
 * offset has all blocks before the next one does. `copies` has room for count * pieces. 0, or -ENOMEM. */
int kvfs_places_list(const struct kvfs_places *places, const uint64_t *whole, enum kvfs_direction direction,
                     struct kvfs_copy *copies);

/* A plan: pieces as the kernel's list has them, so that most are copied there as they are. */
struct kvfs_copies {
    struct kvfs_copy *pieces;
    size_t count;
    uint64_t bytes, largest_bytes;
};

/* Takes `count` planned pieces, which are the plan's from now on. */
struct kvfs_copies kvfs_copies_of(struct kvfs_copy *pieces, size_t count);

/* Starts all copies on `stream` as a batch of the driver's, behind `after` (NULL: nothing), and records `done` behind
 * them. Where it fails nothing of it is in flight any more, and what the destinations hold is not known. */
CUresult kvfs_copies_start(const struct kvfs_cuda *d, CUcontext context, const struct kvfs_copies *copies,
                           CUstream stream, CUevent after, CUevent done);

/* A launch's list of pieces lies in registered memory, which is its own until `read` is reached. */
enum {
    KVFS_COPIER_TURNS = 16,
    KVFS_COPIER_PIECES = 1 << 14,
    KVFS_COPIER_BYTES = KVFS_COPIER_PIECES * sizeof(struct kvfs_copy)
};

struct kvfs_copier {
    CUfunction kernel; /* kvfs_copy of kernels/copy.cu */
    struct kvfs_copier_turn {
        struct kvfs_copy *pieces; /* KVFS_COPIER_BYTES */
        CUdeviceptr device;
        CUevent read;
    } turns[KVFS_COPIER_TURNS];
    size_t next;
};

/* As kvfs_copies_start, by the kernel with `blocks` thread blocks. Waits for the kernel of KVFS_COPIER_TURNS launches
 * before. A copier belongs to one thread at a time. */
CUresult kvfs_copier_start(const struct kvfs_cuda *d, CUcontext context, struct kvfs_copier *copier,
                           const struct kvfs_copies *copies, unsigned int blocks, CUstream stream, CUevent after,
                           CUevent done);

#endif
