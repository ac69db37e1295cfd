/* Blocks of large batches, copied from a mapping of their slots past the caches.
 *
 * Why: the kernel's copy reads each line of the destination before it overwrites it. Without that 8 threads of an H100's
 * host moved 40 GB/s of blocks of 2 MiB instead of 29, 16 threads 58 instead of 47; two cores of an EPYC took half of the
 * processor time for 16 to 128 blocks of 1 MiB. What is read so is not in a cache afterwards, as with the kernel's copy of
 * more than the caches hold.
 *
 * Invariants: the caller has the slot open, which is its lease, so that nobody truncates it; a slot of another size, or
 * with a hole, whose first read would take a page of the tier, is left to `kvfs_read_fd`.
 *
 * Concurrency: any threads.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "reader_core.h"
#include "shared/pages.h"

#if defined(__x86_64__)
#include <emmintrin.h>

enum { STEP_BYTES = 64, VECTOR_BYTES = 16 };

static void stream(uint8_t *to, const uint8_t *from, size_t size) {
    size_t head = (size_t)(-(uintptr_t)to & (VECTOR_BYTES - 1));
    head = head < size ? head : size;
    memcpy(to, from, head);
    size_t at = head;
    for (; size - at >= STEP_BYTES; at += STEP_BYTES) {
        const __m128i *source = (const __m128i *)(from + at);
        __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1), c = _mm_loadu_si128(source + 2),
                d = _mm_loadu_si128(source + 3);
        __m128i *target = (__m128i *)(to + at);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    memcpy(to + at, from + at, size - at);
}

/* Copies a whole block of `size` bytes, for which the pieces have room; returns 0 where it is to be read. */
int kvfs_stream_fd(int fd, const struct iovec *vectors, ssize_t pieces, uint64_t size) {
    struct stat found;
    if (fstat(fd, &found) != 0 || (uint64_t)found.st_size != size ||
        (uint64_t)found.st_blocks * 512 != kvfs_page_up(size))
        return 0;
    uint8_t *place = mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
    if (place == MAP_FAILED) return 0;
    uint64_t done = 0;
    for (ssize_t i = 0; i < pieces && done < size; i++) {
        uint64_t length = vectors[i].iov_len < size - done ? vectors[i].iov_len : size - done;
        stream(vectors[i].iov_base, place + done, length);
        done += length;
    }
    _mm_sfence(); /* who is told of the block sees all of it */
    munmap(place, size);
    return 1;
}
#else
int kvfs_stream_fd(int fd, const struct iovec *vectors, ssize_t pieces, uint64_t size) {
    (void)fd, (void)vectors, (void)pieces, (void)size;
    return 0;
}
#endif
