/* What the default policy learns, from a sample of uses.
 *
 * Responsibility: the order of cells (class, bin of age) by the hits per unit of time that their items are still to
 * give. One use in 2^shift is sampled by its place in the stream, and kept until its key is used again or about HORIZON
 * capacities later, whether the cache still holds the key or not: so what is learned depends neither on what was
 * evicted nor on what keys look like. For each cell that
 * gives how many samples were used again at that age, of how many that came to it: its chance of a hit. The rank of a
 * cell is the Gittins index of an item there: the best ratio of hits to time over all ages at which one may give up
 * (Gittins, Bandit Processes and Dynamic Allocation Indices, 1979). LHD (Beckmann and others, NSDI 2018) ranks by
 * the ratio of hits to time too, over ages that the cache itself let items reach, and so learns from its own choices.
 *
 * Invariants: samples are listed by time of use (oldest, newest); a key has one at most. A cell without evidence takes
 * its chance from its kind and turn, and those from the kind.
 */
#include "policy_state.h"

#include <math.h>

#define MIN_SAMPLES 8192 /* a chance of a tenth, from a tenth of them, is known to one in a hundred */
#define SAMPLE_SHARE 16  /* beyond that, samples are this share of the units */
#define HORIZON 8        /* ages are followed for this many times as many uses as the cache has units */
#define RANK_EVERY 2048  /* uses of samples between two computations of the ranks, which takes 0.23 ms */
#define KEPT 0.9         /* what each computation keeps of the counts: half is gone after 13,000 uses of samples */
#define PRIOR 30.0       /* samples that a chance of a wider pool counts as; a prompt's blocks are not independent */

/* By its place in the stream: what keys look like decides nothing. */
static bool is_sampled(const struct learner *l, uint32_t clock) {
    return !((uint32_t)kvfs_mix(clock) >> (31 - l->shift) >> 1);
}

static void clear_samples(struct learner *l) {
    memset(l->buckets, 0xff, (l->bucket_mask + 1ull) * sizeof *l->buckets);
    l->oldest = l->newest = l->free = NONE;
    for (uint32_t i = l->max_samples; i-- > 0;) {
        l->samples[i].chain = l->free;
        l->free = i;
    }
}

int kvfs_learner_init(struct learner *l) {
    memset(l, 0, sizeof *l);
    l->max_samples = MIN_SAMPLES;
    l->bucket_mask = MIN_SAMPLES - 1;
    l->samples = calloc(l->max_samples, sizeof *l->samples);
    l->buckets = malloc((l->bucket_mask + 1ull) * sizeof *l->buckets);
    if (kvfs_shadow_init(&l->shadow) || kvfs_memory_init(&l->memory) || !l->samples || !l->buckets) return -ENOMEM;
    for (int at = 0; at < CELLS; at++) { /* until ranks are known: the older first */
        l->cells.at[at] = (uint16_t)(at % CLASSES * BINS + BINS - 1 - at / CLASSES);
        l->cells.position[l->cells.at[at]] = (uint16_t)at;
    }
    clear_samples(l);
    return 0;
}

void kvfs_learner_free(struct learner *l) {
    free(l->samples);
    free(l->buckets);
    kvfs_memory_free(&l->memory);
    kvfs_shadow_free(&l->shadow);
}

uint64_t kvfs_learner_bytes(const struct learner *l) {
    return sizeof *l + l->max_samples * sizeof *l->samples + (l->bucket_mask + 1ull) * sizeof *l->buckets +
           kvfs_memory_bytes(&l->memory) + kvfs_shadow_bytes(&l->shadow);
}

/* --- samples ---------------------------------------------------------------------------------------------------- */
static uint32_t *sample_slot(struct learner *l, uint32_t hash) {
    uint32_t *at = &l->buckets[hash & l->bucket_mask];
    while (*at != NONE && l->samples[*at].hash != hash) at = &l->samples[*at].chain;
    return at;
}

/* A sample ends: its use was followed by another, or nobody waits for that any longer. */
static void end_sample(struct learner *l, uint32_t i) {
    struct sample *s = &l->samples[i];
    if (s->prev != NONE)
        l->samples[s->prev].next = s->next;
    else
        l->oldest = s->next;
    if (s->next != NONE)
        l->samples[s->next].prev = s->prev;
    else
        l->newest = s->prev;
    *sample_slot(l, s->hash) = s->chain;
    s->chain = l->free;
    l->free = i;
}

