/* Operations on slot files.
 *
 * Responsibility: one file per slot, named by eight hex digits in the slot directory. Everything here is a short
 * sequence of system calls on a descriptor that is opened and closed in the same call: a standing descriptor or
 * mapping per slot would meet RLIMIT_NOFILE and vm.max_map_count, and would itself look like a holder.
 *
 * How holders are found: a lease (F_SETLEASE) is granted by the kernel only when no other open file description of
 * the inode conflicts, and a mapping keeps its description alive. F_RDLCK on a read-only descriptor is refused
 * while a writer lives; F_WRLCK is refused while anyone else has the file open or mapped. While F_WRLCK is granted
 * nobody can open the file (O_NONBLOCK: EWOULDBLOCK), so truncating under it cannot take bytes from a reader.
 *
 * How a free slot may keep its pages, so that the next block of that size meets no page fault: bytes that a reader took
 * by reference (sendfile, splice, a mapping that a device reads) can outlive his descriptor, and no lease shows them. The
 * kernel sets a file's access time with its first read, splice or mmap, by whomever. A slot gets the time 0 when it
 * becomes free; while it still is 0, nobody has had a reference to any of its pages. The mount's loop marks what it hands
 * to the kernel (kvfs_fd_mark_read), since O_NOATIME of its openers goes through to the slot.
 *
 * Invariants: never blocks on a holder; -EAGAIN means "held", -EOPNOTSUPP means that this filesystem or this
 * process cannot take leases (then nobody may conclude that a slot is free of readers). No state, any thread.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "slots_core.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "hash/xxh3.h"
#include "pages.h"

/* Breaking a lease sends SIGIO to its holder, and the default action of SIGIO ends the process: a reader that opens a
 * slot in the microsecond of a probe would kill the service. A handler that the application has set stays. */
void kvfs_ignore_sigio(void) {
    struct sigaction current;
    if (sigaction(SIGIO, NULL, &current) == 0 && !(current.sa_flags & SA_SIGINFO) && current.sa_handler == SIG_DFL) {
        struct sigaction ignore;
        memset(&ignore, 0, sizeof ignore);
        ignore.sa_handler = SIG_IGN;
        sigaction(SIGIO, &ignore, NULL);
    }
}

/* EACCES: the file is another user's and CAP_LEASE is missing; EINVAL: the filesystem has no leases (overlayfs,
 * network filesystems, all but a few from Linux 6.20 on); EPERM: a security module. None says anything about holders. */
static int lease_error(int error) {
    switch (error) {
    case EAGAIN:
    case ENOLCK:
    case ENOMEM:
        return -EAGAIN;
    case EACCES:
    case EINVAL:
    case EPERM:
    case EOPNOTSUPP:
        return -EOPNOTSUPP;
    default:
        return -error;
    }
}

static int lease_take(int fd, int kind) { return fcntl(fd, F_SETLEASE, kind) == 0 ? 0 : lease_error(errno); }

static void lease_drop(int fd) { (void)fcntl(fd, F_SETLEASE, F_UNLCK); }

static int probe(int fd, int kind) {
    int rc = lease_take(fd, kind);
    if (rc == 0) lease_drop(fd);
    return rc == -EAGAIN ? 1 : rc;
}

/* 1 while anyone else has the file open or mapped, 0 if not. */
int kvfs_fd_is_held(int fd) { return probe(fd, F_WRLCK); }

/* `fd` is read-only. 1 while anyone has a writable descriptor or mapping, 0 if not. */
int kvfs_fd_has_writer(int fd) { return probe(fd, F_RDLCK); }

int kvfs_fd_stat(int fd, struct kvfs_slot_stat *out) {
    struct stat st;
    if (fstat(fd, &st) != 0) return -errno;
    out->size_bytes = (uint64_t)st.st_size;
    out->physical_bytes = (uint64_t)st.st_blocks * 512u;
    return 0;
}

#define FILL_CHUNK_BYTES (2u << 20)

static const struct timespec NEVER[2] = {{0, 0}, {0, UTIME_OMIT}};

static int is_unread(const struct stat *st) { return st->st_atim.tv_sec == 0 && st->st_atim.tv_nsec == 0; }

/* 1 if reads through this directory's mount set access times, which noatime and read-only mounts do not. */
int kvfs_shows_reads(int dirfd) {
    struct stat st;
    char byte = 0;
    int fd = openat(dirfd, ".", O_RDWR | O_TMPFILE | O_CLOEXEC, 0600);
    if (fd < 0) return 0;
    int shows = pwrite(fd, &byte, 1, 0) == 1 && futimens(fd, NEVER) == 0 && fstat(fd, &st) == 0 && is_unread(&st) &&
                pread(fd, &byte, 1, 0) == 1 && fstat(fd, &st) == 0 && !is_unread(&st);
    close(fd);
    return shows;
}

