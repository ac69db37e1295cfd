/* Which sources of a cluster hold which blocks: 25 to 51 bytes for each block.
 *
 * Responsibility: blocks by prefix hash, each with the number of its set (holder_sets.c); walks along a prompt, and how
 * far sources with windows count of them (windows_core.c); sources that are cleared at once and swept later.
 *
 * The table is an extendible hash table (Fagin and others, TODS 1979): a directory of segments of 64 KiB by the first
 * bits of a hash. A full segment is split in two, which is the longest that a change ever takes; none moves the whole.
 *
 * Invariants:
 * - A block has an entry while some source holds it, or held it and was cleared. Nobody is in set 0: a free place.
 * - A segment of depth d has 2^(directory's depth - d) consecutive places in the directory, those of its d first bits.
 * - A column that is not live belongs to a source that was cleared. It is free again after a whole pass over the table
 *   that began after the clearing. `cursor`: the hashes below it were passed; splits keep that order.
 * - `held[c]`: the entries whose set has column c.
 *
 * Concurrency: none; one thread at a time.
 */
#include "index_core.h"
#include "growth.h"
#include "segments.h"
#include "windows_core.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define HASH KVFS_CLUSTER_HASH_BYTES
#define MAX_DEPTH 40u
#define AHEAD 16u
/* One segment is swept for so many changes. */
#define CHANGES_PER_SWEEP 256u
#define NO_COLUMN UINT32_MAX

struct kvfs_cluster {
    struct kvfs_segment **directory;
    uint32_t depth;
    uint64_t count, max_blocks;
    struct kvfs_segments pool;
    uint64_t seed[2];
    struct kvfs_sets sets;
    uint32_t column_of[KVFS_CLUSTER_SOURCES], source_of[KVFS_COLUMNS];
    uint64_t held[KVFS_COLUMNS];
    uint64_t own[KVFS_SET_WORDS];      /* live columns with the number of their source */
    uint64_t taken[KVFS_SET_WORDS];    /* columns that are live, or not swept yet */
    uint64_t sweeping[KVFS_SET_WORDS]; /* columns that are free after this pass */
    uint64_t cursor, changes;
    struct kvfs_windows windows;
};

/* --- columns ------------------------------------------------------------------------------------------------------ */
static void put_bit(uint64_t *words, uint32_t bit) { words[bit / 64] |= 1ull << bit % 64; }
static void take_bit(uint64_t *words, uint32_t bit) { words[bit / 64] &= ~(1ull << bit % 64); }
static int has_bit(const uint64_t *words, uint32_t bit) { return (words[bit / 64] >> bit % 64 & 1) != 0; }

static int is_zero(const uint64_t *words) {
    uint64_t all = 0;
    for (uint32_t i = 0; i < KVFS_SET_WORDS; i++) all |= words[i];
    return all == 0;
}

static uint32_t free_column(const struct kvfs_cluster *c, uint32_t wanted) {
    if (!has_bit(c->taken, wanted)) return wanted;
    for (uint32_t i = 0; i < KVFS_SET_WORDS; i++)
        if (~c->taken[i]) return 64 * i + (uint32_t)__builtin_ctzll(~c->taken[i]);
    return NO_COLUMN;
}

/* A source has a column from its first block on. There are more columns than sources, so a pass frees one at the last; who
 * clears no further source while KVFS_COLUMNS - KVFS_CLUSTER_SOURCES are not swept never waits for that. */
static uint32_t column_for(struct kvfs_cluster *c, uint32_t source) {
    if (c->column_of[source] == NO_COLUMN) {
        uint32_t column;
        while ((column = free_column(c, source)) == NO_COLUMN) kvfs_cluster_sweep(c, 1);
        c->column_of[source] = column;
        c->source_of[column] = source;
        put_bit(c->taken, column);
        if (column == source) put_bit(c->own, column);
        kvfs_sets_open(&c->sets, column);
    }
    return c->column_of[source];
}

/* The sources of the columns. */
static void translate(const struct kvfs_cluster *c, const uint64_t *columns, uint64_t *sources) {
    memset(sources, 0, KVFS_CLUSTER_MASK_WORDS * sizeof *sources);
    for (uint32_t i = 0; i < c->sets.words; i++) {
        const uint64_t live = columns[i] & c->sets.live[i];
        if (i < KVFS_CLUSTER_MASK_WORDS) sources[i] |= live & c->own[i];
        for (uint64_t left = live & ~c->own[i]; left; left &= left - 1)
            put_bit(sources, c->source_of[64 * i + (uint32_t)__builtin_ctzll(left)]);
    }
}

