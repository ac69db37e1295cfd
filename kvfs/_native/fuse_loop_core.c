/* See fuse_loop_core.h. This file: life, threads, relay and native answers. */
#include "fuse_loop_core.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "fuse_loop_state.h"

/* --- answers ---------------------------------------------------------------------------------------- */

static void write_device(struct fuse_loop *loop, const struct iovec *parts, int count) {
    /* ENOENT: the request was interrupted and the kernel no longer waits; ENODEV: the mount is gone. */
    ssize_t written = writev(loop->config.dev_fd, parts, count);
    (void)written;
}

static void answer(struct fuse_loop *loop, uint64_t unique, int error, const void *body, uint32_t size) {
    struct fw_out_header header = {.len = sizeof header + size, .error = error, .unique = unique};
    struct iovec parts[2] = {{&header, sizeof header}, {(void *)body, size}};
    write_device(loop, parts, size ? 2 : 1);
}

static int open_slot(struct fuse_loop *loop, uint32_t slot, int flags) {
    char name[16];
    snprintf(name, sizeof name, "%08x", slot);
    int fd = openat(loop->config.slots_dir_fd, name, flags | O_CLOEXEC | O_NONBLOCK);
    return fd < 0 ? -errno : fd;
}

static int slot_is(struct fuse_loop *loop, uint32_t slot, uint32_t generation) {
    if (slot >= loop->config.slot_count) return 0;
    const char *at = loop->config.generations + (uint64_t)slot * loop->config.generation_stride;
    return __atomic_load_n((const uint32_t *)at, __ATOMIC_ACQUIRE) == generation;
}

