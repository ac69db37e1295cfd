/* Runs: uses of one chain, one after the other, put together into what a request asked for.
 *
 * Responsibility: the class of each block. Blocks of one prompt are used in one go, from the first or from the last;
 * what tells whether the conversation goes on is not in a block but in the prompt: in which turn it is, how much of it
 * is new, which block is its last (a partial tail is never asked for again). A use that continues the chain joins
 * the run; any other closes it.
 *
 * A run is *placed* when victims are asked for or when it closes: its blocks get their class and their place, the
 * deepest as the oldest. One that goes on after that (a writer whose every block evicts another) is placed again:
 * the new blocks, the one that was the last before, and all of them whenever the class of lengths changes, which a
 * run of n blocks does log n times.
 *
 * Invariants: IN_RUN is set on exactly the nodes of the run, RUN is the place of those not yet placed. Blocks of
 * several writers that interleave end up in short runs: that costs accuracy, never correctness.
 */
#include "policy_state.h"

#define MAX_RUN (1u << 15) /* blocks: limits.MAX_TRACE_REQUEST_BLOCKS; a longer chain goes on in another run */
#define MEMORY_STEP 4      /* a block in four is remembered: tells the known part to within three blocks */
#define MAX_TURN 200

static int turn_class(int turn) { return turn <= 2 ? 0 : turn <= 4 ? 1 : 2; }

/* By octaves: none or one, 2, 4, ... 128 and more. */
static int length_class(uint32_t blocks) {
    int octave = blocks < 2 ? 0 : 31 - __builtin_clz(blocks);
    return octave > 7 ? 7 : octave;
}

static int class_of(const struct run *r, const struct node *n, uint32_t at) {
    int last = at + 1 == r->count, hit = (n->link.flags & WAS_HIT) != 0;
    return turn_class(r->turn) + 3 * (length_class(r->count - r->known) + 8 * (last + 2 * hit));
}

static bool continues(const struct kvfs_policy *p, uint32_t unit) {
    const struct run *r = &p->run;
    if (!r->count || r->count >= MAX_RUN) return false;
    uint32_t last = r->nodes[r->count - 1];
    bool forwards = parent_of(&p->nodes[unit]) == last, backwards = parent_of(&p->nodes[last]) == unit;
    if (r->count == 1 && !r->placed) return forwards || backwards;
    return r->backwards && !r->placed ? backwards : forwards;
}

void kvfs_run_close(struct kvfs_policy *p) {
    struct run *r = &p->run;
    for (uint32_t i = 0; i < r->count; i++) p->nodes[r->nodes[i]].link.flags &= (uint8_t) ~(IN_RUN | WAS_HIT);
    r->count = r->placed = r->known = 0;
    r->turn = 1;
    r->backwards = false;
}

/* Add a unit that is in no list, as used now. */
int kvfs_run_add(struct kvfs_policy *p, uint32_t unit, bool hit) {
    struct run *r = &p->run;
    if (!continues(p, unit)) {
        int rc = kvfs_run_place(p);
        if (rc) return rc;
        kvfs_run_close(p);
    }
    if (r->count == r->room) {
        uint32_t room = r->room ? 2 * r->room : 64;
        uint32_t *nodes = realloc(r->nodes, room * sizeof *nodes);
        if (!nodes) return -ENOMEM;
        r->nodes = nodes;
        r->room = room;
    }
    if (r->count == 1 && !r->placed) r->backwards = parent_of(&p->nodes[r->nodes[0]]) == unit;
    struct link *link = &p->nodes[unit].link;
    link->place = RUN;
    link->flags |= (uint8_t)(IN_RUN | (hit ? WAS_HIT : 0));
    r->nodes[r->count++] = unit;
    return 0;
}

static void turn_round(struct run *r) {
    for (uint32_t i = 0, j = r->count; i + 1 < j; i++) {
        uint32_t swapped = r->nodes[i];
        r->nodes[i] = r->nodes[--j];
        r->nodes[j] = swapped;
    }
}

