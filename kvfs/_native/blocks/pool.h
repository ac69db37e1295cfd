/* Threads that help with large batches of blocks. See pool.c. */
#ifndef KVFS_BLOCK_POOL_H
#define KVFS_BLOCK_POOL_H

#include <stdint.h>

/* What is shared out: `work` takes blocks of the batch until all are taken, in several threads at once. */
struct kvfs_pool_job {
    void (*work)(struct kvfs_pool_job *job);
    int helping; /* the pool's: its threads in `work` */
};

/* Of so many bytes on other threads pay: waking one costs some 10 us, in which one core copies 256 KiB. */
#define KVFS_POOL_BYTES ((uint64_t)2 << 20)

/* Does all of a batch; where it `pays`, with what helpers of the pool take. */
void kvfs_pool_run(struct kvfs_pool_job *job, int pays);

#endif
