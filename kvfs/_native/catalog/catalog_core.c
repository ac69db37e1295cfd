/* The blocks of a store: 80 bytes for each, and 4 to 8 for the two hash tables.
 *
 * Responsibility: find blocks by prefix hash, by object id and behind a parent; count them by bucket; list a bucket's by
 * their first byte.
 *
 * Invariants:
 * - A node is a block that is here (PRESENT), or a parent that is awaited: it has children and nothing else.
 * - A present node is in the chains of its key and its sequence, in the shelf of its bucket and first byte, and among
 *   its parent's children, if it has a parent. Siblings and shelves are doubly linked.
 * - A node that is not present and has no children is free. A block may be its own parent: writers may lie.
 *
 * Concurrency: none; one thread at a time.
 */
#include "catalog_core.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#define NONE KVFS_BLOCK_NONE
#define KEY KVFS_BLOCK_KEY_BYTES
#define MIN_ROOM 256u
/* The share of the nodes by which their array grows: realloc moves pages, and a doubled array would be half empty. */
#define GROWTH_SHARE 16u

enum { PRESENT = 1, PINNED = 2 };

struct node {
    uint8_t key[KEY];
    uint64_t sequence;
    int64_t sealed_ns;
    uint64_t size_flags; /* size << 2 | flags */
    uint32_t uid, bucket;
    uint32_t parent, child, next_sibling, prev_sibling;
    uint32_t next_shelf, prev_shelf;
    uint32_t key_chain, id_chain; /* key_chain also links free nodes */
};
_Static_assert(sizeof(struct node) == 80, "a block");

struct bucket {
    uint64_t blocks, bytes;
    uint32_t shelf[256], count[256];
};

struct kvfs_catalog {
    struct node *nodes;
    uint32_t room, free, used, count;
    uint32_t *by_key, *by_id, mask; /* as many chains of each */
    uint64_t seed;
    struct bucket **buckets;
    uint32_t bucket_room;
};

static uint64_t mix(uint64_t x) {
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdull;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ull;
    return x ^ (x >> 33);
}

static uint32_t *key_home(const struct kvfs_catalog *c, const uint8_t *key) {
    uint64_t low, high;
    memcpy(&low, key, 8);
    memcpy(&high, key + 8, 8);
    return &c->by_key[mix(mix(low ^ c->seed) + high) & c->mask];
}

static uint32_t *id_home(const struct kvfs_catalog *c, uint64_t id) { return &c->by_id[mix(id ^ c->seed) & c->mask]; }

static int is_present(const struct node *n) { return (n->size_flags & PRESENT) != 0; }

/* --- life --------------------------------------------------------------------------------------------------------- */
static uint32_t *new_chains(uint32_t count) {
    uint32_t *chains = malloc(count * sizeof *chains);
    if (chains) memset(chains, 0xff, count * sizeof *chains);
    return chains;
}

struct kvfs_catalog *kvfs_catalog_new(uint64_t seed) {
    struct kvfs_catalog *c = calloc(1, sizeof *c);
    if (!c) return NULL;
    c->seed = seed;
    c->free = NONE;
    c->mask = MIN_ROOM - 1;
    c->by_key = new_chains(MIN_ROOM);
    c->by_id = new_chains(MIN_ROOM);
    if (!c->by_key || !c->by_id) {
        kvfs_catalog_free(c);
        return NULL;
    }
    return c;
}

void kvfs_catalog_free(struct kvfs_catalog *c) {
    if (!c) return;
    for (uint32_t i = 0; i < c->bucket_room; i++) free(c->buckets[i]);
    free(c->buckets);
    free(c->by_key);
    free(c->by_id);
    free(c->nodes);
    free(c);
}

static int grow_nodes(struct kvfs_catalog *c) {
    uint64_t room = (uint64_t)c->room + (c->room / GROWTH_SHARE > MIN_ROOM ? c->room / GROWTH_SHARE : MIN_ROOM);
    if (room >= NONE) return -ENOMEM;
    struct node *nodes = realloc(c->nodes, room * sizeof *nodes);
    if (!nodes) return -ENOMEM;
    c->nodes = nodes;
    for (uint32_t i = (uint32_t)room; i-- > c->room;) {
        nodes[i].size_flags = 0;
        nodes[i].key_chain = c->free;
        c->free = i;
    }
    c->room = (uint32_t)room;
    return 0;
}