static void start_sample(struct learner *l, uint32_t hash, int class, uint32_t clock) {
    if (l->free == NONE) {
        const struct sample *oldest = &l->samples[l->oldest];
        l->counts.ended[oldest->class][kvfs_age_bin(clock - oldest->stamp)] += 1;
        end_sample(l, l->oldest);
    }
    uint32_t i = l->free;
    struct sample *s = &l->samples[i];
    l->free = s->chain;
    *s = (struct sample){
        .hash = hash, .chain = NONE, .prev = l->newest, .next = NONE, .stamp = clock, .class = (uint8_t) class};
    if (s->prev != NONE)
        l->samples[s->prev].next = i;
    else
        l->oldest = i;
    l->newest = i;
    *sample_slot(l, hash) = i;
}

/* A key was used; the caller passes every use. */
void kvfs_learner_use(struct learner *l, uint32_t hash, int class, uint32_t clock) {
    uint32_t i = *sample_slot(l, hash);
    if (i != NONE) {
        const struct sample *s = &l->samples[i];
        l->counts.hits[s->class][kvfs_age_bin(clock - s->stamp)] += 1;
        end_sample(l, i);
    }
    if (!is_sampled(l, clock)) return;
    l->since++;
    start_sample(l, hash, class, clock);
}

/* The key was used a moment ago, and more of its prompt has come: it is of another class. */
void kvfs_learner_reclass(struct learner *l, uint32_t hash, int class) {
    uint32_t i = *sample_slot(l, hash);
    if (i != NONE) l->samples[i].class = (uint8_t) class;
}

static int grow_samples(struct learner *l, uint32_t wanted) {
    struct sample *samples = realloc(l->samples, wanted * sizeof *samples);
    if (!samples) return -ENOMEM;
    l->samples = samples;
    for (; l->max_samples < wanted; l->max_samples++) {
        samples[l->max_samples].chain = l->free;
        l->free = l->max_samples;
    }
    if (wanted <= 2 * (l->bucket_mask + 1ull)) return 0;
    uint32_t mask = 2 * l->bucket_mask + 1;
    uint32_t *buckets = malloc((mask + 1ull) * sizeof *buckets);
    if (!buckets) return -ENOMEM;
    free(l->buckets);
    l->buckets = buckets;
    l->bucket_mask = mask;
    memset(buckets, 0xff, (mask + 1ull) * sizeof *buckets);
    for (uint32_t i = l->oldest; i != NONE; i = samples[i].next) {
        samples[i].chain = buckets[samples[i].hash & mask];
        buckets[samples[i].hash & mask] = i;
    }
    return 0;
}

/* Make samples, their rate and the memory fit so many units. */
int kvfs_learner_fit(struct learner *l, uint32_t population) {
    l->memory.units = population;
    if (population / SAMPLE_SHARE > l->max_samples + l->max_samples / 8) {
        int rc = grow_samples(l, population / SAMPLE_SHARE);
        if (rc) return rc;
    }
    int shift = l->shift;
    while ((uint64_t)population * HORIZON >> shift > l->max_samples) shift++;
    while (shift && (uint64_t)population * HORIZON >> (shift - 1) < l->max_samples / 2) shift--;
    bool sparser = shift > l->shift;
    l->shift = shift;
    for (uint32_t i = l->oldest, next; sparser && i != NONE; i = next) {
        next = l->samples[i].next;
        if (!is_sampled(l, l->samples[i].stamp)) end_sample(l, i);
    }
    return 0;
}

/* --- ranks ------------------------------------------------------------------------------------------------------ */
bool kvfs_learner_due(const struct learner *l) { return l->since >= RANK_EVERY; }

void kvfs_policy_ranks(const double *chance, const double *edges, int bins, double *ranks) {
    for (int from = 0; from < bins; from++) {
        double here = 1, hits = 0, time = 0; /* share still unused, hits and time spent so far */
        ranks[from] = 0;
        for (int bin = from; bin < bins; bin++) {
            /* On average an item of the first bin is half way through it. */
            double width = (edges[bin + 1] - edges[bin]) * (bin == from ? 0.5 : 1);
            double used = here * (bin == from ? 1 - sqrt(1 - chance[bin]) : chance[bin]);
            hits += used;
            time += width * (here - used / 2);
            here -= used;
            if (hits > ranks[from] * time) ranks[from] = hits / time;
        }
    }
}

