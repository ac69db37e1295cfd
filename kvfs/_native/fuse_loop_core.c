/* See fuse_loop_core.h. This file: the device, the threads, life, and what the seam asks for. */
#include "fuse_loop_core.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "fuse_loop_state.h"

/* --- the device ------------------------------------------------------------------------------------- */

void fl_write_device(struct fuse_loop *loop, const struct iovec *parts, int count) {
    /* ENOENT: the request was interrupted and the kernel no longer waits; ENODEV: the mount is gone. */
    ssize_t written = writev(loop->config.dev_fd, parts, count);
    (void)written;
}

void fl_answer(struct fuse_loop *loop, uint64_t unique, int error, const void *body, uint32_t size) {
    struct fw_out_header header = {.len = sizeof header + size, .error = error, .unique = unique};
    struct iovec parts[2] = {{&header, sizeof header}, {(void *)body, size}};
    fl_write_device(loop, parts, size ? 2 : 1);
}

#define QUIET_MS 1

/* --- threads ---------------------------------------------------------------------------------------- */

static int needs_patch(uint32_t opcode) {
    switch (opcode) {
    case FW_INIT:
    case FW_CREATE:
    case FW_LOOKUP:
    case FW_MKDIR:
    case FW_MKNOD:
    case FW_SYMLINK:
    case FW_LINK:
    case FW_OPEN:
    case FW_GETATTR:
    case FW_SETATTR:
    case FW_READDIRPLUS:
        return 1;
    default:
        return 0;
    }
}

/* Waits for `fd` or for the stop; 0 when stopping. Calls that nobody was told of wait for QUIET_MS at most. */
static int wait_for(struct fuse_loop *loop, int fd, short events) {
    struct pollfd watched[2] = {{fd, events, 0}, {loop->stop_fd, POLLIN, 0}};
    for (;;) {
        int count = poll(watched, 2, fl_calls_quiet(loop) ? QUIET_MS : -1);
        if (count == 0) fl_calls_tell(loop, 1);
        if (count == 0 || (count < 0 && errno == EINTR)) continue;
        return count > 0 && watched[1].revents == 0;
    }
}

/* Waits while the library's socket is full, but not beyond the stop. 0, or -EIO. */
static int send_to_library(struct fuse_loop *loop, const void *message, size_t size) {
    while (send(loop->sockets[0], message, size, MSG_NOSIGNAL | MSG_DONTWAIT) < 0) {
        if (errno == EINTR) continue;
        if (errno != EAGAIN || !wait_for(loop, loop->sockets[0], POLLOUT)) return -EIO;
    }
    return 0;
}

static void relay(struct fuse_loop *loop, struct fw_in_header *in, size_t size) {
    if (in->opcode == FW_INIT && size >= sizeof *in + sizeof(struct fw_init_in)) {
        const struct fw_init_in *init = (const struct fw_init_in *)(in + 1);
        loop->offered_flags = init->flags;
        loop->offered_flags2 = init->flags & FW_INIT_FLAG_EXT ? init->flags2 : 0;
    }
    if (needs_patch(in->opcode)) {
        pthread_mutex_lock(&loop->nodes_lock);
        int status = fl_pending_add(loop, in->unique, in->opcode, in->nodeid);
        pthread_mutex_unlock(&loop->nodes_lock);
        if (status < 0) {
            fl_answer(loop, in->unique, status, NULL, 0);
            return;
        }
    }
    fl_count(&loop->stats.relayed);
    if (send_to_library(loop, in, size) == 0) return;
    struct fl_pending unsent;
    pthread_mutex_lock(&loop->nodes_lock);
    fl_pending_take(loop, in->unique, &unsent);
    pthread_mutex_unlock(&loop->nodes_lock);
    fl_answer(loop, in->unique, -EIO, NULL, 0);
}

/* One request into the buffer: its size, 0 to stop, -EAGAIN to try again. `read_lock` is held. */
static ssize_t read_request(struct fuse_loop *loop, struct fl_buffers *buffers) {
    ssize_t size = read(loop->config.dev_fd, buffers->request, loop->request_size);
    if (size >= 0) {
        memset(buffers->request + size, 0, FL_REQUEST_END);
        return size;
    }
    switch (errno) {
    case EAGAIN:
        return wait_for(loop, loop->config.dev_fd, POLLIN) ? -EAGAIN : 0;
    case EINTR:
    case ENOENT: /* the caller gave up before the request was read */
        return -EAGAIN;
    default: /* ENODEV: unmounted */
        return 0;
    }
}

