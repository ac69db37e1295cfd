/* What the default policy learns, from the history of a sample of keys.
 *
 * Responsibility: the order of cells (class, bin of age) by how many hits per unit of time their items have still to
 * give. One key in 2^shift is sampled by its hash and kept for about HORIZON capacities after its last use, whether
 * the cache still holds it or not: so what is learned does not depend on what was evicted. For each cell that
 * gives how many samples were used again at that age, of how many that came to it: its chance of a hit. The rank of a
 * cell is the Gittins index of an item there: the best ratio of hits to time over all ages at which one may give up
 * (Gittins, Bandit Processes and Dynamic Allocation Indices, 1979). LHD (Beckmann and others, NSDI 2018) ranks by
 * the ratio of hits to time too, over ages that the cache itself let items reach, and so learns from its own choices.
 *
 * Safety net: two small caches of sampled keys, 1 in 2^shift of the real size, one by last use and one by rank, see
 * the same uses. While last use leads beyond chance, the policy goes by last use.
 *
 * Memory: a table of fingerprints of blocks that were seen, of every fourth depth, tells a prompt's known part from
 * its new part after the cache has forgotten it, and in which turn it was.
 *
 * Invariants: samples are listed by last use (oldest, newest); those from `lru_edge` on are in the cache by last use,
 * those LISTED in `ranked`. A cell without evidence takes its chance from its kind and turn, and those from the kind.
 */
#include "policy_state.h"

#include <math.h>

#define MIN_SAMPLES 8192 /* a chance of a tenth, from a tenth of them, is known to one in a hundred */
#define SAMPLE_SHARE 16  /* beyond that, samples are this share of the units */
#define HORIZON 8        /* ages are followed for this many times as many uses as the cache has units */
#define RANK_EVERY 2048  /* uses of samples between two computations of the ranks, which takes 0.23 ms */
#define KEPT 0.9         /* what each computation keeps of the counts: half is gone after 13,000 uses of samples */
#define PRIOR 30.0       /* samples that a chance of a wider pool counts as; a prompt's blocks are not independent */
#define TRUST_SIGMAS 2.0 /* by how much last use must lead: less is chance */
#define MIN_MEMORY 4096  /* fingerprints */

/* By the high bits, since buckets go by the low ones. */
static bool is_sampled(const struct learner *l, uint32_t hash)
{
    return !(hash >> (31 - l->shift) >> 1);
}

static void clear_samples(struct learner *l)
{
    memset(l->buckets, 0xff, (l->bucket_mask + 1ull) * sizeof *l->buckets);
    l->oldest = l->newest = l->lru_edge = l->free = NONE;
    l->lru_count = l->ranked_count = 0;
    kvfs_lists_init(&l->ranked, &l->cells, sizeof *l->samples);
    l->ranked.base = (char *)l->samples + offsetof(struct sample, link);
    for (uint32_t i = l->max_samples; i-- > 0;) {
        l->samples[i].chain = l->free;
        l->samples[i].link.place = GONE;
        l->free = i;
    }
}

int kvfs_learner_init(struct learner *l)
{
    memset(l, 0, sizeof *l);
    l->max_samples = MIN_SAMPLES;
    l->bucket_mask = MIN_SAMPLES - 1;
    l->memory_mask = MIN_MEMORY / 4 - 1;
    l->samples = calloc(l->max_samples, sizeof *l->samples);
    l->buckets = malloc((l->bucket_mask + 1ull) * sizeof *l->buckets);
    l->memory = calloc(MIN_MEMORY, sizeof *l->memory);
    if (!l->samples || !l->buckets || !l->memory)
        return -ENOMEM;
    for (int at = 0; at < CELLS; at++) { /* until ranks are known: the older first */
        l->cells.at[at] = (uint16_t)(at % CLASSES * BINS + BINS - 1 - at / CLASSES);
        l->cells.position[l->cells.at[at]] = (uint16_t)at;
    }
    clear_samples(l);
    return 0;
}

void kvfs_learner_free(struct learner *l)
{
    free(l->samples);
    free(l->buckets);
    free(l->memory);
}

uint64_t kvfs_learner_bytes(const struct learner *l)
{
    return sizeof *l + l->max_samples * sizeof *l->samples + (l->bucket_mask + 1ull) * sizeof *l->buckets +
           (l->memory_mask + 1ull) * 4 * sizeof *l->memory;
}

/* --- samples ---------------------------------------------------------------------------------------------------- */
static uint32_t *sample_slot(struct learner *l, uint32_t hash)
{
    uint32_t *at = &l->buckets[hash & l->bucket_mask];
    while (*at != NONE && l->samples[*at].hash != hash)
        at = &l->samples[*at].chain;
    return at;
}

static void leave_caches(struct learner *l, uint32_t i)
{
    struct sample *s = &l->samples[i];
    if (s->link.flags & IN_LRU) {
        s->link.flags &= (uint8_t)~IN_LRU;
        l->lru_count--;
        if (l->lru_edge == i)
            l->lru_edge = s->next;
    }
    if (s->link.place == LISTED) {
        kvfs_lists_remove(&l->ranked, i);
        s->link.place = GONE;
        l->ranked_count--;
    }
    if (s->prev != NONE)
        l->samples[s->prev].next = s->next;
    else
        l->oldest = s->next;
    if (s->next != NONE)
        l->samples[s->next].prev = s->prev;
    else
        l->newest = s->prev;
}

