/* The background checksummer: one thread, one bounded ring of (slot, generation).
 *
 * Responsibility: read a sealed slot, put its XXH3-64 into the slot header if the slot is still of that generation.
 *
 * Invariants: the thread has at most one slot open, and `busy_slot` says which. Its open would look like a reader to
 * the recycler, so whoever probes a slot for holders pauses it first: the thread closes a paused slot at its next
 * chunk (256 KiB, some 20 us) and goes on with it, from where it was, after the pause. A slot whose generation has
 * moved is dropped. The ring never grows: a push into a full one is refused.
 *
 * Concurrency: `lock` guards every field but the counters' readers; it is never held during I/O. It may be held
 * while nothing else is; `table->lock` is taken alone. One pauser at a time.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "checksummer_core.h"

#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "shared/slots_core.h"
#include "shared/table_write.h"

/* Waking the thread costs the sealing thread 14 us (a futex and a reschedule on a shared core), ten times the rest of
 * a push. So after work the thread dozes for a while, looks by itself, and only then sleeps until it is woken. */
#define DOZE_NS 500000ll
#define DOZES 16

struct kvfs_reading {
    int fd;
    uint64_t offset;
    XXH3_state_t *state;
    uint8_t chunk[KVFS_HASH_CHUNK_BYTES];
};

static void set_busy(struct kvfs_checksummer *c, uint32_t slot) REQUIRES(c->lock) {
    __atomic_store_n(&c->busy_slot, slot, __ATOMIC_RELAXED);
    if (slot == KVFS_NO_SLOT) pthread_cond_broadcast(&c->idle);
}

/* Opens the job's slot unless it is paused (then waits), gone or moved on. 1 open, 0 abandoned, -errno. */
static int open_slot(struct kvfs_checksummer *c, struct kvfs_checksum_job job, struct kvfs_reading *r) {
    kvfs_lock(&c->lock);
    while (c->paused_slot == job.slot && !c->stop) kvfs_wait(&c->work, &c->lock);
    int stop = c->stop;
    if (!stop) set_busy(c, job.slot);
    kvfs_unlock(&c->lock);
    if (stop || kvfs_table_generation(c->table, job.slot) != job.generation) return 0;
    r->fd = kvfs_slot_open(c->dirfd, job.slot, O_RDONLY | O_NONBLOCK | O_NOATIME);
    return r->fd >= 0 ? 1 : r->fd == -ENOENT ? 0 : r->fd;
}

static void close_slot(struct kvfs_checksummer *c, struct kvfs_reading *r) {
    if (r->fd >= 0) close(r->fd);
    r->fd = -1;
    kvfs_lock(&c->lock);
    set_busy(c, KVFS_NO_SLOT);
    kvfs_unlock(&c->lock);
}

static int is_paused(struct kvfs_checksummer *c, uint32_t slot) {
    return __atomic_load_n(&c->paused_slot, __ATOMIC_ACQUIRE) == slot;
}

/* 1 with the whole slot hashed, 0 abandoned, -errno. */
static int hash_slot(struct kvfs_checksummer *c, struct kvfs_checksum_job job, struct kvfs_reading *r) {
    int rc = open_slot(c, job, r);
    while (rc == 1) {
        if (__atomic_load_n(&c->stop, __ATOMIC_RELAXED) || kvfs_table_generation(c->table, job.slot) != job.generation)
            return 0;
        if (is_paused(c, job.slot)) {
            close_slot(c, r);
            __atomic_fetch_add(&c->yielded, 1, __ATOMIC_RELAXED);
            rc = open_slot(c, job, r);
            continue;
        }
        ssize_t n = pread(r->fd, r->chunk, KVFS_HASH_CHUNK_BYTES, (off_t)r->offset);
        if (n == 0) return 1;
        if (n > 0) {
            XXH3_64bits_update(r->state, r->chunk, (size_t)n);
            r->offset += (uint64_t)n;
        } else if (errno != EINTR) {
            rc = -errno;
        }
    }
    return rc;
}

static void run_job(struct kvfs_checksummer *c, struct kvfs_checksum_job job, struct kvfs_reading *r) {
    r->fd = -1;
    r->offset = 0;
    XXH3_64bits_reset(r->state);
    int rc = hash_slot(c, job, r);
    if (rc == 1) {
        kvfs_lock(&c->table->lock);
        rc = kvfs_slot_store_checksum(c->table, job.slot, job.generation, XXH3_64bits_digest(r->state));
        kvfs_unlock(&c->table->lock);
    }
    uint64_t *counter = rc == 1 ? &c->done : rc == 0 ? &c->abandoned : &c->failed;
    __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED);
    close_slot(c, r);
}

/* One wait for work, with an empty ring. */
static void wait_for_work(struct kvfs_checksummer *c, int *dozes) REQUIRES(c->lock) {
    if (*dozes >= DOZES) {
        *dozes = 0;
        kvfs_wait(&c->work, &c->lock);
        return;
    }
    struct timespec deadline = kvfs_deadline_after(DOZE_NS);
    ++*dozes;
    c->dozing = 1;
    kvfs_wait_until(&c->work, &c->lock, &deadline);
    c->dozing = 0;
}

