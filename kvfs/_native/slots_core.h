/* Slot files: create, open, probe, recycle, detach, hash. See slots_core.c. */
#ifndef KVFS_SLOTS_CORE_H
#define KVFS_SLOTS_CORE_H

#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#define KVFS_SLOT_NAME_BYTES 9
#define KVFS_HASH_CHUNK_BYTES (256u << 10)

struct kvfs_slot_stat {
    uint64_t size_bytes;
    uint64_t physical_bytes;
};

static inline void kvfs_slot_name(uint32_t slot, char name[KVFS_SLOT_NAME_BYTES])
{
    static const char digits[] = "0123456789abcdef";
    for (int i = 0; i < 8; i++)
        name[i] = digits[(slot >> (28 - 4 * i)) & 15];
    name[8] = 0;
}

/* All return >= 0, or -errno. */
int kvfs_slot_create(int dirfd, uint32_t slot, int64_t gid);
int kvfs_slot_open(int dirfd, uint32_t slot, int flags);
int kvfs_slot_check_no_writer(int dirfd, uint32_t slot, struct kvfs_slot_stat *out);
int kvfs_slot_is_held(int dirfd, uint32_t slot);
int kvfs_slot_recycle(int dirfd, uint32_t slot);
int kvfs_slot_detach(int dirfd, uint32_t slot, struct kvfs_slot_stat *out);
int kvfs_fd_is_held(int fd);
int kvfs_fd_has_writer(int fd);
int kvfs_fd_stat(int fd, struct kvfs_slot_stat *out);
int kvfs_fd_xxh3(int fd, uint64_t *checksum, uint64_t *bytes);
void kvfs_ignore_sigio(void);

#endif
