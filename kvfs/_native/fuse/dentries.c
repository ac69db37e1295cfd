/* Names: which node each leads to, and of which directories every name is known. See state.h.
 *
 * A directory has `room` while each name in it, whatever door it came by, has an edge here: to its node, or a
 * mark as unresolved that sends LOOKUP to the library. What has no edge there does not exist. The library keeps that true: it
 * marks a name that another door made before anybody can learn of it, and the name of a node that it drops. Unresolved
 * names are counted over all directories; one that would go over `unresolved_names` has its room set to 0.
 *
 * The loop links names by itself (mutations.c) before the library hears of it, so what the library takes
 * away it takes away of the node that it means.
 */
#include "state.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NAMES_AT_ONCE 256 /* made or dropped under one hold of the lock: some 50 us */

static uint64_t edge_hash(uint64_t parent, const char *name, uint32_t length) {
    uint64_t hash = 0xCBF29CE484222325ull ^ parent; /* FNV-1a, then mixed: names are short */
    for (uint32_t i = 0; i < length; i++) hash = (hash ^ (uint8_t)name[i]) * 0x100000001B3ull;
    return hash ^ hash >> 29;
}

/* The first edge of a bucket. Linear hashing: of the buckets of the next round, those before `edge_buckets` are
 * there, and the names of the others are still with the bucket that they are going to be split off from. */
static struct fl_edge **bucket(struct fuse_loop *loop, uint64_t hash) REQUIRES(loop->nodes_lock) {
    uint64_t at = hash & (2 * loop->edge_round - 1);
    if (at >= loop->edge_buckets) at -= loop->edge_round;
    return &loop->edges[at >> FL_EDGE_CHUNK_BITS][at & ((1u << FL_EDGE_CHUNK_BITS) - 1)];
}

static struct fl_edge **edge_place(struct fuse_loop *loop, uint64_t parent, const char *name, uint32_t length,
                                   uint64_t hash) REQUIRES(loop->nodes_lock) {
    struct fl_edge **at = bucket(loop, hash);
    while (*at != NULL && ((*at)->hash != hash || (*at)->parent != parent || (*at)->length != length ||
                           memcmp((*at)->name, name, length) != 0))
        at = &(*at)->next;
    return at;
}

int fl_edges_make(struct fuse_loop *loop) UNCHECKED /* no thread yet */ {
    loop->edges[0] = calloc(1u << FL_EDGE_CHUNK_BITS, sizeof **loop->edges);
    loop->edge_round = loop->edge_buckets = 1u << FL_EDGE_CHUNK_BITS;
    return loop->edges[0] == NULL ? -ENOMEM : 0;
}

/* One more bucket, which takes its names from one other: all names at once would be seconds under the lock. */
static void edges_grow(struct fuse_loop *loop) REQUIRES(loop->nodes_lock) {
    uint64_t added = loop->edge_buckets, moved = 0;
    struct fl_edge ***chunk = &loop->edges[added >> FL_EDGE_CHUNK_BITS];
    if (added >> FL_EDGE_CHUNK_BITS == FL_EDGE_CHUNKS) return; /* longer chains, nothing else */
    if (*chunk == NULL) *chunk = calloc(1u << FL_EDGE_CHUNK_BITS, sizeof **chunk);
    if (*chunk == NULL) return;
    struct fl_edge **from = bucket(loop, added), **to = &(*chunk)[added & ((1u << FL_EDGE_CHUNK_BITS) - 1)];
    while (*from != NULL) {
        struct fl_edge *edge = *from;
        moved++;
        if ((edge->hash & (2 * loop->edge_round - 1)) != added) {
            from = &edge->next;
            continue;
        }
        *from = edge->next;
        edge->next = *to;
        *to = edge;
    }
    if (++loop->edge_buckets == 2 * loop->edge_round) loop->edge_round *= 2;
    if (moved > loop->stats.most_names_moved) __atomic_store_n(&loop->stats.most_names_moved, moved, __ATOMIC_RELAXED);
}

