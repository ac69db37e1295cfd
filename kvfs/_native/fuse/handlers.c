/* The requests that the loop answers by itself: about sealed files, files being written, known names. See loop.h.
 *
 * Each handler returns whether it has answered; after 0 the request goes to the calls or the relay.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "shared/slots_core.h"
#include "state.h"

static int open_slot(struct fuse_loop *loop, uint32_t slot, int flags) {
    char name[KVFS_SLOT_NAME_BYTES];
    kvfs_slot_name(slot, name);
    int fd = openat(loop->config.slots_dir_fd, name, flags | O_CLOEXEC | O_NONBLOCK);
    return fd < 0 ? -errno : fd;
}

static int slot_is(struct fuse_loop *loop, uint32_t slot, uint32_t generation) {
    if (slot >= loop->config.slot_count) return 0;
    const char *at = loop->config.generations + (uint64_t)slot * loop->config.generation_stride;
    return __atomic_load_n((const uint32_t *)at, __ATOMIC_ACQUIRE) == generation;
}

/* Makes `fd` the node's backing. Takes over nothing: the caller closes `fd`. */
int fl_attach_backing(struct fuse_loop *loop, struct fl_node *node, int fd) {
    int marked = kvfs_fd_mark_read(fd);
    if (marked < 0) return marked;
    if (loop->passthrough) {
        struct fw_backing_map map = {.fd = fd};
        int id = ioctl(loop->config.dev_fd, FW_IOC_BACKING_OPEN, &map);
        if (id >= 0) {
            node->backing_id = id;
            return 0;
        }
        /* EPERM: no CAP_SYS_ADMIN; EOPNOTSUPP, ENOTTY, EINVAL: a kernel without it. Others may pass. */
        if (loop->passthrough_used || (errno != EPERM && errno != EOPNOTSUPP && errno != ENOTTY && errno != EINVAL))
            return -errno;
        loop->passthrough = 0;
    }
    if (!loop->passthrough) {
        int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
        if (copy < 0) return -errno;
        node->fd = copy;
    }
    return 0;
}

void fl_detach_backing(struct fuse_loop *loop, struct fl_node *node) {
    if (node->backing_id > 0) {
        uint32_t id = (uint32_t)node->backing_id;
        ioctl(loop->config.dev_fd, FW_IOC_BACKING_CLOSE, &id);
        node->backing_id = 0;
    }
    if (node->fd >= 0) {
        close(node->fd);
        node->fd = -1;
    }
}

/* A handle of the library that may write (mounts/tree/handles.py). */
#define WRITABLE_HANDLE 1ull

/* Opens a sealed node for reading. -EAGAIN: relay it. That includes a replaced one: its opener is answered ESTALE, looks
 * the name up again, and is expected then. */
static int open_sealed(struct fuse_loop *loop, const struct fw_in_header *in, struct fw_open_out *out)
    REQUIRES(loop->nodes_lock) {
    struct fl_node *node = fl_find(loop, in->nodeid);
    if (node == NULL || __atomic_load_n(&loop->relay_opens, __ATOMIC_RELAXED) || node->state != FL_SEALED)
        return -EAGAIN;
    if (fl_is_expected(loop, in->pid) || !slot_is(loop, node->slot, node->generation)) return -EAGAIN;
    if (node->opens == 0) {
        int fd = open_slot(loop, node->slot, O_RDONLY);
        if (fd < 0) return fd == -EWOULDBLOCK || fd == -ENOENT ? -EAGAIN : fd;
        int status = slot_is(loop, node->slot, node->generation) ? fl_attach_backing(loop, node, fd) : -EAGAIN;
        close(fd);
        if (status < 0) return status;
    }
    node->opens++;
    out->fh = FL_NATIVE_HANDLE | in->nodeid;
    out->backing_id = node->backing_id;
    out->open_flags = loop->passthrough ? FW_FOPEN_PASSTHROUGH : FW_FOPEN_KEEP_CACHE;
    if (!fl_reports_close(loop, node)) out->open_flags |= FW_FOPEN_NOFLUSH;
    fl_record_open(loop, in->nodeid, in->uid, in->pid);
    return 0;
}

