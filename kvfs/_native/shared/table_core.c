/* The shared table's one writer: creation, index entries, slot headers.
 *
 * Responsibility: every change of the file. Readers are described in table_core.h.
 *
 * Invariants: `t->lock` is held for every change. No page of the file is touched before the filesystem has given it
 * (fallocate): a full tmpfs would answer a store with SIGBUS, and even a *reader's* load, since on tmpfs a read
 * fault of a hole allocates a page. So the index is backed at creation, slot headers in steps as slots are first
 * used. At most KVFS_TABLE_MAX_LOAD_PERCENT of the entries are live, so every run ends.
 *
 * Concurrency: threads of one process. The mutex is the process's own; a second process must not write.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "table_core.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "pages.h"
#include "table_write.h"

/* Slot headers are backed this many bytes at a time: 512 slots. */
#define BACKING_STEP (64ull << 10)

/* --- creation and attaching ----------------------------------------------------------------------------- */

static int back(int fd, uint64_t offset, uint64_t bytes) {
    while (fallocate(fd, 0, (off_t)offset, (off_t)bytes) != 0) {
        if (errno == EOPNOTSUPP) /* a filesystem without it: nothing better can be done */
            return 0;
        if (errno != EINTR) return -errno;
    }
    return 0;
}

static uint64_t fixed_sum(const struct kvfs_table_header *h) { return kvfs_xxh3_64(h, KVFS_TABLE_FIXED_BYTES); }

static void set_views(struct kvfs_table *t, void *base) {
    struct kvfs_table_header *h = (struct kvfs_table_header *)base;
    t->header = h;
    t->slots = (struct kvfs_slot_header *)((uint8_t *)base + h->slots_offset);
    t->entries = (struct kvfs_index_entry *)((uint8_t *)base + h->entries_offset);
    t->slot_count = h->slot_count;
    t->entry_mask = h->entry_count - 1;
    t->hash_seed = h->hash_seed;
    t->max_live = (uint32_t)((uint64_t)h->entry_count * KVFS_TABLE_MAX_LOAD_PERCENT / 100);
}

static int init_header(struct kvfs_table_header *h, const uint8_t store_id[16], uint32_t slots, uint32_t entries) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    memset(h, 0, sizeof *h);
    memcpy(h->magic, KVFS_TABLE_MAGIC, 8);
    h->version = KVFS_TABLE_VERSION;
    h->header_bytes = KVFS_TABLE_HEADER_BYTES;
    memcpy(h->store_id, store_id, 16);
    h->slot_count = slots;
    h->entry_count = entries;
    h->entries_offset = KVFS_TABLE_HEADER_BYTES;
    h->slots_offset = h->entries_offset + kvfs_page_up((uint64_t)entries * KVFS_ENTRY_BYTES);
    h->file_bytes = h->slots_offset + kvfs_page_up((uint64_t)slots * KVFS_SLOT_HEADER_BYTES);
    h->slot_header_bytes = KVFS_SLOT_HEADER_BYTES;
    h->entry_bytes = KVFS_ENTRY_BYTES;
    h->created_ns = (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
    if (getrandom(&h->hash_seed, sizeof h->hash_seed, 0) != sizeof h->hash_seed) return -EIO;
    h->header_checksum = fixed_sum(h);
    return 0;
}

static int fill_new(struct kvfs_table *t, int fd, const struct kvfs_table_header *h) UNCHECKED /* nobody has it yet */
{
    if (ftruncate(fd, (off_t)h->file_bytes) != 0) return -errno;
    int rc = back(fd, 0, h->slots_offset);
    if (rc < 0) return rc;
    void *base = mmap(NULL, h->file_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) return -errno;
    memcpy(base, h, sizeof *h);
    t->bytes = h->file_bytes;
    t->fd = fd;
    t->writable = 1;
    t->slots_backed = 0;
    set_views(t, base);
    kvfs_mutex_init(&t->lock);
    return 0;
}

