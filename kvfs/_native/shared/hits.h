/* Hits that the service has not heard of: keys that a reader notes, and that eviction takes in by batches.
 *
 * Responsibility: a bounded list, for readers that do not ask the service. A full one drops further hits, which are a
 * hint.
 *
 * Concurrency: any threads; `lock` guards the list. Who notes several takes it once.
 */
#ifndef KVFS_HITS_H
#define KVFS_HITS_H

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "shared/formats.h"
#include "shared/mutex.h"

struct kvfs_hits {
    struct kvfs_mutex lock;
    uint8_t *keys GUARDED_BY(lock);
    uint32_t count GUARDED_BY(lock);
    uint32_t room;
};

static inline int kvfs_hits_init(struct kvfs_hits *h, uint32_t room) UNCHECKED /* nobody has them yet */
{
    h->keys = malloc((size_t)room * KVFS_KEY_BYTES);
    h->room = h->keys ? room : 0;
    h->count = 0;
    return kvfs_mutex_init(&h->lock) == 0 && h->keys ? 0 : -ENOMEM;
}

static inline void kvfs_hits_free(struct kvfs_hits *h) UNCHECKED /* nobody has them any more */
{
    free(h->keys);
    kvfs_mutex_destroy(&h->lock);
}

static inline void kvfs_hits_note(struct kvfs_hits *h, const uint8_t *key) REQUIRES(h->lock) {
    if (h->count < h->room) memcpy(h->keys + (size_t)h->count++ * KVFS_KEY_BYTES, key, KVFS_KEY_BYTES);
}

/* Moves at most `most` keys out; returns how many. */
static inline uint32_t kvfs_hits_take(struct kvfs_hits *h, uint8_t *keys, uint32_t most) {
    kvfs_lock(&h->lock);
    uint32_t n = h->count < most ? h->count : most;
    h->count -= n;
    memcpy(keys, h->keys + (size_t)h->count * KVFS_KEY_BYTES, (size_t)n * KVFS_KEY_BYTES);
    kvfs_unlock(&h->lock);
    return n;
}

#endif