/* --- places ------------------------------------------------------------------------------------------------------- */
static uint64_t hash_of(const struct kvfs_cluster *c, const uint8_t *key) {
    uint64_t low, high;
    memcpy(&low, key, 8);
    memcpy(&high, key + 8, 8);
    const unsigned __int128 product = (unsigned __int128)(low ^ c->seed[0]) * (high ^ c->seed[1]);
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t place_in_directory(const struct kvfs_cluster *c, uint64_t hash) { return hash >> (64 - c->depth); }

static struct kvfs_segment *segment_of(const struct kvfs_cluster *c, uint64_t hash) {
    return c->directory[place_in_directory(c, hash)];
}

/* The line that a block's search begins at, on its way to the processor. */
static const struct kvfs_line *prefetch(const struct kvfs_cluster *c, const uint8_t *key) {
    const uint64_t hash = hash_of(c, key);
    const struct kvfs_line *line = &segment_of(c, hash)->lines[kvfs_line_of(hash)];
    __builtin_prefetch(line);
    return line;
}

static struct kvfs_place find(const struct kvfs_cluster *c, const uint8_t *key) {
    const uint64_t hash = hash_of(c, key);
    return kvfs_segment_find(segment_of(c, hash), hash, key);
}

static uint32_t set_of(const struct kvfs_cluster *c, const uint8_t *key) {
    const struct kvfs_place found = find(c, key);
    return found.line ? found.line->sets[found.way] : 0;
}

static void drop(struct kvfs_cluster *c, struct kvfs_place gone) {
    const uint64_t hash = hash_of(c, gone.line->keys[gone.way]);
    kvfs_segment_drop(segment_of(c, hash), hash, gone);
    c->count--;
}

/* --- growth ------------------------------------------------------------------------------------------------------- */
static int double_directory(struct kvfs_cluster *c) {
    const uint64_t places = 1ull << c->depth;
    struct kvfs_segment **directory = c->depth < MAX_DEPTH ? realloc(c->directory, 2 * places * sizeof *directory)
                                                           : NULL;
    if (!directory) return -ENOMEM;
    for (uint64_t i = places; i-- > 0;) directory[2 * i] = directory[2 * i + 1] = directory[i];
    c->directory = directory;
    c->depth++;
    return 0;
}

static void move_entries(const struct kvfs_cluster *c, const struct kvfs_segment *old, struct kvfs_segment *halves[2]) {
    for (uint32_t i = 0; i < KVFS_CLUSTER_SEGMENT_BLOCKS; i++) {
        const struct kvfs_line *line = &old->lines[i / KVFS_WAYS];
        if (line->sets[i % KVFS_WAYS]) {
            const uint64_t hash = hash_of(c, line->keys[i % KVFS_WAYS]);
            kvfs_segment_put(halves[hash >> (63 - old->depth) & 1], hash, line->keys[i % KVFS_WAYS],
                             line->sets[i % KVFS_WAYS]);
        }
    }
}

/* Split the segment of this hash. */
static int split(struct kvfs_cluster *c, uint64_t hash) {
    struct kvfs_segment *old = segment_of(c, hash);
    if (old->depth == c->depth && double_directory(c) < 0) return -ENOMEM;
    struct kvfs_segment *halves[2] = {kvfs_segment_new(&c->pool, old->depth + 1),
                                      kvfs_segment_new(&c->pool, old->depth + 1)};
    if (!halves[0] || !halves[1]) {
        kvfs_segment_free(&c->pool, halves[0]);
        kvfs_segment_free(&c->pool, halves[1]);
        return -ENOMEM;
    }
    move_entries(c, old, halves);
    const uint64_t half = 1ull << (c->depth - old->depth - 1);
    const uint64_t first = place_in_directory(c, hash) & ~(2 * half - 1);
    for (uint64_t i = 0; i < 2 * half; i++) c->directory[first + i] = halves[i / half];
    kvfs_segment_free(&c->pool, old);
    return 0;
}

/* --- life --------------------------------------------------------------------------------------------------------- */
struct kvfs_cluster *kvfs_cluster_new(uint64_t max_blocks, uint64_t seed) {
    struct kvfs_cluster *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->max_blocks = max_blocks;
    c->seed[0] = seed;
    c->seed[1] = seed * 0x9e3779b97f4a7c15ull ^ seed >> 29;
    memset(c->column_of, 0xff, sizeof c->column_of);
    c->directory = calloc(2, sizeof *c->directory);
    if (c->directory) {
        c->depth = 1;
        c->directory[0] = kvfs_segment_new(&c->pool, 1);
        c->directory[1] = kvfs_segment_new(&c->pool, 1);
    }
    if (!c->directory || !c->directory[0] || !c->directory[1] || kvfs_sets_init(&c->sets) < 0) {
        kvfs_cluster_free(c);
        return NULL;
    }
    return c;
}

void kvfs_cluster_free(struct kvfs_cluster *c) {
    if (!c) return;
    kvfs_segments_destroy(&c->pool);
    free(c->directory);
    kvfs_sets_destroy(&c->sets);
    free(c->windows.at);
    free(c);
}

uint64_t kvfs_cluster_count(const struct kvfs_cluster *c) { return c->count; }

uint64_t kvfs_cluster_source_blocks(const struct kvfs_cluster *c, uint32_t source) {
    return c->column_of[source] == NO_COLUMN ? 0 : c->held[c->column_of[source]];
}

uint64_t kvfs_cluster_bytes(const struct kvfs_cluster *c) {
    return sizeof *c + kvfs_segments_bytes(&c->pool) + (sizeof(void *) << c->depth) + kvfs_sets_bytes(&c->sets) +
           c->windows.room * sizeof *c->windows.at;
}

/* --- changes ------------------------------------------------------------------------------------------------------ */
static void count_column(struct kvfs_cluster *c, uint32_t column, uint32_t from, uint32_t to) {
    c->held[column] += (uint64_t)kvfs_set_has(kvfs_set_at(&c->sets, to), column);
    c->held[column] -= (uint64_t)kvfs_set_has(kvfs_set_at(&c->sets, from), column);
}

/* Give the block at a place another set, with the caller's reference to it; nobody in it ends the entry. */
static void replace(struct kvfs_cluster *c, struct kvfs_place at, uint32_t to) {
    const uint32_t from = at.line->sets[at.way];
    if (to)
        at.line->sets[at.way] = to;
    else
        drop(c, at);
    kvfs_sets_release(&c->sets, from);
}

/* A block whose right set has no room is one that nobody holds: it is computed anew, which is safe. */
static void replace_by_nobody(struct kvfs_cluster *c, struct kvfs_place at) {
    const struct kvfs_set *set = kvfs_set_at(&c->sets, at.line->sets[at.way]);
    for (uint32_t column = 0; column < KVFS_COLUMNS; column++)
        c->held[column] -= (uint64_t)(has_bit(c->sets.live, column) && kvfs_set_has(set, column));
    replace(c, at, 0);
}

/* Give the block at a place the set that a change makes of its own. Whether there was room. */
static int change_held(struct kvfs_cluster *c, struct kvfs_place at, enum kvfs_set_change change, uint32_t column,
                       struct kvfs_producer producer) {
    const uint32_t from = at.line->sets[at.way];
    const int64_t to = kvfs_sets_change(&c->sets, from, change, column, producer);
    if (to < 0 && change != KVFS_SET_ADD && change != KVFS_SET_PRODUCE) replace_by_nobody(c, at);
    if (to < 0) return 0;
    if (change != KVFS_SET_SWEEP && change != KVFS_SET_PRODUCED) count_column(c, column, from, (uint32_t)to);
    replace(c, at, (uint32_t)to);
    return 1;
}

/* Add a block that nobody holds. Whether there was room. */
static int insert(struct kvfs_cluster *c, const uint8_t *key, enum kvfs_set_change change, uint32_t column,
                  struct kvfs_producer producer) {
    const uint64_t hash = hash_of(c, key);
    if (c->count >= c->max_blocks) return 0;
    while (segment_of(c, hash)->count >= KVFS_SEGMENT_FULL)
        if (split(c, hash) < 0) return 0;
    const int64_t set = kvfs_sets_change(&c->sets, 0, change, column, producer);
    if (set < 0) return 0;
    kvfs_segment_put(segment_of(c, hash), hash, key, (uint32_t)set);
    c->count++;
    c->held[column]++;
    return 1;
}

/* Whether there was room. */
static int change_one(struct kvfs_cluster *c, const uint8_t *key, enum kvfs_set_change change, uint32_t column,
                      struct kvfs_producer producer) {
    const struct kvfs_place found = find(c, key);
    if (found.line) return change_held(c, found, change, column, producer);
    if (change == KVFS_SET_ADD || change == KVFS_SET_PRODUCE) return insert(c, key, change, column, producer);
    return 1;
}

int64_t kvfs_cluster_change(struct kvfs_cluster *c, enum kvfs_set_change change, uint32_t source,
                            struct kvfs_producer producer, const uint8_t *hashes, size_t count) {
    const int adds = change == KVFS_SET_ADD || change == KVFS_SET_PRODUCE;
    const uint32_t column = adds ? column_for(c, source) : c->column_of[source];
    const uint64_t before = column == NO_COLUMN ? 0 : c->held[column];
    int64_t refused = 0;
    if (change == KVFS_SET_REMOVE && column == NO_COLUMN) return 0;
    for (size_t i = 0; i < count && i < AHEAD; i++) prefetch(c, hashes + i * HASH);
    for (size_t i = 0; i < count; i++) {
        if (i + AHEAD < count) prefetch(c, hashes + (i + AHEAD) * HASH);
        refused += !change_one(c, hashes + i * HASH, change, column, producer);
        if (++c->changes % CHANGES_PER_SWEEP == 0) kvfs_cluster_sweep(c, 1);
    }
    return change == KVFS_SET_REMOVE ? (int64_t)(before - c->held[column]) : refused;
}

/* --- sources that were cleared ------------------------------------------------------------------------------------ */
int kvfs_cluster_is_swept(const struct kvfs_cluster *c) { return is_zero(c->sweeping); }

uint32_t kvfs_cluster_unswept(const struct kvfs_cluster *c) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < KVFS_SET_WORDS; i++)
        count += (uint32_t)__builtin_popcountll(c->taken[i] & ~c->sets.live[i]);
    return count;
}

