/* One connection to another machine: a socket, or a session over one, that bytes go over.
 *
 * Responsibility: whole messages or an error, for both ends of a connection. What a channel that would block means is the
 * caller's: `wait` gets `of` and what to wait for, and says 0 to go on, or -errno.
 *
 * Invariants: without a session these are the socket's own calls. A session is an object of a module that nobody here is
 * linked with (tls_core.c); it never blocks, whatever `flags` say. Who holds a channel holds its descriptor and session.
 *
 * Concurrency: one thread for each channel at a time; the socket may be shut down by any.
 */
#ifndef KVFS_REMOTE_CHANNEL_H
#define KVFS_REMOTE_CHANNEL_H

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <unistd.h>

/* Names the capsule in which a session comes from its module. */
#define KVFS_SESSION_CAPSULE "kvfs_session"

struct kvfs_session;

struct kvfs_session_calls {
    /* Bytes, or -errno. After -EAGAIN the next call is to have the same data. With MSG_MORE they may wait for more. */
    ssize_t (*send)(struct kvfs_session *s, const void *data, size_t bytes, int flags);
    /* Bytes, 0 at the end of the stream, or -errno. */
    ssize_t (*receive)(struct kvfs_session *s, void *into, size_t bytes);
    /* Whether bytes are there that the socket has no more. */
    int (*has_bytes)(const struct kvfs_session *s);
    void (*free)(struct kvfs_session *s);
};

struct kvfs_session {
    const struct kvfs_session_calls *calls;
    short wants; /* POLLIN or POLLOUT, after -EAGAIN */
};

struct kvfs_channel {
    int fd;
    struct kvfs_session *session; /* NULL: the bytes are the socket's own */
};

typedef int kvfs_channel_wait(const void *of, short events);

/* Bytes that went, or -errno. */
static inline ssize_t kvfs_channel_send(const struct kvfs_channel *c, const void *data, size_t bytes, int flags) {
    if (c->session != NULL) return c->session->calls->send(c->session, data, bytes, flags);
    ssize_t put;
    while ((put = send(c->fd, data, bytes, MSG_NOSIGNAL | flags)) < 0)
        if (errno != EINTR) return -errno;
    return put;
}

/* Bytes that came, 0 at the end of the stream, or -errno. */
static inline ssize_t kvfs_channel_receive(const struct kvfs_channel *c, void *into, size_t bytes, int flags) {
    if (c->session != NULL) return c->session->calls->receive(c->session, into, bytes);
    ssize_t got;
    while ((got = recv(c->fd, into, bytes, flags)) < 0)
        if (errno != EINTR) return -errno;
    return got;
}

/* What to wait for where a call that needs `events` would block. */
static inline short kvfs_channel_wants(const struct kvfs_channel *c, short events) {
    return c->session != NULL ? c->session->wants : events;
}

static inline int kvfs_channel_has_bytes(const struct kvfs_channel *c) {
    return c->session != NULL && c->session->calls->has_bytes(c->session);
}

/* Whether nothing has come that was not received, nor the end of the stream. */
static inline int kvfs_channel_is_quiet(const struct kvfs_channel *c) {
    struct pollfd waits = {.fd = c->fd, .events = POLLIN | POLLRDHUP};
    return !kvfs_channel_has_bytes(c) && poll(&waits, 1, 0) == 0;
}

static inline void kvfs_channel_close(struct kvfs_channel *c) {
    if (c->session != NULL) c->session->calls->free(c->session);
    close(c->fd);
}

static inline int kvfs_send_all(const struct kvfs_channel *c, const void *data, size_t bytes, int flags,
                                kvfs_channel_wait *wait, const void *of) {
    const uint8_t *from = (const uint8_t *)data;
    while (bytes > 0) {
        ssize_t put = kvfs_channel_send(c, from, bytes, flags);
        if (put >= 0) {
            from += put;
            bytes -= (size_t)put;
            continue;
        }
        const int rc = put == -EAGAIN ? wait(of, kvfs_channel_wants(c, POLLOUT)) : (int)put;
        if (rc < 0) return rc;
    }
    return 0;
}

/* At least one byte: how many came, 0 at the end of the stream, or -errno. */
static inline ssize_t kvfs_receive_some(const struct kvfs_channel *c, void *into, size_t bytes, int flags,
                                        kvfs_channel_wait *wait, const void *of) {
    ssize_t got;
    while ((got = kvfs_channel_receive(c, into, bytes, flags)) == -EAGAIN) {
        const int rc = wait(of, kvfs_channel_wants(c, POLLIN));
        if (rc < 0) return rc;
    }
    return got;
}

/* -ECONNRESET where the peer ends before. */
static inline int kvfs_receive_all(const struct kvfs_channel *c, void *into, size_t bytes, int flags,
                                   kvfs_channel_wait *wait, const void *of) {
    uint8_t *to = (uint8_t *)into;
    while (bytes > 0) {
        const ssize_t got = kvfs_receive_some(c, to, bytes, flags, wait, of);
        if (got <= 0) return got == 0 ? -ECONNRESET : (int)got;
        to += got;
        bytes -= (size_t)got;
    }
    return 0;
}

#endif
