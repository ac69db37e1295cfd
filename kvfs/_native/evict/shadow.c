/* What a cache by last use would hold of the same stream, and how far the real one may differ from it.
 *
 * Responsibility: the floor of the default policy. LRU leaf-first holds what was used since a certain time, the
 * *edge*, since a prompt's blocks are used the deepest first: as many units as the cache has. So the shadow needs the
 * last use of what is here, which its node has, and of what was evicted from within the edge: the *ghosts*. The use
 * of a ghost is a loss against last use, the use of what is here from beyond the edge a gain. All of the stream is
 * counted, no sample of it, and nothing depends on what keys look like.
 *
 * Two accounts say how many ghosts there may be. The *balance* is what was won less what was lost since the beginning,
 * and an allowance for each use. Each ghost is lost once at most, and there is one for each unit of balance at most: so
 * if all were lost at once, losses would exceed gains by the allowance and no more. That holds at every
 * moment and whatever comes, since a ghost is made only while its loss can be paid. It is capped at the units of the
 * cache: nobody can lose more at once, and what was won long ago pays for no more than that.
 *
 * The *credit* bounds stretches of time, whose losses what was won before them may not pay. It follows gains and losses
 * too, but it is capped at a small share of all uses and what was won of late. So traffic that changes finds few
 * ghosts, unless the learner was winning up to then: this is measured, not proved (docs/policies.md says why).
 *
 * Victims are the lowest of all while both accounts cover one more ghost, else the lowest of what is beyond the edge:
 * so the learner has as much of the cache as it has earned.
 *
 * Invariants: `used[i]` counts the units whose last use falls into bucket i of time from `base` on, `ghosts_of[i]` the
 * ghosts among them; `held` and `missing` are the sums from bucket `oldest` on. The edge is the beginning of a
 * bucket: what is beyond it last use does not hold, what is within it may be a bucket more than that. A ghost from
 * beyond the edge is dead, and stays in the table until that is made anew. Without memory for the table evictions leave
 * no ghosts, and the floor is lower.
 */
#include "policy_state.h"

#define FINE 1024 /* fewer buckets of time in use than this are cut in two */
#define MIN_ROOM 256

#define ALLOWANCE 0.0045 /* of all uses: what may be lost, whatever comes. The promise is .005 */

/* For stretches: chosen with the public trace, 72 generated ones of tests/support/mixtures.py and those of
 * tests/support/workloads.py in view. */
#define REGAINED 0.001      /* credit for each use */
#define KEPT 0.002          /* of all uses so far: credit that does not fade */
#define RECENT 4            /* capacities of uses, in which what was won fades to less than a half */
#define GHOSTS_FOR_CREDIT 2 /* that may be out for each loss that the credit covers: few are used again */

int kvfs_shadow_init(struct shadow *s) {
    memset(s, 0, sizeof *s);
    s->room = MIN_ROOM;
    s->ghosts = calloc(MIN_ROOM, sizeof *s->ghosts);
    return s->ghosts ? 0 : -ENOMEM;
}

void kvfs_shadow_free(struct shadow *s) { free(s->ghosts); }

uint64_t kvfs_shadow_bytes(const struct shadow *s) { return s->room * sizeof *s->ghosts; }

/* --- time ------------------------------------------------------------------------------------------------------- */
static uint32_t bucket_of(const struct shadow *s, uint32_t stamp) { return (stamp - s->base) >> s->shift; }

static bool is_counted(const struct shadow *s, uint32_t stamp) {
    uint32_t bucket = bucket_of(s, stamp);
    return bucket >= s->oldest && bucket < SHADOW_BUCKETS;
}

static bool is_within(const struct shadow *s, uint32_t stamp) {
    return is_counted(s, stamp) && stamp - s->base >= s->edge - s->base;
}

static void count(struct shadow *s, uint32_t stamp) {
    s->used[bucket_of(s, stamp)]++;
    s->held++;
}

