/* Replay of a trace through a policy of the store.
 *
 * The rule, here as in baselines.c: a request's blocks score while they are there, from the first on; then
 * all its blocks are used, last to first; then evictions bring the cache down to its capacity.
 *
 * Invariants: all state is the call's own. Concurrency: any thread.
 */
#include "policy_state.h"

/* --- a policy of the store ------------------------------------------------------------------------------------------ */
static void key_of(uint32_t id, uint8_t key[KVFS_POLICY_KEY_BYTES]) {
    memset(key, 0, KVFS_POLICY_KEY_BYTES);
    memcpy(key, &id, sizeof id);
}

static int use_blocks(struct kvfs_policy *p, const uint32_t *ids, uint32_t count) {
    uint8_t key[KVFS_POLICY_KEY_BYTES], parent[KVFS_POLICY_KEY_BYTES];
    for (uint32_t i = count; i-- > 0;) {
        key_of(ids[i], key);
        int rc = kvfs_policy_touch(p, key);
        if (rc == -ENOENT) {
            if (i) key_of(ids[i - 1], parent);
            rc = kvfs_policy_insert(p, key, 1, i ? parent : NULL, NULL, 0);
        }
        if (rc) return rc;
    }
    return 0;
}

static int evict(struct kvfs_policy *p, struct kvfs_replay *r) {
    while (kvfs_policy_count(p) > r->capacity) {
        int64_t unit = kvfs_policy_claim(p);
        if (unit < 0 || unit == NONE) return unit < 0 ? (int)unit : -EINVAL;
        uint8_t key[KVFS_POLICY_KEY_BYTES];
        uint32_t id;
        memcpy(key, kvfs_policy_key(p, (uint32_t)unit), sizeof key);
        memcpy(&id, key, sizeof id);
        note_victim(r, id);
        int rc = kvfs_policy_remove(p, key);
        p->level = p->population;
        if (rc) return rc;
    }
    return 0;
}

int kvfs_replay_policy(struct kvfs_policy *p, struct kvfs_replay *r, uint64_t from, uint64_t to) {
    for (uint64_t at = from; at < to; at++) {
        const uint32_t *ids = r->ids + r->start[at];
        uint32_t count = (uint32_t)(r->start[at + 1] - r->start[at]), hits = 0;
        uint8_t key[KVFS_POLICY_KEY_BYTES];
        for (; hits < count; hits++) {
            key_of(ids[hits], key);
            if (!kvfs_policy_has(p, key)) break;
        }
        r->prefix_hits[at] = hits;
        int rc = use_blocks(p, ids, count);
        if (!rc) rc = evict(p, r);
        if (rc) return rc;
    }
    return 0;
}