static int handle_open(struct fuse_loop *loop, const struct fw_in_header *in, const struct fw_open_in *body) {
    struct fw_open_out out = {0};
    if ((body->flags & O_ACCMODE) != O_RDONLY || (body->flags & O_TRUNC)) return 0;
    kvfs_lock(&loop->nodes_lock);
    int status = open_sealed(loop, in, &out);
    kvfs_unlock(&loop->nodes_lock);
    if (status == -EAGAIN) return 0;
    if (status == 0)
        fl_answer(loop, in->unique, 0, &out, sizeof out);
    else
        fl_answer(loop, in->unique, status, NULL, 0);
    fl_count(&loop->stats.native_opens);
    return 1;
}

static int handle_release(struct fuse_loop *loop, const struct fw_in_header *in, const struct fw_release_in *body) {
    int native = (body->fh & FL_NATIVE_HANDLE) != 0;
    int last = !native || fl_release(loop, body->fh & ~FL_NATIVE_HANDLE) == 0;
    fl_locks_release(loop, in->nodeid, body, last);
    if (!native) return 0;
    fl_answer(loop, in->unique, 0, NULL, 0);
    return 1;
}

/* The node's attributes as they are now: a draft's size and times are the slot file's. 0, or -errno. */
int fl_current_attr(struct fuse_loop *loop, const struct fl_node *node, struct fw_attr *attr, uint64_t *valid_s) {
    *attr = node->attr;
    *valid_s = loop->config.attr_valid_s;
    if (node->state != FL_DRAFT) return node->attr.mode == 0 ? -EAGAIN : 0;
    struct stat status;
    char name[KVFS_SLOT_NAME_BYTES];
    kvfs_slot_name(node->slot, name);
    if (fstatat(loop->config.slots_dir_fd, name, &status, 0) < 0 || !slot_is(loop, node->slot, node->generation))
        return -EAGAIN;
    *valid_s = 0; /* passthrough writes change it without a request */
    attr->size = (uint64_t)status.st_size;
    attr->blocks = (uint64_t)status.st_blocks;
    attr->atime = (uint64_t)status.st_atim.tv_sec;
    attr->atimensec = (uint32_t)status.st_atim.tv_nsec;
    attr->mtime = (uint64_t)status.st_mtim.tv_sec;
    attr->mtimensec = (uint32_t)status.st_mtim.tv_nsec;
    uint64_t ctime = (uint64_t)status.st_ctim.tv_sec;
    uint32_t ctimensec = (uint32_t)status.st_ctim.tv_nsec;
    if (ctime > attr->ctime || (ctime == attr->ctime && ctimensec > attr->ctimensec)) {
        attr->ctime = ctime; /* else its attributes were set after its bytes */
        attr->ctimensec = ctimensec;
    }
    return 0;
}

static int handle_getattr(struct fuse_loop *loop, const struct fw_in_header *in) {
    struct fw_attr_out out = {0};
    kvfs_lock(&loop->nodes_lock);
    struct fl_node *node = fl_find(loop, in->nodeid);
    int ours = node != NULL && node->state != FL_DEAD && fl_current_attr(loop, node, &out.attr, &out.attr_valid) == 0;
    if (ours) node->asked = 1;
    kvfs_unlock(&loop->nodes_lock);
    if (!ours) return 0;
    fl_answer(loop, in->unique, 0, &out, sizeof out);
    fl_count(&loop->stats.native_getattrs);
    return 1;
}

/* Names that have an edge to a node, and those without an edge where all names are known. What is unknown here
 * may well exist: it is a call. */
