/* Slot files: create, open, probe, recycle, detach, hash. See slots_core.c. */
#ifndef KVFS_SLOTS_CORE_H
#define KVFS_SLOTS_CORE_H

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

#define KVFS_SLOT_NAME_BYTES 9
#define KVFS_HASH_CHUNK_BYTES (256u << 10)

struct kvfs_slot_stat {
    uint64_t size_bytes;
    uint64_t physical_bytes;
};

static inline void kvfs_slot_name(uint32_t slot, char name[KVFS_SLOT_NAME_BYTES]) {
    static const char digits[] = "0123456789abcdef";
    for (int i = 0; i < 8; i++) name[i] = digits[(slot >> (28 - 4 * i)) & 15];
    name[8] = 0;
}

/* A descriptor, which is a lease while it is open; or -errno. */
static inline int kvfs_slot_open(int dirfd, uint32_t slot, int flags) {
    char name[KVFS_SLOT_NAME_BYTES];
    kvfs_slot_name(slot, name);
    int fd = openat(dirfd, name, flags | O_CLOEXEC | O_NOFOLLOW | O_NOCTTY);
    return fd >= 0 ? fd : -errno;
}

/* Marks a slot as one whose pages somebody may have references to (slots_core.c). */
static inline int kvfs_fd_mark_read(int fd) {
    const struct timespec now[2] = {{0, UTIME_NOW}, {0, UTIME_OMIT}};
    return futimens(fd, now) == 0 ? 0 : -errno;
}

/* All return >= 0, or -errno. */
int kvfs_slot_create(int dirfd, uint32_t slot, int64_t gid);
int kvfs_slot_check_no_writer(int dirfd, uint32_t slot, struct kvfs_slot_stat *out);
int kvfs_slot_is_held(int dirfd, uint32_t slot);
int kvfs_slot_recycle(int dirfd, uint32_t slot, uint64_t keep_bytes);
int kvfs_slot_fill(int dirfd, uint32_t slot, uint64_t size);
int kvfs_slot_detach(int dirfd, uint32_t slot, struct kvfs_slot_stat *out);
int kvfs_shows_reads(int dirfd);
int kvfs_fd_is_held(int fd);
int kvfs_fd_has_writer(int fd);
int kvfs_fd_stat(int fd, struct kvfs_slot_stat *out);
int kvfs_fd_xxh3(int fd, uint64_t *checksum, uint64_t *bytes);
void kvfs_ignore_sigio(void);

#endif
