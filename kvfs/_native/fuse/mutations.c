/* The changes that the loop makes by itself: a CREATE takes a spare draft, a RENAME moves a draft's name. See loop.h.
 *
 * Only where all names are known, only to names that are free, and with the call that notifies the library queued in
 * the same step. Everything else (a name that is taken, a reader, a full queue, names that are not ASCII, which need
 * checking) is left to the calls.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#include "shared/slots_core.h"
#include "state.h"

static int is_ascii(const char *name, uint32_t length) {
    unsigned char seen = 0;
    for (uint32_t i = 0; i < length; i++) seen |= (unsigned char)name[i];
    return seen < 0x80;
}

/* Whether a file of this name can be made in the directory here and now. */
static int is_free(struct fuse_loop *loop, uint64_t directory, const char *name, uint32_t length)
    REQUIRES(loop->nodes_lock) {
    return length > 0 && fl_names_known(fl_find(loop, directory), length) && is_ascii(name, length) &&
           fl_edge_find(loop, directory, name, length) == NULL;
}

/* --- times of directories ----------------------------------------------------------------------------- */

/* The kernel asks for a directory's attributes after what it has changed in it. Times do not go back. */
static void touch(struct fuse_loop *loop, uint64_t nodeid, uint64_t when_ns) REQUIRES(loop->nodes_lock) {
    struct fl_node *node = fl_find(loop, nodeid);
    if (node == NULL || !S_ISDIR(node->attr.mode)) return;
    if (when_ns <= node->attr.ctime * 1000000000ull + node->attr.ctimensec) return;
    node->attr.atime = node->attr.mtime = node->attr.ctime = when_ns / 1000000000ull;
    node->attr.atimensec = node->attr.mtimensec = node->attr.ctimensec = (uint32_t)(when_ns % 1000000000ull);
}

int fl_touch(struct fuse_loop *loop, uint64_t nodeid, uint64_t when_ns) {
    kvfs_lock(&loop->nodes_lock);
    struct fl_node *node = fl_find(loop, nodeid);
    int asked = node != NULL && node->asked;
    touch(loop, nodeid, when_ns);
    if (node != NULL) node->asked = 0;
    kvfs_unlock(&loop->nodes_lock);
    return asked;
}

/* --- spare drafts ----------------------------------------------------------------------------------- */

int fl_spare_add(struct fuse_loop *loop, uint64_t nodeid, uint64_t fh, int fd) {
    struct fl_node scratch = {.fd = -1};
    int status = fl_attach_backing(loop, &scratch, fd); /* nobody else knows the node yet: no lock over the ioctl */
    if (status < 0) return status;
    kvfs_lock(&loop->nodes_lock);
    struct fl_node *node = fl_find(loop, nodeid);
    status = node == NULL || node->state != FL_DRAFT ? -ESTALE : loop->spare_count == FL_SPARES ? -ENOSPC : 0;
    if (status == 0) {
        node->opens = 1;
        node->backing_id = scratch.backing_id;
        node->fd = scratch.fd;
        loop->spares[loop->spare_count++] = (struct fl_spare){.nodeid = nodeid, .fh = fh};
    }
    kvfs_unlock(&loop->nodes_lock);
    if (status < 0) fl_detach_backing(loop, &scratch);
    return status;
}

uint32_t fl_spare_count(struct fuse_loop *loop) { return __atomic_load_n(&loop->spare_count, __ATOMIC_RELAXED); }

uint64_t fl_spare_take(struct fuse_loop *loop) {
    kvfs_lock(&loop->nodes_lock);
    uint64_t nodeid = loop->spare_count == 0 ? 0 : loop->spares[--loop->spare_count].nodeid;
    kvfs_unlock(&loop->nodes_lock);
    if (nodeid != 0) fl_node_drop(loop, nodeid);
    return nodeid;
}

/* --- CREATE ----------------------------------------------------------------------------------------- */

struct created {
    struct fw_entry_out entry;
    struct fw_open_out open;
};

/* The kernel sees to the size itself, as it writes and truncates; else it would ask before the first write. */
#define CREATED_VALID_S 1

/* An empty file is as old as its CREATE, not as its slot, whose time of change is the one that it keeps. */
static void set_times(struct fuse_loop *loop, struct fl_node *node) REQUIRES(loop->nodes_lock) {
    struct stat status;
    struct timespec now;
    char name[KVFS_SLOT_NAME_BYTES];
    clock_gettime(CLOCK_REALTIME_COARSE, &now); /* as writes set it: finer, the first one could be before it */
    kvfs_slot_name(node->slot, name);
    utimensat(loop->config.slots_dir_fd, name, (struct timespec[2]){now, now}, 0);
    if (fstatat(loop->config.slots_dir_fd, name, &status, 0) < 0) status.st_ctim = now;
    node->attr.atime = node->attr.mtime = (uint64_t)now.tv_sec;
    node->attr.atimensec = node->attr.mtimensec = (uint32_t)now.tv_nsec;
    node->attr.ctime = (uint64_t)status.st_ctim.tv_sec;
    node->attr.ctimensec = (uint32_t)status.st_ctim.tv_nsec;
}

