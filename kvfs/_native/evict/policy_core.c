/* Which objects a full tier evicts: `tiers/eviction/policy.py` says what the calls mean, for the order by last use as for the
 * default. Parts: this file owns nodes, keys, parents, groups, pins and claims; order.c keeps units by class,
 * age and last use; runs.c finds the class of a block; learner.c ranks classes and ages;
 * shadow.c says how far the ranks may be trusted.
 *
 * Responsibility: never a block before its descendants, nothing pinned, a group as a whole.
 *
 * Invariants:
 * - A node is a key that is here (PRESENT), a parent that is awaited (children, but not here), or a GROUP. A member's
 *   `owner` is its group and its links join the group's members, of which the group's `owner` is the first.
 * - A unit is a PRESENT node without a group, or a group. It is in a list (LISTED), in the run (RUN), PARKED until
 *   its last child or pin goes, in the heap `ready` (READY: it was passed over, so it is next), or CLAIMED.
 * - `children` counts present, unclaimed keys that name a node as parent; a group's is the sum of its members'.
 * - A node that a claimed unit may name stays until no unit is claimed (RETIRED).
 * - The heap may hold stale pairs: one is valid while its unit is READY with that stamp.
 * - A unit that was cooled is READY, PARKED or CLAIMED with a stamp of COOLED_AGE ago, until it is used.
 *
 * Costs: O(1) amortised for each call, plus O(log r) where r parents wait in `ready`; 52 bytes for a node, 2 to 4 for
 * its bucket, a thirty-second of the nodes as room, 3 to 11 for the memory, 2 for its share of a sample, 8 to 13 for
 * each ghost.
 *
 * Clocks are counts of uses modulo 2^32: a unit that is passed by that many uses looks young again, once.
 *
 * Concurrency: none; one thread at a time.
 */
#include "policy_state.h"

#define MIN_ROOM 256
#define MAX_NODES (UINT32_MAX - 1)
#define MAX_SIZE ((1ull << 40) - 1)

uint64_t kvfs_node_hash(const struct node *n) {
    uint64_t low = (uint64_t)n->key[1] << 32 | n->key[0], high = (uint64_t)n->key[3] << 32 | n->key[2];
    uint64_t group = n->link.flags & GROUP ? 0x5bd1e9955bd1e995u : 0; /* groups are named apart from keys */
    return kvfs_mix(low ^ kvfs_mix(high ^ group));
}

struct kvfs_policy *kvfs_policy_new(enum kvfs_policy_kind kind) {
    struct kvfs_policy *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    p->kind = kind;
    p->free = NONE;
    p->bucket_mask = MIN_ROOM - 1;
    p->buckets = malloc(MIN_ROOM * sizeof *p->buckets);
    if (kind == KVFS_POLICY_DEFAULT) p->learner = malloc(sizeof *p->learner);
    if (!p->buckets || (kind == KVFS_POLICY_DEFAULT && (!p->learner || kvfs_learner_init(p->learner)))) {
        kvfs_policy_free(p);
        return NULL;
    }
    memset(p->buckets, 0xff, MIN_ROOM * sizeof *p->buckets);
    const struct cell_order *cells = p->learner ? &p->learner->cells : &p->plain;
    kvfs_lists_init(&p->within, cells, sizeof *p->nodes);
    kvfs_lists_init(&p->beyond, cells, sizeof *p->nodes);
    kvfs_run_close(p);
    return p;
}

void kvfs_policy_free(struct kvfs_policy *p) {
    if (!p) return;
    if (p->learner) kvfs_learner_free(p->learner);
    free(p->learner);
    free(p->nodes);
    free(p->buckets);
    free(p->ready);
    free(p->retired);
    free(p->run.nodes);
    free(p);
}

/* --- nodes ------------------------------------------------------------------------------------------------------ */
static uint32_t *node_slot(const struct kvfs_policy *p, const uint8_t *key, uint8_t group) {
    struct node wanted = {.link.flags = group};
    memcpy(wanted.key, key, sizeof wanted.key);
    uint32_t *at = &p->buckets[kvfs_node_hash(&wanted) & p->bucket_mask];
    while (*at != NONE) {
        struct node *n = &p->nodes[*at];
        if (!memcmp(n->key, key, sizeof n->key) && (n->link.flags & GROUP) == group) break;
        at = &n->chain;
    }
    return at;
}

