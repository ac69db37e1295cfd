/* The shared table: lock-free readers, for any native code. The writer's side is in table_core.c.
 *
 * Responsibility: find a key while the one writing process changes the table, without a system call or a lock.
 *
 * Invariants a reader relies on:
 * - An entry is changed under its `seq` (odd meanwhile); an entry whose key matched is used only if `seq` was even
 *   and stood still, so it is never torn. One that did not match needs no such check: a present key's own words
 *   never change in place.
 * - There are no tombstones. Removing an entry moves later entries of its run towards their home position, each
 *   copied before its old place is overwritten, all under the table's `move_seq` (odd meanwhile). So a hit is always
 *   right, and a miss is right if `move_seq` was even and stood still: a key that is there all the time is found.
 * - Only the writer moves, so readers wait for nothing else; a writer that died in mid-change costs a reader
 *   KVFS_READER_WAIT_NS, then -ETIMEDOUT.
 *
 * Concurrency: any number of reading threads and processes; `struct kvfs_table` itself is immutable to readers.
 */
#ifndef KVFS_TABLE_CORE_H
#define KVFS_TABLE_CORE_H

#include <errno.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#include "formats.h"
#include "mutex.h"

#ifndef KVFS_LOAD /* a test defines one that lingers */
#define KVFS_LOAD(p) __atomic_load_n((p), __ATOMIC_RELAXED)
#endif
#define KVFS_LOAD_ACQUIRE(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)

struct kvfs_table {
    struct kvfs_table_header *header;
    struct kvfs_slot_header *slots;
    struct kvfs_index_entry *entries;
    uint64_t hash_seed;
    uint32_t slot_count;
    uint32_t entry_mask;
    uint64_t bytes;
    /* The writer's own. */
    int fd;
    int writable;
    uint32_t max_live;
    struct kvfs_mutex lock;
    uint32_t slots_backed GUARDED_BY(lock);
};

/* What a lookup returns: a consistent copy. */
struct kvfs_entry_view {
    uint32_t slot;
    uint32_t generation;
    uint64_t size_bytes;
    uint64_t location;
    uint32_t hits;
    uint32_t last_access_s;
    uint8_t kind;
    uint8_t tiers;
    uint8_t flags;
};

/* An index entry as eight words, which is how it crosses between processes. */
#define KVFS_ENTRY_WORDS 8
static inline uint64_t *kvfs_entry_words(const struct kvfs_index_entry *e) { return (uint64_t *)(uintptr_t)e; }
static inline uint32_t kvfs_word0_seq(uint64_t w) { return (uint32_t)w; }
static inline uint8_t kvfs_word0_state(uint64_t w) { return (uint8_t)(w >> 32); }

static inline uint64_t kvfs_mix64(uint64_t x) {
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdull;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ull;
    return x ^ (x >> 33);
}

/* Seeded, since keys of named objects are consecutive numbers and clients choose what they store. */
static inline uint32_t kvfs_home(const struct kvfs_table *t, uint64_t key0, uint64_t key1) {
    return (uint32_t)kvfs_mix64(kvfs_mix64(key0 ^ t->hash_seed) + key1) & t->entry_mask;
}

static inline void kvfs_key_words(const uint8_t *key, uint64_t *key0, uint64_t *key1) {
    memcpy(key0, key, 8);
    memcpy(key1, key + 8, 8);
}

/* One step of waiting for the writer. `deadline_ns` starts at 0. */
static inline int kvfs_reader_wait(uint32_t *spins, int64_t *deadline_ns) {
    if (++*spins < 128) {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#endif
        return 0;
    }
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    int64_t now_ns = (int64_t)now.tv_sec * 1000000000ll + now.tv_nsec;
    if (*deadline_ns == 0)
        *deadline_ns = now_ns + KVFS_READER_WAIT_NS;
    else if (now_ns > *deadline_ns)
        return -ETIMEDOUT;
    sched_yield();
    return 0;
}