/* What of a request's body this loop reads, names not counted. */
static size_t least_body(uint32_t opcode) {
    switch (opcode) {
    case FW_FORGET:
        return sizeof(uint64_t);
    case FW_BATCH_FORGET:
        return sizeof(struct fw_batch_forget_in);
    case FW_OPEN:
        return sizeof(struct fw_open_in);
    case FW_RELEASE:
        return sizeof(struct fw_release_in);
    case FW_READ:
        return sizeof(struct fw_read_in);
    case FW_WRITE:
        return sizeof(struct fw_write_in);
    case FW_GETXATTR:
        return sizeof(struct fw_getxattr_in);
    case FW_FALLOCATE:
        return sizeof(struct fw_fallocate_in);
    case FW_LSEEK:
        return sizeof(struct fw_lseek_in);
    case FW_FLUSH:
        return sizeof(struct fw_flush_in);
    case FW_GETLK:
    case FW_SETLK:
    case FW_SETLKW:
        return sizeof(struct fw_lk_in);
    case FW_FSYNC:
    case FW_INTERRUPT:
        return sizeof(uint64_t);
    case FW_CREATE:
        return sizeof(struct fw_create_in);
    case FW_RENAME:
        return sizeof(struct fw_rename_in);
    case FW_RENAME2:
        return sizeof(struct fw_rename2_in);
    default:
        return 0;
    }
}

/* A request shorter than its kind or its length says would be read into what the last one left behind. */
static int is_whole(const struct fw_in_header *in, size_t size) {
    return in->len == size && size - sizeof *in >= least_body(in->opcode);
}

static void pass_on(struct fuse_loop *loop, struct fl_buffers *buffers, struct fw_in_header *in, size_t size) {
    if (!is_whole(in, size)) {
        int answered = in->opcode != FW_FORGET && in->opcode != FW_BATCH_FORGET && in->opcode != FW_INTERRUPT;
        if (answered) fl_answer(loop, in->unique, -EIO, NULL, 0);
        return;
    }
    if (fl_answers(in->opcode) && fl_handle_natively(loop, buffers, in)) return;
    if (fl_queue_call(loop, in)) return;
    relay(loop, in, size);
}

static void *read_requests(void *argument) {
    struct fuse_loop *loop = argument;
    struct fl_buffers buffers;
    if (fl_buffers_make(loop, &buffers) < 0) return NULL;
    for (;;) {
        pthread_mutex_lock(&loop->read_lock);
        ssize_t size = __atomic_load_n(&loop->stopping, __ATOMIC_ACQUIRE) ? 0 : read_request(loop, &buffers);
        struct fw_in_header *in = (struct fw_in_header *)buffers.request;
        int whole = size >= (ssize_t)sizeof *in;
        int later = whole && !loop->single && in->opcode == FW_READ; /* copies run side by side */
        if (whole && !later) pass_on(loop, &buffers, in, (size_t)size);
        pthread_mutex_unlock(&loop->read_lock);
        if (size == 0) break;
        if (later) pass_on(loop, &buffers, in, (size_t)size);
    }
    fl_buffers_free(&buffers);
    uint64_t one = 1;
    ssize_t written = write(loop->ended_fd, &one, sizeof one);
    (void)written;
    return NULL;
}

static void *write_replies(void *argument) {
    struct fuse_loop *loop = argument;
    char *buffer = malloc(loop->request_size);
    while (buffer != NULL && wait_for(loop, loop->sockets[0], POLLIN)) {
        ssize_t size = recv(loop->sockets[0], buffer, loop->request_size, 0);
        if (size < 0 && errno == EINTR) continue;
        if (size < (ssize_t)sizeof(struct fw_out_header)) break;
        struct fw_out_header *header = (struct fw_out_header *)buffer;
        struct fl_pending request;
        pthread_mutex_lock(&loop->nodes_lock);
        if (fl_pending_take(loop, header->unique, &request) && header->error == 0)
            fl_patch_reply(loop, &request, buffer + sizeof *header, (uint32_t)(size - sizeof *header));
        pthread_mutex_unlock(&loop->nodes_lock);
        struct iovec part = {buffer, (size_t)size};
        fl_write_device(loop, &part, 1);
    }
    free(buffer);
    return NULL;
}