static void *thread_main(void *argument) {
    struct kvfs_checksummer *c = (struct kvfs_checksummer *)argument;
    int dozes = DOZES;
    kvfs_lock(&c->lock);
    while (!c->stop) {
        if (c->count == 0) {
            wait_for_work(c, &dozes);
            continue;
        }
        dozes = 0;
        struct kvfs_checksum_job job = c->ring[c->head];
        c->head = (c->head + 1) % c->capacity;
        c->count--;
        c->working = 1;
        kvfs_unlock(&c->lock);
        run_job(c, job, c->reading);
        kvfs_lock(&c->lock);
        c->working = 0;
        pthread_cond_broadcast(&c->idle);
    }
    kvfs_unlock(&c->lock);
    return NULL;
}

static struct kvfs_reading *make_reading(void) {
    struct kvfs_reading *r = malloc(sizeof *r);
    if (!r) return NULL;
    r->fd = -1;
    r->state = XXH3_createState();
    if (r->state) return r;
    free(r);
    return NULL;
}

static void free_memory(struct kvfs_checksummer *c) UNCHECKED /* no thread */
{
    if (c->reading) XXH3_freeState(c->reading->state);
    free(c->reading);
    free(c->ring);
    c->reading = NULL;
    c->ring = NULL;
}

int kvfs_checksummer_start(struct kvfs_checksummer *c, struct kvfs_table *table, int dirfd, uint32_t capacity)
    UNCHECKED /* no thread yet */
{
    memset(c, 0, sizeof *c);
    c->table = table;
    c->dirfd = dirfd;
    c->capacity = capacity;
    c->busy_slot = c->paused_slot = KVFS_NO_SLOT;
    c->ring = calloc(capacity, sizeof *c->ring);
    c->reading = make_reading();
    if (!c->ring || !c->reading) {
        free_memory(c);
        return -ENOMEM;
    }
    kvfs_mutex_init(&c->lock);
    kvfs_cond_init(&c->work);
    kvfs_cond_init(&c->idle);
    int rc = kvfs_thread_start(&c->thread, thread_main, c, 0);
    c->started = rc == 0;
    if (rc < 0) free_memory(c);
    return rc;
}

int kvfs_checksummer_push(struct kvfs_checksummer *c, uint32_t slot, uint32_t generation) {
    kvfs_lock(&c->lock);
    int rc = c->count == c->capacity ? -EAGAIN : c->stop ? -ESHUTDOWN : 0;
    if (rc == 0) {
        c->ring[(c->head + c->count++) % c->capacity] = (struct kvfs_checksum_job){slot, generation};
        if (c->dozing ? c->count == c->capacity / 2 : c->count == 1) pthread_cond_signal(&c->work);
    }
    kvfs_unlock(&c->lock);
    return rc;
}

/* After 0 the thread does not have `slot` open and will not open it until resume. */
int kvfs_checksummer_pause(struct kvfs_checksummer *c, uint32_t slot, int64_t timeout_ns) {
    struct timespec deadline;
    int rc = 0;
    kvfs_lock(&c->lock);
    __atomic_store_n(&c->paused_slot, slot, __ATOMIC_RELEASE);
    if (c->busy_slot == slot) deadline = kvfs_deadline_after(timeout_ns);
    while (c->busy_slot == slot && rc == 0) rc = kvfs_wait_until(&c->idle, &c->lock, &deadline);
    rc = c->busy_slot == slot ? rc : 0;
    kvfs_unlock(&c->lock);
    if (rc < 0) kvfs_checksummer_resume(c);
    return rc;
}

void kvfs_checksummer_resume(struct kvfs_checksummer *c) {
    kvfs_lock(&c->lock);
    __atomic_store_n(&c->paused_slot, KVFS_NO_SLOT, __ATOMIC_RELEASE);
    if (c->working) pthread_cond_signal(&c->work);
    kvfs_unlock(&c->lock);
}

/* Waits until every job pushed so far is done. */
int kvfs_checksummer_drain(struct kvfs_checksummer *c, int64_t timeout_ns) {
    struct timespec deadline = kvfs_deadline_after(timeout_ns);
    int rc = 0;
    kvfs_lock(&c->lock);
    if (c->dozing) pthread_cond_signal(&c->work);
    while ((c->count || c->working) && rc == 0) rc = kvfs_wait_until(&c->idle, &c->lock, &deadline);
    kvfs_unlock(&c->lock);
    return rc;
}

int kvfs_checksummer_idle(struct kvfs_checksummer *c) {
    kvfs_lock(&c->lock);
    int idle = c->count == 0 && !c->working;
    kvfs_unlock(&c->lock);
    return idle;
}

/* Ends the thread at its next chunk; jobs left in the ring are dropped. Harmless if never started. */
void kvfs_checksummer_stop(struct kvfs_checksummer *c) UNCHECKED /* the end: no thread any more */
{
    if (!c->started) return;
    kvfs_lock(&c->lock);
    __atomic_store_n(&c->stop, 1, __ATOMIC_RELAXED);
    pthread_cond_broadcast(&c->work);
    kvfs_unlock(&c->lock);
    pthread_join(c->thread, NULL);
    pthread_cond_destroy(&c->work);
    pthread_cond_destroy(&c->idle);
    kvfs_mutex_destroy(&c->lock);
    free_memory(c);
    c->started = 0;
}
