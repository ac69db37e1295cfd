#include "sampler_core.h"

#include <string.h>

#include "xxh3.h"

#define LINE KVFS_SAMPLE_LINE_BYTES
/* Lines are far apart, so each is a miss of every cache: this many are asked for before the first is used. */
#define AT_ONCE 64

static uint64_t lines_of(uint64_t bytes) { return (bytes + LINE - 1) / LINE; }

static uint64_t sum_capped(const struct kvfs_area *areas, size_t count, uint64_t cap) {
    uint64_t sum = 0;
    for (size_t i = 0; i < count; i++) {
        const uint64_t lines = lines_of(areas[i].bytes);
        sum += lines < cap ? lines : cap;
    }
    return sum;
}

void kvfs_sample_shares(struct kvfs_area *areas, size_t count, uint64_t budget) {
    uint64_t low = 1, high = budget > 1 ? budget : 1; /* the largest share that fits is in between */
    while (low < high) {
        const uint64_t middle = low + (high - low + 1) / 2;
        if (sum_capped(areas, count, middle) <= budget)
            low = middle;
        else
            high = middle - 1;
    }
    for (size_t i = 0; i < count; i++) {
        const uint64_t lines = lines_of(areas[i].bytes);
        areas[i].lines = lines < low ? lines : low;
    }
}

/* The finaliser of splitmix64: every bit of the input reaches every bit of the output. */
static uint64_t mixed(uint64_t x) {
    x += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
}

/* Where in its even share of the area is drawn, not fixed: an even step meets the same columns of every row. */
uint64_t kvfs_sample_line(uint64_t seed, uint64_t number, uint64_t lines, uint64_t whole) {
    const uint64_t first = (uint64_t)((unsigned __int128)number * whole / lines);
    const uint64_t end = (uint64_t)((unsigned __int128)(number + 1) * whole / lines);
    return first + mixed(mixed(seed) ^ number) % (end - first);
}

static void digest_area(const struct kvfs_area *area, uint64_t seed, XXH3_state_t *state) {
    const uint64_t whole = lines_of(area->bytes);
    uint8_t gathered[AT_ONCE * LINE];
    uint64_t places[AT_ONCE];
    for (uint64_t done = 0; done < area->lines; done += AT_ONCE) {
        const size_t some = area->lines - done < AT_ONCE ? (size_t)(area->lines - done) : AT_ONCE;
        size_t held = 0;
        for (size_t i = 0; i < some; i++) {
            places[i] = kvfs_sample_line(seed, done + i, area->lines, whole) * LINE;
            __builtin_prefetch(area->at + places[i]);
        }
        for (size_t i = 0; i < some; i++) {
            const uint64_t left = area->bytes - places[i];
            const size_t bytes = left < LINE ? (size_t)left : LINE;
            memcpy(gathered + held, area->at + places[i], bytes);
            held += bytes;
        }
        XXH3_128bits_update(state, gathered, held);
    }
}

void kvfs_sample_digest(const struct kvfs_area *areas, size_t count, uint8_t out[KVFS_SAMPLE_DIGEST_BYTES]) {
    XXH3_state_t state;
    XXH128_canonical_t canonical;
    XXH3_128bits_reset(&state);
    for (size_t i = 0; i < count; i++)
        if (areas[i].lines > 0) digest_area(&areas[i], i, &state);
    XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(&state));
    memcpy(out, canonical.digest, KVFS_SAMPLE_DIGEST_BYTES);
}
