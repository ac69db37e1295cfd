/* Who reads requests, and whose turn it is at a file's bytes. See fuse_loop_core.h.
 *
 * One thread at a time is the reader: it takes a request from the device and handles it, and then the next. Before it
 * copies a file's bytes, which may take as long as memory or a disk does, it steps aside: another thread becomes the
 * reader, a new one if all are busy and there may be more. With as many slow requests as threads, the first that ends
 * makes the next reader.
 *
 * Who steps aside with a request that changes a file takes a turn at it, in the kernel's order, and requests that
 * come after it and mean the same file wait for that turn to end: WRITE, FALLOCATE, and what must find the bytes of
 * those before it (FLUSH, FSYNC, RELEASE, SETATTR, RENAME). The kernel itself sends most of them only after the answer.
 * A thread that has a turn waits for nothing but the bytes, so turns always end.
 *
 * Concurrency: `reader_lock` guards who reads and which threads there are, `nodes_lock` the turns.
 */
#include "fuse_loop_state.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* --- the reader ------------------------------------------------------------------------------------- */

void fl_server_free(struct fl_server *server) {
    free(server->request);
    free(server->reply);
    free(server);
}

static struct fl_server *server_make(struct fuse_loop *loop) {
    struct fl_server *server = calloc(1, sizeof *server);
    if (server == NULL) return NULL;
    server->loop = loop;
    if (posix_memalign((void **)&server->request, 4096, loop->request_size + FL_REQUEST_END) != 0) server->request = NULL;
    if (posix_memalign((void **)&server->reply, 4096, loop->config.buffer_size) != 0) server->reply = NULL;
    if (server->request != NULL && server->reply != NULL) return server;
    fl_server_free(server);
    return NULL;
}

int fl_server_add(struct fuse_loop *loop) {
    struct fl_server *server = server_make(loop);
    if (server == NULL) return -ENOMEM;
    int status = pthread_create(&loop->threads[loop->running], NULL, fl_serve, server);
    if (status != 0) {
        fl_server_free(server);
        return -status;
    }
    loop->running++;
    loop->servers++;
    return 0;
}

int fl_become_reader(struct fl_server *server) {
    struct fuse_loop *loop = server->loop;
    pthread_mutex_lock(&loop->reader_lock);
    while (loop->has_reader && !loop->stopping) {
        loop->idle++;
        pthread_cond_wait(&loop->reader_free, &loop->reader_lock);
        loop->idle--;
    }
    server->reads = loop->has_reader = !loop->stopping;
    pthread_mutex_unlock(&loop->reader_lock);
    return server->reads;
}

void fl_step_aside(struct fl_server *server) {
    struct fuse_loop *loop = server->loop;
    if (!server->reads) return;
    pthread_mutex_lock(&loop->reader_lock);
    server->reads = loop->has_reader = 0;
    if (loop->idle > 0)
        pthread_cond_signal(&loop->reader_free);
    else if (loop->servers < loop->config.threads && !loop->stopping)
        (void)fl_server_add(loop); /* without it, whoever is ready first reads on */
    pthread_mutex_unlock(&loop->reader_lock);
}

void fl_end(struct fuse_loop *loop, const char *where, int error) {
    uint64_t one = 1;
    pthread_mutex_lock(&loop->reader_lock);
    if (error != 0 && loop->failure == 0 && !loop->stopping) {
        loop->failure = error;
        loop->failed_at = where;
    }
    pthread_mutex_unlock(&loop->reader_lock);
    ssize_t written = write(loop->ended_fd, &one, sizeof one);
    (void)written;
}

int fl_failure(struct fuse_loop *loop, const char **where) {
    pthread_mutex_lock(&loop->reader_lock);
    int failure = loop->failure;
    *where = loop->failed_at;
    pthread_mutex_unlock(&loop->reader_lock);
    return failure;
}

/* --- turns at a file's bytes ------------------------------------------------------------------------ */

struct fl_turn fl_turn_take(struct fl_node *node) {
    return (struct fl_turn){.nodeid = node->nodeid, .number = node->turns_given++};
}

void fl_turn_wait(struct fuse_loop *loop, struct fl_turn turn) {
    const struct fl_node *node;
    pthread_mutex_lock(&loop->nodes_lock);
    while ((node = fl_find(loop, turn.nodeid)) != NULL && node->turns_done != turn.number)
        pthread_cond_wait(&loop->turn_done, &loop->nodes_lock);
    pthread_mutex_unlock(&loop->nodes_lock);
}

void fl_turn_end(struct fuse_loop *loop, struct fl_turn turn) {
    if (turn.nodeid == 0) return;
    pthread_mutex_lock(&loop->nodes_lock);
    struct fl_node *node = fl_find(loop, turn.nodeid);
    int waited_for = node == NULL || ++node->turns_done != node->turns_given;
    pthread_mutex_unlock(&loop->nodes_lock);
    if (waited_for) pthread_cond_broadcast(&loop->turn_done);
}

/* The node whose bytes a request that is no WRITE and no FALLOCATE wants to find as the ones before it left them. */
static struct fl_node *meant(struct fuse_loop *loop, const struct fw_in_header *in) {
    const char *name;
    const struct fl_edge *edge;
    switch (in->opcode) {
    case FW_FLUSH:
    case FW_FSYNC:
    case FW_RELEASE:
    case FW_SETATTR:
        return fl_find(loop, in->nodeid);
    case FW_RENAME:
    case FW_RENAME2:
        name = (const char *)(in + 1);
        name += in->opcode == FW_RENAME ? sizeof(struct fw_rename_in) : sizeof(struct fw_rename2_in);
        edge = fl_edge_find(loop, in->nodeid, name, (uint32_t)strlen(name));
        return edge == NULL ? NULL : fl_find(loop, edge->nodeid);
    default:
        return NULL;
    }
}

struct fl_turn fl_keep_order(struct fl_server *server, const struct fw_in_header *in) {
    struct fuse_loop *loop = server->loop;
    struct fl_turn turn = {0};
    pthread_mutex_lock(&loop->nodes_lock);
    struct fl_node *node = meant(loop, in);
    if (node != NULL && node->turns_done != node->turns_given) turn = fl_turn_take(node);
    pthread_mutex_unlock(&loop->nodes_lock);
    if (turn.nodeid != 0) {
        fl_step_aside(server);
        fl_turn_wait(loop, turn);
    }
    return turn;
}
