/* Reading blocks without asking the service: shared table, openat, check of the generation, pread or mmap.
 *
 * Responsibility: whole batches in one call. An open descriptor is the lease: while it is open the slot is neither
 * truncated nor reused, so what is copied or mapped through it is the block that was looked up.
 *
 * Why the check after the open is enough: the service moves the generation before it probes for holders
 * (kvfs_slot_retire), and a later service marks this table dead before it reuses a slot. Whoever opened before is
 * seen by the probe; whoever opened after sees the generation, or the mark. A slot that a start drops may be empty
 * for a moment before that: so a copy counts only if it has the block's full length.
 *
 * Concurrency: any threads; no state but the table's mapping and the hits, which have a lock.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "reader_core.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "blocks/vectors.h"
#include "shared/slots_core.h"

/* How often a block that moves meanwhile (evicted, read back, replaced) is looked up again. */
#define ATTEMPTS 8
#define STREAM_BYTES ((uint64_t)128 << 10)

static void note_hits(struct kvfs_hits *h, const uint8_t *keys, int64_t n, const int64_t *results) {
    kvfs_lock(&h->lock);
    for (int64_t i = 0; i < n; i++)
        if (results[i] >= 0) kvfs_hits_note(h, keys + i * KVFS_KEY_BYTES);
    kvfs_unlock(&h->lock);
}

/* Whether the block may have moved meanwhile: then it is looked up again. Other errors are the caller's. */
static int has_moved(int error) { return error == ENOENT || error == EWOULDBLOCK; }

/* Returns a descriptor of the block's slot, which is the lease, and its size; or a code. */
static int open_block(const struct kvfs_table *t, int dirfd, const uint8_t *key, uint64_t *size) {
    struct kvfs_entry_view view;
    for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
        if (kvfs_table_lookup(t, key, &view) != 1 || view.kind != KVFS_KIND_BLOCK || kvfs_visible(t, &view) == 0)
            return KVFS_READ_MISS;
        if (!(view.tiers & KVFS_TIER_DRAM)) return KVFS_READ_BELOW;
        if (view.slot >= t->slot_count) return KVFS_READ_MISS;
        int fd = kvfs_slot_open(dirfd, view.slot, O_RDONLY | O_NONBLOCK);
        if (fd < 0 && !has_moved(-fd)) return KVFS_READ_ERROR + fd;
        if (fd >= 0) {
            *size = view.size_bytes;
            if (kvfs_table_generation(t, view.slot) == view.generation && kvfs_table_alive(t)) return fd;
            close(fd);
        }
    }
    return KVFS_READ_MISS;
}

/* Reads `size` bytes from `offset` on into the pieces; returns the count, short where the file is, or a code. */
int64_t kvfs_read_fd(int fd, uint64_t offset, const struct iovec *vectors, ssize_t pieces, uint64_t size) {
    struct iovec some[KVFS_CALL_VECTORS];
    uint64_t done = 0, skip = 0; /* `skip` bytes of the first piece are filled */
    while (done < size) {
        int n = 0;
        size_t asked = 0;
        for (ssize_t i = 0; i < pieces && n < KVFS_CALL_VECTORS && asked < KVFS_CALL_BYTES && done + asked < size;
             i++) {
            size_t from = i == 0 ? skip : 0, length = vectors[i].iov_len - from, left = size - done - asked;
            some[n].iov_base = (uint8_t *)vectors[i].iov_base + from;
            some[n].iov_len = length < left ? length : left;
            some[n].iov_len = some[n].iov_len < KVFS_CALL_BYTES ? some[n].iov_len : KVFS_CALL_BYTES;
            asked += some[n].iov_len;
            n++;
        }
        ssize_t got = n == 1 ? pread(fd, some[0].iov_base, some[0].iov_len, (off_t)(offset + done))
                             : preadv(fd, some, n, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return KVFS_READ_ERROR - errno;
        if (got == 0) break;
        done += (uint64_t)got;
        skip += (uint64_t)got;
        while (pieces > 0 && skip >= vectors->iov_len) {
            skip -= vectors->iov_len;
            vectors++;
            pieces--;
        }
    }
    return (int64_t)done;
}

static uint64_t room_of(const struct iovec *vectors, ssize_t pieces) {
    uint64_t room = 0;
    for (ssize_t i = 0; i < pieces; i++) room += vectors[i].iov_len;
    return room;
}

static int64_t copy_block(int fd, const struct iovec *vectors, ssize_t pieces, uint64_t size, int streams) {
    if (size > room_of(vectors, pieces)) return KVFS_READ_NO_ROOM;
    if (streams && size >= STREAM_BYTES && kvfs_stream_fd(fd, vectors, pieces, size)) return (int64_t)size;
    return kvfs_read_fd(fd, 0, vectors, pieces, size);
}

static int64_t read_block(const struct kvfs_read_job *job, const uint8_t *key, const struct iovec *vectors,
                          ssize_t pieces) {
    uint64_t size;
    for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
        int fd = open_block(job->table, job->dirfd, key, &size);
        if (fd < 0) return fd;
        int64_t got = copy_block(fd, vectors, pieces, size, job->streams);
        close(fd);
        if (got < 0 || (uint64_t)got == size) return got;
    }
    return KVFS_READ_MISS;
}