/* More chains, once they are two nodes long: each node that is in use is put into its new ones. */
static int grow_chains(struct kvfs_catalog *c) {
    uint32_t count = 2 * (c->mask + 1), *by_key = new_chains(count), *by_id = new_chains(count);
    uint32_t *old = c->by_key, old_count = c->mask + 1;
    if (!by_key || !by_id) {
        free(by_key);
        free(by_id);
        return -ENOMEM;
    }
    free(c->by_id);
    c->by_key = by_key;
    c->by_id = by_id;
    c->mask = count - 1;
    for (uint32_t chain = 0; chain < old_count; chain++) {
        for (uint32_t i = old[chain], next; i != NONE; i = next) {
            struct node *n = &c->nodes[i];
            uint32_t *home = key_home(c, n->key);
            next = n->key_chain;
            n->key_chain = *home;
            *home = i;
            if (is_present(n)) {
                home = id_home(c, n->sequence);
                n->id_chain = *home;
                *home = i;
            }
        }
    }
    free(old);
    return 0;
}

/* --- nodes -------------------------------------------------------------------------------------------------------- */
static uint32_t find(const struct kvfs_catalog *c, const uint8_t *key) {
    uint32_t i = *key_home(c, key);
    while (i != NONE && memcmp(c->nodes[i].key, key, KEY) != 0) i = c->nodes[i].key_chain;
    return i;
}

static uint32_t find_present(const struct kvfs_catalog *c, const uint8_t *key) {
    uint32_t i = find(c, key);
    return i != NONE && is_present(&c->nodes[i]) ? i : NONE;
}

/* The node of a key, made where there is none. There is a free node. */
static uint32_t node_of(struct kvfs_catalog *c, const uint8_t *key) {
    uint32_t i = find(c, key);
    if (i != NONE) return i;
    i = c->free;
    struct node *n = &c->nodes[i];
    uint32_t *home = key_home(c, key);
    c->free = n->key_chain;
    memset(n, 0, sizeof *n);
    memcpy(n->key, key, KEY);
    n->parent = n->child = n->next_sibling = n->prev_sibling = NONE;
    n->key_chain = *home;
    *home = i;
    c->used++;
    return i;
}

static void free_unused(struct kvfs_catalog *c, uint32_t i) {
    struct node *n = &c->nodes[i];
    if (is_present(n) || n->child != NONE) return;
    uint32_t *at = key_home(c, n->key);
    while (*at != i) at = &c->nodes[*at].key_chain;
    *at = n->key_chain;
    n->key_chain = c->free;
    c->free = i;
    c->used--;
}

/* --- links -------------------------------------------------------------------------------------------------------- */
static void link_parent(struct kvfs_catalog *c, uint32_t i, uint32_t parent) {
    struct node *n = &c->nodes[i], *p = &c->nodes[parent];
    n->parent = parent;
    n->prev_sibling = NONE;
    n->next_sibling = p->child;
    if (p->child != NONE) c->nodes[p->child].prev_sibling = i;
    p->child = i;
}

static void unlink_parent(struct kvfs_catalog *c, uint32_t i) {
    struct node *n = &c->nodes[i];
    uint32_t parent = n->parent;
    if (parent == NONE) return;
    if (n->prev_sibling != NONE)
        c->nodes[n->prev_sibling].next_sibling = n->next_sibling;
    else
        c->nodes[parent].child = n->next_sibling;
    if (n->next_sibling != NONE) c->nodes[n->next_sibling].prev_sibling = n->prev_sibling;
    n->parent = NONE;
    if (parent != i) free_unused(c, parent);
}

static void link_shelf(struct kvfs_catalog *c, uint32_t i) {
    struct node *n = &c->nodes[i];
    struct bucket *bucket = c->buckets[n->bucket];
    uint32_t *first = &bucket->shelf[n->key[0]];
    n->prev_shelf = NONE;
    n->next_shelf = *first;
    if (*first != NONE) c->nodes[*first].prev_shelf = i;
    *first = i;
    bucket->count[n->key[0]]++;
    bucket->blocks++;
    bucket->bytes += n->size_flags >> 2;
}

static void unlink_shelf(struct kvfs_catalog *c, uint32_t i) {
    struct node *n = &c->nodes[i];
    struct bucket *bucket = c->buckets[n->bucket];
    if (n->prev_shelf != NONE)
        c->nodes[n->prev_shelf].next_shelf = n->next_shelf;
    else
        bucket->shelf[n->key[0]] = n->next_shelf;
    if (n->next_shelf != NONE) c->nodes[n->next_shelf].prev_shelf = n->prev_shelf;
    bucket->count[n->key[0]]--;
    bucket->blocks--;
    bucket->bytes -= n->size_flags >> 2;
}