static int handle_lookup(struct fuse_loop *loop, const struct fw_in_header *in, const char *name) {
    struct fw_entry_out out = {.entry_valid = loop->config.attr_valid_s};
    uint32_t length = (uint32_t)strlen(name);
    kvfs_lock(&loop->nodes_lock);
    const struct fl_edge *edge = fl_edge_find(loop, in->nodeid, name, length);
    struct fl_node *node = edge == NULL ? NULL : fl_find(loop, edge->nodeid);
    int nothing = edge == NULL && fl_names_known(fl_find(loop, in->nodeid), length);
    int ours = node != NULL && (node->state == FL_DRAFT || node->state == FL_OTHER ||
                                (node->state == FL_SEALED && slot_is(loop, node->slot, node->generation)));
    if (ours) ours = !fl_is_expected(loop, in->pid) && fl_current_attr(loop, node, &out.attr, &out.attr_valid) == 0;
    if (ours) {
        out.nodeid = node->nodeid;
        node->lookups++;
        node->asked = 1;
    }
    loop->misses += (uint64_t)nothing;
    kvfs_unlock(&loop->nodes_lock);
    if (!ours && !nothing) return 0;
    fl_answer(loop, in->unique, nothing ? -ENOENT : 0, &out, nothing ? 0 : sizeof out);
    fl_count(&loop->stats.native_lookups);
    return 1;
}

/* Takes from the lookups counted here first; `lookups` becomes what is left for the library. When none are
 * left here, the library is notified by a call, since it may have kept the node for them alone.
 * 0: that call found no room, and the message has to be relayed. */
static int forget_node(struct fuse_loop *loop, uint64_t nodeid, uint64_t *lookups) {
    kvfs_lock(&loop->nodes_lock);
    struct fl_node *node = fl_find(loop, nodeid);
    uint64_t here = node == NULL ? 0 : node->lookups;
    uint64_t taken = here < *lookups ? here : *lookups;
    if (node != NULL) node->lookups -= taken;
    kvfs_unlock(&loop->nodes_lock);
    *lookups -= taken;
    if (here > taken) return 1;
    struct fl_call call = {.opcode = FW_FORGET, .nodeid = nodeid, .other = *lookups};
    if (fl_call_put(loop, &call) < 0) return 0;
    fl_calls_notify(loop, 1);
    *lookups = 0;
    return 1;
}

static int handle_batch_forget(struct fuse_loop *loop, const struct fw_in_header *in, struct fw_batch_forget_in *body) {
    struct fw_forget_one *each = (struct fw_forget_one *)(body + 1);
    uint64_t room = (in->len - sizeof *in - sizeof *body) / sizeof *each;
    int handled = 1;
    for (uint32_t i = 0; i < body->count && i < room; i++)
        handled &= forget_node(loop, each[i].nodeid, &each[i].nlookup);
    return handled;
}

/* A descriptor of the node's bytes that stays valid after the lock is gone, or -EAGAIN. The caller closes it, and ends
 * the `ticket`, if it wants one: it has one then, unless this failed. */
static int node_descriptor(struct fuse_loop *loop, uint64_t nodeid, struct fl_ticket *ticket) {
    kvfs_lock(&loop->nodes_lock);
    struct fl_node *node = fl_find(loop, nodeid);
    int fd = -EAGAIN;
    if (node != NULL && node->fd >= 0) {
        fd = fcntl(node->fd, F_DUPFD_CLOEXEC, 0);
        if (fd < 0) fd = -errno;
    }
    if (fd >= 0 && ticket != NULL) *ticket = fl_ticket_take(node);
    kvfs_unlock(&loop->nodes_lock);
    return fd;
}

static int handle_read(struct fuse_loop *loop, struct fl_server *server, const struct fw_in_header *in,
                       const struct fw_read_in *body) {
    int fd = node_descriptor(loop, in->nodeid, NULL);
    if (fd == -EAGAIN) return 0;
    fl_step_aside(server);
    uint32_t size = body->size < loop->config.buffer_size ? body->size : loop->config.buffer_size;
    ssize_t got = fd < 0 ? -1 : pread(fd, server->reply, size, (off_t)body->offset);
    if (got < 0)
        fl_answer(loop, in->unique, fd < 0 ? fd : -errno, NULL, 0);
    else
        fl_answer(loop, in->unique, 0, server->reply, (uint32_t)got);
    if (fd >= 0) close(fd);
    fl_count(&loop->stats.native_reads);
    return 1;
}

