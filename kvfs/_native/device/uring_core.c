/* One io_uring, the thread that owns it, and one that helps it to hash.
 *
 * Responsibility: move every byte of a request or return an error, and hash the payloads of reads with XXH3-64.
 *
 * Invariants: a request is in exactly one place: free, queued, in the ring, waiting for its hash, or done; whoever
 * moves it holds `lock`, and only the place's owner touches its fields. Memory of a request belongs to the kernel from
 * the submit until its result is reaped. At most `depth` requests exist, so no queue can overflow, and the ring's
 * entries hold them all beside the wake-up read.
 *
 * Concurrency: the ring's thread alone makes system calls on the ring (SINGLE_ISSUER), registration included. It sleeps
 * in the ring with a read of `wake_fd` armed; a submit writes there only when the thread has said, under `lock`, that it
 * found the queue empty. `done_fd` is written when the done queue stops being empty. `lock` is never held during I/O
 * or hashing.
 *
 * Both threads hash: the ring's thread one payload between two visits to the kernel, the other thread when more than
 * one waits. Reads of 1 MiB at depth 8 on two cores, medians of runs in turns: from a tmpfs 6.9 GiB/s, with all hashing on the
 * other thread 4.6; from a drive 2.2 GiB/s, with all of it on the ring's thread 1.8.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "uring_core.h"

#include <errno.h>

#ifdef KVFS_HAVE_URING

#include <liburing.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "hash/xxh3.h"
#include "shared/mutex.h"

/* The kernel retries by itself where it can; this bounds the rest, such as a signal inside a read. */
#define MAX_RETRIES 64
#define TAG_WAKE (1ull << 32)
#define TAG_CANCEL (2ull << 32)
#define BACKOFF_NS 1000000

enum { RING_STARTING = 1, RING_RUNNING = 0, RING_ENDED = 2 }; /* or -errno: it did not start */

struct request {
    enum kvfs_device_op op;
    int fd;
    uint8_t *data;
    size_t bytes, payload_bytes, moved;
    uint64_t offset, checksum;
    int error;
    int retries;
};

struct buffer {
    uint8_t *data;
    size_t bytes;
    int registered;
};

/* Numbers of requests, first in first out. */
struct queue {
    uint32_t *numbers;
    uint32_t capacity, head, count;
};

struct kvfs_device {
    struct io_uring ring;
    pthread_t ring_thread, hash_thread;
    int wake_fd, done_fd;
    uint64_t wake_value;
    int deferred;
    uint32_t depth, max_buffers;
    struct request *requests;
    struct buffer *buffers;
    uint32_t in_ring; /* the ring's thread only */
    int wake_armed;   /* the ring's thread only */
    int cancelled;    /* the ring's thread only */
    struct kvfs_mutex lock;
    pthread_cond_t hash_work; /* for the hash thread */
    pthread_cond_t changed;   /* for start and stop */
    struct queue free GUARDED_BY(lock), queued GUARDED_BY(lock), hashing GUARDED_BY(lock), done GUARDED_BY(lock);
    uint32_t buffers_added GUARDED_BY(lock);
    uint32_t buffers_seen;       /* the ring's thread only */
    uint32_t registered;         /* counted atomically */
    int asleep GUARDED_BY(lock); /* the ring's thread found `queued` empty */
    int stop GUARDED_BY(lock);   /* read without, atomically */
    int ring_state GUARDED_BY(lock);
};

static int queue_init(struct queue *q, uint32_t capacity) {
    q->numbers = calloc(capacity, sizeof *q->numbers);
    q->capacity = capacity;
    return q->numbers ? 0 : -ENOMEM;
}

static void queue_push(struct queue *q, uint32_t number) { q->numbers[(q->head + q->count++) % q->capacity] = number; }

static uint32_t queue_pop(struct queue *q) {
    uint32_t number = q->numbers[q->head];
    q->head = (q->head + 1) % q->capacity;
    q->count--;
    return number;
}