/* The node of a key that is here, or NONE. */
static uint32_t find(const struct kvfs_policy *p, const uint8_t *key) {
    uint32_t at = *node_slot(p, key, 0);
    return at != NONE && p->nodes[at].link.flags & PRESENT ? at : NONE;
}

static int grow_nodes(struct kvfs_policy *p) {
    uint64_t room = (uint64_t)p->room + (p->room / 32 > MIN_ROOM ? p->room / 32 : MIN_ROOM);
    if (room > MAX_NODES) return -ENOMEM;
    struct node *nodes = realloc(p->nodes, room * sizeof *nodes);
    if (!nodes) return -ENOMEM;
    p->nodes = nodes;
    p->within.base = p->beyond.base = (char *)nodes + offsetof(struct node, link);
    for (uint32_t i = (uint32_t)room; i-- > p->room;) {
        nodes[i].chain = p->free;
        p->free = i;
    }
    p->room = (uint32_t)room;
    return 0;
}

static int grow_buckets(struct kvfs_policy *p) {
    uint32_t mask = 2 * p->bucket_mask + 1;
    uint32_t *buckets = malloc((mask + 1ull) * sizeof *buckets);
    if (!buckets) return -ENOMEM;
    memset(buckets, 0xff, (mask + 1ull) * sizeof *buckets);
    for (uint32_t old = 0; old <= p->bucket_mask; old++) {
        for (uint32_t i = p->buckets[old], next; i != NONE; i = next) {
            struct node *n = &p->nodes[i];
            uint32_t *at = &buckets[kvfs_node_hash(n) & mask];
            next = n->chain;
            n->chain = *at;
            *at = i;
        }
    }
    free(p->buckets);
    p->buckets = buckets;
    p->bucket_mask = mask;
    return 0;
}

/* The node of a key or group, made where there is none; NONE without memory. */
static uint32_t node_for(struct kvfs_policy *p, const uint8_t *key, uint8_t group) {
    uint32_t *at = node_slot(p, key, group);
    if (*at != NONE) return *at;
    if (p->free == NONE && grow_nodes(p)) return NONE;
    if (p->in_use > 2 * (p->bucket_mask + 1ull) && grow_buckets(p)) return NONE;
    at = node_slot(p, key, group);
    uint32_t made = p->free;
    struct node *n = &p->nodes[made];
    p->free = n->chain;
    memset(n, 0, sizeof *n);
    memcpy(n->key, key, sizeof n->key);
    n->owner = n->chain = NONE;
    n->link.flags = group;
    *at = made;
    p->in_use++;
    if (group) {
        p->groups++;
        p->population++;
    } else {
        p->awaited++;
    }
    return made;
}

static void free_node(struct kvfs_policy *p, uint32_t i) {
    struct node *n = &p->nodes[i];
    uint32_t *at = node_slot(p, (const uint8_t *)n->key, n->link.flags & GROUP);
    *at = n->chain;
    if (n->link.flags & GROUP) {
        p->groups--;
        p->population--;
    } else {
        p->awaited--;
    }
    n->link.place = GONE;
    n->link.flags = 0;
    n->chain = p->free;
    p->free = i;
    p->in_use--;
}

/* Free a node that nothing present names; while units are claimed, later, since a claimed one may still name it. */
static void retire(struct kvfs_policy *p, uint32_t i) {
    if (!p->claimed) {
        free_node(p, i);
        return;
    }
    if (p->nodes[i].link.flags & RETIRED) return;
    if (p->retired_count == p->retired_room) {
        uint32_t room = p->retired_room ? 2 * p->retired_room : 64;
        uint32_t *retired = realloc(p->retired, room * sizeof *retired);
        if (!retired) /* it stays, as a parent that is awaited */
            return;
        p->retired = retired;
        p->retired_room = room;
    }
    p->nodes[i].link.flags |= RETIRED;
    p->retired[p->retired_count++] = i;
}

/* A unit is claimed no more. */
static void unclaim(struct kvfs_policy *p) {
    if (--p->claimed) return;
    for (uint32_t at = 0; at < p->retired_count; at++) {
        struct node *n = &p->nodes[p->retired[at]];
        n->link.flags &= (uint8_t)~RETIRED;
        if (!(n->link.flags & PRESENT) && !n->children) free_node(p, p->retired[at]);
    }
    p->retired_count = 0;
}

