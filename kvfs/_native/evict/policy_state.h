/* What the files of the policy share: nodes, the order of units, what is learned. See policy_core.c. */
#ifndef KVFS_POLICY_STATE_H
#define KVFS_POLICY_STATE_H

#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "policy_core.h"

#define NONE KVFS_POLICY_NONE

/* --- links: places in the segmented lists of order.c --------------------------------------------------- */
#define BINS 48    /* of age: [0,16), then two per octave */
#define CLASSES 96 /* 3 turns x 8 lengths x last or not x hit or new */
#define CELLS (CLASSES * BINS)
#define CELL_WORDS ((CELLS + 63) / 64)

enum place { GONE, RUN, LISTED, PARKED, READY, CLAIMED };
enum flag { PRESENT = 1, PINNED = 2, MEMBER = 4, GROUP = 8, IN_RUN = 16, WAS_HIT = 32, RETIRED = 64, BEYOND = 128 };

struct link {
    uint32_t prev, next;
    uint32_t stamp; /* of the last use, on the clock of references */
    uint8_t class, bin, place, flags;
};

struct cell_order {
    uint16_t position[CELLS], at[CELLS]; /* of each cell (class, bin) in the order of eviction, and back */
};

struct lists {
    char *base; /* of the first item's link; items are `stride` bytes apart */
    size_t stride;
    const struct cell_order *cells;
    uint32_t head[CELLS], tail[CELLS];
    uint64_t bins_used[CLASSES]; /* bit b: cell (class, b) has items */
    uint64_t used[CELL_WORDS];   /* bit position[cell] */
    uint64_t used_words[(CELL_WORDS + 63) / 64];
};

static inline struct link *link_of(const struct lists *l, uint32_t item) {
    return (struct link *)(l->base + item * l->stride);
}

int kvfs_age_bin(uint32_t age);
uint32_t kvfs_age_edge(int bin);
void kvfs_lists_init(struct lists *l, const struct cell_order *cells, size_t stride);
void kvfs_lists_append(struct lists *l, uint32_t item, int class, int bin);
void kvfs_lists_remove(struct lists *l, uint32_t item);
void kvfs_lists_age(struct lists *l, uint32_t before, uint32_t now);
void kvfs_lists_reorder(struct lists *l);
void kvfs_lists_pass(struct lists *from, struct lists *to, uint32_t age, uint32_t now);
uint32_t kvfs_lists_first(const struct lists *l);
uint32_t kvfs_lists_oldest(const struct lists *l, uint32_t now);

/* --- the floor: shadow.c ---------------------------------------------------------------------------------- */
#define SHADOW_BUCKETS 4096

struct ghost {
    uint32_t hash, stamp; /* stamp 0: none */
};

struct shadow {
    uint32_t used[SHADOW_BUCKETS],
        ghosts_of[SHADOW_BUCKETS]; /* by bucket of time, each of 2^shift uses from `base` on */
    uint32_t base, oldest;
    int shift;
    uint32_t held, missing;
    uint32_t edge; /* the last use from which on last use may hold it */
    struct ghost *ghosts;
    uint32_t room, filled;
    uint32_t losses, gains; /* of the prompt */
    double balance, credit; /* what pays for ghosts: since the beginning, and of late */
    double won;             /* of late */
    uint64_t judged;        /* uses */
};

int kvfs_shadow_init(struct shadow *s);
void kvfs_shadow_free(struct shadow *s);
uint64_t kvfs_shadow_bytes(const struct shadow *s);
void kvfs_shadow_reach(struct shadow *s, uint32_t clock);
void kvfs_shadow_evict(struct shadow *s, uint32_t clock, uint32_t units);
void kvfs_shadow_use(struct shadow *s, uint32_t hash, uint32_t before, uint32_t stamp);
void kvfs_shadow_restamp(struct shadow *s, uint32_t before, uint32_t stamp);
void kvfs_shadow_remove(struct shadow *s, uint32_t hash, uint32_t stamp, bool evicted);
void kvfs_shadow_judge(struct shadow *s, uint32_t uses, uint32_t units);
bool kvfs_shadow_allows(const struct shadow *s);

/* --- blocks that were seen: memory.c ------------------------------------------------------------------------- */
struct generation {
    uint32_t *slots; /* fingerprint and turn; 0: none */
    uint32_t room, filled;
};

struct memory {
    struct generation now, before;
    uint32_t units;
};

