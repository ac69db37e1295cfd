/* Memory of the cluster's index.
 *
 * Responsibility: segments, from arenas that end with the index.
 *
 * Concurrency: none; one thread at a time.
 */
#include "segments.h"

#include <errno.h>
#include <stdlib.h>
#include <sys/mman.h>

/* What segments are allocated by: a huge page, since a walk is at a random place with each block. */
#define ARENA_BYTES (2u << 20)

static int add_arena(struct kvfs_segments *s) {
    struct kvfs_segment **arenas = realloc(s->arenas, (s->arena_count + 1) * sizeof *arenas);
    struct kvfs_segment *arena = arenas ? aligned_alloc(ARENA_BYTES, ARENA_BYTES) : NULL;
    if (arenas) s->arenas = arenas;
    if (!arena) return -ENOMEM;
    madvise(arena, ARENA_BYTES, MADV_HUGEPAGE);
    s->arenas[s->arena_count++] = arena;
    for (uint32_t i = ARENA_BYTES / KVFS_SEGMENT_BYTES; i-- > 0;) {
        arena[i].next = s->free;
        s->free = &arena[i];
    }
    return 0;
}

struct kvfs_segment *kvfs_segment_new(struct kvfs_segments *s, uint32_t depth) {
    if (!s->free && add_arena(s) < 0) return NULL;
    struct kvfs_segment *segment = s->free;
    s->free = segment->next;
    memset(segment, 0, sizeof *segment);
    segment->depth = depth;
    return segment;
}

void kvfs_segment_free(struct kvfs_segments *s, struct kvfs_segment *segment) {
    if (segment) {
        segment->next = s->free;
        s->free = segment;
    }
}

void kvfs_segments_destroy(struct kvfs_segments *s) {
    for (uint64_t i = 0; i < s->arena_count; i++) free(s->arenas[i]);
    free(s->arenas);
}

uint64_t kvfs_segments_bytes(const struct kvfs_segments *s) { return s->arena_count * ARENA_BYTES; }