static void unresolved_add(struct fuse_loop *loop, struct fl_node *directory, struct fl_edge *edge)
    REQUIRES(loop->nodes_lock) {
    edge->nodeid = 0;
    edge->unresolved_next = directory->unresolved;
    edge->unresolved_at = &directory->unresolved;
    if (edge->unresolved_next != NULL) edge->unresolved_next->unresolved_at = &edge->unresolved_next;
    directory->unresolved = edge;
    loop->unresolved_count++;
}

static void unresolved_remove(struct fuse_loop *loop, struct fl_edge *edge) REQUIRES(loop->nodes_lock) {
    *edge->unresolved_at = edge->unresolved_next;
    if (edge->unresolved_next != NULL) edge->unresolved_next->unresolved_at = edge->unresolved_at;
    edge->unresolved_at = NULL;
    loop->unresolved_count--;
}

static void edge_remove(struct fuse_loop *loop, struct fl_edge **at) REQUIRES(loop->nodes_lock) {
    struct fl_edge *edge = *at;
    if (edge->unresolved_at != NULL) unresolved_remove(loop, edge);
    *at = edge->next;
    loop->edge_count--;
    free(edge);
}

/* The edge of a name, still without a node where there was none; NULL without memory. */
static struct fl_edge *edge_make(struct fuse_loop *loop, uint64_t parent, const char *name, uint32_t length)
    REQUIRES(loop->nodes_lock) {
    uint64_t hash = edge_hash(parent, name, length);
    struct fl_edge **at = edge_place(loop, parent, name, length, hash);
    if (*at != NULL) return *at;
    struct fl_edge *edge = malloc(sizeof *edge + length);
    if (edge == NULL) return NULL;
    *edge = (struct fl_edge){.parent = parent, .hash = hash, .length = length};
    memcpy(edge->name, name, length);
    *at = edge;
    if (++loop->edge_count > loop->edge_buckets) edges_grow(loop);
    return edge;
}

struct fl_edge *fl_edge_find(struct fuse_loop *loop, uint64_t parent, const char *name, uint32_t length) {
    return *edge_place(loop, parent, name, length, edge_hash(parent, name, length));
}

int fl_edge_set(struct fuse_loop *loop, uint64_t parent, const char *name, uint32_t length, uint64_t nodeid) {
    struct fl_edge *edge = edge_make(loop, parent, name, length);
    if (edge == NULL) return -ENOMEM;
    if (edge->unresolved_at != NULL) unresolved_remove(loop, edge);
    edge->nodeid = nodeid;
    return 0;
}

void fl_edge_drop(struct fuse_loop *loop, uint64_t parent, const char *name, uint32_t length) {
    struct fl_edge **at = edge_place(loop, parent, name, length, edge_hash(parent, name, length));
    if (*at != NULL) edge_remove(loop, at);
}

/* Whether a name of this length that has no edge in the directory does not exist. */
int fl_names_known(const struct fl_node *directory, uint32_t length) {
    return directory != NULL && directory->state == FL_OTHER && length <= directory->room;
}

/* Releases `nodes_lock` after NAMES_AT_ONCE steps, and sleeps: a waiting thread is slower to take it. */
static void pause_often(struct fuse_loop *loop, uint64_t step) REQUIRES(loop->nodes_lock) {
    if (step % NAMES_AT_ONCE != 0) return;
    kvfs_unlock(&loop->nodes_lock);
    usleep(1);
    kvfs_lock(&loop->nodes_lock);
}

void fl_names_unknown(struct fuse_loop *loop, uint64_t nodeid) {
    struct fl_node *directory = fl_find(loop, nodeid);
    if (directory != NULL) directory->room = 0; /* from here on its unresolved names say nothing */
    for (uint64_t step = 1; directory != NULL && directory->unresolved != NULL; step++) {
        const struct fl_edge *edge = directory->unresolved;
        edge_remove(loop, edge_place(loop, edge->parent, edge->name, edge->length, edge->hash));
        pause_often(loop, step);
        directory = fl_find(loop, nodeid);
    }
}

/* Makes a name that has no edge unresolved; 0 where that cannot be, and its directory has to be unknown. */
static int make_unresolved(struct fuse_loop *loop, struct fl_node *directory, const char *name, uint32_t length)
    REQUIRES(loop->nodes_lock) {
    struct fl_edge *edge = NULL;
    if (loop->unresolved_count < loop->config.unresolved_names) edge = edge_make(loop, directory->nodeid, name, length);
    if (edge != NULL) unresolved_add(loop, directory, edge);
    return edge != NULL;
}