static void unlink_id(struct kvfs_catalog *c, uint32_t i) {
    uint32_t *at = id_home(c, c->nodes[i].sequence);
    while (*at != i) at = &c->nodes[*at].id_chain;
    *at = c->nodes[i].id_chain;
}

static void copy_out(const struct kvfs_catalog *c, uint32_t i, struct kvfs_block *out) {
    const struct node *n = &c->nodes[i];
    memcpy(out->key, n->key, KEY);
    out->has_parent = n->parent != NONE;
    if (out->has_parent) memcpy(out->parent, c->nodes[n->parent].key, KEY);
    out->sequence = n->sequence;
    out->size_bytes = n->size_flags >> 2;
    out->sealed_ns = n->sealed_ns;
    out->uid = n->uid;
    out->bucket = n->bucket;
    out->pinned = (n->size_flags & PINNED) != 0;
}

/* --- calls -------------------------------------------------------------------------------------------------------- */
/* Room for a block and a parent that is not here yet. */
static int make_room(struct kvfs_catalog *c) {
    int is_short = c->free == NONE || c->nodes[c->free].key_chain == NONE;
    if (is_short && grow_nodes(c) < 0) return -ENOMEM;
    return c->used > 2 * (uint64_t)c->mask ? grow_chains(c) : 0;
}

int kvfs_catalog_add(struct kvfs_catalog *c, const struct kvfs_block *block) {
    if (block->bucket >= c->bucket_room || !c->buckets[block->bucket]) return -EINVAL;
    if (make_room(c) < 0) return -ENOMEM;
    kvfs_catalog_remove(c, block->key, NULL);
    uint32_t i = node_of(c, block->key);
    struct node *n = &c->nodes[i];
    n->sequence = block->sequence;
    n->sealed_ns = block->sealed_ns;
    n->size_flags = block->size_bytes << 2 | PRESENT | (block->pinned ? PINNED : 0);
    n->uid = block->uid;
    n->bucket = block->bucket;
    n->parent = NONE;
    if (block->has_parent) link_parent(c, i, node_of(c, block->parent));
    link_shelf(c, i);
    uint32_t *home = id_home(c, n->sequence);
    n->id_chain = *home;
    *home = i;
    c->count++;
    return 0;
}

int kvfs_catalog_remove(struct kvfs_catalog *c, const uint8_t *key, struct kvfs_block *removed) {
    uint32_t i = find_present(c, key);
    if (i == NONE) return 0;
    if (removed) copy_out(c, i, removed);
    unlink_id(c, i);
    unlink_shelf(c, i);
    c->nodes[i].size_flags = 0;
    unlink_parent(c, i);
    free_unused(c, i);
    c->count--;
    return 1;
}

int kvfs_catalog_get(const struct kvfs_catalog *c, const uint8_t *key, struct kvfs_block *found) {
    uint32_t i = find_present(c, key);
    if (i != NONE) copy_out(c, i, found);
    return i != NONE;
}

int kvfs_catalog_pin(struct kvfs_catalog *c, const uint8_t *key, int pinned) {
    uint32_t i = find_present(c, key);
    if (i != NONE) c->nodes[i].size_flags = (c->nodes[i].size_flags & ~(uint64_t)PINNED) | (pinned ? PINNED : 0);
    return i != NONE;
}

int kvfs_catalog_of_sequence(const struct kvfs_catalog *c, uint64_t sequence, uint8_t *key) {
    uint32_t i = *id_home(c, sequence);
    while (i != NONE && c->nodes[i].sequence != sequence) i = c->nodes[i].id_chain;
    if (i != NONE) memcpy(key, c->nodes[i].key, KEY);
    return i != NONE;
}

uint32_t kvfs_catalog_count(const struct kvfs_catalog *c) { return c->count; }

uint64_t kvfs_catalog_state_bytes(const struct kvfs_catalog *c) {
    return sizeof *c + (uint64_t)c->room * sizeof *c->nodes + 2 * (c->mask + 1ull) * sizeof *c->by_key;
}