/* Whether a set has a column that is not live. */
static int is_stale(const struct kvfs_sets *s, const struct kvfs_set *set) {
    uint64_t stale = 0;
    for (uint32_t i = 0; i < s->words; i++) stale |= set->words[i] & ~s->live[i];
    return stale != 0;
}

static void sweep_segment(struct kvfs_cluster *c, struct kvfs_segment *segment) {
    for (uint32_t i = 0; i < KVFS_CLUSTER_SEGMENT_BLOCKS; i++) {
        const struct kvfs_place at = {&segment->lines[i / KVFS_WAYS], i % KVFS_WAYS};
        const uint32_t set = at.line->sets[at.way];
        if (set && is_stale(&c->sets, kvfs_set_at(&c->sets, set)))
            change_held(c, at, KVFS_SET_SWEEP, 0, kvfs_no_producer);
    }
}

/* Frees the columns of the pass, and begins another for those whose sources were cleared meanwhile. */
static void end_pass(struct kvfs_cluster *c) {
    for (uint32_t i = 0; i < KVFS_SET_WORDS; i++) {
        c->taken[i] &= ~c->sweeping[i];
        c->sweeping[i] = c->taken[i] & ~c->sets.live[i];
    }
}

void kvfs_cluster_sweep(struct kvfs_cluster *c, uint64_t segments) {
    for (; segments && !kvfs_cluster_is_swept(c); segments--) {
        struct kvfs_segment *segment = segment_of(c, c->cursor);
        sweep_segment(c, segment);
        c->cursor += 1ull << (64 - segment->depth);
        if (!c->cursor) end_pass(c);
    }
}

