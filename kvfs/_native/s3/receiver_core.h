/* Bodies from a socket into a file, with their checksums, in one pass. See receiver_core.c. */
#ifndef KVFS_RECEIVER_CORE_H
#define KVFS_RECEIVER_CORE_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

struct kvfs_body {
    void *xxh3;   /* the streaming state */
    uint64_t crc; /* CRC-64/NVME as it stands */
    int wants_crc;
    int avx2;
};

int kvfs_body_init(struct kvfs_body *b, int wants_crc);
void kvfs_body_free(struct kvfs_body *b);
void kvfs_body_update(struct kvfs_body *b, const uint8_t *data, size_t bytes);
uint64_t kvfs_body_xxh3(const struct kvfs_body *b);
/* Hashes bytes, and writes them to `offset` of `fd`. 0, or -errno of the file. */
int kvfs_body_take(struct kvfs_body *b, int fd, uint64_t offset, const uint8_t *data, size_t bytes);

enum kvfs_receive_end {
    KVFS_RECEIVE_MOVED = 0, /* as much as was asked for */
    KVFS_RECEIVE_WAIT = 1,  /* nothing more is there yet */
    KVFS_RECEIVE_END = 2,   /* the stream ended */
    KVFS_RECEIVE_GONE = 3,  /* the connection failed */
};

/* Moves at most `most` bytes to `offset` of `fd` through `buffer`. Bytes moved, with why no more in `*end`; or -errno of
 * the file. */
int64_t kvfs_receive(struct kvfs_body *b, int socket, int fd, uint64_t offset, uint64_t most, uint8_t *buffer,
                     size_t room, int *end);

/* CRC-64/NVME of what `crc` is of, and these bytes. `engine` 0: what this processor does best, 1: tables, 2: 128-bit
 * multiplications, 3: 512-bit ones; -1 where it cannot. */
int kvfs_crc64nvme_engine(int wanted);
uint64_t kvfs_crc64nvme(uint64_t crc, const uint8_t *data, size_t bytes, int engine);

#endif
