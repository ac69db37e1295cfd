/* Filling drafts: pwritev into a slot, or a writable mapping of it; and whole puts over a seal channel.
 *
 * Responsibility: bytes from any number of pieces into an open draft, and their seals. pwrite is the faster
 * way: the kernel takes large pages and fills them, where a mapping clears each before it is written. One call for a
 * whole block, since the kernel chooses the pages' size by the call's.
 *
 * The checksum comes first and costs nothing: the kernel copies page by page, and pays the latency of memory at the
 * start of each; summing brings the block into the cache in one stream. Measured for 1 MiB that is in no cache:
 * write 72 us, sum (SSE2) and write 70 us, sum (AVX2, see writer_avx2.c) and write 55 us.
 *
 * Invariants: a draft that has bytes of an earlier object is overwritten whole: one of another size than the block is
 * emptied first. 0 or -errno; a draft that failed may hold a part. Descriptors of a put are closed before its seal is
 * asked for, and in any case. No state, any thread; a channel has one user at a time.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "writer_core.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "blocks/pool.h"
#include "blocks/vectors.h"
#include "hash/xxh3.h"
#include "shared/mutex.h"

int kvfs_write_fd(int fd, uint64_t offset, const struct iovec *vectors, ssize_t pieces) {
    struct iovec some[KVFS_CALL_VECTORS];
    size_t skip = 0; /* bytes of the first piece that are written */
    for (;;) {
        while (pieces > 0 && skip >= vectors->iov_len) {
            skip -= vectors->iov_len;
            vectors++;
            pieces--;
        }
        if (pieces == 0) return 0;
        int n = 0;
        size_t asked = 0;
        for (ssize_t i = 0; i < pieces && n < KVFS_CALL_VECTORS && asked < KVFS_CALL_BYTES; i++, n++) {
            size_t from = i == 0 ? skip : 0, length = vectors[i].iov_len - from;
            some[n].iov_base = (uint8_t *)vectors[i].iov_base + from;
            some[n].iov_len = length < KVFS_CALL_BYTES ? length : KVFS_CALL_BYTES;
            asked += some[n].iov_len;
        }
        ssize_t put = n == 1 ? pwrite(fd, some[0].iov_base, some[0].iov_len, (off_t)offset)
                             : pwritev(fd, some, n, (off_t)offset);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) return put < 0 ? -errno : -EIO;
        offset += (uint64_t)put;
        skip += (size_t)put;
    }
}

/* Allocates the pages first: a hole in a full tmpfs would be a SIGBUS. `size` > 0. */
int kvfs_map_draft(int fd, uint64_t size, void **place) {
    int rc = posix_fallocate(fd, 0, (off_t)size);
    if (rc != 0) return -rc;
    void *base = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (base == MAP_FAILED) return -errno;
    (void)madvise(base, size, MADV_DONTFORK); /* a child that lives on would keep the draft from being sealed */
    *place = base;
    return 0;
}

uint64_t kvfs_xxh3_avx2(const struct iovec *vectors, ssize_t pieces);

/* XXH3-64 of the pieces, one after the other. */
uint64_t kvfs_sum_pieces(const struct iovec *vectors, ssize_t pieces) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) return kvfs_xxh3_avx2(vectors, pieces);
#endif
    return kvfs_xxh3_pieces(vectors, pieces);
}

/* One packet out, one back. It names this thread's processor, so that its peer wakes there (see sealer_core.c). The
 * socket's own timeout wakes the waits; the deadline ends them. */
static int exchange(int channel, struct kvfs_seal_request *seals, size_t n, struct kvfs_seal_result *results,
                    int64_t timeout_ns) {
    const int64_t end = kvfs_clock_ns(CLOCK_MONOTONIC) + timeout_ns;
    seals->processor = (uint32_t)(sched_getcpu() + 1);
    while (send(channel, seals, n * sizeof *seals, MSG_NOSIGNAL) < 0) {
        if (errno != EINTR && errno != EAGAIN) return -ECONNRESET;
        if (kvfs_clock_ns(CLOCK_MONOTONIC) > end) return -ETIMEDOUT;
    }
    for (;;) {
        ssize_t got = recv(channel, results, n * sizeof *results, 0);
        if (got == (ssize_t)(n * sizeof *results)) return 0;
        if (got >= 0 || (errno != EINTR && errno != EAGAIN)) return -ECONNRESET;
        if (kvfs_clock_ns(CLOCK_MONOTONIC) > end) return -ETIMEDOUT;
    }
}

