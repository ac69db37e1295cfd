/* Eviction orders over 16-byte keys. See policy_core.c for the parts and their laws. */
#ifndef KVFS_POLICY_CORE_H
#define KVFS_POLICY_CORE_H

#include <stddef.h>
#include <stdint.h>

#define KVFS_POLICY_NONE UINT32_MAX
#define KVFS_POLICY_KEY_BYTES 16

enum kvfs_policy_kind { KVFS_POLICY_LRU_LEAF, KVFS_POLICY_DEFAULT };

struct kvfs_policy;

struct kvfs_policy *kvfs_policy_new(enum kvfs_policy_kind kind);
void kvfs_policy_free(struct kvfs_policy *p);

/* 0, or -ENOENT (unknown key), -ENOMEM, -EINVAL (a parent and a group at once), -E2BIG (size). */
int kvfs_policy_insert(struct kvfs_policy *p, const uint8_t *key, uint64_t size_bytes, const uint8_t *parent,
                       const uint8_t *group, int pinned);
int kvfs_policy_touch(struct kvfs_policy *p, const uint8_t *key);
int kvfs_policy_cool(struct kvfs_policy *p, const uint8_t *key);
int kvfs_policy_remove(struct kvfs_policy *p, const uint8_t *key);
int kvfs_policy_pin(struct kvfs_policy *p, const uint8_t *key, int pinned);
int kvfs_policy_has(const struct kvfs_policy *p, const uint8_t *key);

/* The next victim as a unit, KVFS_POLICY_NONE when nothing may go, or -ENOMEM; it counts as gone until it is touched,
 * removed or released. Its keys: `first`, then `next` until KVFS_POLICY_NONE. */
int64_t kvfs_policy_claim(struct kvfs_policy *p);
int kvfs_policy_release(struct kvfs_policy *p, uint32_t unit);
uint32_t kvfs_policy_first(const struct kvfs_policy *p, uint32_t unit);
uint32_t kvfs_policy_next(const struct kvfs_policy *p, uint32_t unit, uint32_t key);
const uint8_t *kvfs_policy_key(const struct kvfs_policy *p, uint32_t key);
uint64_t kvfs_policy_size(const struct kvfs_policy *p, uint32_t key);

uint64_t kvfs_policy_total_bytes(const struct kvfs_policy *p);
uint32_t kvfs_policy_count(const struct kvfs_policy *p);
/* Whether there is no key, no awaited parent and no group. */
int kvfs_policy_is_empty(const struct kvfs_policy *p);
/* Bytes allocated now. */
uint64_t kvfs_policy_state_bytes(const struct kvfs_policy *p);
/* Whether the default policy goes by what it learned; else by last use. */
int kvfs_policy_follows_learned(const struct kvfs_policy *p);

/* ranks[b]: most hits per unit of time to be had from age bin b on, given each bin's chance of a hit and its edges. */
void kvfs_policy_ranks(const double *chance, const double *edges, int bins, double *ranks);

/* --- replay of a trace: request r is the blocks ids[start[r] .. start[r + 1]), each of size 1 --------------------- */
struct kvfs_replay {
    const uint64_t *start;
    const uint32_t *ids; /* below `unique` */
    uint64_t requests;
    uint32_t unique;
    uint32_t capacity;
    uint32_t *prefix_hits; /* out: per request */
    uint32_t *victims;     /* out, or NULL: ids in order of eviction, for at most `max_victims` */
    uint64_t max_victims;
    uint64_t evicted; /* out */
};

int kvfs_replay_policy(struct kvfs_policy *p, struct kvfs_replay *r, uint64_t from, uint64_t to);
int kvfs_replay_s3_fifo(struct kvfs_replay *r);
int kvfs_replay_arc(struct kvfs_replay *r);
int kvfs_replay_min(struct kvfs_replay *r);

#endif