/* Built under another name and renamed, so that `path` is a whole table or none. */
int kvfs_table_create(struct kvfs_table *t, const char *path, const uint8_t store_id[16], uint32_t slots,
                      uint32_t entries) {
    struct kvfs_table_header header;
    char *temporary;
    memset(t, 0, sizeof *t);
    t->fd = -1;
    if (slots == 0 || entries == 0 || (entries & (entries - 1))) return -EINVAL;
    int rc = init_header(&header, store_id, slots, entries);
    if (rc < 0) return rc;
    if (asprintf(&temporary, "%s.new", path) < 0) return -ENOMEM;
    unlink(temporary);
    int fd = open(temporary, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0640);
    rc = fd < 0 || fchmod(fd, 0640) != 0 ? -errno : fill_new(t, fd, &header);
    if (rc == 0 && rename(temporary, path) != 0) rc = -errno;
    if (rc < 0) {
        if (fd >= 0) unlink(temporary);
        if (t->header)
            kvfs_table_close(t);
        else if (fd >= 0)
            close(fd);
    }
    free(temporary);
    return rc;
}

static const char *mismatch(const struct kvfs_table_header *h, uint64_t file_bytes, const uint8_t *store_id) {
    if (memcmp(h->magic, KVFS_TABLE_MAGIC, 8) != 0) return "no kvfs table (wrong magic)";
    if (h->version != KVFS_TABLE_VERSION) return "of another format version";
    if (h->header_checksum != fixed_sum(h)) return "damaged (header checksum)";
    if (h->header_bytes != KVFS_TABLE_HEADER_BYTES || h->slot_header_bytes != KVFS_SLOT_HEADER_BYTES ||
        h->entry_bytes != KVFS_ENTRY_BYTES)
        return "of another layout";
    if (h->entry_count == 0 || (h->entry_count & (h->entry_count - 1)) || h->file_bytes > file_bytes ||
        h->entries_offset % KVFS_PAGE_BYTES || h->slots_offset % KVFS_PAGE_BYTES || h->entries_offset > h->file_bytes ||
        h->slots_offset > h->file_bytes ||
        (uint64_t)h->entry_count * KVFS_ENTRY_BYTES > h->file_bytes - h->entries_offset ||
        (uint64_t)h->slot_count * KVFS_SLOT_HEADER_BYTES > h->file_bytes - h->slots_offset)
        return "truncated or inconsistent";
    if (store_id && memcmp(h->store_id, store_id, 16) != 0) return "of another store";
    return NULL;
}

static int read_header(int fd, struct kvfs_table_header *h, uint64_t *file_bytes) {
    struct stat st;
    if (fstat(fd, &st) != 0) return -errno;
    *file_bytes = (uint64_t)st.st_size;
    memset(h, 0, sizeof *h);
    return pread(fd, h, sizeof *h, 0) < 0 ? -errno : 0;
}

int kvfs_table_attach(struct kvfs_table *t, const char *path, const uint8_t *store_id, const char **why) {
    struct kvfs_table_header header;
    memset(t, 0, sizeof *t);
    t->fd = -1;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -errno;
    int rc = read_header(fd, &header, &t->bytes);
    if (rc == 0) {
        *why = mismatch(&header, t->bytes, store_id);
        rc = *why ? -EPROTONOSUPPORT : 0;
    }
    if (rc == 0) {
        t->bytes = header.file_bytes;
        void *base = mmap(NULL, t->bytes, PROT_READ, MAP_SHARED, fd, 0);
        if (base == MAP_FAILED)
            rc = -errno;
        else
            set_views(t, base);
    }
    close(fd);
    return rc;
}

/* Marks an older table as one that will not change again. Anything else at `path` stays as it is. */
int kvfs_table_mark_dead(const char *path) {
    struct kvfs_table_header header;
    uint64_t file_bytes = 0;
    int fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0) return -errno;
    int rc = read_header(fd, &header, &file_bytes);
    if (rc == 0 && (file_bytes < sizeof header || memcmp(header.magic, KVFS_TABLE_MAGIC, 8) != 0))
        rc = -EPROTONOSUPPORT;
    const uint32_t dead = 1;
    if (rc == 0 && pwrite(fd, &dead, sizeof dead, offsetof(struct kvfs_table_header, dead)) != sizeof dead) rc = -EIO;
    close(fd);
    return rc;
}