static uint32_t unit_of(const struct kvfs_policy *p, uint32_t i) {
    return p->nodes[i].link.flags & MEMBER ? p->nodes[i].owner : i;
}

static bool is_kept(const struct node *unit) {
    return unit->children || (unit->link.flags & GROUP ? unit->size_low != 0 : (unit->link.flags & PINNED) != 0);
}

/* --- the heap of units that are next ------------------------------------------------------------------------------ */
static bool is_older(const struct kvfs_policy *p, struct waiting a, struct waiting b) {
    return p->clock - a.stamp > p->clock - b.stamp;
}

static bool is_valid(const struct kvfs_policy *p, struct waiting w) {
    return p->nodes[w.unit].link.place == READY && p->nodes[w.unit].link.stamp == w.stamp;
}

static void sift_up(struct kvfs_policy *p, uint32_t at) {
    struct waiting w = p->ready[at];
    for (; at && is_older(p, w, p->ready[(at - 1) / 2]); at = (at - 1) / 2) p->ready[at] = p->ready[(at - 1) / 2];
    p->ready[at] = w;
}

static struct waiting pop_ready(struct kvfs_policy *p) {
    struct waiting top = p->ready[0], last = p->ready[--p->ready_count];
    uint32_t at = 0, child;
    while ((child = 2 * at + 1) < p->ready_count) {
        if (child + 1 < p->ready_count && is_older(p, p->ready[child + 1], p->ready[child])) child++;
        if (!is_older(p, p->ready[child], last)) break;
        p->ready[at] = p->ready[child];
        at = child;
    }
    if (p->ready_count) p->ready[at] = last;
    return top;
}

static void drop_stale(struct kvfs_policy *p) {
    uint32_t count = p->ready_count;
    p->ready_count = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (is_valid(p, p->ready[i])) {
            p->ready[p->ready_count] = p->ready[i];
            sift_up(p, p->ready_count++);
        }
    }
}

static int make_ready(struct kvfs_policy *p, uint32_t unit) {
    if (p->ready_count == p->ready_room) {
        drop_stale(p);
        if (2 * p->ready_count >= p->ready_room) {
            uint32_t room = p->ready_room ? 2 * p->ready_room : 64;
            struct waiting *ready = realloc(p->ready, room * sizeof *ready);
            if (!ready) return -ENOMEM;
            p->ready = ready;
            p->ready_room = room;
        }
    }
    struct link *link = &p->nodes[unit].link;
    link->place = READY;
    p->ready[p->ready_count] = (struct waiting){link->stamp, unit};
    sift_up(p, p->ready_count++);
    return 0;
}

static int wake(struct kvfs_policy *p, uint32_t unit) {
    const struct node *n = &p->nodes[unit];
    return n->link.place == PARKED && !is_kept(n) ? make_ready(p, unit) : 0;
}

/* --- parents and groups ------------------------------------------------------------------------------------------ */
static void gain_child(struct kvfs_policy *p, uint32_t parent) {
    p->nodes[parent].children++;
    if (p->nodes[parent].link.flags & MEMBER) p->nodes[p->nodes[parent].owner].children++;
}

static int lose_child(struct kvfs_policy *p, uint32_t parent) {
    struct node *n = &p->nodes[parent];
    n->children--;
    if (!(n->link.flags & PRESENT)) {
        if (!n->children) retire(p, parent);
        return 0;
    }
    if (n->link.flags & MEMBER) p->nodes[n->owner].children--;
    return wake(p, unit_of(p, parent));
}

/* A unit's keys release their parents, or hold them again. */
static int lose_parents(struct kvfs_policy *p, uint32_t unit) {
    uint32_t parent = parent_of(&p->nodes[unit]);
    return parent == NONE ? 0 : lose_child(p, parent);
}

static void gain_parents(struct kvfs_policy *p, uint32_t unit) {
    uint32_t parent = parent_of(&p->nodes[unit]);
    if (parent != NONE) gain_child(p, parent);
}

static void join_group(struct kvfs_policy *p, uint32_t i, uint32_t group) {
    struct node *n = &p->nodes[i], *g = &p->nodes[group];
    n->link.flags |= MEMBER;
    n->owner = group;
    n->link.prev = NONE;
    n->link.next = g->owner;
    if (g->owner != NONE) p->nodes[g->owner].link.prev = i;
    g->owner = i;
    g->children += n->children;
}