/* What is known of the blocks from `from` on: how far the prompt was seen before, and so in which turn it is. */
static void recognise(struct kvfs_policy *p, uint32_t from) {
    struct run *r = &p->run;
    for (uint32_t i = r->count; i-- > from;) {
        struct node *n = &p->nodes[r->nodes[i]];
        uint8_t turn = n->turn;
        if (!(n->link.flags & WAS_HIT))
            turn = n->depth % MEMORY_STEP == MEMORY_STEP - 1 ? kvfs_memory_turn(&p->learner->memory, kvfs_node_hash(n))
                                                             : 0;
        if (turn) {
            r->known = i + 1;
            r->turn = turn < MAX_TURN ? turn + 1 : MAX_TURN;
            return;
        }
    }
    uint32_t parent = parent_of(&p->nodes[r->nodes[0]]);
    if (!from && parent != NONE && p->nodes[parent].turn && p->nodes[parent].turn < MAX_TURN)
        r->turn = p->nodes[parent].turn + 1;
}

static void number_blocks(struct kvfs_policy *p, uint32_t from) {
    struct run *r = &p->run;
    for (uint32_t i = from; i < r->count; i++) {
        struct node *n = &p->nodes[r->nodes[i]];
        uint32_t parent = parent_of(n);
        uint16_t above = parent == NONE ? UINT16_MAX : p->nodes[parent].depth;
        n->depth = above == UINT16_MAX - 1 ? above : (uint16_t)(above + 1);
    }
}

/* New blocks belong to the run's turn; the memory keeps the turn in which it saw a block first. */
static void remember(struct kvfs_policy *p, uint32_t from) {
    struct run *r = &p->run;
    for (uint32_t i = r->count; i-- > from;) {
        struct node *n = &p->nodes[r->nodes[i]];
        if (!(n->link.flags & WAS_HIT)) n->turn = r->turn;
        if (n->depth % MEMORY_STEP != MEMORY_STEP - 1) continue;
        uint8_t seen = kvfs_memory_turn(&p->learner->memory, kvfs_node_hash(n));
        kvfs_memory_add(&p->learner->memory, kvfs_node_hash(n), seen ? seen : n->turn);
    }
}

/* Give the blocks from `from` on their place; those from `fresh` on have none yet. */
static void place_blocks(struct kvfs_policy *p, uint32_t from, uint32_t fresh) {
    struct run *r = &p->run;
    uint32_t stamp = p->clock - (r->count - from);
    for (uint32_t i = r->count; i-- > from;) {
        uint32_t unit = r->nodes[i];
        struct node *n = &p->nodes[unit];
        int class = class_of(r, n, i);
        stamp++;
        if (i >= fresh) {
            kvfs_learner_use(p->learner, (uint32_t)kvfs_node_hash(n), class, stamp);
            const uint32_t before = is_cooled(p, n) ? 0 : n->link.stamp;
            kvfs_shadow_use(&p->learner->shadow, (uint32_t)kvfs_node_hash(n), before, stamp);
        } else {
            kvfs_learner_reclass(p->learner, (uint32_t)kvfs_node_hash(n), class);
            if (n->link.place != LISTED) /* parked or claimed: it comes back by its stamp */
                continue;
            kvfs_policy_unlist(p, unit);
            kvfs_shadow_restamp(&p->learner->shadow, n->link.stamp, stamp);
        }
        kvfs_policy_list(p, unit, class, stamp);
    }
}

int kvfs_run_place(struct kvfs_policy *p) {
    struct run *r = &p->run;
    uint32_t fresh = r->placed;
    if (fresh == r->count) return 0;
    if (!fresh && r->backwards) turn_round(r);
    int length = length_class(fresh - r->known), turn = turn_class(r->turn);
    number_blocks(p, fresh);
    recognise(p, fresh);
    remember(p, fresh);
    bool all = !fresh || length_class(r->count - r->known) != length || turn_class(r->turn) != turn;
    uint32_t before = p->clock;
    p->clock += r->count - fresh;
    struct shadow *shadow = &p->learner->shadow;
    uint32_t units = p->level ? p->level : p->population;
    kvfs_shadow_reach(shadow, p->clock);
    place_blocks(p, all ? 0 : fresh - 1, fresh);
    kvfs_shadow_judge(shadow, r->count - fresh, p->level);
    kvfs_shadow_evict(shadow, p->clock, units);
    r->placed = r->count;
    kvfs_lists_age(&p->within, before, p->clock);
    kvfs_lists_age(&p->beyond, before, p->clock);
    kvfs_lists_pass(&p->within, &p->beyond, p->clock - shadow->edge, p->clock);
    return kvfs_learner_fit(p->learner, p->population);
}
