/* See state.h. */
#include "state.h"

#include <errno.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define REQUEST_OVERHEAD 4096u /* FUSE_MIN_READ_BUFFER leaves room for headers above max_write */

static struct fl_node *node_at(struct fuse_loop *loop, uint64_t nodeid, int make) REQUIRES(loop->nodes_lock) {
    uint32_t index = (uint32_t)nodeid & ((1u << FL_NODE_INDEX_BITS) - 1);
    struct fl_node **chunk = &loop->chunks[index >> FL_CHUNK_BITS];
    if (*chunk == NULL) {
        if (!make) return NULL;
        *chunk = calloc(1u << FL_CHUNK_BITS, sizeof **chunk);
        if (*chunk == NULL) return NULL;
        for (uint32_t i = 0; i < 1u << FL_CHUNK_BITS; i++) (*chunk)[i].fd = -1;
    }
    return *chunk + (index & ((1u << FL_CHUNK_BITS) - 1));
}

struct fl_node *fl_find(struct fuse_loop *loop, uint64_t nodeid) {
    struct fl_node *node = node_at(loop, nodeid, 0);
    return node != NULL && node->nodeid == nodeid ? node : NULL;
}

int fl_node_set(struct fuse_loop *loop, uint64_t nodeid, enum fl_state state, uint32_t slot, uint32_t generation,
                const struct fw_attr *attr) {
    kvfs_lock(&loop->nodes_lock);
    struct fl_node *node = node_at(loop, nodeid, state != FL_DEAD);
    int status = node == NULL ? -ENOMEM : node->nodeid != 0 && node->nodeid != nodeid ? -EEXIST : 0;
    int gone = state == FL_DEAD && (node == NULL || node->nodeid != nodeid); /* dropped: nothing to mark */
    if (gone) status = 0;
    if (status == 0 && !gone) {
        node->nodeid = nodeid;
        if (state == FL_DRAFT && node->state != FL_DRAFT) node->killed = node->flushed = 0; /* of an earlier draft */
        node->state = (uint8_t)state;
        node->slot = slot;
        node->generation = generation;
        if (attr != NULL) node->attr = *attr;
        if (state == FL_DEAD) fl_names_unknown(loop, nodeid);
    }
    kvfs_unlock(&loop->nodes_lock);
    return status;
}

int fl_node_settles(struct fuse_loop *loop, uint64_t nodeid, int settles) {
    kvfs_lock(&loop->nodes_lock);
    struct fl_node *node = fl_find(loop, nodeid);
    if (node != NULL) node->settles = (uint8_t)settles;
    kvfs_unlock(&loop->nodes_lock);
    return node == NULL ? -ESTALE : 0;
}

static uint32_t expected_at(struct fuse_loop *loop, uint32_t thread) REQUIRES(loop->nodes_lock) {
    uint32_t at = 0;
    while (at < loop->expected_count && loop->expected[at] != thread) at++;
    return at;
}

int fl_is_expected(struct fuse_loop *loop, uint32_t thread) {
    return loop->expected_count != 0 && expected_at(loop, thread) < loop->expected_count;
}

int fl_expect(struct fuse_loop *loop, uint32_t thread, int expected) {
    kvfs_lock(&loop->nodes_lock);
    uint32_t at = expected_at(loop, thread);
    int status = 0;
    if (expected && at == FL_EXPECTED)
        status = -ENOSPC;
    else if (expected && at == loop->expected_count)
        loop->expected[loop->expected_count++] = thread;
    else if (!expected && at < loop->expected_count)
        loop->expected[at] = loop->expected[--loop->expected_count];
    kvfs_unlock(&loop->nodes_lock);
    return status;
}

int fl_opens(struct fuse_loop *loop, uint64_t nodeid) {
    kvfs_lock(&loop->nodes_lock);
    struct fl_node *node = fl_find(loop, nodeid);
    int opens = node == NULL ? 0 : (int)node->opens;
    kvfs_unlock(&loop->nodes_lock);
    return opens;
}

/* --- requests in flight ----------------------------------------------------------------------------- */

/* Open addressing with linear probing; deletion shifts back, so that no tombstone is ever left. */
static uint32_t pending_home(uint64_t unique) {
    return (uint32_t)((unique >> 1) * 0x9E3779B97F4A7C15ull >> (64 - FL_PENDING_BITS));
}