void kvfs_cluster_clear(struct kvfs_cluster *c, uint32_t source) {
    const uint32_t column = c->column_of[source];
    if (column == NO_COLUMN || !c->held[column]) return;
    c->column_of[source] = NO_COLUMN;
    c->held[column] = 0;
    take_bit(c->own, column);
    kvfs_sets_close(&c->sets, column);
    if (kvfs_cluster_is_swept(c)) put_bit(c->sweeping, column);
}

/* --- walks ---------------------------------------------------------------------------------------------------- */
/* Along the hashes of a prompt, until one has no entry; or past those, to the last one. */
struct walk {
    const struct kvfs_cluster *index;
    const uint8_t *hashes;
    size_t count, at;   /* `at`: of the first block of the next stretch */
    uint32_t set;       /* of that block; 0 where it has no entry, and at the end */
    int passes_missing; /* it goes on there */
    const struct kvfs_line *ahead[AHEAD];
};

static uint32_t look(struct walk *walk) {
    if (walk->at >= walk->count) return 0;
    const uint8_t *key = walk->hashes + walk->at * HASH;
    const struct kvfs_line *line = walk->ahead[walk->at % AHEAD];
    if (walk->at + AHEAD < walk->count)
        walk->ahead[walk->at % AHEAD] = prefetch(walk->index, key + (size_t)AHEAD * HASH);
    for (uint64_t ways = kvfs_ways_of(line, key); ways; ways &= ways - 1)
        if (line->sets[__builtin_ctzll(ways)]) return line->sets[__builtin_ctzll(ways)];
    return line->passed ? set_of(walk->index, key) : 0;
}