/* Makes `fd` the node's backing. Takes over nothing: the caller closes `fd`. */
static int attach_backing(struct fuse_loop *loop, struct fl_node *node, int fd) {
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

static void detach_backing(struct fuse_loop *loop, struct fl_node *node) {
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

/* A handle that this loop gave out: the library's handles are small counters. */
#define NATIVE_HANDLE (1ull << 63)
/* A handle of the library that may write (mounts/files.py). */
#define WRITABLE_HANDLE 1ull

/* Opens a sealed node for reading. -EAGAIN: not ours, relay it. */
static int open_sealed(struct fuse_loop *loop, const struct fw_in_header *in, struct fw_open_out *out) {
    struct fl_node *node = fl_find(loop, in->nodeid);
    if (node == NULL || loop->relay_opens) return -EAGAIN;
    if (node->state == FL_DEAD) return -ESTALE;
    if (node->state != FL_SEALED) return -EAGAIN;
    if (!slot_is(loop, node->slot, node->generation)) return -ESTALE;
    if (node->opens == 0) {
        int fd = open_slot(loop, node->slot, O_RDONLY);
        if (fd < 0) return fd == -EWOULDBLOCK || fd == -ENOENT ? -ESTALE : fd;
        int status = slot_is(loop, node->slot, node->generation) ? attach_backing(loop, node, fd) : -ESTALE;
        close(fd);
        if (status < 0) return status;
    }
    node->opens++;
    out->fh = NATIVE_HANDLE | in->nodeid;
    out->backing_id = node->backing_id;
    out->open_flags = FW_FOPEN_NOFLUSH | (loop->passthrough ? FW_FOPEN_PASSTHROUGH : FW_FOPEN_KEEP_CACHE);
    fl_record_open(loop, in->nodeid, in->uid, in->pid);
    return 0;
}

static int handle_open(struct fuse_loop *loop, const struct fw_in_header *in, const struct fw_open_in *body) {
    struct fw_open_out out = {0};
    if ((body->flags & O_ACCMODE) != O_RDONLY || (body->flags & O_TRUNC)) return 0;
    pthread_mutex_lock(&loop->nodes_lock);
    int status = open_sealed(loop, in, &out);
    pthread_mutex_unlock(&loop->nodes_lock);
    if (status == -EAGAIN) return 0;
    if (status == 0)
        answer(loop, in->unique, 0, &out, sizeof out);
    else
        answer(loop, in->unique, status, NULL, 0);
    fl_count(&loop->stats.native_opens);
    return 1;
}

static int handle_release(struct fuse_loop *loop, const struct fw_in_header *in, const struct fw_release_in *body) {
    if (!(body->fh & NATIVE_HANDLE)) return 0;
    fl_release(loop, body->fh & ~NATIVE_HANDLE);
    answer(loop, in->unique, 0, NULL, 0);
    return 1;
}

/* The node's attributes as they are now: a draft's size and times are the slot file's. 0, or -errno. */
static int current_attr(struct fuse_loop *loop, const struct fl_node *node, struct fw_attr *attr, uint64_t *valid_s) {
    *attr = node->attr;
    *valid_s = loop->config.attr_valid_s;
    if (node->state != FL_DRAFT) return node->attr.mode == 0 ? -EAGAIN : 0;
    struct stat status;
    char name[16];
    snprintf(name, sizeof name, "%08x", node->slot);
    if (fstatat(loop->config.slots_dir_fd, name, &status, 0) < 0 || !slot_is(loop, node->slot, node->generation))
        return -EAGAIN;
    *valid_s = 0; /* passthrough writes change it without a request */
    attr->size = (uint64_t)status.st_size;
    attr->blocks = (uint64_t)status.st_blocks;
    attr->atime = (uint64_t)status.st_atim.tv_sec;
    attr->atimensec = (uint32_t)status.st_atim.tv_nsec;
    attr->mtime = (uint64_t)status.st_mtim.tv_sec;
    attr->mtimensec = (uint32_t)status.st_mtim.tv_nsec;
    attr->ctime = (uint64_t)status.st_ctim.tv_sec;
    attr->ctimensec = (uint32_t)status.st_ctim.tv_nsec;
    return 0;
}

static int handle_getattr(struct fuse_loop *loop, const struct fw_in_header *in) {
    struct fw_attr_out out = {0};
    pthread_mutex_lock(&loop->nodes_lock);
    struct fl_node *node = fl_find(loop, in->nodeid);
    int ours = node != NULL && node->state != FL_DEAD && current_attr(loop, node, &out.attr, &out.attr_valid) == 0;
    pthread_mutex_unlock(&loop->nodes_lock);
    if (!ours) return 0;
    answer(loop, in->unique, 0, &out, sizeof out);
    fl_count(&loop->stats.native_getattrs);
    return 1;
}

/* Names that the library has linked. What is unknown here may well exist: it is relayed. */
static int handle_lookup(struct fuse_loop *loop, const struct fw_in_header *in, const char *name) {
    struct fw_entry_out out = {.entry_valid = loop->config.attr_valid_s};
    pthread_mutex_lock(&loop->nodes_lock);
    struct fl_node *node = fl_child(loop, in->nodeid, name, (uint32_t)strlen(name));
    int ours = node != NULL && (node->state == FL_DRAFT || node->state == FL_OTHER ||
                                (node->state == FL_SEALED && slot_is(loop, node->slot, node->generation)));
    if (ours) ours = current_attr(loop, node, &out.attr, &out.attr_valid) == 0;
    if (ours) {
        out.nodeid = node->nodeid;
        node->lookups++;
    }
    pthread_mutex_unlock(&loop->nodes_lock);
    if (!ours) return 0;
    answer(loop, in->unique, 0, &out, sizeof out);
    fl_count(&loop->stats.native_lookups);
    return 1;
}

/* Takes from the lookups counted here first; `lookups` becomes what is left for the library. When none are
 * left here, the library is told by a call, since it may have kept the node for them alone.
 * 0: that call found no room, and the message has to be relayed. */
static int forget_node(struct fuse_loop *loop, uint64_t nodeid, uint64_t *lookups) {
    pthread_mutex_lock(&loop->nodes_lock);
    struct fl_node *node = fl_find(loop, nodeid);
    uint64_t here = node == NULL ? 0 : node->lookups;
    uint64_t taken = here < *lookups ? here : *lookups;
    if (node != NULL) node->lookups -= taken;
    pthread_mutex_unlock(&loop->nodes_lock);
    *lookups -= taken;
    if (here > taken) return 1;
    struct fl_call call = {.opcode = FW_FORGET, .nodeid = nodeid, .other = *lookups};
    if (fl_call_put(loop, &call) < 0) return 0;
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

/* A descriptor of the node's bytes that stays valid after the lock is gone, or -EAGAIN. The caller closes it. */
static int node_descriptor(struct fuse_loop *loop, uint64_t nodeid) {
    pthread_mutex_lock(&loop->nodes_lock);
    struct fl_node *node = fl_find(loop, nodeid);
    int fd = -EAGAIN;
    if (node != NULL && node->fd >= 0) {
        fd = fcntl(node->fd, F_DUPFD_CLOEXEC, 0);
        if (fd < 0) fd = -errno;
    }
    pthread_mutex_unlock(&loop->nodes_lock);
    return fd;
}

static int handle_read(struct fuse_loop *loop, struct fl_buffers *buffers, const struct fw_in_header *in,
                       const struct fw_read_in *body) {
    int fd = node_descriptor(loop, in->nodeid);
    if (fd == -EAGAIN) return 0;
    uint32_t size = body->size < loop->config.buffer_size ? body->size : loop->config.buffer_size;
    ssize_t got = fd < 0 ? -1 : pread(fd, buffers->reply, size, (off_t)body->offset);
    if (got < 0)
        answer(loop, in->unique, fd < 0 ? fd : -errno, NULL, 0);
    else
        answer(loop, in->unique, 0, buffers->reply, (uint32_t)got);
    if (fd >= 0) close(fd);
    fl_count(&loop->stats.native_reads);
    return 1;
}

static int handle_write(struct fuse_loop *loop, const struct fw_in_header *in, const struct fw_write_in *body) {
    int fd = node_descriptor(loop, in->nodeid);
    if (fd == -EAGAIN) return 0;
    size_t room = in->len - sizeof *in - sizeof *body;
    size_t size = body->size < room ? body->size : room;
    ssize_t written = fd < 0 ? -1 : pwrite(fd, body + 1, size, (off_t)body->offset);
    struct fw_write_out out = {.size = written < 0 ? 0 : (uint32_t)written};
    if (written < 0)
        answer(loop, in->unique, fd < 0 ? fd : -errno, NULL, 0);
    else
        answer(loop, in->unique, 0, &out, sizeof out);
    if (fd >= 0) close(fd);
    fl_count(&loop->stats.native_writes);
    return 1;
}

static int handle_getxattr(struct fuse_loop *loop, const struct fw_in_header *in, const char *name) {
    /* The kernel asks for security.capability before the first write to every inode. */
    if (strncmp(name, "security.", 9) != 0 && strncmp(name, "system.", 7) != 0) return 0;
    answer(loop, in->unique, -ENODATA, NULL, 0);
    return 1;
}

/* Opens the slot behind a node, checking that it still is that slot. -EAGAIN: the node has none. */
static int open_node_slot(struct fuse_loop *loop, uint64_t nodeid, int writable) {
    pthread_mutex_lock(&loop->nodes_lock);
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
    }
    pthread_mutex_unlock(&loop->nodes_lock);
    return fd;
}

static int handle_fallocate(struct fuse_loop *loop, const struct fw_in_header *in,
                            const struct fw_fallocate_in *body) {
    int fd = open_node_slot(loop, in->nodeid, 1);
    int status = fd == -EAGAIN ? -EOPNOTSUPP : fd;
    if (fd >= 0) {
        uint64_t end = body->offset + body->length;
        if (end > loop->largest_object)
            status = -EFBIG;
        else
            status = fallocate(fd, (int)body->mode, (off_t)body->offset, (off_t)body->length) < 0 ? -errno : 0;
        close(fd);
    }
    answer(loop, in->unique, status, NULL, 0);
    return 1;
}

static int handle_lseek(struct fuse_loop *loop, const struct fw_in_header *in, const struct fw_lseek_in *body) {
    int fd = open_node_slot(loop, in->nodeid, 0);
    struct fw_lseek_out out = {0};
    int status = fd == -EAGAIN ? -EINVAL : fd;
    if (fd >= 0) {
        off_t found = lseek(fd, (off_t)body->offset, (int)body->whence);
        status = found < 0 ? -errno : 0;
        out.offset = found < 0 ? 0 : (uint64_t)found;
        close(fd);
    }
    answer(loop, in->unique, status < 0 ? status : 0, &out, status < 0 ? 0 : sizeof out);
    return 1;
}

/* Whether a task is exiting because of a signal. close() waits for FLUSH, so the task is still there.
 * Source: proc_pid_stat(5): field 9 is the task's flags (PF_EXITING = 4), field 52 the exit code. */
int fl_died_by_signal(uint32_t pid) {
    char path[32], text[1024];
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t size = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0) close(fd);
    if (size <= 0) return 0;
    text[size] = 0;
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

/* close() of a handle: an object over the limit is refused while the writer can still be told, and a writer
 * that dies by a signal is remembered, so that what it leaves is not published. */
static int handle_flush(struct fuse_loop *loop, const struct fw_in_header *in, const uint64_t *handle) {
    int fd = open_node_slot(loop, in->nodeid, 0);
    if (fd == -EAGAIN) return 0;
    struct stat status;
    int killed = fl_died_by_signal(in->pid);
    int result = fd >= 0 && fstat(fd, &status) == 0 && (uint64_t)status.st_size > loop->largest_object ? -EFBIG : 0;
    if (fd >= 0) close(fd);
    pthread_mutex_lock(&loop->nodes_lock);
    struct fl_node *node = fl_find(loop, in->nodeid);
    if (node != NULL) {
        if (*handle & WRITABLE_HANDLE) node->killed = (uint8_t)killed; /* a reader's end says nothing of the bytes */
        node->flushed = 1;
    }
    pthread_mutex_unlock(&loop->nodes_lock);
    answer(loop, in->unique, result, NULL, 0);
    return 1;
}

/* --- calls ------------------------------------------------------------------------------------------ */

static int set_name(char *to, uint16_t *length, const char *from) {
    size_t size = strlen(from);
    if (size > FL_CALL_NAME_MAX) return -ENAMETOOLONG;
    memcpy(to, from, size);
    *length = (uint16_t)size;
    return 0;
}

static int set_names(struct fl_call *call, uint64_t new_parent, const char *names) {
    call->other = new_parent;
    int status = set_name(call->name, &call->name_length, names);
    return status < 0 ? status : set_name(call->new_name, &call->new_length, names + call->name_length + 1);
}

/* The request as a call; 0 where it is none. */
static int as_call(const struct fw_in_header *in, struct fl_call *call) {
    const void *body = in + 1;
    *call = (struct fl_call){.unique = in->unique, .nodeid = in->nodeid, .opcode = in->opcode};
    call->uid = in->uid;
    call->gid = in->gid;
    call->pid = in->pid;
    switch (in->opcode) {
    case FW_LOOKUP:
    case FW_UNLINK:
        return set_name(call->name, &call->name_length, body) == 0;
    case FW_CREATE:
        call->flags = ((const struct fw_create_in *)body)->flags;
        call->mode = ((const struct fw_create_in *)body)->mode;
        return set_name(call->name, &call->name_length, (const char *)body + sizeof(struct fw_create_in)) == 0;
    case FW_RENAME:
        call->opcode = FW_RENAME2;
        return set_names(call, ((const struct fw_rename_in *)body)->newdir,
                         (const char *)body + sizeof(struct fw_rename_in)) == 0;
    case FW_RENAME2:
        call->flags = ((const struct fw_rename2_in *)body)->flags;
        return set_names(call, ((const struct fw_rename2_in *)body)->newdir,
                         (const char *)body + sizeof(struct fw_rename2_in)) == 0;
    case FW_RELEASE:
        call->other = ((const struct fw_release_in *)body)->fh;
        return 1;
    default:
        return 0;
    }
}

/* Queues the request as a call where it is one. */
static int queue_call(struct fuse_loop *loop, const struct fw_in_header *in) {
    struct fl_call call;
    if (!as_call(in, &call) || fl_call_put(loop, &call) < 0) return 0;
    /* Nobody waits for RELEASE, and what it starts needs no answer. */
    if (in->opcode == FW_RELEASE) answer(loop, in->unique, 0, NULL, 0);
    fl_count(&loop->stats.calls);
    return 1;
}

/* Whether a request is one that this loop answers by itself; then it has been answered. */
static int handle_natively(struct fuse_loop *loop, struct fl_buffers *buffers, struct fw_in_header *in) {
    void *body = in + 1;
    switch (in->opcode) {
    case FW_LOOKUP:
        return handle_lookup(loop, in, body);
    case FW_FORGET:
        return forget_node(loop, in->nodeid, body);
    case FW_BATCH_FORGET:
        return handle_batch_forget(loop, in, body);
    case FW_GETATTR:
        return handle_getattr(loop, in);
    case FW_OPEN:
        return handle_open(loop, in, body);
    case FW_RELEASE:
        return handle_release(loop, in, body);
    case FW_READ:
        return handle_read(loop, buffers, in, body);
    case FW_WRITE:
        return handle_write(loop, in, body);
    case FW_GETXATTR:
        return handle_getxattr(loop, in, (const char *)body + sizeof(struct fw_getxattr_in));
    case FW_FALLOCATE:
        return handle_fallocate(loop, in, body);
    case FW_LSEEK:
        return handle_lseek(loop, in, body);
    case FW_FLUSH:
        return handle_flush(loop, in, body);
    case FW_FSYNC:
        if (!(*(const uint64_t *)body & NATIVE_HANDLE)) return 0;
        answer(loop, in->unique, 0, NULL, 0);
        return 1;
    case FW_INTERRUPT:
        return 1;
    default:
        return 0;
    }
}

/* --- replies of the library ------------------------------------------------------------------------- */

static void set_ino(struct fuse_loop *loop, uint64_t nodeid, struct fw_attr *attr) {
    struct fl_node *node = fl_find(loop, nodeid);
    if (node != NULL && node->attr.ino != 0) attr->ino = node->attr.ino;
}

static void patch_init(struct fuse_loop *loop, struct fw_init_out *out) {
    if (!(out->flags & FW_INIT_FLAG_EXT)) out->flags2 = 0;
    out->flags |= FW_INIT_FLAG_EXT | (loop->offered_flags & FW_INIT_FLAG_KILLPRIV_V2);
    out->flags2 |= loop->offered_flags2 & FW_INIT_FLAG2_DIRECT_IO_ALLOW_MMAP;
    if (loop->passthrough && (loop->offered_flags2 & FW_INIT_FLAG2_PASSTHROUGH)) {
        out->flags2 |= FW_INIT_FLAG2_PASSTHROUGH;
        out->max_stack_depth = 1;
    } else {
        loop->passthrough = 0;
    }
}

static void patch_open(struct fuse_loop *loop, uint64_t nodeid, struct fw_open_out *out) {
    struct fl_node *node = fl_find(loop, nodeid);
    if (node == NULL || node->opens == 0 || node->backing_id <= 0) return;
    out->open_flags = (out->open_flags & FW_FOPEN_PASSTHROUGH_MASK) | FW_FOPEN_PASSTHROUGH;
    out->backing_id = node->backing_id;
}

static void patch_listing(struct fuse_loop *loop, char *body, uint32_t size) {
    while (size >= sizeof(struct fw_direntplus)) {
        struct fw_direntplus *entry = (struct fw_direntplus *)body;
        uint64_t length = (sizeof *entry + (uint64_t)entry->namelen + 7) & ~7ull;
        if (length > size) return;
        if (entry->entry.nodeid != 0) {
            set_ino(loop, entry->entry.nodeid, &entry->entry.attr);
            entry->ino = entry->entry.attr.ino;
        }
        body += length;
        size -= (uint32_t)length;
    }
}

static void patch_reply(struct fuse_loop *loop, const struct fl_pending *request, char *body, uint32_t size) {
    struct fw_entry_out *entry = (struct fw_entry_out *)body;
    switch (request->opcode) {
    case FW_INIT:
        if (size >= sizeof(struct fw_init_out)) patch_init(loop, (struct fw_init_out *)body);
        return;
    case FW_CREATE:
        if (size >= sizeof *entry + sizeof(struct fw_open_out))
            patch_open(loop, entry->nodeid, (struct fw_open_out *)(entry + 1));
        /* fall through */
    case FW_LOOKUP:
    case FW_MKDIR:
    case FW_MKNOD:
    case FW_SYMLINK:
    case FW_LINK:
        if (size >= sizeof *entry) set_ino(loop, entry->nodeid, &entry->attr);
        return;
    case FW_OPEN:
        if (size >= sizeof(struct fw_open_out)) patch_open(loop, request->nodeid, (struct fw_open_out *)body);
        return;
    case FW_GETATTR:
    case FW_SETATTR:
        if (size >= sizeof(struct fw_attr_out)) set_ino(loop, request->nodeid, &((struct fw_attr_out *)body)->attr);
        return;
    case FW_READDIRPLUS:
        patch_listing(loop, body, size);
        return;
    default:
        return;
    }
}

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
            answer(loop, in->unique, status, NULL, 0);
            return;
        }
    }
    fl_count(&loop->stats.relayed);
    if (send(loop->sockets[0], in, size, MSG_NOSIGNAL) < 0) answer(loop, in->unique, -EIO, NULL, 0);
}