int fl_pending_add(struct fuse_loop *loop, uint64_t unique, uint32_t opcode, uint64_t nodeid) {
    const uint32_t mask = (1u << FL_PENDING_BITS) - 1;
    if (loop->pending_count > mask - mask / 8) return -EAGAIN;
    uint32_t at = pending_home(unique);
    while (loop->pending[at].unique != 0) at = (at + 1) & mask;
    loop->pending[at] = (struct fl_pending){.unique = unique, .nodeid = nodeid, .opcode = opcode};
    loop->pending_count++;
    return 0;
}

int fl_pending_take(struct fuse_loop *loop, uint64_t unique, struct fl_pending *out) {
    const uint32_t mask = (1u << FL_PENDING_BITS) - 1;
    uint32_t at = pending_home(unique);
    if (unique == 0) return 0;
    while (loop->pending[at].unique != unique) {
        if (loop->pending[at].unique == 0) return 0;
        at = (at + 1) & mask;
    }
    *out = loop->pending[at];
    loop->pending_count--;
    for (uint32_t next = (at + 1) & mask; loop->pending[next].unique != 0; next = (next + 1) & mask) {
        uint32_t home = pending_home(loop->pending[next].unique);
        if (((next - home) & mask) >= ((next - at) & mask)) {
            loop->pending[at] = loop->pending[next];
            at = next;
        }
    }
    loop->pending[at].unique = 0;
    return 1;
}

void fl_record_open(struct fuse_loop *loop, uint64_t nodeid, uint32_t uid, uint32_t pid) {
    if (loop->record_count == FL_OPEN_RECORDS) {
        loop->record_first = (loop->record_first + 1) % FL_OPEN_RECORDS;
        loop->record_count--;
        fl_count(&loop->stats.dropped_records);
    }
    loop->records[(loop->record_first + loop->record_count++) % FL_OPEN_RECORDS] = (struct fl_open_record){
        .nodeid = nodeid, .uid = uid, .pid = pid};
}

uint32_t fl_drain_opens(struct fuse_loop *loop, struct fl_open_record *out, uint32_t capacity) {
    kvfs_lock(&loop->nodes_lock);
    uint32_t count = loop->record_count < capacity ? loop->record_count : capacity;
    for (uint32_t i = 0; i < count; i++) out[i] = loop->records[(loop->record_first + i) % FL_OPEN_RECORDS];
    loop->record_first = (loop->record_first + count) % FL_OPEN_RECORDS;
    loop->record_count -= count;
    kvfs_unlock(&loop->nodes_lock);
    return count;
}

/* --- calls ------------------------------------------------------------------------------------------ */

int fl_call_put(struct fuse_loop *loop, const struct fl_call *call) {
    kvfs_lock(&loop->calls_lock);
    int status = loop->call_count == FL_CALLS ? -EAGAIN : 0;
    if (status == 0) {
        loop->calls[(loop->call_first + loop->call_count) % FL_CALLS] = *call;
        __atomic_store_n(&loop->call_count, loop->call_count + 1, __ATOMIC_RELEASE);
    }
    kvfs_unlock(&loop->calls_lock);
    return status;
}

void fl_calls_notify(struct fuse_loop *loop, uint32_t least) {
    kvfs_lock(&loop->calls_lock);
    /* Under the lock: written after a take that emptied the queue, it would wake for ever. */
    if (!loop->calls_notified && !loop->calls_watched && loop->call_count >= least) {
        uint64_t one = 1;
        loop->calls_notified = write(loop->calls_fd, &one, sizeof one) == sizeof one;
    }
    kvfs_unlock(&loop->calls_lock);
}

uint32_t fl_take_calls(struct fuse_loop *loop, struct fl_call *out, uint32_t capacity) {
    if (__atomic_load_n(&loop->call_count, __ATOMIC_ACQUIRE) == 0) return 0;
    kvfs_lock(&loop->calls_lock);
    uint32_t count = loop->call_count < capacity ? loop->call_count : capacity;
    for (uint32_t i = 0; i < count; i++) out[i] = loop->calls[(loop->call_first + i) % FL_CALLS];
    loop->call_first = (loop->call_first + count) % FL_CALLS;
    __atomic_store_n(&loop->call_count, loop->call_count - count, __ATOMIC_RELEASE);
    uint64_t seen;
    if (loop->call_count == 0 && loop->calls_notified)
        loop->calls_notified = read(loop->calls_fd, &seen, sizeof seen) < 0;
    kvfs_unlock(&loop->calls_lock);
    return count;
}