static void begin_walk(struct walk *walk, const struct kvfs_cluster *c, const uint8_t *hashes, size_t count) {
    walk->index = c;
    walk->hashes = hashes;
    walk->count = count;
    walk->at = 0;
    walk->passes_missing = 0;
    for (size_t i = 0; i < count && i < AHEAD; i++) walk->ahead[i] = prefetch(c, hashes + i * HASH);
    walk->set = look(walk);
}

/* The set of the next blocks, which are those before `at` from where it was on; 0 at the end. */
static uint32_t next_stretch(struct walk *walk) {
    const uint32_t set = walk->set;
    while (set && walk->set == set) {
        walk->at++;
        walk->set = look(walk);
    }
    return set;
}

static int is_at_end(const struct walk *walk) {
    return !walk->set && (walk->at >= walk->count || !walk->passes_missing);
}

static void pass_missing(struct walk *walk) {
    while (!walk->set && !is_at_end(walk)) {
        walk->at++;
        walk->set = look(walk);
    }
}

/* Writes who holds the next block, and the prefill that is to make it. Whether anybody does. */
static int find_holders(const struct walk *walk, struct kvfs_run *run) {
    const struct kvfs_set *set = kvfs_set_at(&walk->index->sets, walk->set);
    uint64_t any = 0;
    translate(walk->index, set->words, run->holders);
    for (uint32_t i = 0; i < KVFS_CLUSTER_MASK_WORDS; i++) any |= run->holders[i];
    run->producer = any ? set->producer.number : KVFS_NO_PRODUCER;
    return any != 0;
}

/* 1 and the next run, or 0. */
static int next_run(struct walk *walk, struct kvfs_run *run) {
    const size_t first = walk->at;
    struct kvfs_run next;
    if (is_at_end(walk) || (!find_holders(walk, run) && !walk->passes_missing)) return 0;
    /* Sets may differ in columns of nobody alone, and without any other they are as no entry is. */
    do {
        if (!next_stretch(walk)) pass_missing(walk);
        if (is_at_end(walk)) break;
        find_holders(walk, &next);
    } while (next.producer == run->producer && memcmp(next.holders, run->holders, sizeof next.holders) == 0);
    run->blocks = walk->at - first;
    return 1;
}

int kvfs_cluster_runs(const struct kvfs_cluster *c, const uint8_t *hashes, size_t count, struct kvfs_runs *runs) {
    struct walk walk;
    begin_walk(&walk, c, hashes, count);
    walk.passes_missing = c->windows.alone != 0;
    for (runs->count = 0;; runs->count++) {
        struct kvfs_run *grown = kvfs_grow(runs->at, &runs->room, runs->count + 1, sizeof *grown);
        if (!grown) return -ENOMEM;
        runs->at = grown;
        if (!next_run(&walk, &runs->at[runs->count])) break;
    }
    return kvfs_windows_limit(&c->windows, runs);
}

int kvfs_cluster_set_windows(struct kvfs_cluster *c, uint32_t source, const struct kvfs_window *windows, size_t count) {
    return kvfs_windows_set(&c->windows, source, windows, count);
}

static size_t match_walk(const struct kvfs_cluster *c, const uint8_t *hashes, size_t count,
                         struct kvfs_depth depths[KVFS_CLUSTER_SOURCES]) {
    struct walk walk;
    begin_walk(&walk, c, hashes, count);
    uint64_t left[KVFS_SET_WORDS], any = 1;
    size_t found = 0;
    memcpy(left, c->sets.live, sizeof left);
    for (size_t at = 0; any; at = walk.at) {
        const uint64_t *words = kvfs_set_at(&c->sets, next_stretch(&walk))->words;
        any = 0;
        for (uint32_t i = 0; i < c->sets.words; i++) {
            for (uint64_t gone = left[i] & ~words[i]; gone && at; gone &= gone - 1) {
                const uint32_t source = c->source_of[64 * i + (uint32_t)__builtin_ctzll(gone)];
                depths[found++] = (struct kvfs_depth){source, (uint32_t)at};
            }
            any |= left[i] &= words[i];
        }
    }
    return found;
}

