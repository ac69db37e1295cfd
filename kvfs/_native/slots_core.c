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

#include "xxh3.h"

/* Breaking a lease sends SIGIO to whoever holds it, and the default action of SIGIO ends the process: a reader
 * that opens a slot in the microsecond of a probe would kill the service. A handler that the application has
 * set stays. */
void kvfs_ignore_sigio(void)
{
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
static int lease_error(int error)
{
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

static int probe(int fd, int kind)
{
    int rc = lease_take(fd, kind);
    if (rc == 0)
        lease_drop(fd);
    return rc == -EAGAIN ? 1 : rc;
}

/* 1 while anyone else has the file open or mapped, 0 if not. */
int kvfs_fd_is_held(int fd) { return probe(fd, F_WRLCK); }

/* `fd` is read-only. 1 while anyone has a writable descriptor or mapping, 0 if not. */
int kvfs_fd_has_writer(int fd) { return probe(fd, F_RDLCK); }

int kvfs_fd_stat(int fd, struct kvfs_slot_stat *out)
{
    struct stat st;
    if (fstat(fd, &st) != 0)
        return -errno;
    out->size_bytes = (uint64_t)st.st_size;
    out->physical_bytes = (uint64_t)st.st_blocks * 512u;
    return 0;
}

int kvfs_slot_open(int dirfd, uint32_t slot, int flags)
{
    char name[KVFS_SLOT_NAME_BYTES];
    kvfs_slot_name(slot, name);
    int fd = openat(dirfd, name, flags | O_CLOEXEC | O_NOFOLLOW | O_NOCTTY);
    return fd >= 0 ? fd : -errno;
}

/* A new empty slot file, open for reading and writing. fchmod, because the umask would take the group's right. */
int kvfs_slot_create(int dirfd, uint32_t slot, int64_t gid)
{
    char name[KVFS_SLOT_NAME_BYTES];
    kvfs_slot_name(slot, name);
    int fd = openat(dirfd, name, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0640);
    if (fd < 0)
        return -errno;
    if ((gid >= 0 && fchown(fd, (uid_t)-1, (gid_t)gid) != 0) || fchmod(fd, 0640) != 0) {
        int error = errno;
        close(fd);
        unlinkat(dirfd, name, 0);
        return -error;
    }
    return fd;
}

/* Size and blocks of a slot that nobody can write any more; -EBUSY while a writer lives. */
int kvfs_slot_check_no_writer(int dirfd, uint32_t slot, struct kvfs_slot_stat *out)
{
    int fd = kvfs_slot_open(dirfd, slot, O_RDONLY | O_NONBLOCK);
    if (fd < 0)
        return fd;
    int rc = kvfs_fd_has_writer(fd);
    if (rc == 0)
        rc = kvfs_fd_stat(fd, out);
    else if (rc == 1)
        rc = -EBUSY;
    close(fd);
    return rc;
}

int kvfs_slot_is_held(int dirfd, uint32_t slot)
{
    int fd = kvfs_slot_open(dirfd, slot, O_RDONLY | O_NONBLOCK);
    if (fd < 0)
        return fd;
    int rc = kvfs_fd_is_held(fd);
    close(fd);
    return rc;
}

/* Empties a slot that nobody else has open or mapped; -EAGAIN while held. Under the lease, so that no reader can
 * come between the probe and the truncation. */
int kvfs_slot_recycle(int dirfd, uint32_t slot)
{
    int fd = kvfs_slot_open(dirfd, slot, O_RDWR | O_NONBLOCK);
    if (fd < 0)
        return fd;
    int rc = lease_take(fd, F_WRLCK);
    if (rc == 0) {
        if (ftruncate(fd, 0) != 0)
            rc = -errno;
        lease_drop(fd);
    }
    close(fd);
    return rc;
}

/* Takes a held slot's name away; returns a read-only descriptor of the nameless file, by which it is probed later. */
int kvfs_slot_detach(int dirfd, uint32_t slot, struct kvfs_slot_stat *out)
{
    char name[KVFS_SLOT_NAME_BYTES];
    kvfs_slot_name(slot, name);
    int fd = kvfs_slot_open(dirfd, slot, O_RDONLY | O_NONBLOCK);
    if (fd < 0)
        return fd;
    int rc = kvfs_fd_stat(fd, out);
    if (rc == 0 && unlinkat(dirfd, name, 0) != 0)
        rc = -errno;
    if (rc != 0) {
        close(fd);
        return rc;
    }
    return fd;
}

/* By pread into one bounded buffer: a mapping of the whole payload would fault in page tables for every 4 KiB, and
 * a truncated slot would end it with SIGBUS where pread just comes up short. */
int kvfs_fd_xxh3(int fd, uint64_t *checksum, uint64_t *bytes)
{
    uint8_t *chunk = malloc(KVFS_HASH_CHUNK_BYTES);
    XXH3_state_t *state = XXH3_createState();
    int rc = chunk && state ? 0 : -ENOMEM;
    uint64_t offset = 0;
    if (rc == 0)
        XXH3_64bits_reset(state);
    while (rc == 0) {
        ssize_t n = pread(fd, chunk, KVFS_HASH_CHUNK_BYTES, (off_t)offset);
        if (n == 0)
            break;
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
