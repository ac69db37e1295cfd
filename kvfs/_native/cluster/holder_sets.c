/* Sets of sources, each kept once.
 *
 * Responsibility: the sets that blocks refer to by 32 bits, since millions of blocks share a few of them; and what a
 * change makes of a set, remembered, so that the blocks of one batch cost one look each. A set is of *columns*: a
 * source has one, and another one after it was cleared; columns that are not live count for nobody.
 *
 * Invariants:
 * - Two sets that differ in number differ in their words or their producer. Set 0 is empty, and always there. A
 *   producer's number has one end, so ends are not compared.
 * - `refs` is the number of blocks that refer to a set, and of callers that are about to. Without any it is free, and
 *   its generation goes up: a transition that was remembered is believed only while both generations are as they were.
 * - Transitions depend on the live columns; when one closes, none is kept.
 *
 * Concurrency: none; one thread at a time.
 */
#include "holder_sets.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define HEADS (1u << 18)
#define TRANSITIONS (1u << 12)

struct kvfs_transition {
    uint32_t from, from_generation, to, to_generation;
    uint32_t change; /* column << 2 | change + 1; 0: none */
};

int kvfs_sets_init(struct kvfs_sets *s) {
    memset(s, 0, sizeof *s);
    s->heads = calloc(HEADS, sizeof *s->heads);
    s->transitions = calloc(TRANSITIONS, sizeof *s->transitions);
    s->chunks[0] = calloc(KVFS_SET_CHUNK, sizeof **s->chunks);
    if (!s->heads || !s->transitions || !s->chunks[0]) return -ENOMEM;
    s->chunks[0]->producer = kvfs_no_producer;
    s->chunks[0]->refs = 1;
    s->begun = s->words = 1;
    return 0;
}

void kvfs_sets_destroy(struct kvfs_sets *s) {
    for (uint32_t i = 0; i < KVFS_SET_CHUNKS; i++) free(s->chunks[i]);
    free(s->heads);
    free(s->transitions);
}

uint64_t kvfs_sets_bytes(const struct kvfs_sets *s) {
    const uint64_t chunks = (s->begun + KVFS_SET_CHUNK - 1) / KVFS_SET_CHUNK;
    return HEADS * sizeof *s->heads + TRANSITIONS * sizeof *s->transitions +
           chunks * KVFS_SET_CHUNK * sizeof(struct kvfs_set);
}

void kvfs_sets_open(struct kvfs_sets *s, uint32_t column) {
    s->live[column / 64] |= 1ull << column % 64;
    if (s->words <= column / 64) s->words = column / 64 + 1;
}

void kvfs_sets_close(struct kvfs_sets *s, uint32_t column) {
    s->live[column / 64] &= ~(1ull << column % 64);
    memset(s->transitions, 0, TRANSITIONS * sizeof *s->transitions);
}

/* --- the sets ----------------------------------------------------------------------------------------------------- */
/* Of the words that are not 0, so that it stays when more come into use. */
static uint32_t *head_of(const struct kvfs_sets *s, const struct kvfs_set *wanted) {
    uint64_t hash = (uint64_t)wanted->producer.number * 0x9e3779b97f4a7c15ull;
    for (uint32_t i = 0; i < s->words; i++) {
        if (wanted->words[i]) {
            hash = (hash ^ wanted->words[i] ^ i) * 0xff51afd7ed558ccdull;
            hash ^= hash >> 32;
        }
    }
    return &s->heads[(hash ^ hash >> 29) % HEADS];
}

static int is_same(const struct kvfs_sets *s, const struct kvfs_set *a, const struct kvfs_set *b) {
    return a->producer.number == b->producer.number && memcmp(a->words, b->words, s->words * sizeof *a->words) == 0;
}

/* The number of a set that is free, or -ENOMEM. */
static int64_t take_free(struct kvfs_sets *s) {
    uint32_t set = s->free;
    if (set) {
        s->free = kvfs_set_at(s, set)->chain;
        return set;
    }
    if (s->begun == KVFS_SET_CHUNK * KVFS_SET_CHUNKS) return -ENOMEM;
    struct kvfs_set **chunk = &s->chunks[s->begun / KVFS_SET_CHUNK];
    if (!*chunk) *chunk = calloc(KVFS_SET_CHUNK, sizeof **chunk);
    return *chunk ? (int64_t)s->begun++ : -ENOMEM;
}

