/* Samples of memory that is too large to read whole, to detect changes. See sampler_core.c. */
#ifndef KVFS_SAMPLER_CORE_H
#define KVFS_SAMPLER_CORE_H

#include <stddef.h>
#include <stdint.h>

#define KVFS_SAMPLE_LINE_BYTES 64
#define KVFS_SAMPLE_DIGEST_BYTES 16

struct kvfs_area {
    const uint8_t *at;
    uint64_t bytes;
    uint64_t lines; /* of it that are read, see kvfs_sample_shares */
};

/* Set the lines of each area, `budget` in all: every area that is not empty gets one at least, small ones are read
 * whole, and the others share alike what is left. */
void kvfs_sample_shares(struct kvfs_area *areas, size_t count, uint64_t budget);

/* Which line of an area is its `number`th of the sample, of `lines` out of `whole`; `seed` is the area's place in the
 * sample. REQUIRES number < lines <= whole. */
uint64_t kvfs_sample_line(uint64_t seed, uint64_t number, uint64_t lines, uint64_t whole);

/* XXH3 with 128 bits over all lines that are read, area by area; the last line of an area may be short. */
void kvfs_sample_digest(const struct kvfs_area *areas, size_t count, uint8_t out[KVFS_SAMPLE_DIGEST_BYTES]);

#endif
