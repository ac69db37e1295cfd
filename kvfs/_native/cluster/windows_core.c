/* Sources that can be used only as far as what lies beside them goes on: a cache's blocks of full attention, beside which
 * layers with sliding windows and recurrent layers have blocks of their own, each kind in a source of its own.
 *
 * A prompt goes on from a boundary if the source itself, or its other one, has each block before it and each of its windows
 * has the last `blocks` of its own before it, or all where there are fewer; of chunks, those since the last one ended. Those
 * of a window may be longer: each has the hash of the source's block that ends where it does, and a boundary is where one of
 * each window ends. The same hold all blocks of a run, so that its last boundary is the best of it, and where a chunk's are
 * not among them the last one at which a chunk ends: of each run that one alone is looked at.
 *
 * A model without full attention has windows that are alone: of the blocks far before a boundary it reads none. So its
 * source has each block before one, and its prompts go on behind blocks that nobody holds; until the end those are runs,
 * too.
 *
 * Invariants: a window holds nothing for a prompt by itself, and is in no run that is returned. How far a source can be
 * used depends on what sources hold, never on how far others can be used. Costs: sources with windows x runs.
 * Concurrency: none.
 */
#include "windows_core.h"
#include "growth.h"

#include <errno.h>
#include <string.h>

static int has_source(const uint64_t *mask, uint32_t source) { return (mask[source / 64] >> source % 64 & 1) != 0; }
static void put_source(uint64_t *mask, uint32_t source) { mask[source / 64] |= 1ull << source % 64; }
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
    w->alone = 0;
    for (uint32_t i = 0; i < kept; i++) w->alone += w->at[i].is_alone != 0;
    return 0;
}

/* The least common multiple; of what is over UINT32_MAX, which no prompt has blocks, the larger one. */
static uint64_t common_multiple(uint64_t one, uint64_t other) {
    if (one > UINT32_MAX || other > UINT32_MAX) return one > other ? one : other;
    uint64_t divisor = one, rest = other;
    while (rest) {
        const uint64_t next = divisor % rest;
        divisor = rest;
        rest = next;
    }
    return one / divisor * other;
}

/* How far apart the boundaries are at which a block of each window ends. */
static uint64_t apart(const struct kvfs_window *windows, size_t count) {
    uint64_t blocks = 1;
    for (size_t k = 0; k < count; k++) blocks = common_multiple(blocks, windows[k].stride);
    return blocks;
}

/* How many blocks of a window end up to here. Most are as long as the source's, and divisions would take most of the time of
 * a look-up: of 64 sources with two windows each 216 us in place of 120. */
static uint64_t ended(uint64_t blocks, uint64_t stride) { return stride == 1 ? blocks : blocks / stride; }

/* Where the last boundary is at which a source can be used: behind so many blocks, and so many whole runs. */
struct usable {
    uint64_t blocks;
    size_t runs;
    int splits; /* it is within the next run */
};

/* The last boundary up to `end` from which chunks go on: one at which each kind ends that the run, from `first` on, lacks, and
 * up to which each kind that it has is there since its chunk began. Not over `first` where there is none in the run. `held`:
 * of each window's own, up to `first`. */
static uint64_t chunks_go_on_from(const struct kvfs_window *windows, size_t count, uint64_t step, const uint64_t *held,
                                  const struct kvfs_run *run, uint64_t first, uint64_t end) {
    for (size_t k = 0; k < count; k++)
        if (windows[k].is_chunked && !has_source(run->holders, windows[k].holder))
            step = common_multiple(step, (uint64_t)windows[k].blocks * windows[k].stride);
    const uint64_t boundary = end / step * step;
    for (size_t k = 0; k < count && boundary > first; k++) {
        if (!windows[k].is_chunked || !has_source(run->holders, windows[k].holder)) continue;
        const uint64_t stride = windows[k].stride, ends = boundary / stride;
        if (held[k] + ends - first / stride < ends % windows[k].blocks) return 0; /* the chunk began before the gap */
    }
    return boundary;
}

