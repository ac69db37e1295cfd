/* Requests that need the store, as calls, and the answers to them. See loop.h. */
#include <errno.h>
#include <string.h>

#include "state.h"

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
static int as_call(struct fuse_loop *loop, const struct fw_in_header *in, struct fl_call *call) {
    const void *body = in + 1;
    *call = (struct fl_call){.unique = in->unique, .nodeid = in->nodeid, .opcode = in->opcode};
    call->uid = in->uid;
    call->gid = in->gid;
    call->pid = in->pid;
    switch (in->opcode) {
    case FW_LOOKUP:
    case FW_UNLINK:
        return set_name(call->name, &call->name_length, (const char *)body) == 0;
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
    case FW_FALLOCATE:
        call->mode = ((const struct fw_fallocate_in *)body)->mode;
        call->offset = ((const struct fw_fallocate_in *)body)->offset;
        call->other = ((const struct fw_fallocate_in *)body)->length;
        return 1;
    case FW_READDIRPLUS:
        call->offset = ((const struct fw_read_in *)body)->offset;
        call->other = ((const struct fw_read_in *)body)->fh;
        call->size = ((const struct fw_read_in *)body)->size;
        return fl_listing_wanted(loop, (const struct fw_read_in *)body);
    case FW_RELEASE:
        call->other = ((const struct fw_release_in *)body)->fh;
        return 1;
    default:
        return 0;
    }
}

/* Queues the request as a call where it is one. */
int fl_queue_call(struct fuse_loop *loop, const struct fw_in_header *in) {
    struct fl_call call;
    if (!as_call(loop, in, &call) || fl_call_put(loop, &call) < 0) return 0;
    /* Nobody waits for RELEASE, and what it starts needs no answer. */
    if (in->opcode == FW_RELEASE) fl_answer(loop, in->unique, 0, NULL, 0);
    fl_calls_notify(loop, 1);
    fl_count(&loop->stats.calls);
    return 1;
}

/* --- answers to calls ------------------------------------------------------------------------------- */

void fl_answer_status(struct fuse_loop *loop, uint64_t unique, int status) { fl_answer(loop, unique, status, NULL, 0); }

/* The node's entry, counted as a lookup. A file that lost its name meanwhile is what the caller found or opened all the
 * same: an error would make it a failed call, with a handle that nobody closes. Nothing of it is remembered. */
static int make_entry(struct fuse_loop *loop, uint64_t nodeid, struct fw_entry_out *out) REQUIRES(loop->nodes_lock) {
    struct fl_node *node = fl_find(loop, nodeid);
    *out = (struct fw_entry_out){.nodeid = nodeid, .entry_valid = loop->config.attr_valid_s};
    if (node == NULL || fl_current_attr(loop, node, &out->attr, &out->attr_valid) < 0) return -ESTALE;
    if (node->state == FL_DEAD) out->entry_valid = out->attr_valid = 0;
    node->lookups++;
    node->asked = 1;
    return 0;
}

int fl_answer_entry(struct fuse_loop *loop, uint64_t unique, uint64_t nodeid) {
    struct fw_entry_out out;
    kvfs_lock(&loop->nodes_lock);
    int status = make_entry(loop, nodeid, &out);
    kvfs_unlock(&loop->nodes_lock);
    fl_answer(loop, unique, status, &out, status < 0 ? 0 : sizeof out);
    return status;
}

int fl_answer_created(struct fuse_loop *loop, uint64_t unique, uint64_t nodeid, uint64_t fh) {
    struct {
        struct fw_entry_out entry;
        struct fw_open_out open;
    } out = {.open = {.fh = fh}};
    kvfs_lock(&loop->nodes_lock);
    int status = make_entry(loop, nodeid, &out.entry);
    if (status == 0) fl_patch_open(loop, nodeid, &out.open);
    kvfs_unlock(&loop->nodes_lock);
    fl_answer(loop, unique, status, &out, status < 0 ? 0 : sizeof out);
    return status;
}