/* Gives the last spare this name, and notifies the library; returns 0 where that is not possible. */
static int create(struct fuse_loop *loop, const struct fw_in_header *in, const struct fw_create_in *body,
                  const char *name, struct created *out) REQUIRES(loop->nodes_lock) {
    uint32_t length = (uint32_t)strlen(name);
    if (loop->spare_count == 0 || __atomic_load_n(&loop->relay_opens, __ATOMIC_RELAXED) ||
        !is_free(loop, in->nodeid, name, length))
        return 0;
    const struct fl_spare *spare = &loop->spares[loop->spare_count - 1];
    struct fl_node *node = fl_find(loop, spare->nodeid);
    struct fl_call call = {.opcode = FL_CREATED, .nodeid = in->nodeid, .other = spare->nodeid, .offset = spare->fh};
    const struct fl_node *directory = fl_find(loop, in->nodeid);
    call.uid = in->uid;
    call.gid = in->gid;
    call.pid = in->pid;
    call.mode = body->mode;
    if (directory->attr.mode & S_ISGID) call.gid = directory->attr.gid;
    call.when_ns = (uint64_t)kvfs_clock_ns(CLOCK_REALTIME);
    call.name_length = (uint16_t)length;
    memcpy(call.name, name, length);
    if (node == NULL || fl_edge_set(loop, in->nodeid, name, length, node->nodeid) < 0) return 0;
    if (fl_call_put(loop, &call) < 0) {
        fl_edge_drop(loop, in->nodeid, name, length);
        return 0;
    }
    loop->spare_count--;
    touch(loop, in->nodeid, call.when_ns);
    node->attr.mode = S_IFREG | (call.mode & 07777);
    node->attr.uid = call.uid;
    node->attr.gid = call.gid;
    node->lookups = 1;
    set_times(loop, node);
    out->entry = (struct fw_entry_out){
        .nodeid = node->nodeid, .entry_valid = loop->config.attr_valid_s, .attr = node->attr};
    out->entry.attr_valid = CREATED_VALID_S;
    out->open = (struct fw_open_out){.fh = call.offset};
    fl_patch_open(loop, node->nodeid, &out->open);
    return 1;
}

int fl_handle_create(struct fuse_loop *loop, const struct fw_in_header *in, const struct fw_create_in *body) {
    struct created out;
    if ((body->flags & O_ACCMODE) == O_RDONLY || !S_ISREG(body->mode) || body->mode & (S_ISUID | S_ISGID)) return 0;
    kvfs_lock(&loop->nodes_lock);
    int done = create(loop, in, body, (const char *)(body + 1), &out);
    kvfs_unlock(&loop->nodes_lock);
    if (!done) return 0;
    fl_answer(loop, in->unique, 0, &out, sizeof out);
    fl_calls_notify(loop, 1);
    fl_count(&loop->stats.native_creates);
    return 1;
}

/* --- RENAME ----------------------------------------------------------------------------------------- */

/* Moves a draft's name to a free one, and notifies the library; returns 0 where that is not possible. */
static int move(struct fuse_loop *loop, const struct fw_in_header *in, uint64_t new_parent, const char *name,
                const char *new_name) REQUIRES(loop->nodes_lock) {
    uint32_t length = (uint32_t)strlen(name), new_length = (uint32_t)strlen(new_name);
    if (length > FL_CALL_NAME_MAX || !is_free(loop, new_parent, new_name, new_length)) return 0;
    const struct fl_edge *edge = fl_edge_find(loop, in->nodeid, name, length);
    const struct fl_node *node = edge == NULL ? NULL : fl_find(loop, edge->nodeid);
    if (node == NULL || node->state != FL_DRAFT || node->settles) return 0;
    struct fl_call call = {.opcode = FL_RENAMED, .nodeid = in->nodeid, .other = new_parent, .offset = node->nodeid};
    call.when_ns = (uint64_t)kvfs_clock_ns(CLOCK_REALTIME);
    call.name_length = (uint16_t)length;
    call.new_length = (uint16_t)new_length;
    memcpy(call.name, name, length);
    memcpy(call.new_name, new_name, new_length);
    if (fl_edge_set(loop, new_parent, new_name, new_length, node->nodeid) < 0) return 0;
    if (fl_call_put(loop, &call) < 0) {
        fl_edge_drop(loop, new_parent, new_name, new_length);
        return 0;
    }
    fl_edge_drop(loop, in->nodeid, name, length);
    touch(loop, in->nodeid, call.when_ns);
    touch(loop, new_parent, call.when_ns);
    return 1;
}

int fl_handle_rename(const struct fl_server *server, const struct fw_in_header *in, uint64_t new_parent, uint32_t flags,
                     const char *names) {
    struct fuse_loop *loop = server->loop;
    if (flags & ~RENAME_NOREPLACE) return 0;
    kvfs_lock(&loop->nodes_lock);
    int done = move(loop, in, new_parent, names, names + strlen(names) + 1);
    kvfs_unlock(&loop->nodes_lock);
    if (!done) return 0;
    fl_answer(loop, in->unique, 0, NULL, 0);
    /* A closed draft is looked at again soon, an open one waits for its RELEASE: nobody is woken yet. The reader does it
     * before it sleeps for long; another thread must not rely on a reader that sleeps already. */
    fl_calls_notify(loop, server->reads ? FL_CALLS / 2 : 1);
    fl_count(&loop->stats.native_renames);
    return 1;
}