static void leave_group(struct kvfs_policy *p, uint32_t i) {
    struct node *n = &p->nodes[i], *g = &p->nodes[n->owner];
    if (n->link.prev != NONE)
        p->nodes[n->link.prev].link.next = n->link.next;
    else
        g->owner = n->link.next;
    if (n->link.next != NONE) p->nodes[n->link.next].link.prev = n->link.prev;
    g->children -= n->children;
    g->size_low -= (n->link.flags & PINNED) != 0;
}

/* Whether `i`, not here yet, is an ancestor of `parent`: hashes form no cycle, a writer may lie. */
static bool closes_cycle(const struct kvfs_policy *p, uint32_t i, uint32_t parent) {
    if (!p->nodes[i].children && !p->claimed) /* nothing here names it; claimed children are not counted */
        return i == parent;
    for (; parent != NONE; parent = parent_of(&p->nodes[parent]))
        if (parent == i) return true;
    return false;
}

/* --- the order ---------------------------------------------------------------------------------------------------- */
void kvfs_policy_list(struct kvfs_policy *p, uint32_t unit, int class, uint32_t stamp) {
    p->nodes[unit].link.stamp = stamp;
    p->nodes[unit].link.place = LISTED;
    kvfs_lists_append(&p->within, unit, class, 0);
}

void kvfs_policy_unlist(struct kvfs_policy *p, uint32_t unit) {
    struct link *link = &p->nodes[unit].link;
    if (link->place != LISTED) return;
    kvfs_lists_remove(link->flags & BEYOND ? &p->beyond : &p->within, unit);
    link->flags &= (uint8_t)~BEYOND;
}

/* Give a unit its place and close the run that it is in; the run stays where there is no memory. */
static int leave_run(struct kvfs_policy *p, uint32_t unit) {
    if (!(p->nodes[unit].link.flags & IN_RUN)) return 0;
    int rc = kvfs_run_place(p);
    if (!rc) kvfs_run_close(p);
    return rc;
}

/* Put a unit behind all others. */
static int use(struct kvfs_policy *p, uint32_t unit, bool hit) {
    struct link *link = &p->nodes[unit].link;
    int rc = leave_run(p, unit);
    if (rc) return rc;
    if (link->place == CLAIMED) {
        gain_parents(p, unit);
        link->place = GONE;
        unclaim(p);
    }
    kvfs_policy_unlist(p, unit);
    if (p->learner) return kvfs_run_add(p, unit, hit);
    kvfs_policy_list(p, unit, 0, ++p->clock);
    return 0;
}

/* The unit that was passed over and waits, the oldest first; NONE when none does. */
static uint32_t first_ready(struct kvfs_policy *p) {
    while (p->ready_count && !is_valid(p, p->ready[0])) pop_ready(p);
    return p->ready_count ? p->ready[0].unit : NONE;
}

static uint32_t age_of(const struct kvfs_policy *p, uint32_t unit) { return p->clock - p->nodes[unit].link.stamp; }

static uint32_t lowest(const struct lists *l, uint32_t first) {
    return first < CELLS ? l->head[l->cells->at[first]] : NONE;
}

/* The unit whose turn it is in a list, the lowest: of all while the credit allows it, else of what last use would not
 * hold either; the oldest where there is none, and before ranks are known. */
static uint32_t first_listed(const struct kvfs_policy *p, bool *by_age) {
    uint32_t within = kvfs_lists_first(&p->within), beyond = kvfs_lists_first(&p->beyond);
    *by_age = false;
    if (!p->learner) return lowest(&p->within, within);
    if (p->learner->ranked && within < beyond && kvfs_shadow_allows(&p->learner->shadow))
        return lowest(&p->within, within);
    if (p->learner->ranked && beyond < CELLS) return lowest(&p->beyond, beyond);
    *by_age = true;
    return kvfs_lists_oldest(beyond < CELLS ? &p->beyond : &p->within, p->clock);
}

/* Take the next unit off the order: what was passed over goes first, unless last use would hold it and it may not go. */
static uint32_t take(struct kvfs_policy *p) {
    uint32_t waiting = first_ready(p), unit = NONE;
    bool by_age = false, old = waiting != NONE && (!p->learner || kvfs_shadow_allows(&p->learner->shadow) ||
                                                   age_of(p, waiting) > p->clock - p->learner->shadow.edge);
    if (!old) unit = first_listed(p, &by_age);
    if (waiting != NONE && (old || unit == NONE || (by_age && age_of(p, waiting) > age_of(p, unit)))) {
        pop_ready(p);
        return waiting;
    }
    if (unit != NONE) kvfs_policy_unlist(p, unit);
    return unit;
}