/* Class and bin stay in a sample's link also while it is in no list: they say where it is counted. */
static void enter_caches(struct learner *l, uint32_t i, int class, uint32_t clock)
{
    struct sample *s = &l->samples[i];
    s->prev = l->newest;
    s->next = NONE;
    if (s->prev != NONE)
        l->samples[s->prev].next = i;
    else
        l->oldest = i;
    l->newest = i;
    s->link.flags |= IN_LRU;
    l->lru_count++;
    if (l->lru_edge == NONE)
        l->lru_edge = i;
    s->link.stamp = clock;
    s->link.place = LISTED;
    kvfs_lists_append(&l->ranked, i, class, 0);
    l->ranked_count++;
}

static void forget_sample(struct learner *l, uint32_t i)
{
    struct sample *s = &l->samples[i];
    leave_caches(l, i);
    *sample_slot(l, s->hash) = s->chain;
    s->chain = l->free;
    l->free = i;
}

/* A key was used; the caller passes every use, whether or not the key is sampled. */
void kvfs_learner_use(struct learner *l, uint32_t hash, int class, uint32_t clock)
{
    if (!is_sampled(l, hash))
        return;
    l->since++;
    uint32_t i = *sample_slot(l, hash);
    if (i != NONE) {
        struct sample *s = &l->samples[i];
        l->counts.hits[s->link.class][kvfs_age_bin(clock - s->link.stamp)] += 1;
        l->lru_hits += (s->link.flags & IN_LRU) != 0;
        l->ranked_hits += s->link.place == LISTED;
        leave_caches(l, i);
    } else {
        if (l->free == NONE) {
            struct link *oldest = &l->samples[l->oldest].link;
            l->counts.ended[oldest->class][kvfs_age_bin(clock - oldest->stamp)] += 1;
            forget_sample(l, l->oldest);
        }
        i = l->free;
        l->free = l->samples[i].chain;
        l->samples[i].hash = hash;
        l->samples[i].chain = NONE;
        l->samples[i].link.flags = 0;
        *sample_slot(l, hash) = i;
    }
    enter_caches(l, i, class, clock);
}

/* The key was used a moment ago, and more of its prompt has come: it is of another class. */
void kvfs_learner_reclass(struct learner *l, uint32_t hash, int class)
{
    if (!is_sampled(l, hash))
        return;
    uint32_t i = *sample_slot(l, hash);
    if (i == NONE)
        return;
    struct link *link = &l->samples[i].link;
    if (link->place == LISTED) {
        kvfs_lists_remove(&l->ranked, i);
        kvfs_lists_append(&l->ranked, i, class, 0);
    }
    link->class = (uint8_t)class;
}

/* Evict from both small caches down to their share of `population` units. */
void kvfs_learner_shrink(struct learner *l, uint32_t population)
{
    uint32_t share = population >> l->shift;
    share += !share;
    while (l->lru_count > share) {
        struct sample *s = &l->samples[l->lru_edge];
        s->link.flags &= (uint8_t)~IN_LRU;
        l->lru_edge = s->next;
        l->lru_count--;
    }
    while (l->ranked_count > share) {
        uint32_t i = kvfs_lists_lowest(&l->ranked);
        kvfs_lists_remove(&l->ranked, i);
        l->samples[i].link.place = GONE;
        l->ranked_count--;
    }
}

