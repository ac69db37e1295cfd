/* Filling drafts: pwritev into a slot, or a writable mapping of it.
 *
 * Responsibility: bytes into an open draft, however many pieces they come in. pwrite is the faster way: the kernel
 * takes large pages and fills them, where a mapping clears each before it is written.
 *
 * Invariants: 0 or -errno; a draft that failed may hold a part. No state, any thread.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "writer_core.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#define VECTORS_AT_ONCE 128
#define BYTES_AT_ONCE ((size_t)1 << 30) /* Linux moves at most 2 GiB less a page in one call */

int kvfs_write_fd(int fd, uint64_t offset, const struct iovec *vectors, ssize_t pieces)
{
    struct iovec some[VECTORS_AT_ONCE];
    size_t skip = 0; /* bytes of the first piece that are written */
    for (;;) {
        while (pieces > 0 && skip >= vectors->iov_len) {
            skip -= vectors->iov_len;
            vectors++;
            pieces--;
        }
        if (pieces == 0)
            return 0;
        int n = 0;
        size_t asked = 0;
        for (ssize_t i = 0; i < pieces && n < VECTORS_AT_ONCE && asked < BYTES_AT_ONCE; i++, n++) {
            size_t from = i == 0 ? skip : 0, length = vectors[i].iov_len - from;
            some[n].iov_base = (uint8_t *)vectors[i].iov_base + from;
            some[n].iov_len = length < BYTES_AT_ONCE ? length : BYTES_AT_ONCE;
            asked += some[n].iov_len;
        }
        ssize_t put = n == 1 ? pwrite(fd, some[0].iov_base, some[0].iov_len, (off_t)offset)
                             : pwritev(fd, some, n, (off_t)offset);
        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0)
            return put < 0 ? -errno : -EIO;
        offset += (uint64_t)put;
        skip += (size_t)put;
    }
}

/* The pages are taken first: a hole in a full tmpfs would be a SIGBUS. `size` > 0. */
int kvfs_map_draft(int fd, uint64_t size, void **place)
{
    int rc = posix_fallocate(fd, 0, (off_t)size);
    if (rc != 0)
        return -rc;
    void *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (base == MAP_FAILED)
        return -errno;
    *place = base;
    return 0;
}