void kvfs_table_close(struct kvfs_table *t) {
    if (t->header) munmap(t->header, t->bytes);
    if (t->fd >= 0) close(t->fd);
    if (t->writable) kvfs_mutex_destroy(&t->lock);
    memset(t, 0, sizeof *t);
    t->fd = -1;
}

/* --- index entries -------------------------------------------------------------------------------------- */

#define NOT_FOUND UINT32_MAX

static uint64_t word0(uint32_t seq, uint8_t state, const struct kvfs_entry_value *v) {
    return seq | (uint64_t)state << 32 | (uint64_t)v->kind << 40 | (uint64_t)v->tiers << 48 | (uint64_t)v->flags << 56;
}

/* Words 1..7 and the upper half of word 0 become `next`; the lower half stays the entry's own sequence. */
static void store_entry(struct kvfs_index_entry *entry, const uint64_t next[KVFS_ENTRY_WORDS]) {
    uint64_t *words = kvfs_entry_words(entry);
    uint64_t w0 = KVFS_LOAD(&words[0]);
    uint32_t seq = kvfs_word0_seq(w0);
    KVFS_STORE(&words[0], (w0 & ~0xffffffffull) | (uint32_t)(seq + 1));
    __atomic_thread_fence(__ATOMIC_RELEASE);
    for (int i = 1; i < KVFS_ENTRY_WORDS; i++) KVFS_STORE(&words[i], next[i]);
    KVFS_STORE_RELEASE(&words[0], (next[0] & ~0xffffffffull) | (uint32_t)(seq + 2));
}

/* Where the key is, or NOT_FOUND and in `*empty` where its run ends. */
static uint32_t find(const struct kvfs_table *t, uint64_t key0, uint64_t key1, uint32_t *empty) REQUIRES(t->lock) {
    uint32_t at = kvfs_home(t, key0, key1);
    for (;; at = (at + 1) & t->entry_mask) {
        const uint64_t *words = kvfs_entry_words(&t->entries[at]);
        if (kvfs_word0_state(words[0]) == KVFS_ENTRY_EMPTY) {
            if (empty) *empty = at;
            return NOT_FOUND;
        }
        if (words[1] == key0 && words[2] == key1) return at;
    }
}

static uint32_t now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME_COARSE, &now);
    return (uint32_t)now.tv_sec;
}

static int put_locked(struct kvfs_table *t, const uint8_t *key, const struct kvfs_entry_value *value)
    REQUIRES(t->lock) {
    uint64_t next[KVFS_ENTRY_WORDS] = {0};
    uint32_t empty = NOT_FOUND;
    kvfs_key_words(key, &next[1], &next[2]);
    uint32_t at = find(t, next[1], next[2], &empty);
    if (at == NOT_FOUND && t->header->live_entries >= t->max_live) return -ENOSPC;
    next[0] = word0(0, KVFS_ENTRY_LIVE, value);
    next[3] = value->slot | (uint64_t)value->generation << 32;
    next[4] = value->size_bytes;
    next[5] = value->location;
    next[6] = at != NOT_FOUND ? kvfs_entry_words(&t->entries[at])[6] : (uint64_t)now_s() << 32;
    store_entry(&t->entries[at != NOT_FOUND ? at : empty], next);
    if (at == NOT_FOUND) KVFS_STORE(&t->header->live_entries, t->header->live_entries + 1);
    return 0;
}

/* Inserts the key or replaces its value; hits and last access of a replaced entry stay. -ENOSPC when full. */
int kvfs_table_put(struct kvfs_table *t, const uint8_t *key, const struct kvfs_entry_value *value) {
    kvfs_lock(&t->lock);
    int rc = put_locked(t, key, value);
    kvfs_unlock(&t->lock);
    return rc;
}

static void begin_moves(struct kvfs_table *t) REQUIRES(t->lock) {
    KVFS_STORE(&t->header->move_seq, t->header->move_seq + 1);
    __atomic_thread_fence(__ATOMIC_RELEASE);
}

static void end_moves(struct kvfs_table *t) REQUIRES(t->lock) {
    KVFS_STORE_RELEASE(&t->header->move_seq, t->header->move_seq + 1);
}