static int handle_write(struct fuse_loop *loop, struct fl_server *server, const struct fw_in_header *in,
                        const struct fw_write_in *body) {
    struct fl_ticket ticket = {0};
    int fd = node_descriptor(loop, in->nodeid, &ticket);
    if (fd == -EAGAIN) return 0;
    fl_step_aside(server);
    fl_ticket_wait(loop, ticket);
    size_t room = in->len - sizeof *in - sizeof *body;
    size_t size = body->size < room ? body->size : room;
    if (fd >= 0 && body->offset + size > loop->largest_object) {
        close(fd);
        fd = -EFBIG;
    }
    ssize_t written = fd < 0 ? -1 : pwrite(fd, body + 1, size, (off_t)body->offset);
    int status = written >= 0 ? 0 : fd < 0 ? fd : -errno;
    struct fw_write_out out = {.size = written < 0 ? 0 : (uint32_t)written};
    fl_ticket_end(loop, ticket);
    if (status < 0)
        fl_answer(loop, in->unique, status, NULL, 0);
    else
        fl_answer(loop, in->unique, 0, &out, sizeof out);
    if (fd >= 0) close(fd);
    fl_count(&loop->stats.native_writes);
    return 1;
}

static int handle_getxattr(struct fuse_loop *loop, const struct fw_in_header *in, const char *name) {
    /* The kernel asks for security.capability before the first write to every inode. */
    if (strncmp(name, "security.", 9) != 0 && strncmp(name, "system.", 7) != 0) return 0;
    fl_answer(loop, in->unique, -ENODATA, NULL, 0);
    return 1;
}

/* Opens the slot behind a node, checking that it still is that slot. -EAGAIN: the node has none. */
static int open_node_slot(struct fuse_loop *loop, uint64_t nodeid, int writable, struct fl_ticket *ticket) {
    kvfs_lock(&loop->nodes_lock);
    struct fl_node *node = fl_find(loop, nodeid);
    int fd = -EAGAIN;
    if (node != NULL && (node->state == FL_DRAFT || node->state == FL_SEALED)) {
        if (writable && node->state != FL_DRAFT)
            fd = -EBADF;
        else
            fd = open_slot(loop, node->slot, writable ? O_RDWR : O_RDONLY);
        if (fd >= 0 && !slot_is(loop, node->slot, node->generation)) {
            close(fd);
            fd = -ESTALE;
        }
        if (fd >= 0 && ticket != NULL) *ticket = fl_ticket_take(node);
    }
    kvfs_unlock(&loop->nodes_lock);
    return fd;
}

/* `server`: the thread that asks, which is no reader meanwhile; NULL for the library's thread. */
static int allocate(struct fuse_loop *loop, struct fl_server *server, uint64_t nodeid, uint32_t mode, uint64_t offset,
                    uint64_t length) {
    struct fl_ticket ticket = {0};
    if (length > loop->largest_object || offset > loop->largest_object - length) return -EFBIG;
    int fd = open_node_slot(loop, nodeid, 1, &ticket);
    if (fd < 0) return fd == -EAGAIN ? -EOPNOTSUPP : fd;
    if (server != NULL) fl_step_aside(server);
    fl_ticket_wait(loop, ticket);
    int status = fallocate(fd, (int)mode, (off_t)offset, (off_t)length) < 0 ? -errno : 0;
    close(fd);
    fl_ticket_end(loop, ticket);
    return status;
}

int fl_allocate(struct fuse_loop *loop, uint64_t nodeid, uint32_t mode, uint64_t offset, uint64_t length) {
    return allocate(loop, NULL, nodeid, mode, offset, length);
}