/* A new empty slot file, open for reading and writing. fchmod, because the umask would take the group's right. */
int kvfs_slot_create(int dirfd, uint32_t slot, int64_t gid) {
    char name[KVFS_SLOT_NAME_BYTES];
    kvfs_slot_name(slot, name);
    int fd = openat(dirfd, name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0640);
    if (fd < 0) return -errno;
    if ((gid >= 0 && fchown(fd, (uid_t)-1, (gid_t)gid) != 0) || fchmod(fd, 0640) != 0 || futimens(fd, NEVER) != 0) {
        int error = errno;
        close(fd);
        unlinkat(dirfd, name, 0);
        return -error;
    }
    return fd;
}

/* Size and blocks of a slot that nobody can write any more; -EBUSY while a writer lives. */
int kvfs_slot_check_no_writer(int dirfd, uint32_t slot, struct kvfs_slot_stat *out) {
    int fd = kvfs_slot_open(dirfd, slot, O_RDONLY | O_NONBLOCK);
    if (fd < 0) return fd;
    int rc = kvfs_fd_has_writer(fd);
    if (rc == 0)
        rc = kvfs_fd_stat(fd, out);
    else if (rc == 1)
        rc = -EBUSY;
    close(fd);
    return rc;
}

int kvfs_slot_is_held(int dirfd, uint32_t slot) {
    int fd = kvfs_slot_open(dirfd, slot, O_RDONLY | O_NONBLOCK);
    if (fd < 0) return fd;
    int rc = kvfs_fd_is_held(fd);
    close(fd);
    return rc;
}

/* Whether the slot may stay as it is: of this size, without holes, and nobody has references to its pages. */
static int may_keep(const struct stat *st, uint64_t size) {
    const uint64_t pages = kvfs_page_up(size);
    return (uint64_t)st->st_size == size && (uint64_t)st->st_blocks * 512u == pages && is_unread(st);
}

/* Frees a slot that nobody else has open or mapped; -EAGAIN while held. 1: it keeps its bytes, which it may where it has
 * `keep_bytes` (0: never); 0: it is empty. Under the lease, so that no reader can come in between. */
int kvfs_slot_recycle(int dirfd, uint32_t slot, uint64_t keep_bytes) {
    struct stat st;
    int fd = kvfs_slot_open(dirfd, slot, O_RDWR | O_NONBLOCK);
    if (fd < 0) return fd;
    int rc = lease_take(fd, F_WRLCK);
    if (rc == 0) {
        if (keep_bytes > 0 && fstat(fd, &st) == 0 && may_keep(&st, keep_bytes))
            rc = 1;
        else if (ftruncate(fd, 0) != 0 || futimens(fd, NEVER) != 0)
            rc = -errno;
        lease_drop(fd);
    }
    close(fd);
    return rc;
}

/* Fills an empty slot with zeros, in pages as large as its size allows. */
int kvfs_slot_fill(int dirfd, uint32_t slot, uint64_t size) {
    static const char zeros[FILL_CHUNK_BYTES];
    int fd = kvfs_slot_open(dirfd, slot, O_RDWR | O_NONBLOCK);
    if (fd < 0) return fd;
    int rc = ftruncate(fd, (off_t)size) == 0 ? 0 : -errno;
    for (uint64_t done = 0; rc == 0 && done < size;) {
        const uint64_t left = size - done;
        ssize_t put = pwrite(fd, zeros, left < sizeof zeros ? left : sizeof zeros, (off_t)done);
        if (put > 0)
            done += (uint64_t)put;
        else if (put == 0 || errno != EINTR)
            rc = put == 0 ? -EIO : -errno;
    }
    close(fd);
    return rc;
}

/* Takes a held slot's name away; returns a read-only descriptor of the nameless file, by which it is probed later. */
int kvfs_slot_detach(int dirfd, uint32_t slot, struct kvfs_slot_stat *out) {
    char name[KVFS_SLOT_NAME_BYTES];
    kvfs_slot_name(slot, name);
    int fd = kvfs_slot_open(dirfd, slot, O_RDONLY | O_NONBLOCK);
    if (fd < 0) return fd;
    int rc = kvfs_fd_stat(fd, out);
    if (rc == 0 && unlinkat(dirfd, name, 0) != 0) rc = -errno;
    if (rc != 0) {
        close(fd);
        return rc;
    }
    return fd;
}

/* By pread into one bounded buffer: a mapping of the whole payload would fault in page tables for every 4 KiB, and
 * a truncated slot would end it with SIGBUS where pread just comes up short. */
int kvfs_fd_xxh3(int fd, uint64_t *checksum, uint64_t *bytes) {
    uint8_t *chunk = malloc(KVFS_HASH_CHUNK_BYTES);
    XXH3_state_t *state = XXH3_createState();
    int rc = chunk && state ? 0 : -ENOMEM;
    uint64_t offset = 0;
    if (rc == 0) XXH3_64bits_reset(state);
    while (rc == 0) {
        ssize_t n = pread(fd, chunk, KVFS_HASH_CHUNK_BYTES, (off_t)offset);
        if (n == 0) break;
        if (n > 0) {
            XXH3_64bits_update(state, chunk, (size_t)n);
            offset += (uint64_t)n;
        } else if (errno != EINTR) {
            rc = -errno;
        }
    }
    if (rc == 0) {
        *checksum = XXH3_64bits_digest(state);
        *bytes = offset;
    }
    XXH3_freeState(state);
    free(chunk);
    return rc;
}