/* Closes the gap at `hole`: each later entry of the run that may stand there moves into it and makes the next gap. */
static void remove_at(struct kvfs_table *t, uint32_t hole) REQUIRES(t->lock) {
    static const uint64_t nothing[KVFS_ENTRY_WORDS] = {0};
    int moved = 0;
    for (uint32_t at = (hole + 1) & t->entry_mask;; at = (at + 1) & t->entry_mask) {
        const uint64_t *words = kvfs_entry_words(&t->entries[at]);
        if (kvfs_word0_state(words[0]) == KVFS_ENTRY_EMPTY) break;
        uint32_t from_home = (at - kvfs_home(t, words[1], words[2])) & t->entry_mask;
        if (from_home < ((at - hole) & t->entry_mask))
            continue; /* its home lies behind the gap: there it would not be found */
        if (!moved) begin_moves(t);
        moved = 1;
        store_entry(&t->entries[hole], words);
        hole = at;
    }
    store_entry(&t->entries[hole], nothing);
    if (moved) end_moves(t);
}

/* 1 if the key was there, 0 if not. */
int kvfs_table_remove(struct kvfs_table *t, const uint8_t *key) {
    uint64_t key0, key1;
    kvfs_key_words(key, &key0, &key1);
    kvfs_lock(&t->lock);
    uint32_t at = find(t, key0, key1, NULL);
    if (at != NOT_FOUND) {
        remove_at(t, at);
        KVFS_STORE(&t->header->live_entries, t->header->live_entries - 1);
    }
    kvfs_unlock(&t->lock);
    return at != NOT_FOUND;
}

/* Counts a hit: 1, or 0 where the key is not there. One word changes, so readers need no seqlock for it. */
int kvfs_table_touch(struct kvfs_table *t, const uint8_t *key) {
    uint64_t key0, key1;
    kvfs_key_words(key, &key0, &key1);
    kvfs_lock(&t->lock);
    uint32_t at = find(t, key0, key1, NULL);
    if (at != NOT_FOUND) {
        uint64_t *word = &kvfs_entry_words(&t->entries[at])[6];
        uint32_t hits = (uint32_t)*word;
        KVFS_STORE(word, (hits == UINT32_MAX ? hits : hits + 1) | (uint64_t)now_s() << 32);
    }
    kvfs_unlock(&t->lock);
    return at != NOT_FOUND;
}

/* What `touch` counted in an earlier table: 1, or 0 where the key is not there. */
int kvfs_table_set_access(struct kvfs_table *t, const uint8_t *key, uint32_t hits, uint32_t last_access_s) {
    uint64_t key0, key1;
    kvfs_key_words(key, &key0, &key1);
    kvfs_lock(&t->lock);
    uint32_t at = find(t, key0, key1, NULL);
    if (at != NOT_FOUND) KVFS_STORE(&kvfs_entry_words(&t->entries[at])[6], hits | (uint64_t)last_access_s << 32);
    kvfs_unlock(&t->lock);
    return at != NOT_FOUND;
}

/* --- slot headers --------------------------------------------------------------------------------------- */

static int back_slot(struct kvfs_table *t, uint32_t slot) REQUIRES(t->lock) {
    if (slot >= t->slot_count) return -EINVAL;
    if (slot >= t->slots_backed) {
        uint64_t from = t->header->slots_offset + (uint64_t)t->slots_backed * KVFS_SLOT_HEADER_BYTES;
        uint64_t to = t->header->slots_offset + ((uint64_t)slot + 1) * KVFS_SLOT_HEADER_BYTES;
        to = (to + BACKING_STEP - 1) / BACKING_STEP * BACKING_STEP;
        to = to < t->header->file_bytes ? to : t->header->file_bytes;
        int rc = back(t->fd, from, to - from);
        if (rc < 0) return rc;
        t->slots_backed = (uint32_t)((to - t->header->slots_offset) / KVFS_SLOT_HEADER_BYTES);
    }
    if (slot >= t->header->slots_used) KVFS_STORE_RELEASE(&t->header->slots_used, slot + 1);
    return 0;
}