/* Waits for `fd` or for the stop; 0 when stopping. */
static int wait_for(struct fuse_loop *loop, int fd) {
    struct pollfd watched[2] = {{fd, POLLIN, 0}, {loop->stop_fd, POLLIN, 0}};
    for (;;) {
        int count = poll(watched, 2, -1);
        if (count < 0 && errno == EINTR) continue;
        return count > 0 && watched[1].revents == 0;
    }
}

/* One request into the buffer: its size, 0 to stop, -EAGAIN to try again. `read_lock` is held. */
static ssize_t read_request(struct fuse_loop *loop, struct fl_buffers *buffers) {
    ssize_t size = read(loop->config.dev_fd, buffers->request, loop->request_size);
    if (size >= 0) return size;
    switch (errno) {
    case EAGAIN:
        return wait_for(loop, loop->config.dev_fd) ? -EAGAIN : 0;
    case EINTR:
    case ENOENT: /* the caller gave up before the request was read */
        return -EAGAIN;
    default: /* ENODEV: unmounted */
        return 0;
    }
}

static void pass_on(struct fuse_loop *loop, struct fl_buffers *buffers, struct fw_in_header *in, size_t size) {
    if (fl_answers(in->opcode) && handle_natively(loop, buffers, in)) return;
    if (queue_call(loop, in)) return;
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
    while (buffer != NULL && wait_for(loop, loop->sockets[0])) {
        ssize_t size = recv(loop->sockets[0], buffer, loop->request_size, 0);
        if (size < 0 && errno == EINTR) continue;
        if (size < (ssize_t)sizeof(struct fw_out_header)) break;
        struct fw_out_header *header = (struct fw_out_header *)buffer;
        struct fl_pending request;
        pthread_mutex_lock(&loop->nodes_lock);
        if (fl_pending_take(loop, header->unique, &request) && header->error == 0)
            patch_reply(loop, &request, buffer + sizeof *header, (uint32_t)(size - sizeof *header));
        pthread_mutex_unlock(&loop->nodes_lock);
        struct iovec part = {buffer, (size_t)size};
        write_device(loop, &part, 1);
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
        write_device(loop, &part, 1);
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

/* --- answers to calls ------------------------------------------------------------------------------- */

void fl_answer_status(struct fuse_loop *loop, uint64_t unique, int status) { answer(loop, unique, status, NULL, 0); }

/* The node's entry, counted as a lookup. */
static int make_entry(struct fuse_loop *loop, uint64_t nodeid, struct fw_entry_out *out) {
    struct fl_node *node = fl_find(loop, nodeid);
    *out = (struct fw_entry_out){.nodeid = nodeid, .entry_valid = loop->config.attr_valid_s};
    if (node == NULL || node->state == FL_DEAD || current_attr(loop, node, &out->attr, &out->attr_valid) < 0)
        return -ESTALE;
    node->lookups++;
    return 0;
}

int fl_answer_entry(struct fuse_loop *loop, uint64_t unique, uint64_t nodeid) {
    struct fw_entry_out out;
    pthread_mutex_lock(&loop->nodes_lock);
    int status = make_entry(loop, nodeid, &out);
    pthread_mutex_unlock(&loop->nodes_lock);
    answer(loop, unique, status, &out, status < 0 ? 0 : sizeof out);
    return status;
}

int fl_answer_created(struct fuse_loop *loop, uint64_t unique, uint64_t nodeid, uint64_t fh) {
    struct {
        struct fw_entry_out entry;
        struct fw_open_out open;
    } out = {.open = {.fh = fh}};
    pthread_mutex_lock(&loop->nodes_lock);
    int status = make_entry(loop, nodeid, &out.entry);
    if (status == 0) patch_open(loop, nodeid, &out.open);
    pthread_mutex_unlock(&loop->nodes_lock);
    answer(loop, unique, status, &out, status < 0 ? 0 : sizeof out);
    return status;
}

/* --- for the seam ----------------------------------------------------------------------------------- */

int fl_acquire(struct fuse_loop *loop, uint64_t nodeid, int fd) {
    pthread_mutex_lock(&loop->nodes_lock);
    struct fl_node *node = fl_find(loop, nodeid);
    int status = node == NULL ? -ESTALE : 0;
    if (status == 0 && node->opens == 0) status = attach_backing(loop, node, fd);
    if (status == 0) status = (int)++node->opens;
    pthread_mutex_unlock(&loop->nodes_lock);
    return status;
}

int fl_probe(struct fuse_loop *loop, int fd) {
    struct fl_node scratch = {.fd = -1};
    pthread_mutex_lock(&loop->nodes_lock);
    int status = attach_backing(loop, &scratch, fd);
    detach_backing(loop, &scratch);
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
        if (left == 0) detach_backing(loop, node);
    }
    pthread_mutex_unlock(&loop->nodes_lock);
    return left;
}

uint64_t fl_node_drop(struct fuse_loop *loop, uint64_t nodeid) {
    pthread_mutex_lock(&loop->nodes_lock);
    struct fl_node *node = fl_find(loop, nodeid);
    uint64_t lookups = node == NULL ? 0 : node->lookups;
    if (node != NULL && lookups == 0) {
        detach_backing(loop, node);
        memset(node, 0, sizeof *node);
        node->fd = -1;
    }
    pthread_mutex_unlock(&loop->nodes_lock);
    return lookups;
}
