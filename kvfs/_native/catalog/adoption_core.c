/* What a start takes over of an earlier service's slots.
 *
 * Responsibility: read the old table, look at each slot's file, order what is wanted by its worth, hash payloads. Which
 * objects are wanted is chosen above.
 *
 * Invariants:
 * - The old table is read with pread, and never waited for: no writer of it is left, and through a mapping a hole of a
 *   full tmpfs would be a SIGBUS.
 * - A survivor's header matched its own checksum, says sealed, and names one object. `by_slot` finds it by its slot.
 * - Generations go on from the old table's, damaged ones past all others.
 * - The order begins with the dearest: any first part of it is worth keeping. A block stands behind its ancestors.
 *
 * Concurrency: one thread, but for `check_files` and `verify`: their threads take survivors from `next` on, and write
 * nothing but the flags and sizes of those.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "adoption_core.h"

#include <errno.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "shared/pages.h"
#include "shared/table_write.h"

#define NONE KVFS_NO_SURVIVOR
#define PIECE_BYTES (1u << 20)
#define AT_ONCE 64u /* survivors that a thread takes */
#define NS_PER_S 1000000000ll

static int is_shortage(int error) {
    return error == ENOMEM || error == EMFILE || error == ENFILE || error == EAGAIN || error == ENOSPC;
}

/* --- life --------------------------------------------------------------------------------------------------------- */
int kvfs_adoption_init(struct kvfs_adoption *a, uint32_t slots) {
    memset(a, 0, sizeof *a);
    a->slots = slots;
    a->files = calloc(slots / 8u + 1u, 1);
    return a->files ? 0 : -ENOMEM;
}

void kvfs_adoption_free(struct kvfs_adoption *a) {
    free(a->survivors);
    free(a->generations);
    free(a->by_slot);
    free(a->damaged);
    free(a->by_key);
    free(a->order);
    free(a->files);
    memset(a, 0, sizeof *a);
}

/* --- the old table ------------------------------------------------------------------------------------------------ */
static uint64_t big_endian(const uint8_t *from) {
    uint64_t value;
    memcpy(&value, from, sizeof value);
    return __builtin_bswap64(value);
}

static int names_one_object(const struct kvfs_slot_header *h) {
    if (h->kind != KVFS_KIND_OBJECT && h->kind != KVFS_KIND_BLOCK) return 0;
    if (h->generation & 1) return 0;
    const uint64_t high = big_endian(h->key); /* of no block's hash 0: it would be found as the object of that number */
    return h->kind == KVFS_KIND_BLOCK ? high != 0 : high == 0 && big_endian(h->key + 8) == h->object_id;
}

static int add_survivor(struct kvfs_adoption *a, uint32_t slot, const struct kvfs_slot_header *h) {
    if (a->count == a->room) {
        uint64_t room = a->room + a->room / 8ull + 1024;
        struct kvfs_survivor *survivors = realloc(a->survivors, room * sizeof *survivors);
        if (!survivors) return -ENOMEM;
        a->survivors = survivors;
        a->room = (uint32_t)room;
    }
    int64_t sealed_s = h->sealed_at_ns / NS_PER_S;
    a->by_slot[slot] = a->count;
    a->survivors[a->count++] = (struct kvfs_survivor){
        .header = *h,
        .slot = slot,
        .last_access_s = sealed_s < 0            ? 0
                         : sealed_s > UINT32_MAX ? UINT32_MAX
                                                 : (uint32_t)sealed_s,
        .next = NONE,
    };
    return 0;
}

static int take_header(struct kvfs_adoption *a, uint32_t slot, const struct kvfs_slot_header *h) {
    static const struct kvfs_slot_header nothing;
    a->generations[slot] = h->generation;
    a->by_slot[slot] = NONE;
    if (memcmp(h, &nothing, sizeof nothing) == 0) return 0;
    if (h->seq & 1 || h->version != KVFS_SLOT_VERSION || h->header_checksum != kvfs_slot_header_sum(h)) {
        a->generations[slot] = 0;
        a->damaged[a->damaged_count++] = slot;
        return 0;
    }
    return h->state == KVFS_SLOT_SEALED && names_one_object(h) ? add_survivor(a, slot, h) : 0;
}