/* Where a bucket was cut in two its units may be counted in the other half. */
static void uncount(struct shadow *s, uint32_t stamp) {
    if (!is_counted(s, stamp)) return;
    uint32_t bucket = bucket_of(s, stamp);
    if (!s->used[bucket]) bucket ^= 1;
    if (bucket < s->oldest || !s->used[bucket]) return;
    s->used[bucket]--;
    s->held--;
}

static void uncount_ghost(struct shadow *s, uint32_t stamp) {
    uint32_t bucket = bucket_of(s, stamp);
    if (!s->ghosts_of[bucket]) bucket ^= 1;
    if (bucket < s->oldest || !s->ghosts_of[bucket]) return;
    s->ghosts_of[bucket]--;
    s->missing--;
}

static void move_down(uint32_t *counts, uint32_t by) {
    memmove(counts, counts + by, (SHADOW_BUCKETS - by) * sizeof *counts);
    memset(counts + SHADOW_BUCKETS - by, 0, by * sizeof *counts);
}

static void join_pairs(uint32_t *counts) {
    for (uint32_t i = 0; i < SHADOW_BUCKETS / 2; i++) counts[i] = counts[2 * i] + counts[2 * i + 1];
    memset(counts + SHADOW_BUCKETS / 2, 0, SHADOW_BUCKETS / 2 * sizeof *counts);
}

static void split(uint32_t *counts) {
    for (uint32_t i = SHADOW_BUCKETS / 2; i-- > 0;) {
        uint32_t all = counts[i];
        counts[2 * i] = all / 2;
        counts[2 * i + 1] = all - all / 2;
    }
}

/* Make the buckets reach to `clock`: by what is no longer counted, else by buckets of twice the time. */
void kvfs_shadow_reach(struct shadow *s, uint32_t clock) {
    while (bucket_of(s, clock) >= SHADOW_BUCKETS) {
        if (s->oldest >= SHADOW_BUCKETS / 2) {
            uint32_t by = s->oldest & ~1u, span = bucket_of(s, clock) - s->oldest;
            move_down(s->used, by);
            move_down(s->ghosts_of, by);
            s->base += by << s->shift;
            s->oldest -= by;
            if (span < FINE && s->shift) {
                split(s->used);
                split(s->ghosts_of);
                s->shift--;
                s->oldest *= 2;
            }
        } else {
            join_pairs(s->used);
            join_pairs(s->ghosts_of);
            s->shift++;
            s->oldest /= 2;
        }
    }
}

/* Evict from the shadow, in which all was used by `clock`, down to `units`. */
void kvfs_shadow_evict(struct shadow *s, uint32_t clock, uint32_t units) {
    while (s->held - s->used[s->oldest] >= units && s->oldest < bucket_of(s, clock)) {
        s->held -= s->used[s->oldest];
        s->missing -= s->ghosts_of[s->oldest];
        s->used[s->oldest] = s->ghosts_of[s->oldest] = 0;
        s->oldest++;
    }
    s->edge = s->base + (s->oldest << s->shift);
}

/* --- ghosts ----------------------------------------------------------------------------------------------------- */
static uint32_t home(const struct shadow *s, uint32_t hash) { return (uint32_t)((uint64_t)hash * s->room >> 32); }

static uint32_t after(const struct shadow *s, uint32_t i) { return i + 1 == s->room ? 0 : i + 1; }

static struct ghost *find_ghost(struct shadow *s, uint32_t hash) {
    uint32_t i = home(s, hash);
    while (s->ghosts[i].stamp && s->ghosts[i].hash != hash) i = after(s, i);
    return &s->ghosts[i];
}

