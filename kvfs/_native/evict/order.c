/* Segmented lists: items by class and by bin of age, each list in order of last use.
 *
 * Responsibility: find in O(1) the cell that goes first and its oldest item, where the order of cells is a table
 * (`cell_order`), and the oldest item of all. An item moves on to the next cell as it ages, in
 * `kvfs_lists_age`: at most BINS times between two uses, so a use costs O(1) amortised.
 *
 * Invariants: a list's stamps do not fall from its head to its tail; bit position[cell] of `used` says whether the
 * cell has items, bit w of `used_words` whether word w of `used` has bits. A cell is looked at for ageing each time
 * that the clock crosses a quarter of its width, so an item is in a cell at most that long after its time.
 */
#include "policy_state.h"

uint32_t kvfs_age_edge(int bin) {
    if (bin <= 0) return 0;
    uint64_t octave = 16ull << ((bin - 1) / 2);
    return (uint32_t)((bin - 1) % 2 ? (octave * 92682) >> 16 : octave); /* times the root of two */
}

int kvfs_age_bin(uint32_t age) {
    if (age < 16) return 0;
    int octave = 31 - __builtin_clz(age);
    int bin = 1 + 2 * (octave - 4);
    if (age >= kvfs_age_edge(bin + 1)) bin++;
    return bin < BINS ? bin : BINS - 1;
}

void kvfs_lists_init(struct lists *l, const struct cell_order *cells, size_t stride) {
    memset(l, 0, sizeof *l);
    memset(l->head, 0xff, sizeof l->head);
    memset(l->tail, 0xff, sizeof l->tail);
    l->cells = cells;
    l->stride = stride;
}

static void set_used(struct lists *l, int class, int bin) {
    int at = l->cells->position[class * BINS + bin];
    l->bins_used[class] |= 1ull << bin;
    l->used[at / 64] |= 1ull << (at % 64);
    l->used_words[at / 4096] |= 1ull << (at / 64 % 64);
}

static void clear_used(struct lists *l, int class, int bin) {
    int at = l->cells->position[class * BINS + bin];
    l->bins_used[class] &= ~(1ull << bin);
    l->used[at / 64] &= ~(1ull << (at % 64));
    if (!l->used[at / 64]) l->used_words[at / 4096] &= ~(1ull << (at / 64 % 64));
}

void kvfs_lists_append(struct lists *l, uint32_t item, int class, int bin) {
    struct link *link = link_of(l, item);
    int cell = class * BINS + bin;
    link->class = (uint8_t) class;
    link->bin = (uint8_t)bin;
    link->prev = l->tail[cell];
    link->next = NONE;
    if (link->prev != NONE) {
        link_of(l, link->prev)->next = item;
    } else {
        l->head[cell] = item;
        set_used(l, class, bin);
    }
    l->tail[cell] = item;
}

void kvfs_lists_remove(struct lists *l, uint32_t item) {
    struct link *link = link_of(l, item);
    int cell = link->class * BINS + link->bin;
    if (link->prev != NONE)
        link_of(l, link->prev)->next = link->next;
    else
        l->head[cell] = link->next;
    if (link->next != NONE)
        link_of(l, link->next)->prev = link->prev;
    else
        l->tail[cell] = link->prev;
    if (l->head[cell] == NONE) clear_used(l, link->class, link->bin);
}

static void age_cell(struct lists *l, int class, int bin, uint32_t now) {
    uint32_t item, edge = kvfs_age_edge(bin + 1);
    while ((item = l->head[class * BINS + bin]) != NONE) {
        uint32_t age = now - link_of(l, item)->stamp;
        if (age < edge) return;
        kvfs_lists_remove(l, item);
        kvfs_lists_append(l, item, class, kvfs_age_bin(age));
    }
}

/* The clock went from `before` to `now`. Higher bins first: what arrives in one need not be looked at again. */
void kvfs_lists_age(struct lists *l, uint32_t before, uint32_t now) {
    int crossed = 31 - __builtin_clz((before ^ now) | 1); /* its highest bit that changed */
    int last = 2 * crossed - 2;                           /* the widest bin with a quarter of at most 2^crossed */
    if (last < 0) return;
    if (last > BINS - 2) last = BINS - 2;
    uint64_t looked_at = (2ull << last) - 1;
    for (int class = 0; class < CLASSES; class ++) {
        uint64_t bins = l->bins_used[class] & looked_at;
        while (bins) {
            int bin = 63 - __builtin_clzll(bins);
            bins &= ~(1ull << bin);
            age_cell(l, class, bin, now);
        }
    }
}

/* To be called when the order of cells has changed. */
void kvfs_lists_reorder(struct lists *l) {
    memset(l->used, 0, sizeof l->used);
    memset(l->used_words, 0, sizeof l->used_words);
    for (int class = 0; class < CLASSES; class ++)
        for (uint64_t bins = l->bins_used[class]; bins; bins &= bins - 1) set_used(l, class, __builtin_ctzll(bins));
}

/* Move items older than `age` to other lists, marked BEYOND. Each list is in order of last use, so those are at its head. */
void kvfs_lists_pass(struct lists *from, struct lists *to, uint32_t age, uint32_t now) {
    int youngest = kvfs_age_bin(age);
    uint64_t looked_at = ~0ull << (youngest ? youngest - 1 : 0); /* an item may be one bin late */
    for (int class = 0; class < CLASSES; class ++) {
        for (uint64_t bins = from->bins_used[class] & looked_at; bins; bins &= bins - 1) {
            int bin = __builtin_ctzll(bins);
            uint32_t item;
            while ((item = from->head[class * BINS + bin]) != NONE && now - link_of(from, item)->stamp > age) {
                kvfs_lists_remove(from, item);
                link_of(to, item)->flags |= BEYOND;
                kvfs_lists_append(to, item, class, bin);
            }
        }
    }
}

/* The place of the first cell that has items in the order of cells, or CELLS. */
uint32_t kvfs_lists_first(const struct lists *l) {
    for (int group = 0; group < (CELL_WORDS + 63) / 64; group++) {
        if (!l->used_words[group]) continue;
        int word = group * 64 + __builtin_ctzll(l->used_words[group]);
        return (uint32_t)(word * 64 + __builtin_ctzll(l->used[word]));
    }
    return CELLS;
}

/* The oldest item of all, or NONE. */
uint32_t kvfs_lists_oldest(const struct lists *l, uint32_t now) {
    uint32_t oldest = NONE, oldest_age = 0;
    for (int class = 0; class < CLASSES; class ++) {
        if (!l->bins_used[class]) continue;
        uint32_t item = l->head[class * BINS + 63 - __builtin_clzll(l->bins_used[class])];
        uint32_t age = now - link_of(l, item)->stamp;
        if (oldest == NONE || age > oldest_age) {
            oldest = item;
            oldest_age = age;
        }
    }
    return oldest;
}
