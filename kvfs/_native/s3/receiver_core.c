/* Bodies from a socket into a file.
 *
 * Responsibility: read, hash while the bytes are in the processor's cache, write; until the socket is empty or enough
 * was moved. One call for all of it, so that the interpreter is not loaded into the cache again in between.
 *
 * A buffer of 256 KiB, which stays in the second-level cache; pwrite and not a mapping of the file, which clears each
 * page before it is written: 1 MiB took 62 us through the buffer, 750 us into a new mapping.
 *
 * Concurrency: one thread per body; the buffer is the caller's.
 */
#include "receiver_core.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include "hash/xxh3.h"

void kvfs_xxh3_reset_avx2(void *state);
void kvfs_xxh3_update_avx2(void *state, const void *data, size_t bytes);
uint64_t kvfs_xxh3_digest_avx2(const void *state);

int kvfs_body_init(struct kvfs_body *b, int wants_crc) {
    b->xxh3 = aligned_alloc(64, (sizeof(XXH3_state_t) + 63) / 64 * 64);
    if (b->xxh3 == NULL) return -ENOMEM;
    b->crc = 0;
    b->wants_crc = wants_crc;
    b->avx2 = 0;
#if defined(__x86_64__)
    b->avx2 = __builtin_cpu_supports("avx2") != 0;
    if (b->avx2) {
        kvfs_xxh3_reset_avx2(b->xxh3);
        return 0;
    }
#endif
    XXH3_INITSTATE((XXH3_state_t *)b->xxh3);
    XXH3_64bits_reset(b->xxh3);
    return 0;
}

void kvfs_body_free(struct kvfs_body *b) {
    free(b->xxh3);
    b->xxh3 = NULL;
}

void kvfs_body_update(struct kvfs_body *b, const uint8_t *data, size_t bytes) {
#if defined(__x86_64__)
    if (b->avx2)
        kvfs_xxh3_update_avx2(b->xxh3, data, bytes);
    else
#endif
        XXH3_64bits_update(b->xxh3, data, bytes);
    if (b->wants_crc) b->crc = kvfs_crc64nvme(b->crc, data, bytes, 0);
}

uint64_t kvfs_body_xxh3(const struct kvfs_body *b) {
#if defined(__x86_64__)
    if (b->avx2) return kvfs_xxh3_digest_avx2(b->xxh3);
#endif
    return XXH3_64bits_digest(b->xxh3);
}

static int write_all(int fd, const uint8_t *data, size_t bytes, uint64_t offset) {
    while (bytes > 0) {
        ssize_t put = pwrite(fd, data, bytes, (off_t)offset);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) return put < 0 ? -errno : -EIO;
        data += put;
        bytes -= (size_t)put;
        offset += (uint64_t)put;
    }
    return 0;
}

int kvfs_body_take(struct kvfs_body *b, int fd, uint64_t offset, const uint8_t *data, size_t bytes) {
    kvfs_body_update(b, data, bytes);
    return write_all(fd, data, bytes, offset);
}

int64_t kvfs_receive(struct kvfs_body *b, int socket, int fd, uint64_t offset, uint64_t most, uint8_t *buffer,
                     size_t room, int *end) {
    uint64_t moved = 0;
    *end = KVFS_RECEIVE_MOVED;
    while (moved < most) {
        size_t asked = most - moved < room ? (size_t)(most - moved) : room;
        ssize_t got = recv(socket, buffer, asked, MSG_DONTWAIT);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) {
            *end = got == 0 ? KVFS_RECEIVE_END : errno == EAGAIN ? KVFS_RECEIVE_WAIT : KVFS_RECEIVE_GONE;
            break;
        }
        int rc = kvfs_body_take(b, fd, offset + moved, buffer, (size_t)got);
        if (rc < 0) return rc;
        moved += (uint64_t)got;
    }
    return (int64_t)moved;
}
