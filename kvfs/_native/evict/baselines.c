/* Reference policies that only a replay has: S3-FIFO, ARC and MIN. The rule of scoring is replay.c's.
 *
 * S3-FIFO (Yang and others, SOSP 2023) and ARC (Megiddo and Modha, FAST 2003) are as published, over single blocks:
 * they know of no parents, so they may keep a block whose ancestors are gone, which then scores nothing. Evictions
 * wait for the end of the request. MIN (Belady 1966) evicts the block whose next use is the furthest, the deepest
 * first among equals; a parent's next use is never after its child's, so it goes by leaves by itself.
 *
 * Invariants: all state is the call's own; a block is in one queue at most. Concurrency: any thread.
 */
#include "policy_state.h"

/* --- queues of blocks ----------------------------------------------------------------------------------------------- */
enum { OUTSIDE, FIRST, SECOND, GHOST, SECOND_GHOST, QUEUES };

struct block {
    uint32_t prev, next;
    uint8_t queue, uses;
};

struct queues {
    struct block *blocks;
    uint32_t head[QUEUES], tail[QUEUES], count[QUEUES];
};

static int queues_init(struct queues *q, uint32_t unique) {
    memset(q, 0, sizeof *q);
    memset(q->head, 0xff, sizeof q->head);
    memset(q->tail, 0xff, sizeof q->tail);
    q->blocks = calloc(unique ? unique : 1, sizeof *q->blocks);
    return q->blocks ? 0 : -ENOMEM;
}

static void take_out(struct queues *q, uint32_t id) {
    struct block *b = &q->blocks[id];
    if (b->queue == OUTSIDE) return;
    if (b->prev != NONE)
        q->blocks[b->prev].next = b->next;
    else
        q->head[b->queue] = b->next;
    if (b->next != NONE)
        q->blocks[b->next].prev = b->prev;
    else
        q->tail[b->queue] = b->prev;
    q->count[b->queue]--;
    b->queue = OUTSIDE;
}

/* To the end of a queue, from wherever it is. */
static void put(struct queues *q, uint32_t id, uint8_t queue) {
    struct block *b = &q->blocks[id];
    take_out(q, id);
    b->queue = queue;
    b->prev = q->tail[queue];
    b->next = NONE;
    if (b->prev != NONE)
        q->blocks[b->prev].next = id;
    else
        q->head[queue] = id;
    q->tail[queue] = id;
    q->count[queue]++;
}

static void drop_oldest(struct queues *q, uint8_t queue) { take_out(q, q->head[queue]); }

static bool is_cached(const struct queues *q, uint32_t id) {
    return q->blocks[id].queue == FIRST || q->blocks[id].queue == SECOND;
}

static uint32_t prefix_hits(const struct queues *q, const struct kvfs_replay *r, uint64_t at) {
    uint64_t i = r->start[at];
    while (i < r->start[at + 1] && is_cached(q, r->ids[i])) i++;
    return (uint32_t)(i - r->start[at]);
}

/* --- S3-FIFO: FIRST is the small queue, SECOND the main one ---------------------------------------------------------- */
#define S3_MOST_USES 3
#define S3_SMALL_SHARE 10

static void s3_use(struct queues *q, uint32_t id) {
    struct block *b = &q->blocks[id];
    if (is_cached(q, id)) {
        b->uses += b->uses < S3_MOST_USES;
        return;
    }
    b->uses = 0;
    put(q, id, b->queue == GHOST ? SECOND : FIRST);
}

static uint32_t s3_evict_small(struct queues *q, uint32_t max_ghosts) {
    uint32_t id;
    while ((id = q->head[FIRST]) != NONE) {
        if (q->blocks[id].uses <= 1) {
            put(q, id, GHOST);
            if (q->count[GHOST] > max_ghosts) drop_oldest(q, GHOST);
            return id;
        }
        q->blocks[id].uses = 0;
        put(q, id, SECOND);
    }
    return NONE;
}

static uint32_t s3_evict(struct queues *q, uint32_t small, uint32_t max_ghosts) {
    uint32_t id = q->count[FIRST] >= small || !q->count[SECOND] ? s3_evict_small(q, max_ghosts) : NONE;
    if (id != NONE) return id;
    while (q->blocks[id = q->head[SECOND]].uses) {
        q->blocks[id].uses--;
        put(q, id, SECOND);
    }
    take_out(q, id);
    return id;
}

int kvfs_replay_s3_fifo(struct kvfs_replay *r) {
    uint32_t small = r->capacity / S3_SMALL_SHARE;
    small += !small;
    struct queues q;
    int rc = queues_init(&q, r->unique);
    for (uint64_t at = 0; !rc && at < r->requests; at++) {
        r->prefix_hits[at] = prefix_hits(&q, r, at);
        for (uint64_t i = r->start[at + 1]; i-- > r->start[at];) s3_use(&q, r->ids[i]);
        while (q.count[FIRST] + q.count[SECOND] > r->capacity)
            note_victim(r, s3_evict(&q, small, r->capacity > small ? r->capacity - small : 0));
    }
    free(q.blocks);
    return rc;
}