static int prepare(struct kvfs_policy *p) {
    int rc = kvfs_run_place(p);
    if (!rc && kvfs_learner_due(p->learner)) {
        kvfs_learner_rank(p->learner, p->clock);
        kvfs_lists_reorder(&p->within);
        kvfs_lists_reorder(&p->beyond);
    }
    return rc;
}

int64_t kvfs_policy_claim(struct kvfs_policy *p) {
    int rc = p->learner ? prepare(p) : 0;
    uint32_t unit;
    while (!rc && (unit = take(p)) != NONE) {
        struct node *n = &p->nodes[unit];
        if (is_kept(n)) {
            n->link.place = PARKED;
            continue;
        }
        n->link.place = CLAIMED;
        p->claimed++;
        rc = lose_parents(p, unit);
        return rc ? rc : (int64_t)unit;
    }
    return rc ? rc : (int64_t)NONE;
}

int kvfs_policy_release(struct kvfs_policy *p, uint32_t unit) {
    p->level = p->population;
    if (p->nodes[unit].link.place != CLAIMED) return 0;
    gain_parents(p, unit);
    unclaim(p);
    return make_ready(p, unit);
}

/* --- calls ---------------------------------------------------------------------------------------------------------- */
static void place_before_removal(struct kvfs_policy *p, uint32_t unit, int *rc) {
    if (p->nodes[unit].link.flags & IN_RUN) {
        *rc = kvfs_run_place(p);
        kvfs_run_close(p);
    }
}

static void note_gone(struct kvfs_policy *p, uint32_t unit, bool evicted) {
    struct node *n = &p->nodes[unit];
    if (p->learner) kvfs_shadow_remove(&p->learner->shadow, (uint32_t)kvfs_node_hash(n), n->link.stamp, evicted);
    n->link.stamp = 0;
}

int kvfs_policy_remove(struct kvfs_policy *p, const uint8_t *key) {
    uint32_t i = find(p, key);
    if (i == NONE) return -ENOENT;
    uint32_t unit = unit_of(p, i);
    struct node *n = &p->nodes[i];
    int rc = 0;
    place_before_removal(p, unit, &rc);
    bool claimed = p->nodes[unit].link.place == CLAIMED;
    p->count--;
    p->total_bytes -= kvfs_policy_size(p, i);
    if (n->link.flags & MEMBER) {
        leave_group(p, i);
        if (p->nodes[unit].owner != NONE) {
            claimed = false; /* the others still are */
            rc = rc ? rc : wake(p, unit);
        } else {
            kvfs_policy_unlist(p, unit);
            note_gone(p, unit, claimed);
            free_node(p, unit);
        }
        n->owner = NONE;
    } else {
        kvfs_policy_unlist(p, i);
        note_gone(p, i, claimed);
        p->population--;
        if (!claimed && n->owner != NONE) {
            int lost = lose_child(p, n->owner);
            rc = rc ? rc : lost;
        }
        n->owner = NONE;
    }
    n->link.flags &= RETIRED;
    n->link.place = GONE;
    p->awaited++;
    if (!n->children) retire(p, i);
    if (claimed) unclaim(p);
    return rc;
}

int kvfs_policy_insert(struct kvfs_policy *p, const uint8_t *key, uint64_t size_bytes, const uint8_t *parent,
                       const uint8_t *group, int pinned) {
    if (parent && group) return -EINVAL;
    if (size_bytes > MAX_SIZE) return -E2BIG;
    int rc = kvfs_policy_remove(p, key);
    if (rc && rc != -ENOENT) return rc;
    uint32_t i = node_for(p, key, 0), above = NONE;
    if (i == NONE) return -ENOMEM;
    if (parent || group) above = node_for(p, parent ? parent : group, group ? GROUP : 0);
    if ((parent || group) && above == NONE) {
        if (!p->nodes[i].children) retire(p, i);
        return -ENOMEM;
    }
    struct node *n = &p->nodes[i];
    p->awaited--;
    p->count++;
    p->total_bytes += size_bytes;
    n->link.flags = PRESENT | (n->link.flags & RETIRED);
    n->size_low = (uint32_t)size_bytes;
    n->size_high = (uint8_t)(size_bytes >> 32);
    if (group) {
        join_group(p, i, above);
    } else {
        p->population++;
        if (parent && !closes_cycle(p, i, above)) {
            n->owner = above;
            gain_child(p, above);
        }
    }
    rc = use(p, unit_of(p, i), false);
    return rc || !pinned ? rc : kvfs_policy_pin(p, key, 1);
}

