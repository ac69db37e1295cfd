/* What the loop rewrites in the library's replies before the kernel sees them. See loop.h.
 *
 * Pure functions over a reply and the nodes; `nodes_lock` is held.
 */

#include "state.h"

static void set_ino(struct fuse_loop *loop, uint64_t nodeid, struct fw_attr *attr) REQUIRES(loop->nodes_lock) {
    struct fl_node *node = fl_find(loop, nodeid);
    if (node == NULL) return;
    if (node->attr.ino != 0) attr->ino = node->attr.ino;
    node->asked = 1;
}

static void patch_init(struct fuse_loop *loop, struct fw_init_out *out) REQUIRES(loop->nodes_lock) {
    if (!(out->flags & FW_INIT_FLAG_EXT)) out->flags2 = 0;
    /* A node's target never changes, so the kernel may keep it. */
    uint32_t wanted = FW_INIT_FLAG_KILLPRIV_V2 | FW_INIT_FLAG_POSIX_LOCKS | FW_INIT_FLAG_FLOCK_LOCKS;
    out->flags |= FW_INIT_FLAG_EXT | (loop->offered_flags & (wanted | FW_INIT_FLAG_CACHE_SYMLINKS));
    out->flags2 |= loop->offered_flags2 & FW_INIT_FLAG2_DIRECT_IO_ALLOW_MMAP;
    if (loop->passthrough && (loop->offered_flags2 & FW_INIT_FLAG2_PASSTHROUGH)) {
        out->flags2 |= FW_INIT_FLAG2_PASSTHROUGH;
        out->max_stack_depth = 1;
    } else {
        loop->passthrough = 0;
    }
}

void fl_patch_open(struct fuse_loop *loop, uint64_t nodeid, struct fw_open_out *out) {
    struct fl_node *node = fl_find(loop, nodeid);
    if (node == NULL || node->opens == 0 || node->backing_id <= 0) return;
    out->open_flags = (out->open_flags & FW_FOPEN_PASSTHROUGH_MASK) | FW_FOPEN_PASSTHROUGH;
    out->backing_id = node->backing_id;
}

static void patch_listing(struct fuse_loop *loop, char *body, uint32_t size) REQUIRES(loop->nodes_lock) {
    while (size >= sizeof(struct fw_direntplus)) {
        struct fw_direntplus *entry = (struct fw_direntplus *)body;
        uint64_t length = (sizeof *entry + (uint64_t)entry->namelen + 7) & ~7ull;
        if (length > size) return;
        if (entry->entry.generation != 0) { /* a name and no more: the kernel makes no inode of it */
            entry->ino = entry->entry.attr.ino;
            entry->entry.nodeid = entry->entry.generation = 0;
        } else if (entry->entry.nodeid != 0) {
            set_ino(loop, entry->entry.nodeid, &entry->entry.attr);
            entry->ino = entry->entry.attr.ino;
        }
        body += length;
        size -= (uint32_t)length;
    }
}

void fl_patch_reply(struct fuse_loop *loop, const struct fl_pending *request, char *body, uint32_t size) {
    struct fw_entry_out *entry = (struct fw_entry_out *)body;
    switch (request->opcode) {
    case FW_INIT:
        if (size >= sizeof(struct fw_init_out)) patch_init(loop, (struct fw_init_out *)body);
        return;
    case FW_CREATE:
        if (size >= sizeof *entry + sizeof(struct fw_open_out))
            fl_patch_open(loop, entry->nodeid, (struct fw_open_out *)(entry + 1));
        /* fall through */
    case FW_LOOKUP:
    case FW_MKDIR:
    case FW_MKNOD:
    case FW_SYMLINK:
    case FW_LINK:
        if (size >= sizeof *entry) set_ino(loop, entry->nodeid, &entry->attr);
        return;
    case FW_OPEN:
        if (size >= sizeof(struct fw_open_out)) fl_patch_open(loop, request->nodeid, (struct fw_open_out *)body);
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