void kvfs_cluster_present(const struct kvfs_cluster *c, const uint8_t *hashes, size_t count, const uint64_t *masks,
                          size_t mask_count, uint64_t *depths) {
    struct walk walk;
    begin_walk(&walk, c, hashes, count);
    uint64_t sources[KVFS_CLUSTER_MASK_WORDS], at = 0;
    size_t left = mask_count;
    for (uint32_t set; left && (set = next_stretch(&walk)) != 0; at = walk.at) {
        translate(c, kvfs_set_at(&c->sets, set)->words, sources);
        left = 0;
        for (size_t m = 0; m < mask_count; m++) {
            uint64_t any = 0;
            for (uint32_t i = 0; i < KVFS_CLUSTER_MASK_WORDS; i++)
                any |= sources[i] & masks[m * KVFS_CLUSTER_MASK_WORDS + i];
            if (any && depths[m] == at) {
                depths[m] = walk.at;
                left++;
            }
        }
    }
}

int64_t kvfs_cluster_match(const struct kvfs_cluster *c, const uint8_t *hashes, size_t count,
                           struct kvfs_depth depths[KVFS_CLUSTER_SOURCES]) {
    if (!c->windows.count) return (int64_t)match_walk(c, hashes, count, depths);
    struct kvfs_runs runs = {0};
    const int rc = kvfs_cluster_runs(c, hashes, count, &runs);
    const int64_t found = rc < 0 ? rc : (int64_t)kvfs_runs_match(&runs, depths);
    free(runs.at);
    return found;
}

int kvfs_cluster_depths(const struct kvfs_cluster *c, const uint8_t *hashes, size_t count, const uint64_t *masks,
                        size_t mask_count, uint64_t *depths) {
    struct kvfs_runs runs = {0};
    int rc = 0;
    if (!c->windows.count)
        kvfs_cluster_present(c, hashes, count, masks, mask_count, depths);
    else if ((rc = kvfs_cluster_runs(c, hashes, count, &runs)) == 0)
        kvfs_runs_depths(&runs, masks, mask_count, depths);
    free(runs.at);
    return rc;
}

int kvfs_cluster_holds(const struct kvfs_cluster *c, uint32_t source, const uint8_t *hash) {
    const uint32_t column = c->column_of[source];
    return column != NO_COLUMN && kvfs_set_has(kvfs_set_at(&c->sets, set_of(c, hash)), column);
}

void kvfs_cluster_holders(const struct kvfs_cluster *c, const uint8_t *hash,
                          uint64_t holders[KVFS_CLUSTER_MASK_WORDS]) {
    translate(c, kvfs_set_at(&c->sets, set_of(c, hash))->words, holders);
}

size_t kvfs_cluster_lacking(const struct kvfs_cluster *c, const uint8_t *hashes, size_t count,
                            const uint64_t mask[KVFS_CLUSTER_MASK_WORDS], uint8_t *lacking) {
    size_t found = 0;
    for (size_t i = 0; i < count && i < AHEAD; i++) prefetch(c, hashes + i * HASH);
    for (size_t i = 0; i < count; i++) {
        uint64_t holders[KVFS_CLUSTER_MASK_WORDS], any = 0;
        if (i + AHEAD < count) prefetch(c, hashes + (i + AHEAD) * HASH);
        kvfs_cluster_holders(c, hashes + i * HASH, holders);
        for (uint32_t word = 0; word < KVFS_CLUSTER_MASK_WORDS; word++) any |= holders[word] & mask[word];
        if (!any) memcpy(lacking + HASH * found++, hashes + i * HASH, HASH);
    }
    return found;
}

size_t kvfs_cluster_list(const struct kvfs_cluster *c, uint32_t source, uint64_t *cursor, uint8_t *hashes) {
    const uint32_t column = c->column_of[source];
    const struct kvfs_segment *segment = segment_of(c, *cursor);
    size_t found = 0;
    *cursor += 1ull << (64 - segment->depth);
    for (uint32_t i = 0; i < KVFS_CLUSTER_SEGMENT_BLOCKS && column != NO_COLUMN; i++) {
        const struct kvfs_line *line = &segment->lines[i / KVFS_WAYS];
        if (line->sets[i % KVFS_WAYS] && kvfs_set_has(kvfs_set_at(&c->sets, line->sets[i % KVFS_WAYS]), column))
            memcpy(hashes + HASH * found++, line->keys[i % KVFS_WAYS], HASH);
    }
    return found;
}