/* --- notices ---------------------------------------------------------------------------------------- */

static int notice_put(struct fuse_loop *loop, const struct fl_notice *notice) {
    kvfs_lock(&loop->notice_lock);
    int status = 0;
    if (loop->notice_count == FL_NOTICES) {
        /* One notice that makes every cached name stale says it all. */
        loop->notice_overflow = 1;
        status = -ENOBUFS;
    } else {
        loop->notices[(loop->notice_first + loop->notice_count++) % FL_NOTICES] = *notice;
    }
    pthread_cond_signal(&loop->notice_ready);
    kvfs_unlock(&loop->notice_lock);
    return status;
}

int fl_invalidate_entry(struct fuse_loop *loop, uint64_t parent, const char *name, uint32_t length) {
    struct fl_notice notice = {.nodeid = parent, .code = FW_NOTIFY_INVAL_ENTRY, .length = (uint8_t)length};
    if (length > FL_NAME_MAX) return -ENAMETOOLONG;
    memcpy(notice.name, name, length);
    return notice_put(loop, &notice);
}

int fl_invalidate_attr(struct fuse_loop *loop, uint64_t nodeid) {
    struct fl_notice notice = {.nodeid = nodeid, .code = FW_NOTIFY_INVAL_INODE};
    return notice_put(loop, &notice);
}

int fl_notice_wait(struct fuse_loop *loop, struct fl_notice *out) {
    kvfs_lock(&loop->notice_lock);
    while (loop->notice_count == 0 && !loop->notice_overflow && !loop->notice_stop)
        kvfs_wait(&loop->notice_ready, &loop->notice_lock);
    int more = !loop->notice_stop;
    if (more && loop->notice_overflow) {
        loop->notice_overflow = 0;
        loop->notice_count = 0;
        *out = (struct fl_notice){.code = FW_NOTIFY_INC_EPOCH};
    } else if (more) {
        *out = loop->notices[loop->notice_first];
        loop->notice_first = (loop->notice_first + 1) % FL_NOTICES;
        loop->notice_count--;
    }
    kvfs_unlock(&loop->notice_lock);
    return more;
}

void fl_notice_stop(struct fuse_loop *loop) {
    kvfs_lock(&loop->notice_lock);
    loop->notice_stop = 1;
    pthread_cond_broadcast(&loop->notice_ready);
    kvfs_unlock(&loop->notice_lock);
}

/* --- life ------------------------------------------------------------------------------------------- */

static int make_sockets(struct fuse_loop *loop) {
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, loop->sockets) < 0) return -errno;
    for (int i = 0; i < 2; i++) {
        int wanted = (int)loop->request_size + 65536;
        if (setsockopt(loop->sockets[i], SOL_SOCKET, SO_SNDBUFFORCE, &wanted, sizeof wanted) < 0 &&
            setsockopt(loop->sockets[i], SOL_SOCKET, SO_SNDBUF, &wanted, sizeof wanted) < 0)
            return -errno;
    }
    return 0;
}

int fl_create(const struct fl_config *config, struct fuse_loop **out) UNCHECKED /* no thread yet */ {
    if (config->threads < 1 || config->threads > FL_MAX_THREADS) return -EINVAL;
    struct fuse_loop *loop = calloc(1, sizeof *loop);
    if (loop == NULL) return -ENOMEM;
    loop->config = *config;
    loop->passthrough = config->passthrough;
    loop->request_size = config->buffer_size + REQUEST_OVERHEAD;
    loop->largest_object = config->largest_object;
    loop->sockets[0] = loop->sockets[1] = -1;
    kvfs_mutex_init(&loop->reader_lock);
    kvfs_mutex_init(&loop->nodes_lock);
    kvfs_mutex_init(&loop->notice_lock);
    kvfs_mutex_init(&loop->calls_lock);
    kvfs_mutex_init(&loop->locks_lock);
    kvfs_mutex_init(&loop->listings_lock);
    loop->listings = calloc(1u << FL_LISTING_FILE_BITS, sizeof *loop->listings);
    loop->lock_files = calloc(1u << FL_LOCK_FILE_BITS, sizeof *loop->lock_files);
    loop->locked_keys = calloc(1u << FL_LOCKED_KEY_BITS, sizeof *loop->locked_keys);
    pthread_cond_init(&loop->notice_ready, NULL);
    pthread_cond_init(&loop->reader_free, NULL);
    pthread_cond_init(&loop->ticket_done, NULL);
    loop->pending = calloc(1u << FL_PENDING_BITS, sizeof *loop->pending);
    loop->records = calloc(FL_OPEN_RECORDS, sizeof *loop->records);
    loop->notices = calloc(FL_NOTICES, sizeof *loop->notices);
    loop->calls = calloc(FL_CALLS, sizeof *loop->calls);
    loop->calls_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    loop->stop_fd = eventfd(0, EFD_CLOEXEC);
    loop->ended_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    loop->up_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int whole = fl_edges_make(loop) == 0 && loop->pending && loop->records && loop->notices && loop->calls &&
                loop->lock_files && loop->locked_keys && loop->listings;
    int status = whole ? make_sockets(loop) : -ENOMEM;
    if (status == 0 && (loop->stop_fd < 0 || loop->ended_fd < 0 || loop->up_fd < 0 || loop->calls_fd < 0))
        status = -EMFILE;
    if (status < 0) {
        fl_destroy(loop);
        return status;
    }
    *out = loop;
    return 0;
}