int kvfs_slot_header_write(struct kvfs_table *t, uint32_t slot, const struct kvfs_slot_header *header) {
    struct kvfs_slot_header next = *header;
    kvfs_lock(&t->lock);
    int rc = back_slot(t, slot);
    if (rc == 0) kvfs_slot_header_store(t, slot, &next);
    kvfs_unlock(&t->lock);
    return rc;
}

/* A free slot becomes a draft: its next odd generation in `*generation`. */
int kvfs_slot_begin(struct kvfs_table *t, uint32_t slot, uint32_t *generation) {
    struct kvfs_slot_header next = {0};
    kvfs_lock(&t->lock);
    int rc = back_slot(t, slot);
    if (rc == 0 && t->slots[slot].state != KVFS_SLOT_FREE) rc = -ESTALE;
    if (rc == 0) {
        next.state = KVFS_SLOT_DRAFT;
        next.generation = *generation = t->slots[slot].generation | 1;
        kvfs_slot_header_store(t, slot, &next);
    }
    kvfs_unlock(&t->lock);
    return rc;
}

/* A draft becomes sealed, with the next generation, which is even. -ESTALE if it is no longer that draft. */
int kvfs_slot_publish(struct kvfs_table *t, uint32_t slot, uint32_t draft, const struct kvfs_slot_header *header) {
    struct kvfs_slot_header next = *header;
    kvfs_lock(&t->lock);
    int rc = slot < t->slots_backed ? 0 : -ESTALE;
    if (rc == 0 && (t->slots[slot].state != KVFS_SLOT_DRAFT || t->slots[slot].generation != draft)) rc = -ESTALE;
    if (rc == 0) {
        next.state = KVFS_SLOT_SEALED;
        next.generation = draft + 1;
        kvfs_slot_header_store(t, slot, &next);
    }
    kvfs_unlock(&t->lock);
    return rc;
}

/* A draft or sealed slot becomes free, with the next odd generation. The full fence pairs with the reader's: whoever
 * opened the file before the probe that follows is seen by it, whoever opens it later sees this generation. */
int kvfs_slot_retire(struct kvfs_table *t, uint32_t slot, uint32_t generation) {
    struct kvfs_slot_header next = {0};
    kvfs_lock(&t->lock);
    int rc = slot < t->slots_backed ? 0 : -ESTALE;
    if (rc == 0 && (t->slots[slot].state == KVFS_SLOT_FREE || t->slots[slot].generation != generation)) rc = -ESTALE;
    if (rc == 0) {
        next.state = KVFS_SLOT_FREE;
        next.generation = (generation + 1) | 1;
        kvfs_slot_header_store(t, slot, &next);
    }
    kvfs_unlock(&t->lock);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return rc;
}

int kvfs_slot_set_generation(struct kvfs_table *t, uint32_t slot, uint32_t generation) {
    struct kvfs_slot_header next;
    kvfs_lock(&t->lock);
    int rc = back_slot(t, slot);
    if (rc == 0) {
        memcpy(&next, &t->slots[slot], sizeof next);
        next.generation = generation;
        kvfs_slot_header_store(t, slot, &next);
    }
    kvfs_unlock(&t->lock);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return rc;
}

/* 1 if the checksum was recorded, 0 if the slot has moved on from that generation. */
int kvfs_slot_set_checksum(struct kvfs_table *t, uint32_t slot, uint32_t generation, uint64_t value) {
    kvfs_lock(&t->lock);
    int rc = slot < t->slots_backed ? kvfs_slot_store_checksum(t, slot, generation, value) : 0;
    kvfs_unlock(&t->lock);
    return rc;
}

uint64_t kvfs_slot_header_checksum(const struct kvfs_slot_header *header) { return kvfs_slot_header_sum(header); }

/* --- the life of the table ------------------------------------------------------------------------------ */

int kvfs_table_set_clean(struct kvfs_table *t, uint32_t clean) {
    KVFS_STORE_RELEASE(&t->header->clean, clean);
    return 0;
}

void kvfs_table_hide(struct kvfs_table *t, uint32_t tiers) { KVFS_STORE_RELEASE(&t->header->hidden_tiers, tiers); }

int kvfs_table_set_dead(struct kvfs_table *t) {
    KVFS_STORE_RELEASE(&t->header->dead, 1);
    return 0;
}
