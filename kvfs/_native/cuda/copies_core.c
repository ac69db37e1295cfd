/* Copies between a device's memory and another: coalesced, bounded, started as one.
 *
 * Responsibility: refuse what would touch memory outside the regions, merge what lies side by side at both ends, which
 * the driver never does, and start the rest.
 *
 * Invariants: no copy spans two regions, before or after merging. No destination overlaps anything else in the plan, so a
 * batch, which has no order, gives the same bytes as any order. What was started is over when a start returns an error.
 *
 * Concurrency: planning is pure; a start belongs to one thread, with its stream and events.
 */
#include "cuda/copies_core.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static int by_address(const void *a, const void *b) {
    uint64_t x = ((const struct kvfs_region *)a)->address, y = ((const struct kvfs_region *)b)->address;
    return (x > y) - (x < y);
}

static int by_destination(const void *a, const void *b) {
    uint64_t x = ((const struct kvfs_copy *)a)->to, y = ((const struct kvfs_copy *)b)->to;
    return (x > y) - (x < y);
}

int kvfs_regions_sort(struct kvfs_regions regions) {
    uint64_t end = 0;
    qsort(regions.items, regions.count, sizeof(*regions.items), by_address);
    for (size_t i = 0; i < regions.count; i++) {
        const struct kvfs_region *r = &regions.items[i];
        if (!r->bytes || r->address + r->bytes < r->address || r->address < end) return -EINVAL;
        end = r->address + r->bytes;
    }
    return 0;
}

static int holds(const struct kvfs_region *r, uint64_t address, uint64_t bytes) {
    return r->address <= address && address - r->address <= r->bytes && bytes <= r->bytes - (address - r->address);
}