/* Writes a block into a draft that may have `kept` bytes of an earlier object. */
static int write_block(int fd, uint64_t kept, const struct iovec *vectors, ssize_t pieces) {
    uint64_t size = 0;
    for (ssize_t i = 0; i < pieces; i++) size += vectors[i].iov_len;
    if (kept != 0 && kept != size && ftruncate(fd, 0) != 0) return -errno;
    return kvfs_write_fd(fd, 0, vectors, pieces);
}

/* The blocks of a put. `next` is the first that nobody has taken yet. */
struct write_job {
    struct kvfs_pool_job shared;
    struct kvfs_put *puts;
    uint64_t *checksums;
    int64_t n, next;
    const struct iovec *vectors;
    const ssize_t *starts;
};

/* Sums and writes blocks until all are taken. */
static void write_some(struct kvfs_pool_job *shared) {
    struct write_job *job = (struct write_job *)shared;
    for (;;) {
        const int64_t i = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (i >= job->n) return;
        struct kvfs_put *put = &job->puts[i];
        const struct iovec *vectors = job->vectors + job->starts[put->block];
        const ssize_t pieces = job->starts[put->block + 1] - job->starts[put->block];
        job->checksums[i] = kvfs_sum_pieces(vectors, pieces);
        put->status = -write_block(put->fd, put->kept_bytes, vectors, pieces);
        close(put->fd);
    }
}

static int is_large(const struct write_job *job) {
    uint64_t bytes = 0;
    for (int64_t i = 0; i < job->n && bytes < KVFS_POOL_BYTES; i++) {
        const ssize_t block = job->puts[i].block;
        for (ssize_t piece = job->starts[block]; piece < job->starts[block + 1]; piece++)
            bytes += job->vectors[piece].iov_len;
    }
    return job->n > 1 && bytes >= KVFS_POOL_BYTES;
}

/* Writes and seals `n` blocks, KVFS_SEALS_AT_ONCE at most: 0 with a status in each put; or -errno when the channel is of
 * no use any more, and what was sealed is not known. All descriptors are closed. */
int kvfs_put_blocks(int channel, struct kvfs_put *puts, ssize_t n, const uint8_t *keys, const uint8_t *parents,
                    const struct iovec *vectors, const ssize_t *starts, int64_t timeout_ns) {
    struct kvfs_seal_request seals[KVFS_SEALS_AT_ONCE];
    struct kvfs_seal_result results[KVFS_SEALS_AT_ONCE];
    uint64_t checksums[KVFS_SEALS_AT_ONCE];
    struct write_job job = {
        .shared = {write_some}, .puts = puts, .checksums = checksums, .n = n, .vectors = vectors, .starts = starts};
    kvfs_pool_run(&job.shared, is_large(&job));
    size_t asked = 0;
    for (ssize_t i = 0; i < n; i++) {
        const ssize_t block = puts[i].block;
        struct kvfs_seal_request *seal = &seals[asked];
        memset(seal, 0, sizeof *seal);
        seal->slot = puts[i].slot;
        seal->generation = puts[i].generation;
        memcpy(seal->key, keys + block * KVFS_KEY_BYTES, KVFS_KEY_BYTES);
        memcpy(seal->parent, parents + block * KVFS_KEY_BYTES, KVFS_KEY_BYTES);
        seal->flags = KVFS_SEAL_HAS_CHECKSUM;
        seal->checksum = checksums[i];
        asked += puts[i].status == 0;
    }
    int rc = asked ? exchange(channel, seals, asked, results, timeout_ns) : 0;
    for (ssize_t i = 0, at = 0; rc == 0 && i < n; i++)
        if (puts[i].status == 0) puts[i].status = results[at++].status;
    return rc;
}
