/* See loop.h. This file: the device, the threads, life, and what the seam asks for. */
#include "loop.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "state.h"

/* --- the device ------------------------------------------------------------------------------------- */

static int write_device(struct fuse_loop *loop, const struct iovec *parts, int count) {
    return writev(loop->config.dev_fd, parts, count) < 0 ? -errno : 0;
}

/* The first part begins with the header. A refused reply becomes an error, so that nobody waits for ever. */
int fl_write_reply(struct fuse_loop *loop, const struct iovec *parts, int count) {
    int status = write_device(loop, parts, count);
    /* ENOENT: the request was interrupted and the kernel no longer waits, or the mount is gone. */
    if (status == 0 || status == -ENOENT || status == -ENODEV) return 0;
    struct fw_out_header header = *(const struct fw_out_header *)parts->iov_base;
    if (header.unique == 0) return status; /* a notification of the library's: nobody waits */
    header.len = sizeof header;
    header.error = -EIO;
    struct iovec refusal = {&header, sizeof header};
    int refused = write_device(loop, &refusal, 1);
    if (refused != 0 && refused != -ENOENT && refused != -ENODEV) fl_end(loop, "answering the kernel", -refused);
    return status;
}

void fl_answer(struct fuse_loop *loop, uint64_t unique, int error, const void *body, uint32_t size) {
    struct fw_out_header header = {.len = sizeof header + size, .error = error, .unique = unique};
    struct iovec parts[2] = {{&header, sizeof header}, {(void *)body, size}};
    fl_write_reply(loop, parts, size ? 2 : 1);
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

/* Waits for `fd` or for the stop; 0 when stopping. Calls that nobody was notified of wait for QUIET_MS at most. */
static int wait_for(struct fuse_loop *loop, int fd, short events) {
    struct pollfd watched[2] = {{fd, events, 0}, {loop->stop_fd, POLLIN, 0}};
    for (;;) {
        int count = poll(watched, 2, fl_calls_quiet(loop) ? QUIET_MS : -1);
        if (count == 0) fl_calls_notify(loop, 1);
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
        kvfs_lock(&loop->nodes_lock);
        int status = fl_pending_add(loop, in->unique, in->opcode, in->nodeid);
        kvfs_unlock(&loop->nodes_lock);
        if (status < 0) {
            fl_answer(loop, in->unique, status, NULL, 0);
            return;
        }
    }
    fl_count(&loop->stats.relayed);
    if (send_to_library(loop, in, size) == 0) return;
    struct fl_pending unsent;
    kvfs_lock(&loop->nodes_lock);
    fl_pending_take(loop, in->unique, &unsent);
    kvfs_unlock(&loop->nodes_lock);
    fl_answer(loop, in->unique, -EIO, NULL, 0);
}

/* Reads one request into the buffer; returns its size, 0 to stop, -EAGAIN to try again. */
static ssize_t read_request(struct fuse_loop *loop, struct fl_server *server) {
    if (__atomic_load_n(&loop->stopping, __ATOMIC_ACQUIRE)) return 0;
    ssize_t size = read(loop->config.dev_fd, server->request, loop->request_size);
    if (size >= 0) {
        memset(server->request + size, 0, FL_REQUEST_END);
        fl_note_request(server);
        return size;
    }
    switch (errno) {
    case EAGAIN:
        fl_note_idle(server);
        __atomic_store_n(&loop->reader_waits, 1, __ATOMIC_SEQ_CST);
        size = wait_for(loop, loop->config.dev_fd, POLLIN) ? -EAGAIN : 0;
        __atomic_store_n(&loop->reader_waits, 0, __ATOMIC_SEQ_CST);
        return size;
    case EINTR:
    case ENOENT: /* the caller gave up before the request was read */
        return -EAGAIN;
    case ENODEV:       /* unmounted */
    case ECONNABORTED: /* aborted by a privileged process */
        return 0;
    default:
        fl_end(loop, "reading /dev/fuse", errno);
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
    case FW_READDIRPLUS:
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

static void pass_on(struct fl_server *server, struct fw_in_header *in, size_t size) {
    struct fuse_loop *loop = server->loop;
    if (!is_whole(in, size)) {
        int answered = in->opcode != FW_FORGET && in->opcode != FW_BATCH_FORGET && in->opcode != FW_INTERRUPT;
        if (answered) fl_answer(loop, in->unique, -EIO, NULL, 0);
        return;
    }
    struct fl_ticket ticket = fl_keep_order(server, in);
    if (!(fl_answers(in->opcode) && fl_handle_natively(loop, server, in)) && !fl_queue_call(loop, in))
        relay(loop, in, size);
    fl_ticket_end(loop, ticket);
}

static void stop_servers(struct fuse_loop *loop) {
    kvfs_lock(&loop->reader_lock);
    __atomic_store_n(&loop->stopping, 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&loop->reader_free);
    kvfs_unlock(&loop->reader_lock);
}

void *fl_serve(void *argument) {
    struct fl_server *server = (struct fl_server *)argument;
    struct fuse_loop *loop = server->loop;
    while (server->reads || fl_become_reader(server)) {
        ssize_t size = read_request(loop, server);
        if (size == 0) break;
        if (size >= (ssize_t)sizeof(struct fw_in_header))
            pass_on(server, (struct fw_in_header *)server->request, (size_t)size);
    }
    if (server->reads) { /* no more requests, for anybody */
        stop_servers(loop);
        fl_end(loop, "", 0);
    }
    fl_server_free(server);
    return NULL;
}

/* INIT apart, whose end says whether the kernel and this service understand each other. */
static void write_reply(struct fuse_loop *loop, char *reply, size_t size) {
    struct fw_out_header *header = (struct fw_out_header *)reply;
    struct fl_pending request = {0};
    kvfs_lock(&loop->nodes_lock);
    if (fl_pending_take(loop, header->unique, &request) && header->error == 0)
        fl_patch_reply(loop, &request, reply + sizeof *header, (uint32_t)(size - sizeof *header));
    kvfs_unlock(&loop->nodes_lock);
    int error = -header->error;
    struct iovec part = {reply, size};
    int status = fl_write_reply(loop, &part, 1);
    if (request.opcode != FW_INIT) return;
    if (error != 0 || status != 0) {
        fl_end(loop, "the answer to INIT", error != 0 ? error : -status);
        return;
    }
    uint64_t one = 1;
    ssize_t written = write(loop->up_fd, &one, sizeof one);
    (void)written;
}

static void *write_replies(void *argument) {
    struct fuse_loop *loop = (struct fuse_loop *)argument;
    while (wait_for(loop, loop->sockets[0], POLLIN)) {
        ssize_t size = recv(loop->sockets[0], loop->replies, loop->request_size, 0);
        if (size >= (ssize_t)sizeof(struct fw_out_header)) {
            write_reply(loop, loop->replies, (size_t)size);
        } else if (size >= 0 || errno != EINTR) {
            fl_end(loop, "replies of the FUSE library", size < 0 ? errno : EPIPE);
            return NULL;
        }
    }
    return NULL;
}

static void *write_invalidations(void *argument) {
    struct fuse_loop *loop = (struct fuse_loop *)argument;
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
        (void)write_device(loop, &part, 1); /* the kernel may not know the node or the name */
        fl_count(&loop->stats.invalidations);
    }
    return NULL;
}

/* --- life ------------------------------------------------------------------------------------------- */

int fl_start(struct fuse_loop *loop) {
    loop->replies = malloc(loop->request_size);
    kvfs_lock(&loop->reader_lock);
    int status = loop->replies == NULL ? -ENOMEM : fl_server_add(loop);
    if (status == 0) status = fl_thread_add(loop, write_replies, loop);
    if (status == 0) status = fl_thread_add(loop, write_invalidations, loop);
    if (status == 0) fl_awake_start(loop);
    kvfs_unlock(&loop->reader_lock);
    return status;
}

/* A reader that waits has handled what it read; others step aside, and are idle once they have. */
int fl_is_drained(struct fuse_loop *loop) {
    struct pollfd device = {loop->config.dev_fd, POLLIN, 0};
    if (poll(&device, 1, 0) > 0 && (device.revents & POLLIN)) return 0;
    int waits = __atomic_load_n(&loop->reader_waits, __ATOMIC_SEQ_CST); /* after the look at the device */
    kvfs_lock(&loop->reader_lock);
    int drained = loop->stopping || (waits && loop->idle == loop->servers - 1);
    kvfs_unlock(&loop->reader_lock);
    return drained;
}

void fl_stop(struct fuse_loop *loop) UNCHECKED /* `running` and `threads` stay as they are once it is stopping */ {
    uint64_t one = 1;
    stop_servers(loop); /* from here on no thread is added */
    ssize_t written = write(loop->stop_fd, &one, sizeof one);
    (void)written;
    fl_notice_stop(loop);
    fl_awake_stop(loop);
    /* Those of the least priority would end seconds later on a busy machine. */
    const struct sched_param usual = {0};
    for (int i = 0; i < loop->running; i++) (void)pthread_setschedparam(loop->threads[i], SCHED_OTHER, &usual);
    for (int i = 0; i < loop->running; i++) pthread_join(loop->threads[i], NULL);
    loop->running = 0;
}

/* --- for the seam ----------------------------------------------------------------------------------- */

int fl_acquire(struct fuse_loop *loop, uint64_t nodeid, int fd) {
    kvfs_lock(&loop->nodes_lock);
    struct fl_node *node = fl_find(loop, nodeid);
    int status = node == NULL ? -ESTALE : 0;
    if (status == 0 && node->opens == 0) status = fl_attach_backing(loop, node, fd);
    if (status == 0) status = (int)++node->opens;
    kvfs_unlock(&loop->nodes_lock);
    return status;
}

int fl_probe(struct fuse_loop *loop, int fd) {
    struct fl_node scratch = {.fd = -1};
    kvfs_lock(&loop->nodes_lock);
    int status = fl_attach_backing(loop, &scratch, fd);
    fl_detach_backing(loop, &scratch);
    loop->passthrough_used |= status == 0 && loop->passthrough;
    if (status == 0) status = loop->passthrough;
    kvfs_unlock(&loop->nodes_lock);
    return status;
}

int fl_killed(struct fuse_loop *loop, uint64_t nodeid) {
    kvfs_lock(&loop->nodes_lock);
    struct fl_node *node = fl_find(loop, nodeid);
    int killed = node != NULL && node->killed;
    kvfs_unlock(&loop->nodes_lock);
    return killed;
}

int fl_flushed(struct fuse_loop *loop, uint64_t nodeid) {
    kvfs_lock(&loop->nodes_lock);
    struct fl_node *node = fl_find(loop, nodeid);
    int flushed = node != NULL && node->flushed;
    kvfs_unlock(&loop->nodes_lock);
    return flushed;
}

int fl_release(struct fuse_loop *loop, uint64_t nodeid) {
    kvfs_lock(&loop->nodes_lock);
    struct fl_node *node = fl_find(loop, nodeid);
    int left = -ESTALE;
    if (node != NULL && node->opens > 0) {
        left = (int)--node->opens;
        if (left == 0) fl_detach_backing(loop, node);
    }
    kvfs_unlock(&loop->nodes_lock);
    return left;
}

uint64_t fl_node_drop(struct fuse_loop *loop, uint64_t nodeid) {
    kvfs_lock(&loop->nodes_lock);
    struct fl_node *node = fl_find(loop, nodeid);
    uint64_t lookups = node == NULL ? 0 : node->lookups;
    if (node != NULL && lookups == 0) { /* looked at again: the lock was free meanwhile */
        fl_names_unknown(loop, nodeid);
        node = fl_find(loop, nodeid);
        lookups = node == NULL ? 0 : node->lookups;
    }
    if (node != NULL && lookups == 0) {
        fl_detach_backing(loop, node);
        memset(node, 0, sizeof *node);
        node->fd = -1;
    }
    kvfs_unlock(&loop->nodes_lock);
    return lookups;
}

uint64_t fl_drain_misses(struct fuse_loop *loop) {
    kvfs_lock(&loop->nodes_lock);
    uint64_t misses = loop->misses;
    loop->misses = 0;
    kvfs_unlock(&loop->nodes_lock);
    return misses;
}
