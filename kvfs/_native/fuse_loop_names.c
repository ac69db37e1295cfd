/* Names: which node each leads to, and of which directories every name is known. See fuse_loop_state.h.
 *
 * A directory has `room` while each name in it, whatever door it came by, has an edge here: to its node, or a
 * doubt that sends LOOKUP to the library. What has no edge there does not exist. The library keeps that true: it
 * adds a doubt before anybody can be told of a name that another door made, and turns the edge of a node that it
 * forgets into one. Doubts are counted over all directories; one that would go over FL_DOUBTS loses its room.
 *
 * The loop links names by itself (fuse_loop_changes.c) before the library hears of it, so what the library takes
 * away it takes away of the node that it means.
 */
#include "fuse_loop_state.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

static uint64_t edge_hash(uint64_t parent, const char *name, uint32_t length) {
    uint64_t hash = 0xCBF29CE484222325ull ^ parent; /* FNV-1a, then mixed: names are short */
    for (uint32_t i = 0; i < length; i++) hash = (hash ^ (uint8_t)name[i]) * 0x100000001B3ull;
    return hash ^ hash >> 29;
}

static struct fl_edge **edge_place(struct fuse_loop *loop, uint64_t parent, const char *name, uint32_t length,
                                   uint64_t hash) {
    struct fl_edge **at = &loop->edges[hash & (loop->edge_buckets - 1)];
    while (*at != NULL && ((*at)->hash != hash || (*at)->parent != parent || (*at)->length != length ||
                           memcmp((*at)->name, name, length) != 0))
        at = &(*at)->next;
    return at;
}

static void edges_grow(struct fuse_loop *loop) {
    struct fl_edge **wider = calloc(loop->edge_buckets * 2, sizeof *wider);
    if (wider == NULL) return; /* longer chains, nothing else */
    uint64_t mask = loop->edge_buckets * 2 - 1;
    for (uint64_t i = 0; i < loop->edge_buckets; i++) {
        for (struct fl_edge *edge = loop->edges[i], *next; edge != NULL; edge = next) {
            next = edge->next;
            edge->next = wider[edge->hash & mask];
            wider[edge->hash & mask] = edge;
        }
    }
    free(loop->edges);
    loop->edges = wider;
    loop->edge_buckets *= 2;
}

static void doubt_begin(struct fuse_loop *loop, struct fl_node *directory, struct fl_edge *edge) {
    edge->nodeid = 0;
    edge->doubt_next = directory->doubts;
    edge->doubt_at = &directory->doubts;
    if (edge->doubt_next != NULL) edge->doubt_next->doubt_at = &edge->doubt_next;
    directory->doubts = edge;
    loop->doubt_count++;
}

static void doubt_end(struct fuse_loop *loop, struct fl_edge *edge) {
    *edge->doubt_at = edge->doubt_next;
    if (edge->doubt_next != NULL) edge->doubt_next->doubt_at = edge->doubt_at;
    edge->doubt_at = NULL;
    loop->doubt_count--;
}

static void edge_remove(struct fuse_loop *loop, struct fl_edge **at) {
    struct fl_edge *edge = *at;
    if (edge->doubt_at != NULL) doubt_end(loop, edge);
    *at = edge->next;
    loop->edge_count--;
    free(edge);
}

/* The edge of a name, still without a node where there was none; NULL without memory. */
static struct fl_edge *edge_make(struct fuse_loop *loop, uint64_t parent, const char *name, uint32_t length) {
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
    if (edge->doubt_at != NULL) doubt_end(loop, edge);
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

void fl_names_unknown(struct fuse_loop *loop, struct fl_node *directory) {
    directory->room = 0;
    while (directory->doubts != NULL) {
        const struct fl_edge *edge = directory->doubts;
        edge_remove(loop, edge_place(loop, edge->parent, edge->name, edge->length, edge->hash));
    }
}

/* Makes a name that has no edge doubtful; where that cannot be, no name of the directory is known any more. */
static void doubt(struct fuse_loop *loop, struct fl_node *directory, const char *name, uint32_t length) {
    struct fl_edge *edge = NULL;
    if (loop->doubt_count < loop->config.doubts) edge = edge_make(loop, directory->nodeid, name, length);
    if (edge != NULL)
        doubt_begin(loop, directory, edge);
    else
        fl_names_unknown(loop, directory);
}

void fl_edges_free(struct fuse_loop *loop) {
    for (uint64_t i = 0; loop->edges != NULL && i < loop->edge_buckets; i++) {
        for (struct fl_edge *edge = loop->edges[i], *next; edge != NULL; edge = next) {
            next = edge->next;
            free(edge);
        }
    }
    free(loop->edges);
}

/* --- for the seam ----------------------------------------------------------------------------------- */

int fl_link(struct fuse_loop *loop, uint64_t parent, const char *name, uint32_t length, uint64_t nodeid) {
    pthread_mutex_lock(&loop->nodes_lock);
    int status = fl_edge_set(loop, parent, name, length, nodeid);
    pthread_mutex_unlock(&loop->nodes_lock);
    return status;
}

void fl_unlink(struct fuse_loop *loop, uint64_t parent, const char *name, uint32_t length, uint64_t nodeid) {
    uint64_t hash = edge_hash(parent, name, length);
    pthread_mutex_lock(&loop->nodes_lock);
    struct fl_edge **at = edge_place(loop, parent, name, length, hash);
    if (*at != NULL && (*at)->nodeid == nodeid) edge_remove(loop, at);
    pthread_mutex_unlock(&loop->nodes_lock);
}

void fl_doubt(struct fuse_loop *loop, uint64_t parent, const char *name, uint32_t length, uint64_t nodeid) {
    pthread_mutex_lock(&loop->nodes_lock);
    struct fl_node *directory = fl_find(loop, parent);
    struct fl_edge *edge = fl_edge_find(loop, parent, name, length);
    if (edge != NULL && edge->nodeid == nodeid && nodeid != 0) {
        fl_edge_drop(loop, parent, name, length);
        edge = NULL;
    }
    if (edge == NULL && directory != NULL && directory->room != 0) doubt(loop, directory, name, length);
    pthread_mutex_unlock(&loop->nodes_lock);
}

void fl_undoubt(struct fuse_loop *loop, uint64_t parent, const char *name, uint32_t length) {
    fl_unlink(loop, parent, name, length, 0);
}

int fl_know_names(struct fuse_loop *loop, uint64_t nodeid, uint32_t room, const char *names) {
    pthread_mutex_lock(&loop->nodes_lock);
    struct fl_node *directory = fl_find(loop, nodeid);
    int status = directory != NULL && directory->state == FL_OTHER ? 0 : -ESTALE;
    if (status == 0) {
        fl_names_unknown(loop, directory);
        directory->room = (uint16_t)(room < FL_NAME_MAX ? room : FL_NAME_MAX);
    }
    while (status == 0 && directory->room != 0 && *names != 0) {
        uint32_t length = (uint32_t)(strchrnul(names, '/') - names);
        if (fl_edge_find(loop, nodeid, names, length) == NULL) doubt(loop, directory, names, length);
        names += length + (names[length] != 0);
    }
    pthread_mutex_unlock(&loop->nodes_lock);
    return status;
}