/* A consistent copy of the entry at `entry`, if it holds this key: 1, 0, or -ETIMEDOUT. */
static inline int kvfs_entry_read(const struct kvfs_index_entry *entry, uint64_t key0, uint64_t key1,
                                  struct kvfs_entry_view *out) {
    const uint64_t *words = kvfs_entry_words(entry);
    uint32_t spins = 0;
    int64_t deadline_ns = 0;
    for (;;) {
        uint64_t w0 = KVFS_LOAD_ACQUIRE(&words[0]);
        if (KVFS_LOAD(&words[1]) != key0 || KVFS_LOAD(&words[2]) != key1) return 0;
        uint64_t place = KVFS_LOAD(&words[3]), access = KVFS_LOAD(&words[6]);
        out->size_bytes = KVFS_LOAD(&words[4]);
        out->location = KVFS_LOAD(&words[5]);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (!(kvfs_word0_seq(w0) & 1) && KVFS_LOAD(&words[0]) == w0) {
            out->slot = (uint32_t)place;
            out->generation = (uint32_t)(place >> 32);
            out->hits = (uint32_t)access;
            out->last_access_s = (uint32_t)(access >> 32);
            out->kind = (uint8_t)(w0 >> 40);
            out->tiers = (uint8_t)(w0 >> 48);
            out->flags = (uint8_t)(w0 >> 56);
            return kvfs_word0_state(w0) == KVFS_ENTRY_LIVE;
        }
        int rc = kvfs_reader_wait(&spins, &deadline_ns);
        if (rc < 0) return rc;
    }
}

/* The entry at a place, whatever its key: for walks over the whole table. 1, 0 if empty, -ETIMEDOUT. */
static inline int kvfs_entry_at(const struct kvfs_table *t, uint32_t index, uint8_t *key, struct kvfs_entry_view *out) {
    const uint64_t *words = kvfs_entry_words(&t->entries[index]);
    for (;;) {
        uint64_t w0 = KVFS_LOAD_ACQUIRE(&words[0]), key0 = KVFS_LOAD(&words[1]), key1 = KVFS_LOAD(&words[2]);
        if (kvfs_word0_state(w0) == KVFS_ENTRY_EMPTY) return 0;
        int rc = kvfs_entry_read(&t->entries[index], key0, key1, out);
        memcpy(key, &key0, 8);
        memcpy(key + 8, &key1, 8);
        if (rc != 0) return rc;
    }
}

/* Walks the key's run once. 1 found, 0 met an empty entry, -ETIMEDOUT. */
static inline int kvfs_table_walk(const struct kvfs_table *t, uint64_t key0, uint64_t key1,
                                  struct kvfs_entry_view *out) {
    uint32_t at = kvfs_home(t, key0, key1);
    for (uint32_t n = 0; n <= t->entry_mask; n++, at = (at + 1) & t->entry_mask) {
        uint64_t w0 = KVFS_LOAD_ACQUIRE(kvfs_entry_words(&t->entries[at]));
        if (kvfs_word0_state(w0) == KVFS_ENTRY_EMPTY) return 0;
        int rc = kvfs_entry_read(&t->entries[at], key0, key1, out);
        if (rc != 0) return rc;
    }
    return 0;
}

/* 1 and a consistent copy in `out`, 0 for a miss, -ETIMEDOUT when the writer stopped in mid-change. */
static inline int kvfs_table_lookup(const struct kvfs_table *t, const uint8_t *key, struct kvfs_entry_view *out) {
    uint64_t key0, key1;
    uint32_t spins = 0;
    int64_t deadline_ns = 0;
    kvfs_key_words(key, &key0, &key1);
    for (;;) {
        uint32_t moves = KVFS_LOAD_ACQUIRE(&t->header->move_seq);
        int rc = kvfs_table_walk(t, key0, key1, out);
        if (rc != 0) return rc;
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (!(moves & 1) && KVFS_LOAD(&t->header->move_seq) == moves) return 0;
        rc = kvfs_reader_wait(&spins, &deadline_ns);
        if (rc < 0) return rc;
    }
}

#define KVFS_MATCH_AHEAD 8

/* The bits of an entry's tiers that can be read now. */
static inline uint8_t kvfs_visible(const struct kvfs_table *t, const struct kvfs_entry_view *view) {
    return (uint8_t)(view->tiers & ~KVFS_LOAD(&t->header->hidden_tiers));
}

/* How many of `n` keys, from the first on, are visible entries of `kind`. -ETIMEDOUT only when not even the first could
 * be read. The next keys' home lines are fetched ahead. */
