/* Sources that can be used only as far as what lies beside them goes on: a cache's blocks of full attention, beside which
 * layers with sliding windows and recurrent layers have blocks of their own, each kind in a source of its own.
 *
 * A prompt goes on from a boundary if the source itself, or its other one, has each block before it and each of its windows
 * has the last `blocks` of them, or all where there are fewer. The same hold all blocks of a run, so that its last boundary
 * is the best of it: the ends of runs alone are looked at.
 *
 * Invariants: a window holds nothing for a prompt by itself, and is in no run that is returned. Costs: sources with
 * windows x runs. Concurrency: none.
 */
#include "windows_core.h"
#include "growth.h"

#include <errno.h>
#include <string.h>

#define NOWHERE UINT64_MAX

static int has_source(const uint64_t *mask, uint32_t source) { return (mask[source / 64] >> source % 64 & 1) != 0; }
static void take_source(uint64_t *mask, uint32_t source) { mask[source / 64] &= ~(1ull << source % 64); }

int kvfs_windows_set(struct kvfs_windows *w, uint32_t source, const struct kvfs_window *given, size_t count) {
    struct kvfs_window *grown = kvfs_grow(w->at, &w->room, w->count + count, sizeof *grown);
    if (!grown) return -ENOMEM;
    w->at = grown;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < w->count; i++)
        if (w->at[i].source != source) w->at[kept++] = w->at[i];
    for (size_t i = 0; i < count; i++) {
        w->at[kept] = given[i];
        w->at[kept++].source = source;
    }
    w->count = kept;
    return 0;
}

/* How many runs there are up to the last one at whose end a source can be used. */
static size_t usable_runs(const struct kvfs_window *windows, size_t count, const struct kvfs_runs *runs) {
    uint64_t since[KVFS_WINDOWS_OF_SOURCE] = {0}; /* from which block on each window has all */
    uint64_t end = 0;
    size_t usable = 0;
    for (size_t i = 0; i < runs->count; i++) {
        const struct kvfs_run *run = &runs->at[i];
        if (!has_source(run->holders, windows->source) && !has_source(run->holders, windows->other)) break;
        const uint64_t first = end;
        int goes_on = 1;
        end += run->blocks;
        for (size_t k = 0; k < count; k++) {
            if (!has_source(run->holders, windows[k].holder))
                since[k] = NOWHERE;
            else if (since[k] == NOWHERE)
                since[k] = first;
            goes_on &= since[k] != NOWHERE && (!since[k] || end - since[k] >= windows[k].blocks);
        }
        if (goes_on) usable = i + 1;
    }
    return usable;
}

/* One past the last of the windows that are of the same source as the one at `first`. */
static uint32_t next_source(const struct kvfs_windows *w, uint32_t first) {
    uint32_t next = first;
    while (next < w->count && w->at[next].source == w->at[first].source) next++;
    return next;
}

static int is_same(const struct kvfs_run *one, const struct kvfs_run *other) {
    return one->producer == other->producer && memcmp(one->holders, other->holders, sizeof one->holders) == 0;
}

/* Makes one run of those that have become the same, and ends them before the first one that nobody holds. */
static void join_runs(struct kvfs_runs *runs) {
    size_t kept = 0;
    for (size_t i = 0; i < runs->count; i++) {
        uint64_t any = 0;
        for (uint32_t word = 0; word < KVFS_CLUSTER_MASK_WORDS; word++) any |= runs->at[i].holders[word];
        if (!any) break;
        if (kept && is_same(&runs->at[kept - 1], &runs->at[i]))
            runs->at[kept - 1].blocks += runs->at[i].blocks;
        else
            runs->at[kept++] = runs->at[i];
    }
    runs->count = kept;
}

void kvfs_windows_limit(const struct kvfs_windows *w, struct kvfs_runs *runs) {
    size_t usable[KVFS_CLUSTER_SOURCES];
    if (!w->count) return;
    for (uint32_t first = 0; first < w->count; first = next_source(w, first))
        usable[w->at[first].source] = usable_runs(&w->at[first], next_source(w, first) - first, runs);
    for (uint32_t first = 0; first < w->count; first = next_source(w, first))
        for (size_t i = usable[w->at[first].source]; i < runs->count; i++)
            take_source(runs->at[i].holders, w->at[first].source);
    for (uint32_t k = 0; k < w->count; k++)
        for (size_t i = 0; i < runs->count; i++) take_source(runs->at[i].holders, w->at[k].holder);
    join_runs(runs);
}

size_t kvfs_runs_match(const struct kvfs_runs *runs, struct kvfs_depth depths[KVFS_CLUSTER_SOURCES]) {
    size_t found = 0;
    for (uint32_t source = 0; source < KVFS_CLUSTER_SOURCES; source++) {
        uint64_t depth = 0;
        for (size_t i = 0; i < runs->count && has_source(runs->at[i].holders, source); i++) depth += runs->at[i].blocks;
        if (depth) depths[found++] = (struct kvfs_depth){source, (uint32_t)depth};
    }
    return found;
}

void kvfs_runs_depths(const struct kvfs_runs *runs, const uint64_t *masks, size_t mask_count, uint64_t *depths) {
    for (size_t m = 0; m < mask_count; m++) {
        for (size_t i = 0; i < runs->count; i++) {
            uint64_t any = 0;
            for (uint32_t word = 0; word < KVFS_CLUSTER_MASK_WORDS; word++)
                any |= runs->at[i].holders[word] & masks[m * KVFS_CLUSTER_MASK_WORDS + word];
            if (!any) break;
            depths[m] += runs->at[i].blocks;
        }
    }
}
