/* The objects of the NVMe tier that nobody uses as values: 96 bytes for each, and 5 to 10 for the table by id.
 *
 * Responsibility: find a row by object id; insert and remove rows.
 *
 * Invariants:
 * - A row that is in use (KVFS_RECORD_USED) is in `index` once; others are in the list of free ones, by `size_bytes`.
 * - `index` is open addressing with linear probing, at most 3/4 full, without tombstones: a removal closes the gap.
 * - Pointers to rows hold until the next insertion.
 *
 * Concurrency: none; one thread at a time.
 */
#ifndef KVFS_RECORDS_CORE_H
#define KVFS_RECORDS_CORE_H

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define KVFS_RECORD_NONE UINT32_MAX
#define KVFS_RECORD_MIN_INDEX 1024u
/* The share of the rows by which their array grows: realloc moves pages, and a doubled array would be half empty. */
#define KVFS_RECORD_GROWTH_SHARE 16u
#define KVFS_RECORD_UNIT 512u /* of places and sizes of records */
#define KVFS_RECORD_MAX_HITS ((1u << 24) - 1)

enum kvfs_record_flag {
    KVFS_RECORD_USED = 1,
    KVFS_RECORD_BLOCK = 2,
    KVFS_RECORD_PLACED = 4, /* it has an extent, all of its bytes; else none */
    KVFS_RECORD_HAS_META = 8,
    KVFS_RECORD_NAMED = 16,
    KVFS_RECORD_KEPT = 32,
    KVFS_RECORD_RESTORED = 64, /* during a start: the store knows it */
};

struct kvfs_record {
    uint64_t object_id, first_sequence, writing, checksum;
    int64_t sealed_at_ns;
    uint32_t size_bytes; /* and of the extent */
    uint16_t segment, record_units;
    uint32_t offset_units;
    uint32_t bucket_id, uid;
    uint32_t hits : 24, flags : 8;
    union {
        struct {
            uint8_t key[16], parent[16];
        };
        struct {
            uint64_t meta_segment, meta_offset, meta_counted;
        };
    };
};
_Static_assert(sizeof(struct kvfs_record) == 96, "a row");

struct kvfs_records {
    struct kvfs_record *rows;
    uint32_t room, used, free, count; /* `used`: rows from here on were never in use */
    uint32_t *index, mask;
};

static inline uint64_t kvfs_record_mix(uint64_t x) {
    x ^= x >> 33;
    x *= 0xff51afd7ed558ccdull;
    x ^= x >> 33;
    x *= 0xc4ceb9fe1a85ec53ull;
    return x ^ (x >> 33);
}

static inline uint32_t kvfs_records_home(const struct kvfs_records *r, uint64_t id) {
    return (uint32_t)kvfs_record_mix(id) & r->mask;
}

static inline uint32_t *kvfs_records_new_index(uint32_t places) {
    uint32_t *index = malloc(places * sizeof *index);
    if (index) memset(index, 0xff, places * sizeof *index);
    return index;
}

static inline int kvfs_records_init(struct kvfs_records *r) {
    memset(r, 0, sizeof *r);
    r->free = KVFS_RECORD_NONE;
    r->mask = KVFS_RECORD_MIN_INDEX - 1;
    r->index = kvfs_records_new_index(KVFS_RECORD_MIN_INDEX);
    return r->index ? 0 : -ENOMEM;
}

static inline void kvfs_records_free(struct kvfs_records *r) {
    free(r->rows);
    free(r->index);
    memset(r, 0, sizeof *r);
}

/* The place in the index of this id, or the empty one where it would be. */
static inline uint32_t kvfs_records_place(const struct kvfs_records *r, uint64_t id) {
    uint32_t at = kvfs_records_home(r, id);
    while (r->index[at] != KVFS_RECORD_NONE && r->rows[r->index[at]].object_id != id) at = (at + 1) & r->mask;
    return at;
}

static inline struct kvfs_record *kvfs_records_find(const struct kvfs_records *r, uint64_t id) {
    uint32_t row = r->index[kvfs_records_place(r, id)];
    return row == KVFS_RECORD_NONE ? NULL : &r->rows[row];
}

static inline int kvfs_records_grow_index(struct kvfs_records *r) {
    if (r->mask > UINT32_MAX / 2) return -ENOMEM;
    uint32_t places = 2 * (r->mask + 1), *index = kvfs_records_new_index(places);
    if (!index) return -ENOMEM;
    free(r->index);
    r->index = index;
    r->mask = places - 1;
    for (uint32_t row = 0; row < r->used; row++)
        if (r->rows[row].flags & KVFS_RECORD_USED) index[kvfs_records_place(r, r->rows[row].object_id)] = row;
    return 0;
}

static inline int kvfs_records_grow(struct kvfs_records *r) {
    uint64_t room = r->room + r->room / KVFS_RECORD_GROWTH_SHARE + 256ull;
    struct kvfs_record *rows = room < KVFS_RECORD_NONE ? realloc(r->rows, room * sizeof *rows) : NULL;
    if (!rows) return -ENOMEM;
    r->rows = rows;
    r->room = (uint32_t)room;
    return 0;
}

/* A row of zeros with this id, which has none yet; NULL: no memory. */
static inline struct kvfs_record *kvfs_records_insert(struct kvfs_records *r, uint64_t id) {
    if (r->count >= r->mask / 4u * 3u && kvfs_records_grow_index(r) < 0) return NULL;
    uint32_t row = r->free;
    if (row == KVFS_RECORD_NONE) {
        if (r->used == r->room && kvfs_records_grow(r) < 0) return NULL;
        row = r->used++;
    } else {
        r->free = r->rows[row].size_bytes;
    }
    struct kvfs_record *record = &r->rows[row];
    memset(record, 0, sizeof *record);
    record->object_id = id;
    record->flags = KVFS_RECORD_USED;
    r->index[kvfs_records_place(r, id)] = row;
    r->count++;
    return record;
}

static inline void kvfs_records_remove(struct kvfs_records *r, uint64_t id) {
    uint32_t hole = kvfs_records_place(r, id), row = r->index[hole];
    if (row == KVFS_RECORD_NONE) return;
    for (uint32_t at = (hole + 1) & r->mask; r->index[at] != KVFS_RECORD_NONE; at = (at + 1) & r->mask) {
        uint32_t home = kvfs_records_home(r, r->rows[r->index[at]].object_id);
        if (((at - home) & r->mask) >= ((at - hole) & r->mask)) {
            r->index[hole] = r->index[at];
            hole = at;
        }
    }
    r->index[hole] = KVFS_RECORD_NONE;
    r->rows[row].flags = 0;
    r->rows[row].size_bytes = r->free;
    r->free = row;
    r->count--;
}

#endif