static inline int64_t kvfs_table_match(const struct kvfs_table *t, const uint8_t *keys, uint64_t n, uint8_t kind) {
    struct kvfs_entry_view view;
    uint64_t key0, key1;
    for (uint64_t i = 0; i < n && i < KVFS_MATCH_AHEAD; i++) {
        kvfs_key_words(keys + i * KVFS_KEY_BYTES, &key0, &key1);
        __builtin_prefetch(&t->entries[kvfs_home(t, key0, key1)]);
    }
    for (uint64_t i = 0; i < n; i++) {
        if (i + KVFS_MATCH_AHEAD < n) {
            kvfs_key_words(keys + (i + KVFS_MATCH_AHEAD) * KVFS_KEY_BYTES, &key0, &key1);
            __builtin_prefetch(&t->entries[kvfs_home(t, key0, key1)]);
        }
        int rc = kvfs_table_lookup(t, keys + i * KVFS_KEY_BYTES, &view);
        if (rc < 0 && i == 0) return rc;
        if (rc != 1 || view.kind != kind || kvfs_visible(t, &view) == 0) return (int64_t)i;
    }
    return (int64_t)n;
}

/* The slot's generation now. A reader that has opened a slot calls this after the open: the fence pairs with the
 * writer's, which moves the generation before it probes for holders. */
static inline uint32_t kvfs_table_generation(const struct kvfs_table *t, uint32_t slot) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return KVFS_LOAD_ACQUIRE(&t->slots[slot].generation);
}

/* Whether the service still uses this file. A dead table is one that a later service has replaced. */
static inline int kvfs_table_alive(const struct kvfs_table *t) { return !KVFS_LOAD_ACQUIRE(&t->header->dead); }

/* A consistent copy of a slot header; -ETIMEDOUT as above. The caller checks its checksum where it matters. */
static inline int kvfs_slot_header_read(const struct kvfs_table *t, uint32_t slot, struct kvfs_slot_header *out) {
    const uint64_t *from = (const uint64_t *)&t->slots[slot];
    uint64_t words[sizeof *out / 8];
    uint32_t spins = 0;
    int64_t deadline_ns = 0;
    for (;;) {
        words[0] = KVFS_LOAD_ACQUIRE(&from[0]);
        for (size_t i = 1; i < sizeof *out / 8; i++) words[i] = KVFS_LOAD(&from[i]);
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (!((uint32_t)words[0] & 1) && KVFS_LOAD(&from[0]) == words[0]) {
            memcpy(out, words, sizeof *out);
            return 0;
        }
        int rc = kvfs_reader_wait(&spins, &deadline_ns);
        if (rc < 0) return rc;
    }
}

/* Maps the table of `path` for reading; `store_id` may be NULL. -EPROTONOSUPPORT with `*why` set for a file that is
 * no table of this version (or another store's). kvfs_table_close ends it. In table_core.c. */
int kvfs_table_attach(struct kvfs_table *t, const char *path, const uint8_t *store_id, const char **why);
int kvfs_table_create(struct kvfs_table *t, const char *path, const uint8_t store_id[16], uint32_t slots,
                      uint32_t entries);
int kvfs_table_mark_dead(const char *path);
void kvfs_table_close(struct kvfs_table *t);

/* The writer's side: one process, any of its threads. */
struct kvfs_entry_value {
    uint32_t slot;
    uint32_t generation;
    uint64_t size_bytes;
    uint64_t location;
    uint8_t kind;
    uint8_t tiers;
    uint8_t flags;
};
int kvfs_table_put(struct kvfs_table *t, const uint8_t *key, const struct kvfs_entry_value *value);
int kvfs_table_remove(struct kvfs_table *t, const uint8_t *key);
int kvfs_table_touch(struct kvfs_table *t, const uint8_t *key);
int kvfs_table_set_access(struct kvfs_table *t, const uint8_t *key, uint32_t hits, uint32_t last_access_s);
int kvfs_slot_header_write(struct kvfs_table *t, uint32_t slot, const struct kvfs_slot_header *header);
int kvfs_slot_begin(struct kvfs_table *t, uint32_t slot, uint32_t *generation);
int kvfs_slot_publish(struct kvfs_table *t, uint32_t slot, uint32_t draft, const struct kvfs_slot_header *header);
int kvfs_slot_retire(struct kvfs_table *t, uint32_t slot, uint32_t generation);
int kvfs_slot_set_generation(struct kvfs_table *t, uint32_t slot, uint32_t generation);
int kvfs_slot_set_checksum(struct kvfs_table *t, uint32_t slot, uint32_t generation, uint64_t value);
int kvfs_table_set_clean(struct kvfs_table *t, uint32_t clean);
int kvfs_table_set_dead(struct kvfs_table *t);
void kvfs_table_hide(struct kvfs_table *t, uint32_t tiers);
uint64_t kvfs_slot_header_checksum(const struct kvfs_slot_header *header);

#endif