/* The region that holds the whole range, or NULL. `hint` is one of them, or NULL: most ranges are where the last was. */
static const struct kvfs_region *region_of(struct kvfs_regions regions, const struct kvfs_region *hint,
                                           uint64_t address, uint64_t bytes) {
    size_t low = 0, high = regions.count;
    if (hint && holds(hint, address, bytes)) return hint;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (regions.items[middle].address <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low && holds(&regions.items[low - 1], address, bytes) ? &regions.items[low - 1] : NULL;
}

/* Whether any of one kind of regions overlaps any of another; both are sorted. */
static int meet(struct kvfs_regions a, struct kvfs_regions b) {
    for (size_t i = 0, j = 0; i < a.count && j < b.count;) {
        const struct kvfs_region *x = &a.items[i], *y = &b.items[j];
        if (x->address < y->address + y->bytes && y->address < x->address + x->bytes) return 1;
        if (x->address < y->address)
            i++;
        else
            j++;
    }
    return 0;
}

static int overlaps(const struct kvfs_copy *copies, size_t count, uint64_t address, uint64_t bytes) {
    size_t low = 0, high = count; /* the first destination that ends behind `address` */
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (copies[middle].to + copies[middle].bytes <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && copies[low].to < address + bytes;
}

static size_t merge(struct kvfs_copy *copies, size_t count, struct kvfs_regions to, struct kvfs_regions from) {
    size_t kept = 0;
    for (size_t i = 0; i < count; i++) {
        struct kvfs_copy *last = kept ? &copies[kept - 1] : NULL;
        const struct kvfs_copy *c = &copies[i];
        if (last && last->to + last->bytes == c->to && last->from + last->bytes == c->from &&
            region_of(to, NULL, last->to, last->bytes + c->bytes) &&
            region_of(from, NULL, last->from, last->bytes + c->bytes))
            last->bytes += c->bytes;
        else
            copies[kept++] = *c;
    }
    return kept;
}

static int are_inside(const struct kvfs_copy *copies, size_t count, struct kvfs_regions to, struct kvfs_regions from,
                      size_t *bad) {
    const struct kvfs_region *into = NULL, *out_of = NULL;
    for (*bad = 0; *bad < count; (*bad)++) {
        const struct kvfs_copy *c = &copies[*bad];
        into = region_of(to, into, c->to, c->bytes);
        out_of = region_of(from, out_of, c->from, c->bytes);
        if (!into || !out_of) return 0;
    }
    return 1;
}

/* Lists come sorted where they can be: sorting 8,192 pieces takes ten times as long as listing them. */
static void sort(struct kvfs_copy *copies, size_t count) {
    for (size_t i = 1; i < count; i++)
        if (copies[i - 1].to > copies[i].to) {
            qsort(copies, count, sizeof(*copies), by_destination);
            return;
        }
}

int kvfs_copies_plan(struct kvfs_copy *copies, size_t *count, struct kvfs_regions to, struct kvfs_regions from,
                     size_t *bad) {
    size_t kept = 0;
    if (!are_inside(copies, *count, to, from, bad)) return -ERANGE;
    for (size_t i = 0; i < *count; i++)
        if (copies[i].bytes) copies[kept++] = copies[i];
    sort(copies, kept);
    for (*bad = 1; *bad < kept; (*bad)++)
        if (copies[*bad - 1].to + copies[*bad - 1].bytes > copies[*bad].to) return -EINVAL;
    const int may_overlap = meet(to, from);
    for (*bad = 0; *bad < kept && may_overlap; (*bad)++)
        if (overlaps(copies, kept, copies[*bad].from, copies[*bad].bytes)) return -EINVAL;
    *count = merge(copies, kept, to, from);
    return 0;
}

struct numbered {
    uint64_t number;
    size_t at;
};

static int by_number(const void *a, const void *b) {
    uint64_t x = ((const struct numbered *)a)->number, y = ((const struct numbered *)b)->number;
    return (x > y) - (x < y);
}

/* Where the numbers are, from the least on; NULL without memory. */
static struct numbered *ordered(const uint64_t *numbers, size_t count) {
    struct numbered *order = malloc((count + 1) * sizeof(*order));
    if (!order) return NULL;
    for (size_t i = 0; i < count; i++) order[i] = (struct numbered){numbers[i], i};
    qsort(order, count, sizeof(*order), by_number);
    return order;
}

static struct kvfs_copy copy_of(const struct kvfs_places *places, const uint64_t *whole, size_t block, size_t piece,
                                enum kvfs_direction direction) {
    const uint64_t at = whole[block] + piece * places->piece_bytes;
    const uint64_t place = places->starts[block] + places->offsets[piece];
    return direction == KVFS_INTO_PLACES ? (struct kvfs_copy){place, at, places->piece_bytes}
                                         : (struct kvfs_copy){at, place, places->piece_bytes};
}

static int list_into(const struct kvfs_places *places, const uint64_t *whole, struct kvfs_copy *copies) {
    struct numbered *blocks = ordered(places->starts, places->count);
    struct numbered *pieces = ordered(places->offsets, places->pieces);
    const int rc = blocks && pieces ? 0 : -ENOMEM;
    for (size_t piece = 0; !rc && piece < places->pieces; piece++)
        for (size_t block = 0; block < places->count; block++)
            *copies++ = copy_of(places, whole, blocks[block].at, pieces[piece].at, KVFS_INTO_PLACES);
    free(blocks);
    free(pieces);
    return rc;
}

static int list_out_of(const struct kvfs_places *places, const uint64_t *whole, struct kvfs_copy *copies) {
    struct numbered *blocks = ordered(whole, places->count);
    const int rc = blocks ? 0 : -ENOMEM;
    for (size_t block = 0; !rc && block < places->count; block++)
        for (size_t piece = 0; piece < places->pieces; piece++)
            *copies++ = copy_of(places, whole, blocks[block].at, piece, KVFS_OUT_OF_PLACES);
    free(blocks);
    return rc;
}

int kvfs_places_list(const struct kvfs_places *places, const uint64_t *whole, enum kvfs_direction direction,
                     struct kvfs_copy *copies) {
    return (direction == KVFS_INTO_PLACES ? list_into : list_out_of)(places, whole, copies);
}

struct kvfs_copies kvfs_copies_of(struct kvfs_copy *pieces, size_t count) {
    struct kvfs_copies copies = {.pieces = pieces, .count = count};
    for (size_t i = 0; i < count; i++) {
        copies.bytes += pieces[i].bytes;
        if (pieces[i].bytes > copies.largest_bytes) copies.largest_bytes = pieces[i].bytes;
    }
    return copies;
}

static CUresult start_each(const struct kvfs_cuda *d, const struct kvfs_copies *c, CUstream stream) {
    CUresult rc = CUDA_SUCCESS;
    for (size_t i = 0; i < c->count && !rc; i++)
        rc = d->cuMemcpyAsync(c->pieces[i].to, c->pieces[i].from, c->pieces[i].bytes, stream);
    return rc;
}

/* The driver wants each side, and the sizes, in an array of its own. */
static CUresult start_together(const struct kvfs_cuda *d, const struct kvfs_copies *c, CUstream stream) {
    CUmemcpyAttributes attributes = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};
    size_t begin = 0, failed = 0;
    CUdeviceptr *to = malloc(c->count * sizeof(*to)), *from = malloc(c->count * sizeof(*from));
    size_t *bytes = malloc(c->count * sizeof(*bytes));
    CUresult rc = CUDA_ERROR_OUT_OF_MEMORY;
    if (to && from && bytes) {
        for (size_t i = 0; i < c->count; i++) {
            to[i] = c->pieces[i].to;
            from[i] = c->pieces[i].from;
            bytes[i] = c->pieces[i].bytes;
        }
        rc = d->cuMemcpyBatchAsync(to, from, bytes, c->count, &attributes, &begin, 1, &failed, stream);
    }
    free(to);
    free(from);
    free(bytes);
    return rc;
}

static CUresult start(const struct kvfs_cuda *d, const struct kvfs_copies *c, CUstream stream) {
    return d->cuMemcpyBatchAsync && c->count > 1 ? start_together(d, c, stream) : start_each(d, c, stream);
}

/* A walk over copies in parts. */
struct walk {
    size_t copy;
    uint64_t offset, part_bytes;
};

enum { THREADS = 512, WARP = 32, STEP_BYTES = 4 << 10, MOST_BYTES = 64 << 10, ENOUGH = 1024 };

/* Bytes that a warp is given at once: whole steps of the kernel, so few that every warp has some or ENOUGH warps have. */
static uint64_t part_bytes(const struct kvfs_copies *c, unsigned int blocks) {
    uint64_t warps = (uint64_t)blocks * (THREADS / WARP);
    uint64_t even = c->bytes / (warps < ENOUGH ? warps : ENOUGH) / STEP_BYTES * STEP_BYTES;
    return even < STEP_BYTES ? STEP_BYTES : even < MOST_BYTES ? even : MOST_BYTES;
}

/* Fills a list from `*at` on; returns how many pieces that are. */
static size_t fill(struct kvfs_copy *pieces, const struct kvfs_copies *c, struct walk *at) {
    size_t count = 0;
    for (; at->copy < c->count && count < KVFS_COPIER_PIECES; count++) {
        const struct kvfs_copy *whole = &c->pieces[at->copy];
        uint64_t left = whole->bytes - at->offset;
        uint64_t part = left < at->part_bytes ? left : at->part_bytes;
        pieces[count] = (struct kvfs_copy){whole->to + at->offset, whole->from + at->offset, part};
        at->offset += part;
        if (part == left) {
            at->copy++;
            at->offset = 0;
        }
    }
    return count;
}

/* As `fill`, of pieces that are no larger than a part. */
static size_t fill_whole(struct kvfs_copy *pieces, const struct kvfs_copies *c, struct walk *at) {
    size_t left = c->count - at->copy, count = left < KVFS_COPIER_PIECES ? left : KVFS_COPIER_PIECES;
    memcpy(pieces, c->pieces + at->copy, count * sizeof(*pieces));
    at->copy += count;
    return count;
}

static CUresult launch(const struct kvfs_cuda *d, struct kvfs_copier *copier, const struct kvfs_copies *copies,
                       struct walk *at, unsigned int blocks, CUstream stream) {
    struct kvfs_copier_turn *turn = &copier->turns[copier->next++ % KVFS_COPIER_TURNS];
    CUresult rc = d->cuEventSynchronize(turn->read);
    if (rc) return rc;
    uint64_t count = (copies->largest_bytes > at->part_bytes ? fill : fill_whole)(turn->pieces, copies, at);
    void *parameters[] = {&turn->device, &count};
    rc = d->cuLaunchKernel(copier->kernel, blocks, 1, 1, THREADS, 1, 1, 0, stream, parameters, NULL);
    return rc ? rc : d->cuEventRecord(turn->read, stream);
}

/* As few launches as there can be: beside a model each waits for its turn on the device (half the rate with three). */
static CUresult launch_all(const struct kvfs_cuda *d, struct kvfs_copier *copier, const struct kvfs_copies *copies,
                           unsigned int blocks, CUstream stream) {
    struct walk at = {.part_bytes = part_bytes(copies, blocks)};
    CUresult rc = CUDA_SUCCESS;
    while (at.copy < copies->count && !rc) rc = launch(d, copier, copies, &at, blocks, stream);
    return rc;
}

static CUresult begin(const struct kvfs_cuda *d, CUstream stream, CUevent after) {
    return after ? d->cuStreamWaitEvent(stream, after, 0) : CUDA_SUCCESS;
}

/* Where starting failed with `rc`, what was started ends. */
static CUresult end(const struct kvfs_cuda *d, CUresult rc, CUstream stream, CUevent done) {
    if (!rc) rc = d->cuEventRecord(done, stream);
    if (rc) (void)d->cuStreamSynchronize(stream);
    return rc;
}

static CUresult start_batch(const struct kvfs_cuda *d, const struct kvfs_copies *copies, CUstream stream, CUevent after,
                            CUevent done) {
    CUresult rc = begin(d, stream, after);
    return end(d, rc ? rc : start(d, copies, stream), stream, done);
}

static CUresult start_kernel(const struct kvfs_cuda *d, struct kvfs_copier *copier, const struct kvfs_copies *copies,
                             unsigned int blocks, CUstream stream, CUevent after, CUevent done) {
    CUresult rc = begin(d, stream, after);
    return end(d, rc ? rc : launch_all(d, copier, copies, blocks, stream), stream, done);
}

CUresult kvfs_copies_start(const struct kvfs_cuda *d, CUcontext context, const struct kvfs_copies *copies,
                           CUstream stream, CUevent after, CUevent done) {
    IN_CONTEXT(start_batch(d, copies, stream, after, done));
}

CUresult kvfs_copier_start(const struct kvfs_cuda *d, CUcontext context, struct kvfs_copier *copier,
                           const struct kvfs_copies *copies, unsigned int blocks, CUstream stream, CUevent after,
                           CUevent done) {
    IN_CONTEXT(start_kernel(d, copier, copies, blocks, stream, after, done));
}
