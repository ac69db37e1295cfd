/* Whole messages over a socket, for both ends of a connection.
 *
 * Responsibility: all bytes or an error. What a socket that would block means is the caller's: `wait` gets `of`, and
 * says 0 to go on, or -errno.
 *
 * Concurrency: one thread for each socket and direction.
 */
#ifndef KVFS_REMOTE_SOCKET_IO_H
#define KVFS_REMOTE_SOCKET_IO_H

#include <errno.h>
#include <poll.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

typedef int kvfs_socket_wait(const void *of, short events);

static inline int kvfs_send_all(int fd, const void *data, size_t bytes, int flags, kvfs_socket_wait *wait,
                                const void *of)
{
    const uint8_t *from = (const uint8_t *)data;
    while (bytes > 0) {
        ssize_t put = send(fd, from, bytes, MSG_NOSIGNAL | flags);
        if (put >= 0) {
            from += put;
            bytes -= (size_t)put;
        } else if (errno == EAGAIN) {
            int rc = wait(of, POLLOUT);
            if (rc < 0)
                return rc;
        } else if (errno != EINTR) {
            return -errno;
        }
    }
    return 0;
}

/* -ECONNRESET where the peer ends before. */
static inline int kvfs_receive_all(int fd, void *into, size_t bytes, int flags, kvfs_socket_wait *wait, const void *of)
{
    uint8_t *to = (uint8_t *)into;
    while (bytes > 0) {
        ssize_t got = recv(fd, to, bytes, flags);
        if (got > 0) {
            to += got;
            bytes -= (size_t)got;
        } else if (got == 0) {
            return -ECONNRESET;
        } else if (errno == EAGAIN) {
            int rc = wait(of, POLLIN);
            if (rc < 0)
                return rc;
        } else if (errno != EINTR) {
            return -errno;
        }
    }
    return 0;
}

#endif