/* A full tier: the store makes room first. Never relayed: the library's ENOSYS would end FALLOCATE for good. */
static int handle_fallocate(struct fuse_loop *loop, struct fl_server *server, const struct fw_in_header *in,
                            const struct fw_fallocate_in *body) {
    int status = allocate(loop, server, in->nodeid, body->mode, body->offset, body->length);
    if (status == -ENOSPC && fl_queue_call(loop, in)) return 1;
    fl_answer(loop, in->unique, status, NULL, 0);
    return 1;
}

/* SEEK_DATA and SEEK_HOLE of what has no slot: all of it is data, as lseek(2) allows. */
static int seek_in_size(struct fuse_loop *loop, uint64_t nodeid, const struct fw_lseek_in *body, uint64_t *offset) {
    kvfs_lock(&loop->nodes_lock);
    struct fl_node *node = fl_find(loop, nodeid);
    int known = node != NULL && node->state == FL_OTHER && S_ISREG(node->attr.mode);
    uint64_t size = known ? node->attr.size : 0;
    kvfs_unlock(&loop->nodes_lock);
    if (!known || (body->whence != SEEK_DATA && body->whence != SEEK_HOLE)) return -EINVAL;
    *offset = body->whence == SEEK_DATA ? body->offset : size;
    return body->offset < size ? 0 : -ENXIO;
}

static int handle_lseek(struct fuse_loop *loop, const struct fw_in_header *in, const struct fw_lseek_in *body) {
    int fd = open_node_slot(loop, in->nodeid, 0, NULL);
    struct fw_lseek_out out = {0};
    int status = fd == -EAGAIN ? seek_in_size(loop, in->nodeid, body, &out.offset) : fd;
    if (fd >= 0) {
        off_t found = lseek(fd, (off_t)body->offset, (int)body->whence);
        status = found < 0 ? -errno : 0;
        out.offset = found < 0 ? 0 : (uint64_t)found;
        close(fd);
    }
    fl_answer(loop, in->unique, status < 0 ? status : 0, &out, status < 0 ? 0 : sizeof out);
    return 1;
}

static ssize_t read_proc(uint32_t pid, const char *what, char *text, size_t room) {
    char path[40];
    snprintf(path, sizeof path, "/proc/%u/%s", pid, what);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? -1 : read(fd, text, room - 1);
    if (fd >= 0) close(fd);
    if (size > 0) text[size] = 0;
    return size;
}

/* Whether a task is exiting because of a signal. close() waits for FLUSH, so the task is still there.
 * Source: proc_pid_stat(5): field 9 is the task's flags (PF_EXITING = 4), field 52 the exit code. An exiting
 * task has given up its memory before its files (do_exit): statm separates the living at a fifth of stat's cost. */
int fl_died_by_signal(uint32_t pid) {
    char text[1024];
    if (read_proc(pid, "statm", text, sizeof text) <= 0 || strncmp(text, "0 ", 2) != 0) return 0;
    if (read_proc(pid, "stat", text, sizeof text) <= 0) return 0;
    const char *at = strrchr(text, ')'); /* the command's name may hold blanks */
    unsigned long flags = 0, exit_code = 0;
    for (int field = 3; at != NULL && field <= 52; field++) {
        at = strchr(at + 1, ' ');
        if (at == NULL) return 0;
        if (field == 9) flags = strtoul(at + 1, NULL, 10);
        if (field == 52) exit_code = strtoul(at + 1, NULL, 10);
    }
    return at != NULL && (flags & 4) != 0 && (exit_code & 0x7f) != 0;
}

/* close() of a handle: an object over the limit is refused while the writer can still see it, and a writer
 * that dies by a signal is remembered, so that its draft is not published. A reader's end says nothing.
 * What has no slot is written to NVMe by the library, which answers when it has done so. */
