/* Rows of the name index as bytes (kvfs.index.rows): whether one matches its name, and what a start looks at. */
#ifndef KVFS_NAME_ROW_H
#define KVFS_NAME_ROW_H

#include <stdint.h>
#include <string.h>

#include "hash/xxh3.h"

enum {
    KVFS_ROW_BYTES = 68,
    KVFS_ROW_DIGEST_BYTES = 16,
    KVFS_ROW_CHECK_BYTES = 4,
    KVFS_ROW_ROOM_BYTES = 80 * 1024, /* of the longest name and row (kvfs.limits) */
    KVFS_ROW_PINNED = 1,
    KVFS_ROW_DIRECTORY = 2,
    KVFS_ROW_RETIRED = 8,
    KVFS_ROW_LINK = 16,
};

struct kvfs_name_row {
    uint32_t flags;
    uint64_t object_id, size_bytes, sequence;
};

/* What a row says, of `bytes` bytes without the checksum: 1, or 0 where it is of no form that is known here. */
static inline int kvfs_name_row_read(const char *row, uint64_t bytes, struct kvfs_name_row *out) {
    if (bytes < KVFS_ROW_BYTES || row[0] != 1 || row[2] || row[3] || (row[1] && row[1] != KVFS_ROW_DIGEST_BYTES))
        return 0;
    if (bytes < (uint64_t)KVFS_ROW_BYTES + (uint8_t)row[1]) return 0;
    memcpy(&out->flags, row + 4, sizeof out->flags);
    memcpy(&out->object_id, row + 20, sizeof out->object_id);
    memcpy(&out->size_bytes, row + 36, sizeof out->size_bytes);
    memcpy(&out->sequence, row + 44, sizeof out->sequence);
    return 1;
}

/* The same of a row as it is stored: 0 also where it does not match its checksum, or is long. */
static inline int kvfs_name_row_load(const char *name, uint64_t name_bytes, const char *stored, uint64_t stored_bytes,
                                     struct kvfs_name_row *out) {
    char joined[KVFS_ROW_ROOM_BYTES];
    if (stored_bytes < KVFS_ROW_CHECK_BYTES || name_bytes > sizeof joined || stored_bytes > sizeof joined - name_bytes)
        return 0;
    uint64_t bytes = stored_bytes - KVFS_ROW_CHECK_BYTES;
    uint32_t check;
    memcpy(joined, name, name_bytes);
    memcpy(joined + name_bytes, stored, bytes);
    memcpy(&check, stored + bytes, sizeof check);
    return check == (uint32_t)kvfs_xxh3_64(joined, name_bytes + bytes) && kvfs_name_row_read(stored, bytes, out);
}

/* The directory that ends a key's unit (kvfs.paths.unit_prefix): its bytes with the slash, 0 for none. */
static inline uint64_t kvfs_unit_bytes(const char *key, uint64_t bytes) {
    uint64_t end = bytes ? bytes - 1 : 0, start; /* a directory's own slash does not count */
    while (end && key[end - 1] != '/') end--;
    if (!end) return 0;
    start = end - 1;
    while (start && key[start - 1] != '/') start--;
    uint64_t digits = end - 1 - start;
    for (uint64_t i = start; i < end - 1; i++)
        if (!((key[i] >= '0' && key[i] <= '9') || (key[i] >= 'a' && key[i] <= 'f'))) return 0;
    return digits >= 32 && digits <= 128 ? end : 0;
}

#endif