/* Whether windows go on from a boundary in a run, which is counted in. */
static int windows_go_on(const struct kvfs_window *windows, size_t count, uint64_t *held, const struct kvfs_run *run,
                         uint64_t first, uint64_t boundary) {
    int goes_on = boundary > first;
    for (size_t k = 0; k < count; k++) {
        const uint64_t stride = windows[k].stride, before = ended(first, stride);
        const uint64_t here = ended(first + run->blocks, stride);
        if (here == before) continue; /* none ends in this run, nor is there a boundary in it */
        if (!has_source(run->holders, windows[k].holder)) {
            held[k] = 0;
            goes_on &= windows[k].is_chunked;
            continue;
        }
        const uint64_t wanted = ended(boundary, stride), in_row = held[k] + wanted - before;
        goes_on &= in_row >= windows[k].blocks || in_row == wanted || windows[k].is_chunked;
        held[k] += here - before;
    }
    return goes_on;
}

/* Whether all blocks of a run count as there. */
static int is_there(const struct kvfs_window *of, const struct kvfs_run *run) {
    return of->is_alone || has_source(run->holders, of->source) || has_source(run->holders, of->other);
}

static struct usable usable_of(const struct kvfs_window *windows, size_t count, const struct kvfs_runs *runs) {
    uint64_t held[KVFS_WINDOWS_OF_SOURCE] = {0}; /* of each window's own, up to here and without a gap */
    const uint64_t step = apart(windows, count);
    struct usable usable = {0};
    uint64_t end = 0;
    int has_chunks = 0; /* to ask for them of those that have none takes a fifth of the time of all */
    for (size_t k = 0; k < count; k++) has_chunks |= windows[k].is_chunked;
    for (size_t i = 0; i < runs->count; i++) {
        const struct kvfs_run *run = &runs->at[i];
        if (!is_there(windows, run)) break;
        const uint64_t first = end;
        end += run->blocks;
        const uint64_t boundary = has_chunks ? chunks_go_on_from(windows, count, step, held, run, first, end)
                                             : ended(end, step) * step;
        if (windows_go_on(windows, count, held, run, first, boundary))
            usable = (struct usable){boundary, boundary < end ? i : i + 1, boundary < end};
    }
    return usable;
}

/* Takes the source of a window out of the runs behind so many; one that is alone has all before. */
static void end_behind(struct kvfs_runs *runs, const struct kvfs_window *of, size_t count) {
    for (size_t i = 0; i < count && of->is_alone; i++) put_source(runs->at[i].holders, of->source);
    for (size_t i = count; i < runs->count; i++) take_source(runs->at[i].holders, of->source);
}

/* Ends a run behind so many blocks, and with it those of a window's source: 0 or -ENOMEM. */
static int split_and_end(struct kvfs_runs *runs, const struct kvfs_window *of, uint64_t blocks) {
    size_t i = 0;
    uint64_t before = 0;
    while (before + runs->at[i].blocks <= blocks) before += runs->at[i++].blocks;
    if (before < blocks) {
        struct kvfs_run *grown = kvfs_grow(runs->at, &runs->room, runs->count + 1, sizeof *grown);
        if (!grown) return -ENOMEM;
        runs->at = grown;
        memmove(&grown[i + 1], &grown[i], (runs->count++ - i) * sizeof *grown);
        grown[i].blocks = blocks - before;
        grown[++i].blocks -= blocks - before;
    }
    end_behind(runs, of, i); /* another one may have split what it was in */
    return 0;
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

int kvfs_windows_limit(const struct kvfs_windows *w, struct kvfs_runs *runs) {
    struct usable usable[KVFS_CLUSTER_SOURCES];
    if (!w->count) return 0;
    for (uint32_t first = 0; first < w->count; first = next_source(w, first))
        usable[w->at[first].source] = usable_of(&w->at[first], next_source(w, first) - first, runs);
    for (uint32_t first = 0; first < w->count; first = next_source(w, first)) {
        const struct usable *found = &usable[w->at[first].source];
        if (!found->splits) end_behind(runs, &w->at[first], found->runs);
    }
    for (uint32_t first = 0; first < w->count;
         first = next_source(w, first)) { /* from here on runs have other places */
        const struct usable *found = &usable[w->at[first].source];
        if (found->splits && split_and_end(runs, &w->at[first], found->blocks)) return -ENOMEM;
    }
    for (uint32_t k = 0; k < w->count; k++)
        for (size_t i = 0; i < runs->count; i++) take_source(runs->at[i].holders, w->at[k].holder);
    join_runs(runs);
    return 0;
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