/* Take a ghost out of its row of neighbours: those behind it that this lets come closer to their home do. */
static void drop_ghost(struct shadow *s, struct ghost *g) {
    uint32_t hole = (uint32_t)(g - s->ghosts);
    for (uint32_t i = after(s, hole); s->ghosts[i].stamp; i = after(s, i)) {
        uint32_t from = home(s, s->ghosts[i].hash);
        bool stays = hole <= i ? hole < from && from <= i : hole < from || from <= i;
        if (stays) continue;
        s->ghosts[hole] = s->ghosts[i];
        hole = i;
    }
    s->ghosts[hole].stamp = 0;
    s->filled--;
}

/* A table of 1.6 times the living ghosts. */
static int renew_ghosts(struct shadow *s) {
    uint32_t before = s->room;
    struct ghost *old = s->ghosts;
    uint32_t room = (uint32_t)(s->missing * 1.6);
    room = room > MIN_ROOM ? room : MIN_ROOM;
    struct ghost *ghosts = calloc(room, sizeof *ghosts);
    if (!ghosts) return -ENOMEM;
    s->ghosts = ghosts;
    s->room = room;
    s->filled = 0;
    for (uint32_t i = 0; i < before; i++) {
        if (!old[i].stamp || !is_within(s, old[i].stamp) || s->filled + 1 >= room) continue;
        *find_ghost(s, old[i].hash) = old[i];
        s->filled++;
    }
    free(old);
    return 0;
}

/* --- what happens -------------------------------------------------------------------------------------------------- */
/* A unit that is here was used: `before` is its use before that, 0 for one that came now. */
void kvfs_shadow_use(struct shadow *s, uint32_t hash, uint32_t before, uint32_t stamp) {
    if (before) {
        s->gains += !is_within(s, before);
        uncount(s, before);
    } else {
        struct ghost *g = find_ghost(s, hash);
        if (g->stamp) {
            if (is_within(s, g->stamp)) {
                s->losses++;
                uncount(s, g->stamp);
                uncount_ghost(s, g->stamp);
            }
            drop_ghost(s, g);
        }
    }
    count(s, stamp);
}

/* A unit that is here is now taken for one used at `stamp`. */
void kvfs_shadow_restamp(struct shadow *s, uint32_t before, uint32_t stamp) {
    uncount(s, before);
    count(s, stamp);
}

/* A unit is no longer here. */
void kvfs_shadow_remove(struct shadow *s, uint32_t hash, uint32_t stamp, bool evicted) {
    if (!stamp) return;
    if (!evicted || !is_within(s, stamp)) {
        if (!evicted) uncount(s, stamp);
        return;
    }
    if ((s->filled + 1) * 5ull > s->room * 4ull && renew_ghosts(s) && s->filled + 2 > s->room) return;
    struct ghost *g = find_ghost(s, hash);
    s->filled += !g->stamp;
    *g = (struct ghost){hash, stamp};
    s->ghosts_of[bucket_of(s, stamp)]++;
    s->missing++;
}

/* --- the credit ------------------------------------------------------------------------------------------------------ */
static double at_most(double value, double most) { return value < most ? value : most; }

/* A prompt of `uses` blocks has scored, in a cache that is full with `units`, or not full yet: 0. */
void kvfs_shadow_judge(struct shadow *s, uint32_t uses, uint32_t units) {
    double lead = (double)s->gains - s->losses;
    s->gains = s->losses = 0;
    s->judged += uses;
    s->balance += ALLOWANCE * uses;
    s->credit += REGAINED * uses;
    if (!units) return;
    double fading = RECENT * (double)units;
    s->won = s->won * fading / (fading + uses) + lead;
    s->won = s->won > 0 ? s->won : 0;
    s->balance = at_most(s->balance + lead, units);
    s->credit = at_most(s->credit + lead, KEPT * (double)s->judged + s->won);
}

/* Whether one more of what last use would hold may be evicted. */
bool kvfs_shadow_allows(const struct shadow *s) {
    return s->missing + 1 <= s->balance && s->missing + 1 <= GHOSTS_FOR_CREDIT * s->credit;
}
