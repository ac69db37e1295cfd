/* Sets of sources, each kept once: what a block of the cluster's index refers to. See holder_sets.c. */
#ifndef KVFS_CLUSTER_HOLDER_SETS_H
#define KVFS_CLUSTER_HOLDER_SETS_H

#include <math.h>
#include <stdint.h>

#define KVFS_SET_WORDS 17
#define KVFS_COLUMNS (64 * KVFS_SET_WORDS)
#define KVFS_SET_CHUNK 1024u
#define KVFS_SET_CHUNKS 1024u
#define KVFS_NO_PRODUCER (-1)

/* A prefill that is to make blocks, and when it is predicted to end. */
struct kvfs_producer {
    int64_t number; /* or KVFS_NO_PRODUCER */
    double ends_s;
};

/* Nobody is to make it: so long ago that no prefill that is still to end is the first. */
static const struct kvfs_producer kvfs_no_producer = {KVFS_NO_PRODUCER, -INFINITY};

/* Bit c of the words: the source of column c holds the block. `chain` links sets of one hash, and free ones. */
struct kvfs_set {
    uint64_t words[KVFS_SET_WORDS];
    struct kvfs_producer producer; /* of the prefills that are to make the block the one that ends first */
    uint32_t refs, generation, chain;
};

/* What a change makes of a set. A block's producer ends with its last holder. */
enum kvfs_set_change {
    KVFS_SET_ADD,      /* this column holds it: whoever was to make it, it is there */
    KVFS_SET_REMOVE,   /* this column does not */
    KVFS_SET_SWEEP,    /* columns that are not live are left out */
    KVFS_SET_PRODUCE,  /* this column will hold it, once this prefill is done */
    KVFS_SET_PRODUCED, /* this prefill is done */
};

struct kvfs_transition;

struct kvfs_sets {
    struct kvfs_set *chunks[KVFS_SET_CHUNKS];
    uint32_t *heads;
    struct kvfs_transition *transitions;
    uint32_t begun, free, count; /* `begun`: sets that ever were */
    uint32_t words;              /* of every set and mask, those below this are in use */
    uint64_t live[KVFS_SET_WORDS];
};

int kvfs_sets_init(struct kvfs_sets *s);
void kvfs_sets_destroy(struct kvfs_sets *s);
uint64_t kvfs_sets_bytes(const struct kvfs_sets *s);

/* Columns become live, or are not so any more. */
void kvfs_sets_open(struct kvfs_sets *s, uint32_t column);
void kvfs_sets_close(struct kvfs_sets *s, uint32_t column);

/* What a change makes of a set, with a reference to it: 0 for the set of nobody, or -ENOMEM. */
int64_t kvfs_sets_change(struct kvfs_sets *s, uint32_t set, enum kvfs_set_change change, uint32_t column,
                         struct kvfs_producer producer);
void kvfs_sets_release(struct kvfs_sets *s, uint32_t set);

static inline struct kvfs_set *kvfs_set_at(const struct kvfs_sets *s, uint32_t set) {
    return &s->chunks[set / KVFS_SET_CHUNK][set % KVFS_SET_CHUNK];
}

static inline int kvfs_set_has(const struct kvfs_set *set, uint32_t column) {
    return (set->words[column / 64] >> column % 64 & 1) != 0;
}

#endif
