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

static int by_address(const void *a, const void *b)
{
    uint64_t x = ((const struct kvfs_region *)a)->address, y = ((const struct kvfs_region *)b)->address;
    return (x > y) - (x < y);
}

static int by_destination(const void *a, const void *b)
{
    uint64_t x = ((const struct kvfs_copy *)a)->to, y = ((const struct kvfs_copy *)b)->to;
    return (x > y) - (x < y);
}

int kvfs_regions_sort(struct kvfs_regions regions)
{
    uint64_t end = 0;
    qsort(regions.items, regions.count, sizeof(*regions.items), by_address);
    for (size_t i = 0; i < regions.count; i++) {
        const struct kvfs_region *r = &regions.items[i];
        if (!r->bytes || r->address + r->bytes < r->address || r->address < end)
            return -EINVAL;
        end = r->address + r->bytes;
    }
    return 0;
}

/* The region that holds the whole range, or NULL. */
static const struct kvfs_region *region_of(struct kvfs_regions regions, uint64_t address, uint64_t bytes)
{
    size_t low = 0, high = regions.count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (regions.items[middle].address <= address)
            low = middle + 1;
        else
            high = middle;
    }
    if (!low)
        return NULL;
    const struct kvfs_region *r = &regions.items[low - 1];
    uint64_t offset = address - r->address;
    return offset <= r->bytes && bytes <= r->bytes - offset ? r : NULL;
}

static int overlaps(const struct kvfs_copy *copies, size_t count, uint64_t address, uint64_t bytes)
{
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

static size_t merge(struct kvfs_copy *copies, size_t count, struct kvfs_regions to, struct kvfs_regions from)
{
    size_t kept = 0;
    for (size_t i = 0; i < count; i++) {
        struct kvfs_copy *last = kept ? &copies[kept - 1] : NULL;
        const struct kvfs_copy *c = &copies[i];
        if (last && last->to + last->bytes == c->to && last->from + last->bytes == c->from &&
            region_of(to, last->to, last->bytes + c->bytes) && region_of(from, last->from, last->bytes + c->bytes))
            last->bytes += c->bytes;
        else
            copies[kept++] = *c;
    }
    return kept;
}

int kvfs_copies_plan(struct kvfs_copy *copies, size_t *count, struct kvfs_regions to, struct kvfs_regions from,
                     size_t *bad)
{
    size_t kept = 0;
    for (*bad = 0; *bad < *count; (*bad)++) {
        const struct kvfs_copy *c = &copies[*bad];
        if (!region_of(to, c->to, c->bytes) || !region_of(from, c->from, c->bytes))
            return -ERANGE;
    }
    for (size_t i = 0; i < *count; i++)
        if (copies[i].bytes)
            copies[kept++] = copies[i];
    qsort(copies, kept, sizeof(*copies), by_destination);
    for (*bad = 1; *bad < kept; (*bad)++)
        if (copies[*bad - 1].to + copies[*bad - 1].bytes > copies[*bad].to)
            return -EINVAL;
    for (*bad = 0; *bad < kept; (*bad)++)
        if (overlaps(copies, kept, copies[*bad].from, copies[*bad].bytes))
            return -EINVAL;
    *count = merge(copies, kept, to, from);
    return 0;
}

static CUresult start(const struct kvfs_cuda *d, const struct kvfs_copies *c, CUstream stream)
{
    CUmemcpyAttributes attributes = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};
    size_t begin = 0, failed = 0;
    CUresult rc = CUDA_SUCCESS;
    if (d->cuMemcpyBatchAsync && c->count > 1)
        return d->cuMemcpyBatchAsync(c->to, c->from, c->bytes, c->count, &attributes, &begin, 1, &failed, stream);
    for (size_t i = 0; i < c->count && !rc; i++)
        rc = d->cuMemcpyAsync(c->to[i], c->from[i], c->bytes[i], stream);
    return rc;
}

CUresult kvfs_copies_start(const struct kvfs_cuda *d, CUcontext context, const struct kvfs_copies *copies,
                           CUstream stream, CUevent after, CUevent done)
{
    CUcontext before;
    CUresult rc = d->cuCtxPushCurrent(context);
    if (rc)
        return rc;
    if (after)
        rc = d->cuStreamWaitEvent(stream, after, 0);
    if (!rc)
        rc = start(d, copies, stream);
    if (!rc)
        rc = d->cuEventRecord(done, stream);
    if (rc)
        (void)d->cuStreamSynchronize(stream);
    (void)d->cuCtxPopCurrent(&before);
    return rc;
}
