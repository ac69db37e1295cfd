/* Filling drafts, and having them sealed. See writer_core.c. */
#ifndef KVFS_WRITER_CORE_H
#define KVFS_WRITER_CORE_H

#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#include "seal/packets.h"

/* One block of a put: its draft, its pieces and its status. */
struct kvfs_put {
    int fd;
    uint32_t slot;
    uint32_t generation;
    uint64_t kept_bytes; /* what the draft has of an earlier object */
    ssize_t block;       /* index into the keys, the parents and `starts` */
    int status;          /* 0 new, or an errno */
};

int kvfs_write_fd(int fd, uint64_t offset, const struct iovec *vectors, ssize_t pieces);
int kvfs_map_draft(int fd, uint64_t size, void **place);
uint64_t kvfs_sum_pieces(const struct iovec *vectors, ssize_t pieces);
int kvfs_put_blocks(int channel, struct kvfs_put *puts, ssize_t n, const uint8_t *keys, const uint8_t *parents,
                    const struct iovec *vectors, const ssize_t *starts, int64_t timeout_ns);

#endif