/* Reads blocks until all are taken. */
static void read_some(struct kvfs_pool_job *shared) {
    struct kvfs_read_job *job = (struct kvfs_read_job *)shared;
    for (;;) {
        int64_t i = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (i >= job->n) return;
        const ssize_t first = job->starts[i], pieces = job->starts[i + 1] - first;
        job->results[i] = read_block(job, job->keys + i * KVFS_KEY_BYTES, job->vectors + first, pieces);
    }
}

/* The i-th block goes into vectors[starts[i]] .. vectors[starts[i + 1] - 1]. */
void kvfs_read_batch(struct kvfs_read_job *job, struct kvfs_hits *hits) {
    const uint64_t room = job->n > 1 ? room_of(job->vectors, job->starts[job->n]) : 0;
    job->shared.work = read_some;
    job->streams = room >= job->stream_bytes;
    kvfs_pool_run(&job->shared, room >= KVFS_POOL_BYTES);
    note_hits(hits, job->keys, job->n, job->results);
}

/* Maps `size` bytes of `fd`, populated: a fault for every 64 KiB would cost as much as copying them. An empty
 * block has no mapping. */
int64_t kvfs_map_fd(int fd, uint64_t size, void **place) {
    struct stat found;
    *place = NULL;
    if (fstat(fd, &found) != 0) return KVFS_READ_ERROR - errno;
    if ((uint64_t)found.st_size != size) return KVFS_READ_MISS;
    if (size == 0) return 0;
    void *base = mmap(NULL, size, PROT_READ, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (base == MAP_FAILED) return KVFS_READ_ERROR - errno;
    *place = base;
    return (int64_t)size;
}

/* Leased mappings: the mapping keeps the lease when its descriptor is closed. */
void kvfs_map_batch(const struct kvfs_table *t, int dirfd, const uint8_t *keys, int64_t n, void **places,
                    int64_t *results, struct kvfs_hits *hits) {
    for (int64_t i = 0; i < n; i++) {
        uint64_t size = 0;
        int fd = open_block(t, dirfd, keys + i * KVFS_KEY_BYTES, &size);
        places[i] = NULL;
        results[i] = fd;
        if (fd >= 0) {
            results[i] = kvfs_map_fd(fd, size, &places[i]);
            close(fd);
        }
    }
    note_hits(hits, keys, n, results);
}

/* Finds the tier bits of each block, 0 for one that is not there or cannot be read now. */
void kvfs_find_batch(const struct kvfs_table *t, const uint8_t *keys, int64_t n, uint8_t *tiers) {
    struct kvfs_entry_view view;
    for (int64_t i = 0; i < n; i++) {
        int found = kvfs_table_lookup(t, keys + i * KVFS_KEY_BYTES, &view) == 1 && view.kind == KVFS_KIND_BLOCK;
        tiers[i] = found ? kvfs_visible(t, &view) : 0;
    }
}

/* Copies `size` bytes into the pieces, which have room for them. */
void kvfs_copy_out(const uint8_t *from, uint64_t size, const struct iovec *vectors, ssize_t pieces) {
    for (ssize_t i = 0; i < pieces && size; i++) {
        size_t length = vectors[i].iov_len < size ? vectors[i].iov_len : size;
        memcpy(vectors[i].iov_base, from, length);
        from += length;
        size -= length;
    }
}