/* --- ARC: FIRST and SECOND are T1 and T2, GHOST and SECOND_GHOST are B1 and B2 --------------------------------------- */
static void arc_use(struct queues *q, uint32_t id, uint32_t capacity, double *wanted) {
    uint8_t queue = q->blocks[id].queue;
    double first = q->count[GHOST], second = q->count[SECOND_GHOST];
    if (queue == GHOST) {
        *wanted += second > first ? second / first : 1;
        *wanted = *wanted > capacity ? capacity : *wanted;
    } else if (queue == SECOND_GHOST) {
        *wanted -= first > second ? first / second : 1;
        *wanted = *wanted < 0 ? 0 : *wanted;
    }
    put(q, id, queue == OUTSIDE ? FIRST : SECOND);
}

static uint32_t arc_evict(struct queues *q, double wanted) {
    bool first = q->count[FIRST] && (q->count[FIRST] > wanted || !q->count[SECOND]);
    uint32_t id = q->head[first ? FIRST : SECOND];
    put(q, id, first ? GHOST : SECOND_GHOST);
    return id;
}

int kvfs_replay_arc(struct kvfs_replay *r) {
    double wanted = 0; /* size of T1 */
    struct queues q;
    int rc = queues_init(&q, r->unique);
    for (uint64_t at = 0; !rc && at < r->requests; at++) {
        r->prefix_hits[at] = prefix_hits(&q, r, at);
        for (uint64_t i = r->start[at + 1]; i-- > r->start[at];) arc_use(&q, r->ids[i], r->capacity, &wanted);
        while (q.count[FIRST] + q.count[SECOND] > r->capacity) note_victim(r, arc_evict(&q, wanted));
        while (q.count[GHOST] && q.count[FIRST] + q.count[GHOST] > r->capacity) drop_oldest(&q, GHOST);
        while (q.count[SECOND_GHOST] && q.count[GHOST] + q.count[SECOND_GHOST] > r->capacity)
            drop_oldest(&q, SECOND_GHOST);
    }
    free(q.blocks);
    return rc;
}

/* --- MIN ------------------------------------------------------------------------------------------------------------- */
struct future {
    uint64_t next; /* the request that uses the block next; their number for none */
    uint32_t depth, id;
};

struct heap {
    struct future *items;
    uint64_t count;
};

static bool goes_first(struct future a, struct future b) {
    return a.next != b.next ? a.next > b.next : a.depth > b.depth;
}

static void heap_push(struct heap *h, struct future f) {
    uint64_t at = h->count++;
    for (; at && goes_first(f, h->items[(at - 1) / 2]); at = (at - 1) / 2) h->items[at] = h->items[(at - 1) / 2];
    h->items[at] = f;
}

static struct future heap_pop(struct heap *h) {
    struct future top = h->items[0], last = h->items[--h->count];
    uint64_t at = 0, child;
    while ((child = 2 * at + 1) < h->count) {
        if (child + 1 < h->count && goes_first(h->items[child + 1], h->items[child])) child++;
        if (!goes_first(h->items[child], last)) break;
        h->items[at] = h->items[child];
        at = child;
    }
    if (h->count) h->items[at] = last;
    return top;
}

/* next[i]: the request that uses the block of reference i after its own. */
static void find_next(const struct kvfs_replay *r, uint64_t *next, uint64_t *of_block) {
    for (uint32_t id = 0; id < r->unique; id++) of_block[id] = r->requests;
    for (uint64_t at = r->requests; at-- > 0;) {
        for (uint64_t i = r->start[at]; i < r->start[at + 1]; i++) next[i] = of_block[r->ids[i]];
        for (uint64_t i = r->start[at]; i < r->start[at + 1]; i++) of_block[r->ids[i]] = at;
    }
}

static void min_request(struct kvfs_replay *r, uint64_t at, const uint64_t *next, uint64_t *cached, struct heap *h,
                        uint32_t *count) {
    uint64_t hits = r->start[at];
    while (hits < r->start[at + 1] && cached[r->ids[hits]]) hits++;
    r->prefix_hits[at] = (uint32_t)(hits - r->start[at]);
    for (uint64_t i = r->start[at + 1]; i-- > r->start[at];) {
        uint32_t id = r->ids[i];
        *count += !cached[id];
        cached[id] = next[i] + 1;
        heap_push(h, (struct future){next[i], (uint32_t)(i - r->start[at]), id});
    }
    while (*count > r->capacity) {
        struct future f = heap_pop(h);
        if (cached[f.id] != f.next + 1) /* used or evicted since */
            continue;
        cached[f.id] = 0;
        --*count;
        note_victim(r, f.id);
    }
}

int kvfs_replay_min(struct kvfs_replay *r) {
    uint64_t references = r->start[r->requests];
    uint64_t *next = malloc((references + 1) * sizeof *next);
    uint64_t *cached = malloc((r->unique + 1ull) * sizeof *cached); /* 0, or 1 + the next use */
    struct heap h = {malloc((references + 1) * sizeof *h.items), 0};
    int rc = next && cached && h.items ? 0 : -ENOMEM;
    uint32_t count = 0;
    if (!rc) {
        find_next(r, next, cached);
        memset(cached, 0, r->unique * sizeof *cached);
        for (uint64_t at = 0; at < r->requests; at++) min_request(r, at, next, cached, &h, &count);
    }
    free(next);
    free(cached);
    free(h.items);
    return rc;
}