/* Goes through `count` structures of the file in pieces; it may end early, as a truncated file does. */
static int each_piece(struct kvfs_adoption *a, int fd, uint64_t offset, uint64_t bytes, uint8_t *piece,
                      int (*take)(struct kvfs_adoption *, uint64_t first_byte, const uint8_t *, size_t)) {
    for (uint64_t done = 0; done < bytes;) {
        size_t wanted = bytes - done < PIECE_BYTES ? (size_t)(bytes - done) : PIECE_BYTES;
        ssize_t got = pread(fd, piece, wanted, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return got < 0 ? -errno : 0;
        int rc = take(a, done, piece, (size_t)got);
        if (rc < 0) return rc;
        done += (uint64_t)got;
    }
    return 0;
}

static int take_headers(struct kvfs_adoption *a, uint64_t first_byte, const uint8_t *piece, size_t bytes) {
    struct kvfs_slot_header header;
    int rc = 0;
    for (size_t at = 0; at + sizeof header <= bytes && rc == 0; at += sizeof header) {
        memcpy(&header, piece + at, sizeof header);
        rc = take_header(a, (uint32_t)((first_byte + at) / sizeof header), &header);
    }
    return rc;
}

/* How often each object was used, of entries that name a survivor. */
static int take_entries(struct kvfs_adoption *a, uint64_t first_byte, const uint8_t *piece, size_t bytes) {
    (void)first_byte;
    struct kvfs_index_entry entry;
    for (size_t at = 0; at + sizeof entry <= bytes; at += sizeof entry) {
        memcpy(&entry, piece + at, sizeof entry);
        if (entry.state != KVFS_ENTRY_LIVE || entry.seq & 1 || entry.slot >= a->used || a->by_slot[entry.slot] == NONE)
            continue;
        struct kvfs_survivor *s = &a->survivors[a->by_slot[entry.slot]];
        if (s->header.generation != entry.generation || memcmp(s->header.key, entry.key, KVFS_KEY_BYTES) != 0) continue;
        s->hits = entry.hits;
        s->last_access_s = entry.last_access_s;
        if (entry.flags & KVFS_ENTRY_PINNED) s->flags |= KVFS_SURVIVOR_PINNED;
    }
    return 0;
}

static void skip_damaged(struct kvfs_adoption *a) {
    uint32_t past = 0;
    for (uint32_t slot = 0; slot < a->used; slot++) past = a->generations[slot] > past ? a->generations[slot] : past;
    for (uint32_t i = 0; i < a->damaged_count; i++) a->generations[a->damaged[i]] = past + 2;
}

int kvfs_adoption_read(struct kvfs_adoption *a, int fd, const struct kvfs_table_header *head) {
    uint32_t used = head->slots_used < head->slot_count ? head->slots_used : head->slot_count;
    uint8_t *piece = malloc(PIECE_BYTES);
    a->generations = calloc(used + 1ull, sizeof *a->generations);
    a->by_slot = malloc((used + 1ull) * sizeof *a->by_slot);
    a->damaged = malloc((used + 1ull) * sizeof *a->damaged);
    int rc = piece && a->generations && a->by_slot && a->damaged ? 0 : -ENOMEM;
    if (rc == 0) {
        memset(a->by_slot, 0xff, used * sizeof *a->by_slot);
        a->used = used;
        rc = each_piece(a, fd, head->slots_offset, used * sizeof(struct kvfs_slot_header), piece, take_headers);
    }
    if (rc == 0 && a->count) /* a table for 16 million slots has 2 GiB of entries */
        rc = each_piece(a, fd, head->entries_offset, head->entry_count * sizeof(struct kvfs_index_entry), piece,
                        take_entries);
    if (rc == 0) skip_damaged(a);
    free(piece);
    return rc;
}

/* --- files -------------------------------------------------------------------------------------------------------- */
void kvfs_adoption_note_file(struct kvfs_adoption *a, uint32_t slot) {
    a->files[slot / 8] |= (uint8_t)(1u << slot % 8);
}

int kvfs_adoption_has_file(const struct kvfs_adoption *a, uint32_t slot) {
    return slot < a->slots && (a->files[slot / 8] >> slot % 8 & 1);
}

/* A slot is whole where its file has the header's size and nobody can write it, and there is a checksum for it. Of a small
 * one only that is looked at now which costs no system call: the rest when it is hashed. */
static int check_file(struct kvfs_adoption *a, int dirfd, kvfs_check_slot *check, uint64_t later_bytes,
                      struct kvfs_survivor *s) {
    const struct kvfs_slot_header *h = &s->header;
    struct kvfs_slot_stat found = {h->size_bytes, kvfs_page_up(h->size_bytes)};
    if (!kvfs_adoption_has_file(a, s->slot) || !(h->marks & KVFS_MARK_HAS_CHECKSUM)) return 0;
    int is_later = h->size_bytes <= later_bytes;
    int rc = is_later ? 0 : check(dirfd, s->slot, &found);
    if (rc < 0) return is_shortage(-rc) ? rc : 0;
    if (found.size_bytes == h->size_bytes) {
        s->flags |= KVFS_SURVIVOR_WHOLE | (is_later ? KVFS_SURVIVOR_LATER : 0);
        s->blocks = (uint32_t)(found.physical_bytes / 512);
    }
    return 0;
}

static uint32_t take_some(struct kvfs_adoption *a, uint32_t count, uint32_t *end) {
    if (__atomic_load_n(&a->error, __ATOMIC_RELAXED)) return *end = count;
    uint32_t from = __atomic_fetch_add(&a->next, AT_ONCE, __ATOMIC_RELAXED);
    *end = from + AT_ONCE < count ? from + AT_ONCE : count;
    return from;
}

static int fail(struct kvfs_adoption *a, int rc) {
    __atomic_store_n(&a->error, rc, __ATOMIC_RELAXED);
    return rc;
}

int kvfs_adoption_check_files(struct kvfs_adoption *a, int dirfd, kvfs_check_slot *check, uint64_t later_bytes) {
    uint32_t end;
    for (uint32_t at; (at = take_some(a, a->count, &end)) < a->count;) {
        for (; at < end; at++) {
            int rc = check_file(a, dirfd, check, later_bytes, &a->survivors[at]);
            if (rc < 0) return fail(a, rc);
        }
    }
    return 0;
}

/* Waits for a probe's lease to end, a microsecond: refused, it would look like damage. */
int kvfs_slot_matches(int dirfd, uint32_t slot, uint64_t size_bytes, uint64_t checksum, kvfs_probe_fd *has_writer,
                      uint8_t *chunk) {
    int fd = kvfs_slot_open(dirfd, slot, O_RDONLY);
    if (fd < 0) return is_shortage(-fd) ? fd : 0;
    if (has_writer(fd) != 0) {
        close(fd);
        return 0;
    }
    XXH3_state_t state;
    uint64_t done = 0;
    ssize_t got;
    XXH3_64bits_reset(&state);
    while ((got = pread(fd, chunk, KVFS_HASH_CHUNK_BYTES, (off_t)done)) > 0 || (got < 0 && errno == EINTR)) {
        if (got > 0) {
            XXH3_64bits_update(&state, chunk, (size_t)got);
            done += (uint64_t)got;
        }
    }
    int rc = got < 0 && is_shortage(errno) ? -errno : got == 0 && done == size_bytes;
    close(fd);
    return rc == 1 ? XXH3_64bits_digest(&state) == checksum : rc;
}

/* Hashes what is not verified later. */
int kvfs_adoption_verify(struct kvfs_adoption *a, int dirfd, kvfs_probe_fd *has_writer) {
    uint8_t *chunk = malloc(KVFS_HASH_CHUNK_BYTES);
    uint32_t end;
    if (!chunk) return fail(a, -ENOMEM);
    for (uint32_t at; (at = take_some(a, a->ordered, &end)) < a->ordered;) {
        for (; at < end; at++) {
            struct kvfs_survivor *s = &a->survivors[a->order[at]];
            int rc = s->flags & KVFS_SURVIVOR_LATER ? 1
                                                    : kvfs_slot_matches(dirfd, s->slot, s->header.size_bytes,
                                                                        s->header.checksum, has_writer, chunk);
            if (rc < 0) {
                free(chunk);
                return fail(a, rc);
            }
            if (rc == 0) s->flags |= KVFS_SURVIVOR_BAD;
        }
    }
    free(chunk);
    return 0;
}

/* --- keys --------------------------------------------------------------------------------------------------------- */
static uint32_t *key_home(const struct kvfs_adoption *a, const uint8_t *key) {
    uint64_t low, high;
    memcpy(&low, key, 8);
    memcpy(&high, key + 8, 8);
    return &a->by_key[kvfs_mix64(kvfs_mix64(low) + high) & a->key_mask];
}

static uint32_t find(const struct kvfs_adoption *a, const uint8_t *key) {
    uint32_t i = *key_home(a, key);
    while (i != NONE && memcmp(a->survivors[i].header.key, key, KVFS_KEY_BYTES) != 0) i = a->survivors[i].next;
    return i;
}

/* Of whole slots with one key the one that was sealed first stays whole: the first seal of a block wins. */
int kvfs_adoption_keep_whole(struct kvfs_adoption *a) {
    uint32_t homes = 256;
    while (homes < a->count) homes *= 2;
    a->by_key = malloc(homes * sizeof *a->by_key);
    if (!a->by_key) return -ENOMEM;
    memset(a->by_key, 0xff, homes * sizeof *a->by_key);
    a->key_mask = homes - 1;
    for (uint32_t i = 0; i < a->count; i++) {
        struct kvfs_survivor *s = &a->survivors[i];
        if (!(s->flags & KVFS_SURVIVOR_WHOLE)) continue;
        uint32_t known = find(a, s->header.key);
        if (known != NONE && a->survivors[known].header.sequence <= s->header.sequence) {
            s->flags &= ~(uint32_t)KVFS_SURVIVOR_WHOLE;
            continue;
        }
        if (known != NONE) {
            uint32_t *at = key_home(a, s->header.key);
            while (*at != known) at = &a->survivors[*at].next;
            *at = a->survivors[known].next;
            a->survivors[known].flags &= ~(uint32_t)KVFS_SURVIVOR_WHOLE;
        }
        uint32_t *home = key_home(a, s->header.key);
        s->next = *home;
        *home = i;
    }
    return 0;
}

uint32_t kvfs_adoption_find(const struct kvfs_adoption *a, const uint8_t *key) {
    return a->by_key ? find(a, key) : NONE;
}

/* --- the order ---------------------------------------------------------------------------------------------------- */
static int by_worth(const void *left, const void *right, void *argument) {
    const struct kvfs_survivor *all = (const struct kvfs_survivor *)argument;
    const struct kvfs_survivor *a = &all[*(const uint32_t *)left], *b = &all[*(const uint32_t *)right];
    uint32_t a_pinned = a->flags & KVFS_SURVIVOR_PINNED, b_pinned = b->flags & KVFS_SURVIVOR_PINNED;
    if (a_pinned != b_pinned) return a_pinned ? -1 : 1;
    if (a->last_access_s != b->last_access_s) return a->last_access_s > b->last_access_s ? -1 : 1;
    if (a->header.sequence != b->header.sequence) return a->header.sequence > b->header.sequence ? -1 : 1;
    return 0;
}

static void place(struct kvfs_adoption *a, uint32_t i) {
    if (!(a->survivors[i].flags & KVFS_SURVIVOR_PLACED)) {
        a->survivors[i].flags |= KVFS_SURVIVOR_PLACED;
        a->order[a->ordered++] = i;
    }
}

/* The block that this one stands behind, if that is wanted too and has no place yet. */
static uint32_t unplaced_parent(const struct kvfs_adoption *a, uint32_t i) {
    const struct kvfs_slot_header *h = &a->survivors[i].header;
    uint32_t parent = h->kind == KVFS_KIND_BLOCK ? find(a, h->parent) : NONE;
    if (parent == NONE || a->survivors[parent].header.kind != KVFS_KIND_BLOCK) return NONE;
    uint32_t flags = a->survivors[parent].flags;
    int is_next = flags & KVFS_SURVIVOR_WANTED && !(flags & (KVFS_SURVIVOR_PLACED | KVFS_SURVIVOR_IN_CHAIN));
    return is_next ? parent : NONE;
}

/* Places a block behind those of its ancestors that have no place yet. `chain` has room for all. */
static void place_chain(struct kvfs_adoption *a, uint32_t i, uint32_t *chain) {
    uint32_t length = 0;
    for (; i != NONE; i = unplaced_parent(a, i)) {
        a->survivors[i].flags |= KVFS_SURVIVOR_IN_CHAIN;
        chain[length++] = i;
    }
    while (length) place(a, chain[--length]);
}

static int by_unit(const void *left, const void *right, void *argument) {
    const struct kvfs_survivor *all = (const struct kvfs_survivor *)argument;
    uint32_t i = *(const uint32_t *)left, j = *(const uint32_t *)right, a = all[i].unit, b = all[j].unit;
    return a != b ? (a > b) - (a < b) : (i > j) - (i < j);
}

/* Where the members of a unit begin, of those that are sorted by unit. */
static uint32_t first_of_unit(const struct kvfs_adoption *a, uint32_t unit, const uint32_t *members, uint32_t count) {
    uint32_t low = 0, high = count;
    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (a->survivors[members[middle]].unit < unit)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static void place_all(struct kvfs_adoption *a, const uint32_t *recency, uint32_t count, const uint32_t *members,
                      uint32_t grouped, uint32_t *chain) {
    for (uint32_t at = 0; at < count; at++) {
        const struct kvfs_survivor *s = &a->survivors[recency[at]];
        if (s->flags & KVFS_SURVIVOR_PLACED) continue;
        if (!s->unit) {
            place_chain(a, recency[at], chain);
            continue;
        }
        uint32_t unit = s->unit, member = first_of_unit(a, unit, members, grouped);
        while (member < grouped && a->survivors[members[member]].unit == unit) place(a, members[member++]);
    }
}

/* Pinned ones first, then by last use, the latest first; a block behind its ancestors, a unit's files together. */
int kvfs_adoption_sort(struct kvfs_adoption *a) {
    uint32_t count = 0, grouped = 0, *lists = malloc(3 * (a->count + 1ull) * sizeof *lists);
    a->order = malloc((a->count + 1ull) * sizeof *a->order);
    if (!lists || !a->order) {
        free(lists);
        return -ENOMEM;
    }
    uint32_t *recency = lists, *members = lists + a->count, *chain = lists + 2ull * a->count;
    for (uint32_t i = 0; i < a->count; i++) {
        if (!(a->survivors[i].flags & KVFS_SURVIVOR_WANTED)) continue;
        recency[count++] = i;
        if (a->survivors[i].unit) members[grouped++] = i;
    }
    qsort_r(recency, count, sizeof *recency, by_worth, a->survivors);
    qsort_r(members, grouped, sizeof *members, by_unit, a->survivors);
    place_all(a, recency, count, members, grouped, chain);
    free(lists);
    return 0;
}

uint32_t kvfs_adoption_fit(struct kvfs_adoption *a, int64_t room_bytes) {
    uint32_t all = a->ordered, kept = 0;
    for (; kept < all; kept++) {
        room_bytes -= (int64_t)a->survivors[a->order[kept]].blocks * 512;
        if (room_bytes < 0) break;
    }
    for (uint32_t at = kept; at < all; at++) a->survivors[a->order[at]].flags &= ~(uint32_t)KVFS_SURVIVOR_WANTED;
    a->ordered = kept;
    return all - kept;
}

void kvfs_adoption_drop_bad(struct kvfs_adoption *a) {
    uint32_t kept = 0;
    for (uint32_t at = 0; at < a->ordered; at++) {
        struct kvfs_survivor *s = &a->survivors[a->order[at]];
        if (s->flags & KVFS_SURVIVOR_BAD)
            s->flags &= ~(uint32_t)KVFS_SURVIVOR_WANTED;
        else
            a->order[kept++] = a->order[at];
    }
    a->ordered = kept;
}

int kvfs_adoption_keeps(const struct kvfs_adoption *a, uint32_t slot) {
    uint32_t i = slot < a->used ? a->by_slot[slot] : NONE;
    return i != NONE && (a->survivors[i].flags & KVFS_SURVIVOR_WANTED);
}

uint32_t kvfs_adoption_take_unkept(struct kvfs_adoption *a, uint32_t from) {
    while (from < a->slots && (!kvfs_adoption_has_file(a, from) || kvfs_adoption_keeps(a, from))) from++;
    if (from >= a->slots) return UINT32_MAX;
    a->files[from / 8] &= (uint8_t) ~(1u << from % 8);
    return from;
}
