/* Reading blocks without asking the service. See reader_core.c. */
#ifndef KVFS_READER_CORE_H
#define KVFS_READER_CORE_H

#include <stdint.h>
#include <sys/uio.h>

#include "blocks/pool.h"
#include "shared/hits.h"
#include "shared/table_core.h"

/* Results besides a size >= 0. */
enum {
    KVFS_READ_MISS = -1,
    KVFS_READ_BELOW = -2,   /* no copy in DRAM, but one in a lower tier */
    KVFS_READ_NO_ROOM = -3, /* the block is longer than its pieces */
    KVFS_READ_ERROR = -1000 /* less errno: neither a hit nor a miss */
};

/* A batch of reads. `next` is the first block that nobody has taken yet. */
struct kvfs_read_job {
    struct kvfs_pool_job shared;
    const struct kvfs_table *table;
    int dirfd;
    const uint8_t *keys;
    int64_t n;
    const struct iovec *vectors;
    const ssize_t *starts;
    int64_t *results;
    int64_t next;
    uint64_t stream_bytes; /* of so many bytes on a batch goes past the caches: these hold no more */
    int streams;           /* whether this one does: its blocks of STREAM_BYTES and more */
};

void kvfs_read_batch(struct kvfs_read_job *job, struct kvfs_hits *hits);
void kvfs_map_batch(const struct kvfs_table *t, int dirfd, const uint8_t *keys, int64_t n, void **places,
                    int64_t *results, struct kvfs_hits *hits);
void kvfs_find_batch(const struct kvfs_table *t, const uint8_t *keys, int64_t n, uint8_t *tiers);
int64_t kvfs_read_fd(int fd, uint64_t offset, const struct iovec *vectors, ssize_t pieces, uint64_t size);
int64_t kvfs_map_fd(int fd, uint64_t size, void **place);
int kvfs_stream_fd(int fd, const struct iovec *vectors, ssize_t pieces, uint64_t size);
void kvfs_copy_out(const uint8_t *from, uint64_t size, const struct iovec *vectors, ssize_t pieces);

#endif
