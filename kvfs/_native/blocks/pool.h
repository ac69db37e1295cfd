/* Threads that help with large batches of blocks. See pool.c. */
#ifndef KVFS_BLOCK_POOL_H
#define KVFS_BLOCK_POOL_H

#include <stdint.h>

/* What is shared out: `work` takes blocks of the batch until all are taken, in several threads at once. */
struct kvfs_pool_job {
    void (*work)(struct kvfs_pool_job *job);
};

/* Of so many bytes on other threads pay: waking one costs some 10 us, in which one core copies 256 KiB. */
#define KVFS_POOL_BYTES ((uint64_t)2 << 20)

/* 1: the pool helps with `job` until kvfs_pool_finish; 0: there is none, or it is busy. */
int kvfs_pool_start(struct kvfs_pool_job *job);
/* Waits for what helpers have begun; everything is taken by now. */
void kvfs_pool_finish(struct kvfs_pool_job *job);

#endif