static int handle_flush(struct fuse_loop *loop, const struct fw_in_header *in, const struct fw_flush_in *body) {
    fl_locks_flush(loop, in->nodeid, body->lock_owner);
    struct fw_attr attr = {0};
    uint64_t valid_s;
    int writable = (body->fh & WRITABLE_HANDLE) != 0 && !(body->fh & FL_NATIVE_HANDLE);
    int killed = writable && fl_died_by_signal(in->pid);
    kvfs_lock(&loop->nodes_lock);
    struct fl_node *node = fl_find(loop, in->nodeid);
    int ours = node != NULL && (node->state == FL_DRAFT || node->state == FL_SEALED);
    if (ours && fl_current_attr(loop, node, &attr, &valid_s) < 0) attr.size = 0;
    if (node != NULL && !(body->fh & FL_NATIVE_HANDLE)) {
        if (writable) node->killed = (uint8_t)killed;
        node->flushed = 1;
    }
    int settles = ours && node->settles;
    kvfs_unlock(&loop->nodes_lock);
    int too_large = attr.size > loop->largest_object;
    if (!ours && (body->fh & FL_NATIVE_HANDLE)) {
        fl_answer(loop, in->unique, 0, NULL, 0);
        return 1;
    }
    if (!ours || (settles && writable && !too_large)) return 0;
    fl_answer(loop, in->unique, too_large ? -EFBIG : 0, NULL, 0);
    return 1;
}

/* The request's body as what its kind has. */
#define BODY(type) ((type *)(in + 1))

/* Whether a request is one that this loop answers by itself; then it has been answered. */
int fl_handle_natively(struct fuse_loop *loop, struct fl_server *server, struct fw_in_header *in) {
    switch (in->opcode) {
    case FW_LOOKUP:
        return handle_lookup(loop, in, BODY(const char));
    case FW_FORGET:
        return forget_node(loop, in->nodeid, BODY(uint64_t));
    case FW_BATCH_FORGET:
        return handle_batch_forget(loop, in, BODY(struct fw_batch_forget_in));
    case FW_GETATTR:
        return handle_getattr(loop, in);
    case FW_OPEN:
        return handle_open(loop, in, BODY(struct fw_open_in));
    case FW_RELEASE:
        return handle_release(loop, in, BODY(struct fw_release_in));
    case FW_READ:
        return handle_read(loop, server, in, BODY(struct fw_read_in));
    case FW_WRITE:
        return handle_write(loop, server, in, BODY(struct fw_write_in));
    case FW_GETXATTR:
        return handle_getxattr(loop, in, (const char *)(BODY(struct fw_getxattr_in) + 1));
    case FW_FALLOCATE:
        return handle_fallocate(loop, server, in, BODY(struct fw_fallocate_in));
    case FW_LSEEK:
        return handle_lseek(loop, in, BODY(struct fw_lseek_in));
    case FW_FLUSH:
        return handle_flush(loop, in, BODY(struct fw_flush_in));
    case FW_INTERRUPT:
        return fl_handle_interrupt(loop, *BODY(uint64_t));
    case FW_GETLK:
        return fl_handle_getlk(loop, in, BODY(struct fw_lk_in));
    case FW_SETLK:
    case FW_SETLKW:
        return fl_handle_setlk(loop, in, BODY(struct fw_lk_in));
    case FW_CREATE:
        return fl_handle_create(loop, in, BODY(struct fw_create_in));
    case FW_READDIRPLUS:
        return fl_handle_readdir(loop, server, in, BODY(struct fw_read_in));
    case FW_RENAME:
        return fl_handle_rename(server, in, BODY(struct fw_rename_in)->newdir, 0,
                                (const char *)(BODY(struct fw_rename_in) + 1));
    case FW_RENAME2:
        return fl_handle_rename(server, in, BODY(struct fw_rename2_in)->newdir, BODY(struct fw_rename2_in)->flags,
                                (const char *)(BODY(struct fw_rename2_in) + 1));
    default:
        return 0;
    }
}