/* The one set like this, with a reference to it. */
static int64_t intern(struct kvfs_sets *s, const struct kvfs_set *wanted) {
    uint32_t *head = head_of(s, wanted);
    for (uint32_t i = *head; i; i = kvfs_set_at(s, i)->chain) {
        if (is_same(s, kvfs_set_at(s, i), wanted)) {
            kvfs_set_at(s, i)->refs++;
            return i;
        }
    }
    const int64_t set = take_free(s);
    if (set < 0) return set;
    struct kvfs_set *made = kvfs_set_at(s, (uint32_t)set);
    memcpy(made->words, wanted->words, sizeof made->words);
    made->producer = wanted->producer;
    made->refs = 1;
    made->chain = *head;
    *head = (uint32_t)set;
    s->count++;
    return set;
}

void kvfs_sets_release(struct kvfs_sets *s, uint32_t set) {
    struct kvfs_set *gone = kvfs_set_at(s, set);
    if (!set || --gone->refs) return;
    uint32_t *link = head_of(s, gone);
    while (*link != set) link = &kvfs_set_at(s, *link)->chain;
    *link = gone->chain;
    gone->generation++;
    gone->chain = s->free;
    s->free = set;
    s->count--;
}

/* --- changes ------------------------------------------------------------------------------------------------------ */
/* Writes what a set becomes; whether somebody is in it. */
static int apply(const struct kvfs_sets *s, const struct kvfs_set *from, enum kvfs_set_change change, uint32_t column,
                 struct kvfs_producer producer, struct kvfs_set *to) {
    uint64_t before = 0, after = 0;
    memset(to, 0, sizeof *to);
    for (uint32_t i = 0; i < s->words; i++) before |= to->words[i] = from->words[i] & s->live[i];
    to->producer = from->producer;
    if (!before || change == KVFS_SET_ADD) to->producer = kvfs_no_producer;
    if (change == KVFS_SET_ADD || change == KVFS_SET_PRODUCE)
        to->words[column / 64] |= 1ull << column % 64;
    else if (change == KVFS_SET_REMOVE)
        to->words[column / 64] &= ~(1ull << column % 64);
    if (change == KVFS_SET_PRODUCE && (!before || producer.ends_s < to->producer.ends_s))
        to->producer = producer;
    else if (change == KVFS_SET_PRODUCED && to->producer.number == producer.number)
        to->producer = kvfs_no_producer;
    for (uint32_t i = 0; i < s->words; i++) after |= to->words[i];
    return after != 0;
}

static int64_t compute(struct kvfs_sets *s, uint32_t from, enum kvfs_set_change change, uint32_t column,
                       struct kvfs_producer producer) {
    struct kvfs_set to;
    return apply(s, kvfs_set_at(s, from), change, column, producer, &to) ? intern(s, &to) : 0;
}

int64_t kvfs_sets_change(struct kvfs_sets *s, uint32_t from, enum kvfs_set_change change, uint32_t column,
                         struct kvfs_producer producer) {
    if (change > KVFS_SET_SWEEP) return compute(s, from, change, column, producer);
    const uint32_t wanted = column << 2 | (change + 1);
    struct kvfs_transition *t = &s->transitions[(from * 0x9e3779b1u ^ wanted * 0x85ebca6bu) >> 8 & (TRANSITIONS - 1)];
    if (t->change == wanted && t->from == from && t->from_generation == kvfs_set_at(s, from)->generation &&
        t->to_generation == kvfs_set_at(s, t->to)->generation) {
        if (t->to) kvfs_set_at(s, t->to)->refs++;
        return t->to;
    }
    const int64_t to = compute(s, from, change, column, producer);
    if (to >= 0)
        *t = (struct kvfs_transition){from, kvfs_set_at(s, from)->generation, (uint32_t)to,
                                      kvfs_set_at(s, (uint32_t)to)->generation, wanted};
    return to;
}