static int grow_samples(struct learner *l, uint32_t wanted)
{
    struct sample *samples = realloc(l->samples, wanted * sizeof *samples);
    if (!samples)
        return -ENOMEM;
    l->samples = samples;
    l->ranked.base = (char *)samples + offsetof(struct sample, link);
    for (; l->max_samples < wanted; l->max_samples++) {
        samples[l->max_samples].chain = l->free;
        samples[l->max_samples].link.place = GONE;
        l->free = l->max_samples;
    }
    if (wanted <= 2 * (l->bucket_mask + 1ull))
        return 0;
    uint32_t mask = 2 * l->bucket_mask + 1;
    uint32_t *buckets = malloc((mask + 1ull) * sizeof *buckets);
    if (!buckets)
        return -ENOMEM;
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

/* The bucket's number is the low bits of the hash, so a bucket's entries belong to it or to its copy above. */
static int grow_memory(struct learner *l)
{
    size_t bytes = (l->memory_mask + 1ull) * 4 * sizeof *l->memory;
    uint32_t *memory = realloc(l->memory, 2 * bytes);
    if (!memory)
        return -ENOMEM;
    memcpy((char *)memory + bytes, memory, bytes);
    l->memory = memory;
    l->memory_mask = 2 * l->memory_mask + 1;
    return 0;
}

/* Make samples, their rate and the memory fit so many units. */
int kvfs_learner_fit(struct learner *l, uint32_t population)
{
    if (population / SAMPLE_SHARE > l->max_samples + l->max_samples / 8) {
        int rc = grow_samples(l, population / SAMPLE_SHARE);
        if (rc)
            return rc;
    }
    if (population / 8 > l->memory_mask + 1) {
        int rc = grow_memory(l);
        if (rc)
            return rc;
    }
    int shift = l->shift;
    while ((uint64_t)population * HORIZON >> shift > l->max_samples)
        shift++;
    while (shift && (uint64_t)population * HORIZON >> (shift - 1) < l->max_samples / 2)
        shift--;
    bool sparser = shift > l->shift;
    l->shift = shift;
    for (uint32_t i = l->oldest, next; sparser && i != NONE; i = next) {
        next = l->samples[i].next;
        if (!is_sampled(l, l->samples[i].hash))
            forget_sample(l, i);
    }
    return 0;
}

/* --- memory ----------------------------------------------------------------------------------------------------- */
static uint32_t *memory_bucket(struct learner *l, uint64_t hash)
{
    return l->memory + (hash & l->memory_mask) * 4;
}

static uint32_t fingerprint(uint64_t hash)
{
    return (uint32_t)(hash >> 40) << 8;
}

/* The turn in which a block was first seen; 0 for one that is not remembered. */
uint8_t kvfs_learner_turn(struct learner *l, uint64_t hash)
{
    const uint32_t *bucket = memory_bucket(l, hash);
    for (int i = 0; i < 4; i++)
        if ((bucket[i] & ~0xffu) == fingerprint(hash) && (bucket[i] & 0xff))
            return (uint8_t)bucket[i];
    return 0;
}

/* Remember a block as used now, in the place of the one of its bucket that was used the longest ago. */
void kvfs_learner_remember(struct learner *l, uint64_t hash, uint8_t turn)
{
    uint32_t *bucket = memory_bucket(l, hash);
    int i = 0;
    while (i < 3 && (bucket[i] & ~0xffu) != fingerprint(hash))
        i++;
    memmove(bucket + 1, bucket, (size_t)i * sizeof *bucket);
    bucket[0] = fingerprint(hash) | turn;
}

/* --- ranks ------------------------------------------------------------------------------------------------------ */
bool kvfs_learner_due(const struct learner *l)
{
    return l->since >= RANK_EVERY;
}

void kvfs_policy_ranks(const double *chance, const double *edges, int bins, double *ranks)
{
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
            if (hits > ranks[from] * time)
                ranks[from] = hits / time;
        }
    }
}

/* How many samples came to the middle of each bin: those that were used or ended later, and half of the bin's own. */
static void survivors(const double *hits, const double *ended, double *came)
{
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

static void gather(const struct learner *l, uint32_t clock, struct ranking *r)
{
    struct counts now = l->counts;
    for (uint32_t i = l->oldest; i != NONE; i = l->samples[i].next) {
        const struct link *link = &l->samples[i].link;
        now.ended[link->class][kvfs_age_bin(clock - link->stamp)] += 1;
    }
    for (int class = 0; class < CLASSES; class++) {
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

static void rank_class(const struct ranking *r, int class, uint32_t clock, double *ranks)
{
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
    for (; bins < BINS; bins++)
        ranks[bins] = 0;
}

static int by_rank(const void *a, const void *b, void *ranks)
{
    int left = *(const uint16_t *)a, right = *(const uint16_t *)b;
    double difference = ((const double *)ranks)[left] - ((const double *)ranks)[right];
    if (difference != 0)
        return difference < 0 ? -1 : 1;
    if (left % BINS != right % BINS)
        return right % BINS - left % BINS; /* without evidence, the older first */
    return left - right;
}

/* Judge the two small caches: last use must lead beyond chance to be followed, and lose its lead to be left. */
static void judge(struct learner *l)
{
    double lead = l->lru_hits - l->ranked_hits;
    if (!l->ranked_once)
        l->trusted = l->ranked_once = true;
    if (lead > TRUST_SIGMAS * sqrt(l->lru_hits + l->ranked_hits))
        l->trusted = false;
    else if (lead <= 0)
        l->trusted = true;
    l->lru_hits *= KEPT;
    l->ranked_hits *= KEPT;
}

/* Compute the order of cells anew. The counts of a computation fade, so that the policy follows what changes. */
void kvfs_learner_rank(struct learner *l, uint32_t clock)
{
    struct ranking *r = calloc(1, sizeof *r);
    if (!r) /* the order stays as it was; the next time is RANK_EVERY away */
        return;
    gather(l, clock, r);
    for (int class = 0; class < CLASSES; class++) {
        rank_class(r, class, clock, r->rank + class * BINS);
        for (int bin = 0; bin < BINS; bin++) {
            l->counts.hits[class][bin] *= KEPT;
            l->counts.ended[class][bin] *= KEPT;
        }
    }
    qsort_r(l->cells.at, CELLS, sizeof *l->cells.at, by_rank, r->rank);
    for (int at = 0; at < CELLS; at++)
        l->cells.position[l->cells.at[at]] = (uint16_t)at;
    kvfs_lists_reorder(&l->ranked);
    free(r);
    judge(l);
    l->since = 0;
}
