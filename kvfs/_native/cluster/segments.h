/* Segments of the cluster's index: blocks by the rest of their hash.
 *
 * Responsibility: find, put and drop a block of a segment; segments.c allocates them. A segment is open addressing over
 * cache lines of three blocks. A line counts the blocks that passed it because it was full, so that a search ends at the
 * first line that nothing passed, and a block that is dropped leaves nothing behind.
 *
 * Invariants: a way whose set is 0 is free. `passed` of a line: the blocks that stand behind it, and whose own line is
 * it or one before.
 *
 * Concurrency: none; one thread at a time.
 */
#ifndef KVFS_CLUSTER_SEGMENTS_H
#define KVFS_CLUSTER_SEGMENTS_H

#include <stdint.h>
#include <string.h>

#include "cluster/index_core.h"

#define KVFS_WAYS 3u
#define KVFS_LINES 1023u
#define KVFS_SEGMENT_BYTES (64u << 10)
#define KVFS_SEGMENT_FULL (KVFS_LINES * KVFS_WAYS * 85 / 100)

struct kvfs_line {
    uint8_t keys[KVFS_WAYS][KVFS_CLUSTER_HASH_BYTES];
    uint32_t sets[KVFS_WAYS];
    uint32_t passed;
};
_Static_assert(sizeof(struct kvfs_line) == 64, "a cache line");

/* `next`: of a segment that is free. */
struct kvfs_segment {
    uint32_t count, depth;
    struct kvfs_segment *next;
    uint8_t unused[48];
    struct kvfs_line lines[KVFS_LINES];
};
_Static_assert(sizeof(struct kvfs_segment) == KVFS_SEGMENT_BYTES, "a part of a huge page");

_Static_assert(KVFS_LINES *KVFS_WAYS == KVFS_CLUSTER_SEGMENT_BLOCKS, "what a listing has room for");

struct kvfs_segments {
    struct kvfs_segment *free, **arenas;
    uint64_t arena_count;
};

struct kvfs_place {
    struct kvfs_line *line;
    uint32_t way;
};

/* An empty one, or NULL. */
struct kvfs_segment *kvfs_segment_new(struct kvfs_segments *s, uint32_t depth);
void kvfs_segment_free(struct kvfs_segments *s, struct kvfs_segment *segment);
void kvfs_segments_destroy(struct kvfs_segments *s);
uint64_t kvfs_segments_bytes(const struct kvfs_segments *s);

/* By the last 32 bits; the first ones choose the segment. */
static inline uint32_t kvfs_line_of(uint64_t hash) { return (uint32_t)((hash & UINT32_MAX) * KVFS_LINES >> 32); }
static inline uint32_t kvfs_line_after(uint32_t at) { return at + 1 < KVFS_LINES ? at + 1 : 0; }

static inline uint64_t kvfs_is_key(const uint8_t *a, const uint8_t *b) {
    uint64_t x[2], y[2];
    memcpy(x, a, sizeof x);
    memcpy(y, b, sizeof y);
    return ((x[0] ^ y[0]) | (x[1] ^ y[1])) == 0;
}

/* Bit w: this key stands at way w, of a block that may not be here any more. No branch depends on which. */
static inline uint64_t kvfs_ways_of(const struct kvfs_line *line, const uint8_t *key) {
    return kvfs_is_key(line->keys[0], key) | kvfs_is_key(line->keys[1], key) << 1 |
           kvfs_is_key(line->keys[2], key) << 2;
}

/* Of a block that is not here, `line` is NULL. */
static inline struct kvfs_place kvfs_segment_find(struct kvfs_segment *segment, uint64_t hash, const uint8_t *key) {
    uint32_t at = kvfs_line_of(hash);
    for (uint32_t step = 0; step < KVFS_LINES; step++) {
        struct kvfs_line *line = &segment->lines[at];
        for (uint64_t ways = kvfs_ways_of(line, key); ways; ways &= ways - 1)
            if (line->sets[__builtin_ctzll(ways)]) return (struct kvfs_place){line, (uint32_t)__builtin_ctzll(ways)};
        if (!line->passed) break;
        at = kvfs_line_after(at);
    }
    return (struct kvfs_place){NULL, 0};
}

/* A segment has room: it is split before it is full. */
static inline void kvfs_segment_put(struct kvfs_segment *segment, uint64_t hash, const uint8_t *key, uint32_t set) {
    for (uint32_t at = kvfs_line_of(hash);; at = kvfs_line_after(at)) {
        struct kvfs_line *line = &segment->lines[at];
        for (uint32_t way = 0; way < KVFS_WAYS; way++) {
            if (!line->sets[way]) {
                memcpy(line->keys[way], key, KVFS_CLUSTER_HASH_BYTES);
                line->sets[way] = set;
                segment->count++;
                return;
            }
        }
        line->passed++;
    }
}

static inline void kvfs_segment_drop(struct kvfs_segment *segment, uint64_t hash, struct kvfs_place gone) {
    for (uint32_t at = kvfs_line_of(hash); &segment->lines[at] != gone.line; at = kvfs_line_after(at))
        segment->lines[at].passed--;
    gone.line->sets[gone.way] = 0;
    segment->count--;
}

#endif
