/* The crew: threads that help with large batches of reads.
 *
 * Responsibility: one core copies at about half of what a machine's memory gives, so a batch of blocks is shared out,
 * block by block, among the caller and whoever of the crew wakes up in time.
 *
 * Invariants: the caller does not wait for help to come, only for what a helper has begun. One batch at a time has
 * the crew; others do without. A forked child has a crew of its own, from its first large batch on.
 *
 * Concurrency: `lock` guards everything. Threads are made once and live as long as the process; they hold nothing of a
 * batch after its caller has returned.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "reader_core.h"

#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <unistd.h>

/* With the caller four: as many as meet the bandwidth of common machines. */
#define MOST_HELPERS 3

static struct {
    pthread_mutex_t lock;
    pthread_cond_t work;
    pthread_cond_t done;
    struct kvfs_read_job *job;
    uint64_t number; /* of the job, from 1 */
    int helping; /* helpers in `job` */
    int helpers; /* threads; -1 before this process's first call */
    int registered; /* the handlers of a fork, which children inherit: a second set would lock twice */
} crew = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, 0, 0, -1, 0};

static void *help(void *unused)
{
    (void)unused;
    uint64_t last = 0;
    pthread_mutex_lock(&crew.lock);
    for (;;) {
        struct kvfs_read_job *job = crew.job;
        if (job == NULL || crew.number == last) {
            pthread_cond_wait(&crew.work, &crew.lock);
            continue;
        }
        last = crew.number;
        crew.helping++;
        pthread_mutex_unlock(&crew.lock);
        kvfs_read_some(job);
        pthread_mutex_lock(&crew.lock);
        if (--crew.helping == 0)
            pthread_cond_signal(&crew.done);
    }
    return NULL;
}

static void before_fork(void) { pthread_mutex_lock(&crew.lock); }
static void after_fork_here(void) { pthread_mutex_unlock(&crew.lock); }
static void after_fork_there(void)
{
    crew.job = NULL;
    crew.helping = 0;
    crew.helpers = -1; /* to be made again */
    pthread_cond_init(&crew.work, NULL);
    pthread_cond_init(&crew.done, NULL);
    pthread_mutex_unlock(&crew.lock);
}

/* Signals stay with the application's threads. REQUIRES lock. */
static void hire(void)
{
    cpu_set_t usable;
    sigset_t all, before;
    int wanted = sched_getaffinity(0, sizeof usable, &usable) == 0 ? CPU_COUNT(&usable) - 1 : 0;
    if (!crew.registered)
        crew.registered = pthread_atfork(before_fork, after_fork_here, after_fork_there) == 0;
    if (!crew.registered) { /* a child could not tell its crew from ours: do without */
        crew.helpers = 0;
        return;
    }
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    for (crew.helpers = 0; crew.helpers < wanted && crew.helpers < MOST_HELPERS; crew.helpers++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, NULL) != 0)
            break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* 1: the crew helps with `job` until it is dismissed; 0: there is none, or it is busy. */
int kvfs_crew_call(struct kvfs_read_job *job)
{
    pthread_mutex_lock(&crew.lock);
    if (crew.helpers < 0)
        hire();
    int free = crew.job == NULL && crew.helping == 0 && crew.helpers > 0;
    if (free) {
        crew.job = job;
        crew.number++;
        pthread_cond_broadcast(&crew.work);
    }
    pthread_mutex_unlock(&crew.lock);
    return free;
}

/* Waits for what helpers have begun: every block was taken by now. */
void kvfs_crew_dismiss(struct kvfs_read_job *job)
{
    pthread_mutex_lock(&crew.lock);
    if (crew.job == job)
        crew.job = NULL;
    while (crew.helping)
        pthread_cond_wait(&crew.done, &crew.lock);
    pthread_mutex_unlock(&crew.lock);
}