static void signal_fd(int fd) {
    uint64_t one = 1;
    while (write(fd, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

/* Whether done_fd is to be written, without the lock. */
static int push_done(struct kvfs_device *d, uint32_t number) REQUIRES(d->lock) {
    queue_push(&d->done, number);
    return d->done.count == 1;
}

/* --- hashing ------------------------------------------------------------------------------------------ */
/* With a request in `hashing`; the lock is released meanwhile. */
static void hash_next(struct kvfs_device *d) REQUIRES(d->lock) {
    uint32_t number = queue_pop(&d->hashing);
    struct request *r = &d->requests[number];
    kvfs_unlock(&d->lock);
    r->checksum = kvfs_xxh3_64(r->data, r->payload_bytes);
    kvfs_lock(&d->lock);
    int first = push_done(d, number);
    kvfs_unlock(&d->lock);
    if (first) signal_fd(d->done_fd);
    kvfs_lock(&d->lock);
}

static void *hash_main(void *argument) {
    struct kvfs_device *d = (struct kvfs_device *)argument;
    kvfs_lock(&d->lock);
    while (d->hashing.count || d->ring_state != RING_ENDED) {
        if (d->hashing.count)
            hash_next(d);
        else
            kvfs_wait(&d->hash_work, &d->lock);
    }
    kvfs_unlock(&d->lock);
    return NULL;
}

static int is_stopping(struct kvfs_device *d) { return __atomic_load_n(&d->stop, __ATOMIC_ACQUIRE); }

/* --- the ring's thread -------------------------------------------------------------------------------- */
static void finish(struct kvfs_device *d, uint32_t number, int error) {
    struct request *r = &d->requests[number];
    int first = 0;
    r->error = error;
    kvfs_lock(&d->lock);
    if (error == 0 && r->op == KVFS_DEVICE_READ) {
        queue_push(&d->hashing, number);
        if (d->hashing.count > 1) pthread_cond_signal(&d->hash_work);
    } else {
        first = push_done(d, number);
    }
    kvfs_unlock(&d->lock);
    if (first) signal_fd(d->done_fd);
}

/* The registered buffer that holds [data, data + bytes), or -1. Entries below buffers_seen are this thread's. */
static int find_buffer(struct kvfs_device *d, const uint8_t *data, size_t bytes) {
    for (uint32_t i = 0; i < d->buffers_seen; i++) {
        struct buffer *b = &d->buffers[i];
        if (b->registered && data >= b->data && data + bytes <= b->data + b->bytes) return (int)i;
    }
    return -1;
}

static struct io_uring_sqe *take_sqe(struct kvfs_device *d) {
    struct io_uring_sqe *sqe = io_uring_get_sqe(&d->ring);
    if (!sqe) {
        io_uring_submit(&d->ring);
        sqe = io_uring_get_sqe(&d->ring);
    }
    return sqe;
}

static void enter_ring(struct kvfs_device *d, uint32_t number) {
    struct request *r = &d->requests[number];
    struct io_uring_sqe *sqe = take_sqe(d);
    if (!sqe) {
        finish(d, number, -EAGAIN);
        return;
    }
    uint8_t *data = r->data + r->moved;
    unsigned bytes = (unsigned)(r->bytes - r->moved);
    uint64_t offset = r->offset + r->moved;
    int buffer = r->op == KVFS_DEVICE_SYNC ? -1 : find_buffer(d, data, bytes);
    if (r->op == KVFS_DEVICE_SYNC)
        io_uring_prep_fsync(sqe, r->fd, IORING_FSYNC_DATASYNC);
    else if (r->op == KVFS_DEVICE_READ && buffer >= 0)
        io_uring_prep_read_fixed(sqe, r->fd, data, bytes, offset, buffer);
    else if (r->op == KVFS_DEVICE_READ)
        io_uring_prep_read(sqe, r->fd, data, bytes, offset);
    else if (buffer >= 0)
        io_uring_prep_write_fixed(sqe, r->fd, data, bytes, offset, buffer);
    else
        io_uring_prep_write(sqe, r->fd, data, bytes, offset);
    io_uring_sqe_set_data64(sqe, number);
    d->in_ring++;
}

static void begin(struct kvfs_device *d, uint32_t number) {
    struct request *r = &d->requests[number];
    if (is_stopping(d))
        finish(d, number, -ECANCELED);
    else if (r->bytes == 0 && r->op != KVFS_DEVICE_SYNC)
        finish(d, number, 0);
    else
        enter_ring(d, number);
}

static void advance(struct kvfs_device *d, uint32_t number, int result) {
    struct request *r = &d->requests[number];
    d->in_ring--;
    if (result == -EINTR || result == -EAGAIN) {
        if (++r->retries > MAX_RETRIES)
            finish(d, number, result);
        else
            begin(d, number);
    } else if (result < 0 || r->op == KVFS_DEVICE_SYNC) {
        finish(d, number, result);
    } else if (result == 0) {
        finish(d, number, r->op == KVFS_DEVICE_READ ? -ENODATA : -EIO);
    } else {
        r->moved += (size_t)result;
        if (r->moved < r->bytes)
            begin(d, number);
        else
            finish(d, number, 0);
    }
}

static void arm_wake(struct kvfs_device *d) {
    struct io_uring_sqe *sqe;
    if (d->wake_armed || is_stopping(d) || !(sqe = take_sqe(d))) return;
    io_uring_prep_read(sqe, d->wake_fd, &d->wake_value, sizeof d->wake_value, 0);
    io_uring_sqe_set_data64(sqe, TAG_WAKE);
    d->wake_armed = 1;
}

/* Where RLIMIT_MEMLOCK forbids it the buffer works unregistered: each transfer pins its pages anew. */
static void register_buffers(struct kvfs_device *d, uint32_t added) {
    for (; d->buffers_seen < added; d->buffers_seen++) {
        struct buffer *b = &d->buffers[d->buffers_seen];
        struct iovec iov = {.iov_base = b->data, .iov_len = b->bytes};
        __u64 tag = 0;
        b->registered = io_uring_register_buffers_update_tag(&d->ring, d->buffers_seen, &iov, &tag, 1) == 1;
        __atomic_fetch_add(&d->registered, b->registered, __ATOMIC_RELAXED);
    }
}

static void begin_queued(struct kvfs_device *d) {
    kvfs_lock(&d->lock);
    uint32_t added = d->buffers_added;
    kvfs_unlock(&d->lock);
    register_buffers(d, added);
    kvfs_lock(&d->lock);
    while (d->queued.count) {
        uint32_t number = queue_pop(&d->queued);
        kvfs_unlock(&d->lock);
        begin(d, number);
        kvfs_lock(&d->lock);
    }
    d->asleep = 1;
    kvfs_unlock(&d->lock);
}

/* Once, at the stop. The kernel finishes what it cannot cancel, such as a transfer that the drive has begun. */
static void cancel_all(struct kvfs_device *d) {
    struct io_uring_sqe *sqe;
    if (d->cancelled || !(sqe = take_sqe(d))) return;
    io_uring_prep_cancel64(sqe, 0, IORING_ASYNC_CANCEL_ANY | IORING_ASYNC_CANCEL_ALL);
    io_uring_sqe_set_data64(sqe, TAG_CANCEL);
    d->cancelled = 1;
}

static void take_completions(struct kvfs_device *d) {
    struct io_uring_cqe *cqe;
    while (io_uring_peek_cqe(&d->ring, &cqe) == 0) {
        uint64_t tag = io_uring_cqe_get_data64(cqe);
        int result = cqe->res;
        io_uring_cqe_seen(&d->ring, cqe);
        if (tag == TAG_WAKE)
            d->wake_armed = 0;
        else if (tag != TAG_CANCEL)
            advance(d, (uint32_t)tag, result);
    }
}

/* Submits, and brings in what has completed; waits for something to complete unless there is hashing to do. */
static void enter_kernel(struct kvfs_device *d) {
    kvfs_lock(&d->lock);
    int waiting = d->hashing.count > 0;
    kvfs_unlock(&d->lock);
    int rc = waiting ? io_uring_submit_and_get_events(&d->ring) : io_uring_submit_and_wait(&d->ring, 1);
    if (rc < 0 && rc != -EINTR) {
        /* Short of memory: what completes frees some. */
        struct timespec pause = {.tv_nsec = BACKOFF_NS};
        nanosleep(&pause, NULL);
    }
}

/* Hashes one payload, so that nothing waits in the ring for longer. */
static void hash_one(struct kvfs_device *d) {
    kvfs_lock(&d->lock);
    if (d->hashing.count) hash_next(d);
    kvfs_unlock(&d->lock);
}

static void serve(struct kvfs_device *d) {
    for (;;) {
        arm_wake(d);
        begin_queued(d);
        if (is_stopping(d)) {
            if (d->in_ring == 0 && !d->wake_armed) return;
            cancel_all(d);
        }
        enter_kernel(d);
        take_completions(d);
        hash_one(d);
    }
}

/* Buffers of the pool are registered one by one as they are made, so that unused ones pin nothing. Files are not
 * registered: fio, with fixed buffers, gained nothing from --registerfiles. */
static int open_ring(struct kvfs_device *d) {
    unsigned entries = d->depth + 2;
    int rc = io_uring_queue_init(entries, &d->ring, IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN);
    d->deferred = rc == 0;
    if (rc == -EINVAL) rc = io_uring_queue_init(entries, &d->ring, 0);
    if (rc < 0) return rc;
    if (!(d->ring.features & IORING_FEAT_FAST_POLL)) {
        io_uring_queue_exit(&d->ring);
        return -ENOSYS;
    }
    io_uring_register_buffers_sparse(&d->ring, d->max_buffers);
    return 0;
}

static void set_ring_state(struct kvfs_device *d, int state) {
    kvfs_lock(&d->lock);
    d->ring_state = state;
    pthread_cond_broadcast(&d->changed);
    pthread_cond_broadcast(&d->hash_work);
    kvfs_unlock(&d->lock);
}

static void *ring_main(void *argument) {
    struct kvfs_device *d = (struct kvfs_device *)argument;
    int rc = open_ring(d);
    set_ring_state(d, rc < 0 ? rc : RING_RUNNING);
    if (rc < 0) return NULL;
    serve(d);
    io_uring_queue_exit(&d->ring);
    set_ring_state(d, RING_ENDED);
    return NULL;
}

/* --- the callers' side -------------------------------------------------------------------------------- */
static int allocate(struct kvfs_device *d) UNCHECKED /* no thread yet */
{
    d->requests = calloc(d->depth, sizeof *d->requests);
    d->buffers = calloc(d->max_buffers ? d->max_buffers : 1, sizeof *d->buffers);
    if (!d->requests || !d->buffers || queue_init(&d->free, d->depth) || queue_init(&d->queued, d->depth) ||
        queue_init(&d->hashing, d->depth) || queue_init(&d->done, d->depth))
        return -ENOMEM;
    for (uint32_t number = 0; number < d->depth; number++) queue_push(&d->free, number);
    d->ring_state = RING_STARTING;
    d->wake_fd = eventfd(0, EFD_CLOEXEC);
    d->done_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    return d->wake_fd < 0 || d->done_fd < 0 ? -errno : 0;
}

static int start_threads(struct kvfs_device *d) {
    int rc = kvfs_thread_start(&d->ring_thread, ring_main, d, 0);
    if (rc < 0) return rc;
    kvfs_lock(&d->lock);
    while (d->ring_state == RING_STARTING) kvfs_wait(&d->changed, &d->lock);
    rc = d->ring_state;
    kvfs_unlock(&d->lock);
    if (rc < 0) {
        pthread_join(d->ring_thread, NULL);
        return rc;
    }
    rc = kvfs_thread_start(&d->hash_thread, hash_main, d, 0);
    if (rc < 0) {
        __atomic_store_n(&d->stop, 1, __ATOMIC_RELEASE);
        signal_fd(d->wake_fd);
        pthread_join(d->ring_thread, NULL);
    }
    return rc;
}

int kvfs_device_start(struct kvfs_device **out, uint32_t depth, uint32_t max_buffers) {
    struct kvfs_device *d = calloc(1, sizeof *d);
    if (!d) return -ENOMEM;
    d->depth = depth;
    d->max_buffers = max_buffers;
    d->wake_fd = d->done_fd = -1;
    kvfs_mutex_init(&d->lock);
    kvfs_cond_init(&d->hash_work);
    kvfs_cond_init(&d->changed);
    int rc = allocate(d);
    if (rc == 0) rc = start_threads(d);
    if (rc < 0)
        kvfs_device_free(d);
    else
        *out = d;
    return rc;
}

int kvfs_device_submit(struct kvfs_device *d, enum kvfs_device_op op, int fd, uint64_t offset, void *data, size_t bytes,
                       size_t payload_bytes) {
    int wake = 0, rc;
    kvfs_lock(&d->lock);
    if (d->stop) {
        rc = -ESHUTDOWN;
    } else if (d->free.count == 0) {
        rc = -EAGAIN;
    } else {
        rc = (int)queue_pop(&d->free);
        d->requests[rc] = (struct request){.op = op,
                                           .fd = fd,
                                           .data = (uint8_t *)data,
                                           .bytes = bytes,
                                           .payload_bytes = payload_bytes,
                                           .offset = offset};
        queue_push(&d->queued, (uint32_t)rc);
        wake = d->asleep;
        d->asleep = 0;
    }
    kvfs_unlock(&d->lock);
    if (wake) signal_fd(d->wake_fd);
    return rc;
}

int kvfs_device_add_buffer(struct kvfs_device *d, void *data, size_t bytes) {
    kvfs_lock(&d->lock);
    int rc = d->buffers_added == d->max_buffers ? -EAGAIN : 0;
    if (rc == 0) d->buffers[d->buffers_added++] = (struct buffer){.data = (uint8_t *)data, .bytes = bytes};
    kvfs_unlock(&d->lock);
    return rc;
}

uint32_t kvfs_device_reap(struct kvfs_device *d, struct kvfs_device_result *out) {
    uint64_t count;
    while (read(d->done_fd, &count, sizeof count) < 0 && errno == EINTR)
        ;
    kvfs_lock(&d->lock);
    uint32_t taken = 0;
    while (d->done.count) {
        uint32_t number = queue_pop(&d->done);
        struct request *r = &d->requests[number];
        out[taken++] = (struct kvfs_device_result){number, r->error, r->moved, r->checksum};
        queue_push(&d->free, number);
    }
    kvfs_unlock(&d->lock);
    return taken;
}

int kvfs_device_done_fd(struct kvfs_device *d) { return d->done_fd; }

uint32_t kvfs_device_registered(struct kvfs_device *d) { return __atomic_load_n(&d->registered, __ATOMIC_RELAXED); }

int kvfs_device_deferred(struct kvfs_device *d) { return d->deferred; }

int kvfs_device_stop(struct kvfs_device *d, int64_t timeout_ns) {
    struct timespec deadline = kvfs_deadline_after(timeout_ns);
    int rc = 0;
    kvfs_lock(&d->lock);
    __atomic_store_n(&d->stop, 1, __ATOMIC_RELEASE);
    kvfs_unlock(&d->lock);
    signal_fd(d->wake_fd);
    kvfs_lock(&d->lock);
    while (d->ring_state != RING_ENDED && rc == 0) rc = kvfs_wait_until(&d->changed, &d->lock, &deadline);
    rc = d->ring_state == RING_ENDED ? 0 : rc;
    kvfs_unlock(&d->lock);
    if (rc == 0) {
        pthread_join(d->ring_thread, NULL);
        pthread_join(d->hash_thread, NULL);
    }
    return rc;
}

void kvfs_device_free(struct kvfs_device *d) UNCHECKED /* no thread any more */
{
    if (d->wake_fd >= 0) close(d->wake_fd);
    if (d->done_fd >= 0) close(d->done_fd);
    free(d->free.numbers);
    free(d->queued.numbers);
    free(d->hashing.numbers);
    free(d->done.numbers);
    free(d->requests);
    free(d->buffers);
    pthread_cond_destroy(&d->hash_work);
    pthread_cond_destroy(&d->changed);
    kvfs_mutex_destroy(&d->lock);
    free(d);
}

#else /* built where liburing's header was missing: a device cannot be started, so nothing else is called */

int kvfs_device_start(struct kvfs_device **out, uint32_t depth, uint32_t max_buffers) {
    (void)out, (void)depth, (void)max_buffers;
    return -ENOSYS;
}
int kvfs_device_submit(struct kvfs_device *d, enum kvfs_device_op op, int fd, uint64_t offset, void *data, size_t bytes,
                       size_t payload_bytes) {
    (void)d, (void)op, (void)fd, (void)offset, (void)data, (void)bytes, (void)payload_bytes;
    return -ENOSYS;
}
int kvfs_device_add_buffer(struct kvfs_device *d, void *data, size_t bytes) {
    (void)d, (void)data, (void)bytes;
    return -ENOSYS;
}
uint32_t kvfs_device_reap(struct kvfs_device *d, struct kvfs_device_result *out) {
    (void)d, (void)out;
    return 0;
}
int kvfs_device_done_fd(struct kvfs_device *d) { return (void)d, -1; }
uint32_t kvfs_device_registered(struct kvfs_device *d) { return (void)d, 0; }
int kvfs_device_deferred(struct kvfs_device *d) { return (void)d, 0; }
int kvfs_device_stop(struct kvfs_device *d, int64_t timeout_ns) {
    (void)d, (void)timeout_ns;
    return 0;
}
void kvfs_device_free(struct kvfs_device *d) { (void)d; }

#endif