/* --- buckets ------------------------------------------------------------------------------------------------------ */
int64_t kvfs_catalog_open_bucket(struct kvfs_catalog *c) {
    uint32_t number = 0;
    while (number < c->bucket_room && c->buckets[number]) number++;
    if (number == c->bucket_room) {
        struct bucket **buckets = realloc(c->buckets, (number + 16ull) * sizeof *buckets);
        if (!buckets) return -ENOMEM;
        memset(buckets + number, 0, 16 * sizeof *buckets);
        c->buckets = buckets;
        c->bucket_room += 16;
    }
    c->buckets[number] = calloc(1, sizeof **c->buckets);
    if (!c->buckets[number]) return -ENOMEM;
    memset(c->buckets[number]->shelf, 0xff, sizeof c->buckets[number]->shelf);
    return number;
}

void kvfs_catalog_close_bucket(struct kvfs_catalog *c, uint32_t bucket) {
    free(c->buckets[bucket]);
    c->buckets[bucket] = NULL;
}

uint64_t kvfs_catalog_bucket_blocks(const struct kvfs_catalog *c, uint32_t bucket) {
    return c->buckets[bucket]->blocks;
}

uint64_t kvfs_catalog_bucket_bytes(const struct kvfs_catalog *c, uint32_t bucket) { return c->buckets[bucket]->bytes; }

uint32_t kvfs_catalog_shelf_blocks(const struct kvfs_catalog *c, uint32_t bucket, uint8_t first) {
    return c->buckets[bucket]->count[first];
}

static int by_bytes(const void *a, const void *b) { return memcmp(a, b, KEY); }

void kvfs_catalog_shelf(const struct kvfs_catalog *c, uint32_t bucket, uint8_t first, uint8_t *keys) {
    size_t count = 0;
    for (uint32_t i = c->buckets[bucket]->shelf[first]; i != NONE; i = c->nodes[i].next_shelf)
        memcpy(keys + KEY * count++, c->nodes[i].key, KEY);
    qsort(keys, count, KEY, by_bytes);
}

/* --- walks -------------------------------------------------------------------------------------------------------- */
struct sealed {
    uint64_t sequence;
    uint32_t node;
};

static int by_sequence(const void *a, const void *b) {
    uint64_t left = ((const struct sealed *)a)->sequence, right = ((const struct sealed *)b)->sequence;
    return (left > right) - (left < right);
}

int kvfs_catalog_keys(const struct kvfs_catalog *c, uint8_t *keys) {
    struct sealed *order = malloc((c->count + 1ull) * sizeof *order);
    size_t count = 0;
    if (!order) return -ENOMEM;
    for (uint32_t i = 0; i < c->room; i++)
        if (is_present(&c->nodes[i])) order[count++] = (struct sealed){c->nodes[i].sequence, i};
    qsort(order, count, sizeof *order, by_sequence);
    for (size_t i = 0; i < count; i++) memcpy(keys + KEY * i, c->nodes[order[i].node].key, KEY);
    free(order);
    return 0;
}

/* By generations. A node has one parent, so only a cycle leads back, and every cycle leads through the first. */
int64_t kvfs_catalog_descendants(const struct kvfs_catalog *c, const uint8_t *key, uint8_t **keys) {
    uint32_t first = find(c, key), room = 64, count = 0, looked = 0;
    uint32_t *found = malloc(room * sizeof *found);
    *keys = NULL;
    for (uint32_t at = first; found && at != NONE; at = looked < count ? found[looked++] : NONE) {
        for (uint32_t child = c->nodes[at].child; child != NONE; child = c->nodes[child].next_sibling) {
            if (child == first) continue;
            if (count == room) {
                uint32_t *more = realloc(found, 2ull * room * sizeof *found);
                if (!more) {
                    free(found);
                    return -ENOMEM;
                }
                found = more;
                room *= 2;
            }
            found[count++] = child;
        }
    }
    *keys = found ? malloc(KEY * (count + 1ull)) : NULL;
    for (uint32_t i = 0; *keys && i < count; i++) memcpy(*keys + KEY * (size_t)i, c->nodes[found[i]].key, KEY);
    free(found);
    return *keys ? (int64_t)count : -ENOMEM;
}

uint32_t kvfs_catalog_children(const struct kvfs_catalog *c, const uint8_t *key) {
    uint32_t node = find(c, key), count = 0;
    if (node == NONE) return 0;
    for (uint32_t child = c->nodes[node].child; child != NONE; child = c->nodes[child].next_sibling)
        count += child != node;
    return count;
}
