/* The pool: threads that help with large batches of blocks. Reads have one, and puts.
 *
 * Responsibility: one core copies at about half of a memory's bandwidth, so a batch of blocks is divided, block by
 * block, among the caller and the pool's threads that wake in time.
 *
 * Invariants: the caller does not wait for helpers to wake, only for blocks of its batch that a helper has begun. One batch
 * at a time has the pool; others run without it. Helpers may still be in batches before it, whose callers wait for them. A
 * forked child makes a pool of its own with its first large batch.
 *
 * Concurrency: `lock` guards everything. Threads are made once and live as long as the process; they hold nothing of a
 * batch after its caller has returned.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "blocks/pool.h"

#include <pthread.h>
#include <sched.h>
#include <stddef.h>
#include <unistd.h>

#include "shared/mutex.h"

/* Of a small machine all processors copy, of a large one half of them, the caller with it. Blocks of 2 MiB on 16
 * processors, GB/s (bench/gpu/loads.py): 10 with one helper, 17 with three, 20 with five, 25 with seven, 27 with eleven. */
enum { FEW_HELPERS = 3, MOST_HELPERS = 7 };

static struct {
    struct kvfs_mutex lock;
    pthread_cond_t work;
    pthread_cond_t done; /* several callers may wait, each for its own helpers */
    struct kvfs_pool_job *job GUARDED_BY(lock);
    uint64_t number GUARDED_BY(lock); /* of the job, from 1 */
    int helpers GUARDED_BY(lock);     /* threads; -1 before this process's first call */
    int registered GUARDED_BY(lock); /* the handlers of a fork, which children inherit: a second set would lock twice */
} pool = {KVFS_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, 0, -1, 0};

static void *help(void *unused) {
    (void)unused;
    uint64_t last = 0;
    kvfs_lock(&pool.lock);
    for (;;) {
        struct kvfs_pool_job *job = pool.job;
        if (job == NULL || pool.number == last) {
            kvfs_wait(&pool.work, &pool.lock);
            continue;
        }
        last = pool.number;
        job->helping++;
        kvfs_unlock(&pool.lock);
        job->work(job);
        kvfs_lock(&pool.lock);
        if (--job->helping == 0) pthread_cond_broadcast(&pool.done);
    }
    return NULL;
}

/* UNCHECKED, these three: the lock is held over the fork, from one handler to the other. */
static void before_fork(void) UNCHECKED { kvfs_lock(&pool.lock); }
static void after_fork_here(void) UNCHECKED { kvfs_unlock(&pool.lock); }
static void after_fork_there(void) UNCHECKED {
    pool.job = NULL;
    pool.helpers = -1; /* to be made again */
    pthread_cond_init(&pool.work, NULL);
    pthread_cond_init(&pool.done, NULL);
    kvfs_unlock(&pool.lock);
}

static int helpers_of(int processors) {
    int half = processors / 2 - 1, few = processors - 1 < FEW_HELPERS ? processors - 1 : FEW_HELPERS;
    int wanted = half > few ? half : few;
    return wanted < MOST_HELPERS ? wanted : MOST_HELPERS;
}

static void start_helpers(void) REQUIRES(pool.lock) {
    cpu_set_t usable;
    int processors = sched_getaffinity(0, sizeof usable, &usable) == 0 ? CPU_COUNT(&usable) : 1;
    int wanted = helpers_of(processors);
    if (!pool.registered) pool.registered = pthread_atfork(before_fork, after_fork_here, after_fork_there) == 0;
    if (!pool.registered) { /* a child would use its parent's pool: do without */
        pool.helpers = 0;
        return;
    }
    for (pool.helpers = 0; pool.helpers < wanted; pool.helpers++) {
        pthread_t thread;
        if (kvfs_thread_start(&thread, help, NULL, 0) != 0) break;
        pthread_detach(thread);
    }
}

/* 1: the pool helps with `job` until `finish`; 0: there is none, or it is busy. */
static int start(struct kvfs_pool_job *job) {
    kvfs_lock(&pool.lock);
    if (pool.helpers < 0) start_helpers();
    int free = pool.job == NULL && pool.helpers > 0;
    if (free) {
        job->helping = 0;
        pool.job = job;
        pool.number++;
        pthread_cond_broadcast(&pool.work);
    }
    kvfs_unlock(&pool.lock);
    return free;
}

/* Waits for what helpers have begun; everything is taken by now. */
static void finish(struct kvfs_pool_job *job) {
    kvfs_lock(&pool.lock);
    pool.job = NULL;
    while (job->helping) kvfs_wait(&pool.done, &pool.lock);
    kvfs_unlock(&pool.lock);
}

void kvfs_pool_run(struct kvfs_pool_job *job, int pays) {
    const int called = pays && start(job);
    job->work(job);
    if (called) finish(job);
}
