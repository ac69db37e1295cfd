/* XXH3-64 of more than 240 bytes (seed 0, the default secret), cut for many threads.
 *
 * A block is 1 KiB, 16 stripes of 8 lanes of 8 bytes. What a block adds to its 8 lanes does not depend on the blocks
 * before it, so blocks are summed in any order; a chain over the sums then makes the hash.
 */
#ifndef KVFS_XXH3_LANES_H
#define KVFS_XXH3_LANES_H

#ifndef __CUDACC_RTC__
#include <stdint.h>
#define DEVICE static inline
#define CONSTANT static const
typedef uint64_t __attribute__((may_alias)) xxh3_word;
#else
typedef unsigned long long uint64_t;
typedef unsigned int uint32_t;
typedef unsigned char uint8_t;
typedef uint64_t xxh3_word;
#define DEVICE static __device__ inline
#define CONSTANT static __constant__ const
#endif

#define LANES 8
#define STRIPES 16
#define BLOCK_BYTES 1024
#define PRIME32_1 0x9E3779B1u
#define PRIME64_1 0x9E3779B185EBCA87ull

CONSTANT uint64_t xxh3_begin[LANES] = {
    0xC2B2AE3Du,           0x9E3779B185EBCA87ull, 0xC2B2AE3D27D4EB4Full, 0x165667B19E3779F9ull,
    0x85EBCA77C2B2AE63ull, 0x85EBCA77u,           0x27D4EB2F165667C5ull, 0x9E3779B1u,
};
CONSTANT uint8_t xxh3_secret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4,
    0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
    0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43,
    0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
    0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
    0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78,
    0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16,
    0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

DEVICE uint64_t xxh3_read(const uint8_t *p) {
    uint64_t value = 0;
    if (((uint64_t)p & 7) == 0) return *(const xxh3_word *)p;
    for (int i = 7; i >= 0; i--) value = value << 8 | p[i];
    return value;
}

/* What one stripe adds to `lane`; `secret` is the stripe's. */
DEVICE uint64_t xxh3_stripe(const uint8_t *stripe, const uint8_t *secret, int lane) {
    uint64_t key = xxh3_read(stripe + 8 * lane) ^ xxh3_read(secret + 8 * lane);
    return xxh3_read(stripe + 8 * (lane ^ 1)) + (key & 0xFFFFFFFFu) * (key >> 32);
}

/* What `stripes` whole stripes of a block add to `lane`. */
DEVICE uint64_t xxh3_sum(const uint8_t *block, int stripes, int lane) {
    uint64_t sum = 0;
    for (int i = 0; i < stripes; i++) sum += xxh3_stripe(block + 64 * i, xxh3_secret + 8 * i, lane);
    return sum;
}

/* The lane after a whole block. */
DEVICE uint64_t xxh3_chain(uint64_t lane_value, uint64_t sum, int lane) {
    uint64_t value = lane_value + sum;
    return (value ^ value >> 47 ^ xxh3_read(xxh3_secret + 128 + 8 * lane)) * PRIME32_1;
}

/* The lane after what follows the whole blocks: the stripes left, and the last 64 bytes. */
DEVICE uint64_t xxh3_tail(uint64_t lane_value, const uint8_t *data, uint64_t bytes, int lane) {
    uint64_t whole = (bytes - 1) / BLOCK_BYTES * BLOCK_BYTES;
    lane_value += xxh3_sum(data + whole, (int)((bytes - 1 - whole) / 64), lane);
    return lane_value + xxh3_stripe(data + bytes - 64, xxh3_secret + 121, lane);
}

DEVICE uint64_t xxh3_fold(uint64_t a, uint64_t b) {
    uint64_t low = (a & 0xFFFFFFFFu) * (b & 0xFFFFFFFFu), left = (a >> 32) * (b & 0xFFFFFFFFu);
    uint64_t right = (a & 0xFFFFFFFFu) * (b >> 32), high = (a >> 32) * (b >> 32);
    uint64_t cross = (low >> 32) + (left & 0xFFFFFFFFu) + right;
    return ((left >> 32) + (cross >> 32) + high) ^ (cross << 32 | (low & 0xFFFFFFFFu));
}

DEVICE uint64_t xxh3_merge(const uint64_t *lanes, uint64_t bytes) {
    uint64_t hash = bytes * PRIME64_1;
    for (int i = 0; i < LANES; i += 2)
        hash += xxh3_fold(lanes[i] ^ xxh3_read(xxh3_secret + 11 + 8 * i),
                          lanes[i + 1] ^ xxh3_read(xxh3_secret + 19 + 8 * i));
    hash = (hash ^ hash >> 37) * 0x165667919E3779F9ull;
    return hash ^ hash >> 32;
}

#endif