int kvfs_memory_init(struct memory *m);
void kvfs_memory_free(struct memory *m);
uint64_t kvfs_memory_bytes(const struct memory *m);
uint8_t kvfs_memory_turn(const struct memory *m, uint64_t hash);
void kvfs_memory_add(struct memory *m, uint64_t hash, uint8_t turn);

/* --- what is learned: learner.c --------------------------------------------------------------------------- */
struct sample {
    uint32_t hash, chain;
    uint32_t prev, next; /* by time of the use */
    uint32_t stamp;
    uint8_t class;
};

struct counts {
    double hits[CLASSES][BINS], ended[CLASSES][BINS];
};

struct learner {
    struct sample *samples;
    uint32_t *buckets; /* of samples by hash; as many as a power of two */
    uint32_t max_samples, bucket_mask, free, oldest, newest;
    int shift;      /* one use in 2^shift is sampled */
    uint32_t since; /* samples since ranks were computed */
    bool ranked;    /* ranks were computed */
    struct counts counts;
    struct memory memory;
    struct cell_order cells;
    struct shadow shadow;
};

int kvfs_learner_init(struct learner *l);
void kvfs_learner_free(struct learner *l);
int kvfs_learner_fit(struct learner *l, uint32_t population);
void kvfs_learner_use(struct learner *l, uint32_t hash, int class, uint32_t clock);
void kvfs_learner_reclass(struct learner *l, uint32_t hash, int class);
bool kvfs_learner_due(const struct learner *l);
void kvfs_learner_rank(struct learner *l, uint32_t clock);
uint64_t kvfs_learner_bytes(const struct learner *l);

/* --- nodes: policy_core.c -------------------------------------------------------------------------------------- */
struct node {
    uint32_t key[4];
    uint32_t owner;    /* a block's parent; a member's group; a group's first member */
    uint32_t children; /* present, unclaimed blocks that name it as parent; a group's: the sum of its members' */
    struct link link;
    uint32_t chain;    /* in its bucket, or in the free list */
    uint32_t size_low; /* a group's: how many of its members are pinned */
    uint8_t size_high, turn;
    uint16_t depth;
};
_Static_assert(sizeof(struct node) == 52, "a block's node");

struct waiting {
    uint32_t stamp, unit;
};

struct run {
    uint32_t *nodes; /* in the order of the calls until placed, then from the shallowest on */
    uint32_t count, room, placed;
    uint32_t known; /* how many from the shallowest on were seen before */
    uint8_t turn;
    bool backwards;
};

struct kvfs_policy {
    enum kvfs_policy_kind kind;
    struct node *nodes;
    uint32_t room, free, *buckets, bucket_mask;
    uint32_t awaited, groups; /* parents that are not here, and groups */
    uint32_t population;      /* units: keys without a group, and groups */
    uint32_t level;           /* population when the last eviction ended; 0 before the first */
    uint32_t count, in_use, clock;
    uint64_t total_bytes;
    struct waiting *ready;
    uint32_t ready_count, ready_room;
    uint32_t *retired, retired_count, retired_room, claimed;
    struct run run;
    struct lists within, beyond; /* the edge of what last use would hold; without a learner all are within */
    struct cell_order plain;     /* as they are numbered */
    struct learner *learner;     /* NULL: by last use */
};

static inline uint64_t kvfs_mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Of a unit's last use from when it is cooled on: half of the clock, beyond whatever a cache holds by use. */
#define COOLED_AGE (1u << 31)

static inline bool is_cooled(const struct kvfs_policy *p, const struct node *n) {
    return p->clock - n->link.stamp >= COOLED_AGE;
}

static inline uint32_t parent_of(const struct node *n) { return n->link.flags & (MEMBER | GROUP) ? NONE : n->owner; }

uint64_t kvfs_node_hash(const struct node *n);
void kvfs_policy_list(struct kvfs_policy *p, uint32_t unit, int class, uint32_t stamp);
void kvfs_policy_unlist(struct kvfs_policy *p, uint32_t unit);

/* --- runs: runs.c --------------------------------------------------------------------------------------- */
int kvfs_run_add(struct kvfs_policy *p, uint32_t unit, bool hit);
int kvfs_run_place(struct kvfs_policy *p);
void kvfs_run_close(struct kvfs_policy *p);

/* --- replays: replay.c, baselines.c ---------------------------------------------------------------- */
static inline void note_victim(struct kvfs_replay *r, uint32_t id) {
    if (r->victims && r->evicted < r->max_victims) r->victims[r->evicted] = id;
    r->evicted++;
}

#endif
