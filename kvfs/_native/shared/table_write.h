/* Changing a slot header under its seqlock: shared by the table and the background checksummer, which live in two
 * extension modules.
 */
#ifndef KVFS_TABLE_WRITE_H
#define KVFS_TABLE_WRITE_H

#include "table_core.h"
#include "hash/xxh3.h"

#ifndef KVFS_STORE /* a test defines one that lingers */
#define KVFS_STORE(p, v) __atomic_store_n((p), (v), __ATOMIC_RELAXED)
#endif
#define KVFS_STORE_RELEASE(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)

static inline uint64_t kvfs_slot_header_sum(const struct kvfs_slot_header *h) {
    return kvfs_xxh3_64((const uint8_t *)h + 4, offsetof(struct kvfs_slot_header, header_checksum) - 4);
}

/* `seq` and `header_checksum` of `next` are filled in here. */
static inline void kvfs_slot_header_store(struct kvfs_table *t, uint32_t slot, struct kvfs_slot_header *next)
    REQUIRES(t->lock) {
    uint64_t *to = (uint64_t *)&t->slots[slot], words[sizeof *next / 8];
    uint32_t seq = (uint32_t)KVFS_LOAD(&to[0]);
    next->version = KVFS_SLOT_VERSION;
    next->header_checksum = kvfs_slot_header_sum(next);
    next->seq = seq + 2;
    memcpy(words, next, sizeof *next);
    KVFS_STORE(&t->slots[slot].seq, seq + 1);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    for (size_t i = 1; i < sizeof *next / 8; i++) KVFS_STORE(&to[i], words[i]);
    KVFS_STORE_RELEASE(&to[0], words[0]);
}

/* Records the payload's checksum if the slot is still of that generation: 1, or 0 if it moved on. */
static inline int kvfs_slot_store_checksum(struct kvfs_table *t, uint32_t slot, uint32_t generation, uint64_t value)
    REQUIRES(t->lock) {
    struct kvfs_slot_header next;
    memcpy(&next, &t->slots[slot], sizeof next);
    if (next.generation != generation || next.state != KVFS_SLOT_SEALED) return 0;
    next.checksum = value;
    next.marks |= KVFS_MARK_HAS_CHECKSUM;
    kvfs_slot_header_store(t, slot, &next);
    return 1;
}

#endif