int kvfs_policy_touch(struct kvfs_policy *p, const uint8_t *key) {
    uint32_t i = find(p, key);
    return i == NONE ? -ENOENT : use(p, unit_of(p, i), true);
}

/* The clock goes on by one that is no use. */
static void tick(struct kvfs_policy *p) {
    uint32_t before = p->clock++;
    if (!p->learner) return;
    kvfs_shadow_reach(&p->learner->shadow, p->clock);
    kvfs_lists_age(&p->within, before, p->clock);
    kvfs_lists_age(&p->beyond, before, p->clock);
}

int kvfs_policy_cool(struct kvfs_policy *p, const uint8_t *key) {
    uint32_t i = find(p, key);
    if (i == NONE) return -ENOENT;
    uint32_t unit = unit_of(p, i);
    struct node *n = &p->nodes[unit];
    int rc = leave_run(p, unit);
    if (rc) return rc;
    tick(p);
    kvfs_policy_unlist(p, unit);
    note_gone(p, unit, false); /* last use would hold it, and says nothing of a copy that is not worth its room */
    n->link.stamp = p->clock - COOLED_AGE;
    if (n->link.place == CLAIMED) return 0; /* it comes back by its stamp */
    if (!is_kept(n)) return make_ready(p, unit);
    n->link.place = PARKED;
    return 0;
}

int kvfs_policy_pin(struct kvfs_policy *p, const uint8_t *key, int pinned) {
    uint32_t i = find(p, key);
    if (i == NONE) return -ENOENT;
    struct node *n = &p->nodes[i];
    if (!pinned == !(n->link.flags & PINNED)) return 0;
    n->link.flags ^= PINNED;
    if (n->link.flags & MEMBER) p->nodes[n->owner].size_low += pinned ? 1 : -1u;
    return pinned ? 0 : wake(p, unit_of(p, i));
}

/* --- questions ------------------------------------------------------------------------------------------------------ */
int kvfs_policy_has(const struct kvfs_policy *p, const uint8_t *key) { return find(p, key) != NONE; }

uint32_t kvfs_policy_first(const struct kvfs_policy *p, uint32_t unit) {
    return p->nodes[unit].link.flags & GROUP ? p->nodes[unit].owner : unit;
}

uint32_t kvfs_policy_next(const struct kvfs_policy *p, uint32_t unit, uint32_t key) {
    return key == unit ? NONE : p->nodes[key].link.next;
}

const uint8_t *kvfs_policy_key(const struct kvfs_policy *p, uint32_t key) { return (const uint8_t *)p->nodes[key].key; }

uint64_t kvfs_policy_size(const struct kvfs_policy *p, uint32_t key) {
    return (uint64_t)p->nodes[key].size_high << 32 | p->nodes[key].size_low;
}

uint64_t kvfs_policy_total_bytes(const struct kvfs_policy *p) { return p->total_bytes; }

uint32_t kvfs_policy_count(const struct kvfs_policy *p) { return p->count; }

int kvfs_policy_is_empty(const struct kvfs_policy *p) {
    return !p->count && !p->awaited && !p->groups && !p->in_use && kvfs_lists_first(&p->within) == CELLS &&
           kvfs_lists_first(&p->beyond) == CELLS;
}

uint64_t kvfs_policy_state_bytes(const struct kvfs_policy *p) {
    return sizeof *p + p->room * sizeof *p->nodes + (p->bucket_mask + 1ull) * sizeof *p->buckets +
           p->ready_room * sizeof *p->ready + p->retired_room * sizeof *p->retired +
           p->run.room * sizeof *p->run.nodes + (p->learner ? kvfs_learner_bytes(p->learner) : 0);
}

int kvfs_policy_follows_learned(const struct kvfs_policy *p) {
    return p->learner && p->learner->ranked && p->learner->shadow.credit > 0;
}
