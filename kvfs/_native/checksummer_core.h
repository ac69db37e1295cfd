/* One background thread that computes the checksums of sealed slots. See checksummer_core.c. */
#ifndef KVFS_CHECKSUMMER_CORE_H
#define KVFS_CHECKSUMMER_CORE_H

#include <pthread.h>
#include <stdint.h>

#include "table_core.h"

#define KVFS_NO_SLOT UINT32_MAX

struct kvfs_checksum_job {
    uint32_t slot;
    uint32_t generation;
};

struct kvfs_checksummer {
    struct kvfs_table *table;
    int dirfd;
    pthread_t thread;
    int started;
    pthread_mutex_t lock;
    pthread_cond_t work; /* for the thread: a job, the end of a pause, stop */
    pthread_cond_t idle; /* for others: the thread has closed its slot */
    struct kvfs_checksum_job *ring;
    uint32_t capacity, head, count;
    uint32_t busy_slot;   /* open by the thread now */
    uint32_t paused_slot; /* not to be opened */
    int dozing;  /* waits for at most DOZE_NS: a push need not wake it */
    int working; /* between taking a job and its end */
    int stop;
    uint64_t done, abandoned, failed, yielded;
};

/* All return 0, or -errno. */
int kvfs_checksummer_start(struct kvfs_checksummer *c, struct kvfs_table *table, int dirfd, uint32_t capacity);
int kvfs_checksummer_push(struct kvfs_checksummer *c, uint32_t slot, uint32_t generation); /* -EAGAIN: full */
int kvfs_checksummer_pause(struct kvfs_checksummer *c, uint32_t slot, int64_t timeout_ns); /* -ETIMEDOUT */
void kvfs_checksummer_resume(struct kvfs_checksummer *c);
int kvfs_checksummer_drain(struct kvfs_checksummer *c, int64_t timeout_ns); /* -ETIMEDOUT */
int kvfs_checksummer_idle(struct kvfs_checksummer *c); /* 1: nothing queued, nothing under way */
void kvfs_checksummer_stop(struct kvfs_checksummer *c);

#endif