static void *write_invalidations(void *argument) {
    struct fuse_loop *loop = argument;
    struct fl_notice notice;
    while (fl_notice_wait(loop, &notice)) {
        struct {
            struct fw_out_header header;
            uint64_t words[3];
            char name[FL_NAME_MAX + 1];
        } message = {.header = {.error = notice.code}};
        uint32_t size = sizeof message.header;
        if (notice.code == FW_NOTIFY_INVAL_ENTRY) {
            message.words[0] = notice.nodeid;
            message.words[1] = notice.length; /* namelen, then flags: zero */
            memcpy(&message.words[2], notice.name, notice.length + 1u);
            size += 16 + notice.length + 1u;
        } else if (notice.code == FW_NOTIFY_INVAL_INODE) {
            message.words[0] = notice.nodeid;
            message.words[1] = (uint64_t)-1; /* attributes only */
            message.words[2] = 0;
            size += 24;
        }
        message.header.len = size;
        struct iovec part = {&message, size};
        fl_write_device(loop, &part, 1);
        fl_count(&loop->stats.invalidations);
    }
    return NULL;
}

/* --- life ------------------------------------------------------------------------------------------- */

int fl_start(struct fuse_loop *loop) {
    for (int i = 0; i < loop->config.threads; i++) {
        int status = pthread_create(&loop->threads[loop->running], NULL, read_requests, loop);
        if (status != 0) return -status;
        loop->running++;
    }
    int status = pthread_create(&loop->threads[loop->running], NULL, write_replies, loop);
    if (status != 0) return -status;
    loop->running++;
    status = pthread_create(&loop->threads[loop->running], NULL, write_invalidations, loop);
    if (status != 0) return -status;
    loop->running++;
    return 0;
}

void fl_stop(struct fuse_loop *loop) {
    __atomic_store_n(&loop->stopping, 1, __ATOMIC_RELEASE);
    uint64_t one = 1;
    ssize_t written = write(loop->stop_fd, &one, sizeof one);
    (void)written;
    fl_notice_stop(loop);
    for (int i = 0; i < loop->running; i++) pthread_join(loop->threads[i], NULL);
    loop->running = 0;
}

/* --- for the seam ----------------------------------------------------------------------------------- */

int fl_acquire(struct fuse_loop *loop, uint64_t nodeid, int fd) {
    pthread_mutex_lock(&loop->nodes_lock);
    struct fl_node *node = fl_find(loop, nodeid);
    int status = node == NULL ? -ESTALE : 0;
    if (status == 0 && node->opens == 0) status = fl_attach_backing(loop, node, fd);
    if (status == 0) status = (int)++node->opens;
    pthread_mutex_unlock(&loop->nodes_lock);
    return status;
}

int fl_probe(struct fuse_loop *loop, int fd) {
    struct fl_node scratch = {.fd = -1};
    pthread_mutex_lock(&loop->nodes_lock);
    int status = fl_attach_backing(loop, &scratch, fd);
    fl_detach_backing(loop, &scratch);
    loop->passthrough_used |= status == 0 && loop->passthrough;
    if (status == 0) status = loop->passthrough;
    pthread_mutex_unlock(&loop->nodes_lock);
    return status;
}

int fl_killed(struct fuse_loop *loop, uint64_t nodeid) {
    pthread_mutex_lock(&loop->nodes_lock);
    struct fl_node *node = fl_find(loop, nodeid);
    int killed = node != NULL && node->killed;
    pthread_mutex_unlock(&loop->nodes_lock);
    return killed;
}

int fl_flushed(struct fuse_loop *loop, uint64_t nodeid) {
    pthread_mutex_lock(&loop->nodes_lock);
    struct fl_node *node = fl_find(loop, nodeid);
    int flushed = node != NULL && node->flushed;
    pthread_mutex_unlock(&loop->nodes_lock);
    return flushed;
}

int fl_release(struct fuse_loop *loop, uint64_t nodeid) {
    pthread_mutex_lock(&loop->nodes_lock);
    struct fl_node *node = fl_find(loop, nodeid);
    int left = -ESTALE;
    if (node != NULL && node->opens > 0) {
        left = (int)--node->opens;
        if (left == 0) fl_detach_backing(loop, node);
    }
    pthread_mutex_unlock(&loop->nodes_lock);
    return left;
}

uint64_t fl_node_drop(struct fuse_loop *loop, uint64_t nodeid) {
    pthread_mutex_lock(&loop->nodes_lock);
    struct fl_node *node = fl_find(loop, nodeid);
    uint64_t lookups = node == NULL ? 0 : node->lookups;
    if (node != NULL && lookups == 0) {
        fl_names_unknown(loop, node);
        fl_detach_backing(loop, node);
        memset(node, 0, sizeof *node);
        node->fd = -1;
    }
    pthread_mutex_unlock(&loop->nodes_lock);
    return lookups;
}

uint64_t fl_drain_misses(struct fuse_loop *loop) {
    pthread_mutex_lock(&loop->nodes_lock);
    uint64_t misses = loop->misses;
    loop->misses = 0;
    pthread_mutex_unlock(&loop->nodes_lock);
    return misses;
}