/* How many samples came to the middle of each bin: those that were used or ended later, and half of the bin's own. */
static void survivors(const double *hits, const double *ended, double *came) {
    double later = 0;
    for (int bin = BINS - 1; bin >= 0; bin--) {
        double here = hits[bin] + ended[bin];
        came[bin] = later + here / 2;
        later += here;
    }
}

/* Pools of classes that lend their evidence: those of one kind (last or not, hit or new), and of one turn in it. */
#define TURNS 3
#define KINDS 4
#define PER_KIND (CLASSES / KINDS)

struct evidence {
    double hits[BINS], came[BINS];
};

struct ranking {
    struct evidence of_class[CLASSES], of_turn[KINDS][TURNS], of_kind[KINDS];
    double rank[CELLS];
};

static void gather(const struct learner *l, uint32_t clock, struct ranking *r) {
    struct counts now = l->counts;
    for (uint32_t i = l->oldest; i != NONE; i = l->samples[i].next) {
        const struct sample *s = &l->samples[i];
        now.ended[s->class][kvfs_age_bin(clock - s->stamp)] += 1;
    }
    for (int class = 0; class < CLASSES; class ++) {
        struct evidence *mine = &r->of_class[class];
        memcpy(mine->hits, now.hits[class], sizeof mine->hits);
        survivors(mine->hits, now.ended[class], mine->came);
        struct evidence *pools[] = {&r->of_turn[class / PER_KIND][class % TURNS], &r->of_kind[class / PER_KIND]};
        for (int pool = 0; pool < 2; pool++) {
            for (int bin = 0; bin < BINS; bin++) {
                pools[pool]->hits[bin] += mine->hits[bin];
                pools[pool]->came[bin] += mine->came[bin];
            }
        }
    }
}

static void rank_class(const struct ranking *r, int class, uint32_t clock, double *ranks) {
    const struct evidence *mine = &r->of_class[class], *kind = &r->of_kind[class / PER_KIND];
    const struct evidence *turn = &r->of_turn[class / PER_KIND][class % TURNS];
    double chance[BINS], edges[BINS + 1];
    int bins = 0;
    for (; bins < BINS && kvfs_age_edge(bins) <= clock; bins++) {
        double wide = kind->hits[bins] / (kind->came[bins] + PRIOR / 10);
        double narrow = (turn->hits[bins] + PRIOR * wide) / (turn->came[bins] + PRIOR);
        double own = (mine->hits[bins] + PRIOR * narrow) / (mine->came[bins] + PRIOR);
        chance[bins] = own < 0.95 ? own : 0.95;
        edges[bins] = kvfs_age_edge(bins);
    }
    edges[bins] = kvfs_age_edge(bins);
    kvfs_policy_ranks(chance, edges, bins, ranks);
    for (; bins < BINS; bins++) ranks[bins] = 0;
}

static int by_rank(const void *a, const void *b, void *ranks) {
    int left = *(const uint16_t *)a, right = *(const uint16_t *)b;
    double difference = ((const double *)ranks)[left] - ((const double *)ranks)[right];
    if (difference != 0) return difference < 0 ? -1 : 1;
    if (left % BINS != right % BINS) return right % BINS - left % BINS; /* without evidence, the older first */
    return left - right;
}

/* Compute the order of cells anew. Older counts fade, so that the policy follows changes. */
void kvfs_learner_rank(struct learner *l, uint32_t clock) {
    struct ranking *r = calloc(1, sizeof *r);
    if (!r) /* the order stays as it was; the next time is RANK_EVERY away */
        return;
    gather(l, clock, r);
    for (int class = 0; class < CLASSES; class ++) {
        rank_class(r, class, clock, r->rank + class * BINS);
        for (int bin = 0; bin < BINS; bin++) {
            l->counts.hits[class][bin] *= KEPT;
            l->counts.ended[class][bin] *= KEPT;
        }
    }
    qsort_r(l->cells.at, CELLS, sizeof *l->cells.at, by_rank, r->rank);
    for (int at = 0; at < CELLS; at++) l->cells.position[l->cells.at[at]] = (uint16_t)at;
    free(r);
    l->ranked = true;
    l->since = 0;
}
