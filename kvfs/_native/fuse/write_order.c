/* The reader of requests, and the order in which requests reach a file's bytes. See loop.h.
 *
 * One thread at a time is the reader: it takes a request from the device and handles it, and then the next. Before it
 * copies a file's bytes, which may take as long as memory or a disk does, it steps aside: another thread becomes the
 * reader, a new one if all are busy and there may be more. With as many slow requests as threads, the first that ends
 * makes the next reader.
 *
 * A thread that steps aside with a request that changes a file takes a ticket for it, in the kernel's order, and later
 * requests about the same file wait for that ticket to end: WRITE, FALLOCATE, and what must find the bytes of
 * those before it (FLUSH, FSYNC, RELEASE, SETATTR, RENAME). The kernel itself sends most of them only after the answer.
 * A thread that has a ticket waits for nothing but the bytes, so tickets always end.
 *
 * Concurrency: `reader_lock` guards who reads and which threads there are, `nodes_lock` the tickets.
 */
#include "state.h"

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
    if (posix_memalign((void **)&server->request, 4096, loop->request_size + FL_REQUEST_END) != 0)
        server->request = NULL;
    if (posix_memalign((void **)&server->reply, 4096, loop->config.buffer_size) != 0) server->reply = NULL;
    if (server->request != NULL && server->reply != NULL) return server;
    fl_server_free(server);
    return NULL;
}

int fl_thread_add(struct fuse_loop *loop, void *(*run)(void *), void *argument) {
    int status = kvfs_thread_start(&loop->threads[loop->running], run, argument, 0);
    if (status == 0) loop->running++;
    return status;
}

int fl_server_add(struct fuse_loop *loop) {
    struct fl_server *server = server_make(loop);
    if (server == NULL) return -ENOMEM;
    server->avoided_cpu = -1; /* its maker's processors are its own so far */
    int status = fl_thread_add(loop, fl_serve, server);
    if (status == 0)
        loop->servers++;
    else
        fl_server_free(server);
    return status;
}

int fl_become_reader(struct fl_server *server) {
    struct fuse_loop *loop = server->loop;
    kvfs_lock(&loop->reader_lock);
    while (loop->has_reader && !loop->stopping) {
        loop->idle++;
        kvfs_wait(&loop->reader_free, &loop->reader_lock);
        loop->idle--;
    }
    server->reads = loop->has_reader = !loop->stopping;
    kvfs_unlock(&loop->reader_lock);
    return server->reads;
}

void fl_step_aside(struct fl_server *server) {
    struct fuse_loop *loop = server->loop;
    if (!server->reads) return;
    kvfs_lock(&loop->reader_lock);
    server->reads = loop->has_reader = 0;
    if (loop->idle > 0)
        pthread_cond_signal(&loop->reader_free);
    else if (loop->servers < loop->config.threads && !loop->stopping)
        (void)fl_server_add(loop); /* without it, whoever is ready first reads on */
    kvfs_unlock(&loop->reader_lock);
}

void fl_end(struct fuse_loop *loop, const char *where, int error) {
    uint64_t one = 1;
    kvfs_lock(&loop->reader_lock);
    if (error != 0 && loop->failure == 0 && !loop->stopping) {
        loop->failure = error;
        loop->failed_at = where;
    }
    kvfs_unlock(&loop->reader_lock);
    ssize_t written = write(loop->ended_fd, &one, sizeof one);
    (void)written;
}

int fl_failure(struct fuse_loop *loop, const char **where) {
    kvfs_lock(&loop->reader_lock);
    int failure = loop->failure;
    *where = loop->failed_at;
    kvfs_unlock(&loop->reader_lock);
    return failure;
}

/* --- tickets for a file's bytes --------------------------------------------------------------------- */

struct fl_ticket fl_ticket_take(struct fl_node *node) {
    return (struct fl_ticket){.nodeid = node->nodeid, .number = node->tickets_taken++};
}

void fl_ticket_wait(struct fuse_loop *loop, struct fl_ticket ticket) {
    const struct fl_node *node;
    kvfs_lock(&loop->nodes_lock);
    while ((node = fl_find(loop, ticket.nodeid)) != NULL && node->tickets_done != ticket.number)
        kvfs_wait(&loop->ticket_done, &loop->nodes_lock);
    kvfs_unlock(&loop->nodes_lock);
}

void fl_ticket_end(struct fuse_loop *loop, struct fl_ticket ticket) {
    if (ticket.nodeid == 0) return;
    kvfs_lock(&loop->nodes_lock);
    struct fl_node *node = fl_find(loop, ticket.nodeid);
    int waited_for = node == NULL || ++node->tickets_done != node->tickets_taken;
    kvfs_unlock(&loop->nodes_lock);
    if (waited_for) pthread_cond_broadcast(&loop->ticket_done);
}

/* The node whose bytes a request that is no WRITE and no FALLOCATE wants to find as the ones before it left them. */
static struct fl_node *meant(struct fuse_loop *loop, const struct fw_in_header *in) REQUIRES(loop->nodes_lock) {
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

struct fl_ticket fl_keep_order(struct fl_server *server, const struct fw_in_header *in) {
    struct fuse_loop *loop = server->loop;
    struct fl_ticket ticket = {0};
    kvfs_lock(&loop->nodes_lock);
    struct fl_node *node = meant(loop, in);
    if (node != NULL && node->tickets_done != node->tickets_taken) ticket = fl_ticket_take(node);
    kvfs_unlock(&loop->nodes_lock);
    if (ticket.nodeid != 0) {
        fl_step_aside(server);
        fl_ticket_wait(loop, ticket);
    }
    return ticket;
}