void fl_destroy(struct fuse_loop *loop) UNCHECKED /* no thread any more */ {
    if (loop == NULL) return;
    for (uint32_t i = 0; i < FL_CHUNKS; i++) {
        for (uint32_t j = 0; loop->chunks[i] != NULL && j < 1u << FL_CHUNK_BITS; j++)
            if (loop->chunks[i][j].fd >= 0) close(loop->chunks[i][j].fd);
        free(loop->chunks[i]);
    }
    fl_edges_free(loop);
    fl_locks_free(loop);
    fl_listings_free(loop);
    int descriptors[] = {loop->sockets[0], loop->sockets[1], loop->stop_fd,
                         loop->ended_fd,   loop->up_fd,      loop->calls_fd};
    for (unsigned i = 0; i < sizeof descriptors / sizeof *descriptors; i++)
        if (descriptors[i] >= 0) close(descriptors[i]);
    free(loop->pending);
    free(loop->records);
    free(loop->notices);
    free(loop->calls);
    free(loop->replies);
    free(loop);
}

int fl_library_fd(struct fuse_loop *loop) { return loop->sockets[1]; }
int fl_calls_quiet(struct fuse_loop *loop) {
    kvfs_lock(&loop->calls_lock);
    int quiet = loop->call_count != 0 && !loop->calls_notified && !loop->calls_watched;
    kvfs_unlock(&loop->calls_lock);
    return quiet;
}

void fl_watch_calls(struct fuse_loop *loop, int watched) {
    kvfs_lock(&loop->calls_lock);
    loop->calls_watched = watched;
    kvfs_unlock(&loop->calls_lock);
    fl_note_watcher(loop, watched);
    if (!watched) fl_calls_notify(loop, 1);
}

int fl_await_calls(struct fuse_loop *loop, uint64_t timeout_ns) {
    int64_t end = kvfs_clock_ns(CLOCK_MONOTONIC) + (int64_t)timeout_ns;
    fl_note_watcher(loop, 1);
    while (!fl_calls_waiting(loop)) {
        sched_yield(); /* whoever else wants this processor has it */
        if (kvfs_clock_ns(CLOCK_MONOTONIC) > end) return 0;
    }
    return 1;
}

int fl_calls_waiting(struct fuse_loop *loop) { return __atomic_load_n(&loop->call_count, __ATOMIC_ACQUIRE) != 0; }
int fl_calls_fd(struct fuse_loop *loop) { return loop->calls_fd; }
int fl_ended_fd(struct fuse_loop *loop) { return loop->ended_fd; }
int fl_up_fd(struct fuse_loop *loop) { return loop->up_fd; }
int fl_passthrough(struct fuse_loop *loop) { return loop->passthrough; }

void fl_get_stats(struct fuse_loop *loop, struct fl_stats *out) {
    const uint64_t *from = (const uint64_t *)&loop->stats;
    for (size_t i = 0; i < sizeof *out / sizeof *from; i++)
        ((uint64_t *)out)[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
}

void fl_relay_opens(struct fuse_loop *loop, int relay) {
    __atomic_store_n(&loop->relay_opens, relay, __ATOMIC_RELAXED);
}