void fl_edges_free(struct fuse_loop *loop) UNCHECKED /* no thread any more */ {
    for (uint64_t i = 0; i < loop->edge_buckets; i++) {
        struct fl_edge *const *first = &loop->edges[i >> FL_EDGE_CHUNK_BITS][i & ((1u << FL_EDGE_CHUNK_BITS) - 1)];
        for (struct fl_edge *edge = *first, *next; edge != NULL; edge = next) {
            next = edge->next;
            free(edge);
        }
    }
    for (uint32_t i = 0; i < FL_EDGE_CHUNKS; i++) free(loop->edges[i]);
}

/* --- for the seam ----------------------------------------------------------------------------------- */

int fl_link(struct fuse_loop *loop, uint64_t parent, const char *name, uint32_t length, uint64_t nodeid) {
    kvfs_lock(&loop->nodes_lock);
    int status = fl_edge_set(loop, parent, name, length, nodeid);
    kvfs_unlock(&loop->nodes_lock);
    return status;
}

void fl_unlink(struct fuse_loop *loop, uint64_t parent, const char *name, uint32_t length, uint64_t nodeid) {
    uint64_t hash = edge_hash(parent, name, length);
    kvfs_lock(&loop->nodes_lock);
    struct fl_edge **at = edge_place(loop, parent, name, length, hash);
    if (*at != NULL && (*at)->nodeid == nodeid) edge_remove(loop, at);
    kvfs_unlock(&loop->nodes_lock);
}

void fl_mark_unresolved(struct fuse_loop *loop, uint64_t parent, const char *name, uint32_t length, uint64_t nodeid) {
    kvfs_lock(&loop->nodes_lock);
    struct fl_node *directory = fl_find(loop, parent);
    struct fl_edge *edge = fl_edge_find(loop, parent, name, length);
    if (edge != NULL && edge->nodeid == nodeid && nodeid != 0) {
        fl_edge_drop(loop, parent, name, length);
        edge = NULL;
    }
    int wanted = edge == NULL && directory != NULL && directory->room != 0;
    if (wanted && !make_unresolved(loop, directory, name, length)) fl_names_unknown(loop, parent);
    kvfs_unlock(&loop->nodes_lock);
}

void fl_clear_unresolved(struct fuse_loop *loop, uint64_t parent, const char *name, uint32_t length) {
    fl_unlink(loop, parent, name, length, 0);
}

int fl_is_free(struct fuse_loop *loop, uint64_t parent, const char *name, uint32_t length) {
    kvfs_lock(&loop->nodes_lock);
    int nothing = fl_edge_find(loop, parent, name, length) == NULL && fl_names_known(fl_find(loop, parent), length);
    kvfs_unlock(&loop->nodes_lock);
    return nothing;
}

int fl_know_names(struct fuse_loop *loop, uint64_t nodeid, uint32_t room, const char *names) {
    kvfs_lock(&loop->nodes_lock);
    fl_names_unknown(loop, nodeid);
    struct fl_node *directory = fl_find(loop, nodeid);
    int usable = directory != NULL && directory->state == FL_OTHER, status = usable ? 0 : -ESTALE;
    for (uint64_t step = 1; usable && room != 0 && *names != 0; step++) {
        uint32_t length = (uint32_t)(strchrnul(names, '/') - names);
        if (fl_edge_find(loop, nodeid, names, length) == NULL && !make_unresolved(loop, directory, names, length))
            room = 0;
        names += length + (names[length] != 0);
        pause_often(loop, step);
        directory = fl_find(loop, nodeid);
        usable = directory != NULL && directory->state == FL_OTHER;
    }
    if (usable && room != 0)
        directory->room = (uint16_t)(room < FL_NAME_MAX ? room : FL_NAME_MAX); /* every name has its edge now */
    else
        fl_names_unknown(loop, nodeid);
    kvfs_unlock(&loop->nodes_lock);
    return status;
}
