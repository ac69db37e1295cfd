/* Serving blocks to other machines: a thread for each connection, from the shared table and the slots to the socket.
 * Parts: this file owns the server, connections and their threads; serve_requests.c answers requests, bytes and all;
 * serve_blocks.c finds the blocks that they name, and has the event loop bring up what only NVMe has.
 *
 * Responsibility: a connection's life. The event loop has accepted it and verified the peer before a thread begins.
 *
 * Invariants:
 * - A connection that is used has a thread, which frees its fabric at the end. Its channel is closed once that thread
 *   is joined: when it is reaped, or the server stops.
 * - A peer that is gone, or does not take what it asked for, ends its connection: calls on a socket wait as long as
 *   `prepare` says.
 *
 * Concurrency: a connection's thread owns its socket's bytes; `lock` guards what threads share with the event loop,
 * and is never held over a system call on a socket or slot, nor is that of `hits`. Connections are opened and reaped by
 * the event loop alone.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "serve_state.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

void kvfs_remote_notify(struct kvfs_remote_server *s) {
    const uint64_t one = 1;
    (void)!write(s->notify_fd, &one, sizeof one);
}

static void *thread_main(void *argument) {
    struct kvfs_remote_connection *c = (struct kvfs_remote_connection *)argument;
    uint64_t body[KVFS_REMOTE_MATCHES * KVFS_KEY_BYTES / sizeof(uint64_t)];
    int rc = 0;
    while (rc == 0) rc = kvfs_remote_serve_one(c, body);
    shutdown(c->channel.fd, SHUT_RDWR);
    if (c->fabric != NULL) c->fabric->calls->free(c->fabric); /* takes some ms */
    kvfs_lock(&c->server->lock);
    c->error = rc < 0 ? rc : 0;
    c->server->counts.broken += rc == -EPROTO;
    c->ended = 1;
    kvfs_unlock(&c->server->lock);
    kvfs_remote_notify(c->server);
    return NULL;
}

/* --- the event loop's side --------------------------------------------------------------------------------------- */
static void free_all(struct kvfs_remote_server *s) UNCHECKED /* no thread any more */
{
    if (s->notify_fd >= 0) close(s->notify_fd);
    free(s->connections);
    free(s->bindings);
    free(s->lifts);
    kvfs_hits_free(&s->hits);
    pthread_cond_destroy(&s->lifted);
    kvfs_mutex_destroy(&s->lock);
}

int kvfs_remote_start(struct kvfs_remote_server *s, uint32_t connections, uint32_t lifts, uint32_t hits)
    UNCHECKED /* no thread yet */
{
    s->connection_count = connections;
    s->lift_room = lifts;
    kvfs_mutex_init(&s->lock);
    kvfs_cond_init(&s->lifted);
    s->connections = calloc(connections, sizeof *s->connections);
    s->lifts = calloc(lifts, sizeof *s->lifts);
    s->notify_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int rc = !s->connections || !s->lifts ? -ENOMEM : s->notify_fd < 0 ? -errno : 0;
    const int hits_rc = kvfs_hits_init(&s->hits, hits);
    rc = rc < 0 ? rc : hits_rc;
    s->started = rc == 0;
    if (rc < 0) free_all(s);
    return rc;
}

static void close_connection(struct kvfs_remote_connection *c) {
    kvfs_channel_close(&c->channel);
    free(c->pieces);
}

void kvfs_remote_stop(struct kvfs_remote_server *s) {
    if (!s->started) return;
    s->started = 0;
    kvfs_lock(&s->lock);
    s->stopping = 1;
    pthread_cond_broadcast(&s->lifted);
    kvfs_unlock(&s->lock);
    for (uint32_t i = 0; i < s->connection_count; i++)
        if (s->connections[i].used) shutdown(s->connections[i].channel.fd, SHUT_RDWR);
    for (uint32_t i = 0; i < s->connection_count; i++)
        if (s->connections[i].used) {
            pthread_join(s->connections[i].thread, NULL);
            close_connection(&s->connections[i]);
        }
    free_all(s);
}

/* The thread waits in its calls, within these bounds; keepalive finds peers that are gone while nothing is sent. */
static int prepare(int fd) {
    const struct timeval wait = {.tv_sec = PEER_WAIT_S};
    const int on = 1, idle_s = 30, interval_s = 10, probes = 3, unacknowledged_ms = PEER_WAIT_S * 1000;
    if (fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK) != 0 ||
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof wait) != 0 ||
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof wait) != 0)
        return -errno;
    (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unacknowledged_ms, sizeof unacknowledged_ms);
    return 0;
}

/* Takes over a channel whose peer was verified, and a fabric if there is one; the connection's number, its own until it is
 * reaped; or -errno. */
int64_t kvfs_remote_open(struct kvfs_remote_server *s, struct kvfs_channel channel, struct kvfs_fabric *fabric)
    UNCHECKED /* its thread begins with the last step */
{
    uint32_t number = 0;
    while (number < s->connection_count && s->connections[number].used) number++;
    if (number == s->connection_count) return -EMFILE;
    struct kvfs_remote_connection *c = &s->connections[number];
    *c = (struct kvfs_remote_connection){.server = s, .channel = channel, .fabric = fabric, .number = number};
    int rc = prepare(channel.fd);
    if (rc == 0 && channel.session != NULL) {
        c->pieces = malloc(PIECE_BYTES);
        rc = c->pieces == NULL ? -ENOMEM : 0;
    }
    if (rc == 0) rc = kvfs_thread_start(&c->thread, thread_main, c, KVFS_SMALL_STACK_BYTES);
    c->used = rc == 0;
    if (rc < 0) free(c->pieces);
    return rc < 0 ? (int64_t)rc : (int64_t)number;
}

/* 1 where the connection has ended, and is closed now; 0 where it goes on. */
int kvfs_remote_reap(struct kvfs_remote_server *s, uint32_t number, int *error) {
    if (number >= s->connection_count || !s->connections[number].used) return 0;
    struct kvfs_remote_connection *c = &s->connections[number];
    kvfs_lock(&c->server->lock);
    int ended = c->ended;
    *error = c->error;
    kvfs_unlock(&c->server->lock);
    if (ended) {
        pthread_join(c->thread, NULL);
        close_connection(c);
        c->used = 0;
    }
    return ended;
}

void kvfs_remote_read_counts(struct kvfs_remote_server *s, struct kvfs_remote_counts *into) {
    kvfs_lock(&s->lock);
    *into = s->counts;
    kvfs_unlock(&s->lock);
}
