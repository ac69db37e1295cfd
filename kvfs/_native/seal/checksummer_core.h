/* One background thread that computes the checksums of sealed slots. See checksummer_core.c. */
#ifndef KVFS_CHECKSUMMER_CORE_H
#define KVFS_CHECKSUMMER_CORE_H

#include <stdint.h>

#include "shared/mutex.h"
#include "shared/table_core.h"

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
    struct kvfs_reading *reading; /* the thread's alone */
    struct kvfs_mutex lock;
    pthread_cond_t work; /* for the thread: a job, the end of a pause, stop */
    pthread_cond_t idle; /* for others: the thread has closed its slot */
    struct kvfs_checksum_job *ring GUARDED_BY(lock);
    uint32_t capacity, head GUARDED_BY(lock), count GUARDED_BY(lock);
    uint32_t busy_slot GUARDED_BY(lock);       /* open by the thread now */
    uint32_t paused_slot GUARDED_BY(lock);     /* not to be opened; read without, atomically */
    int dozing GUARDED_BY(lock);               /* waits for at most DOZE_NS: a push need not wake it */
    int working GUARDED_BY(lock);              /* between taking a job and its end */
    int stop GUARDED_BY(lock);                 /* read without, atomically */
    uint64_t done, abandoned, failed, yielded; /* counted atomically */
};

/* All return 0, or -errno. */
int kvfs_checksummer_start(struct kvfs_checksummer *c, struct kvfs_table *table, int dirfd, uint32_t capacity);
int kvfs_checksummer_push(struct kvfs_checksummer *c, uint32_t slot, uint32_t generation); /* -EAGAIN: full */
int kvfs_checksummer_pause(struct kvfs_checksummer *c, uint32_t slot, int64_t timeout_ns); /* -ETIMEDOUT */
void kvfs_checksummer_resume(struct kvfs_checksummer *c);
int kvfs_checksummer_drain(struct kvfs_checksummer *c, int64_t timeout_ns); /* -ETIMEDOUT */
int kvfs_checksummer_idle(struct kvfs_checksummer *c);                      /* 1: nothing queued, nothing under way */
void kvfs_checksummer_stop(struct kvfs_checksummer *c);

#endif
