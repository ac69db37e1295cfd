/* Every field of formats.h with its offset and size, for the test that compares them with kvfs/formats.py. */
#ifndef KVFS_FORMATS_OFFSETS_H
#define KVFS_FORMATS_OFFSETS_H

#include "formats.h"

struct kvfs_field {
    const char *structure;
    const char *name;
    size_t offset;
    size_t size;
};

#define KVFS_FIELD(structure, name) \
    { #structure, #name, offsetof(struct structure, name), sizeof(((struct structure *)0)->name) }
#define T(name) KVFS_FIELD(kvfs_table_header, name)
#define S(name) KVFS_FIELD(kvfs_slot_header, name)
#define E(name) KVFS_FIELD(kvfs_index_entry, name)

/* clang-format off: a structure after the other */
static const struct kvfs_field kvfs_fields[] = {
    T(magic),
    T(version),
    T(header_bytes),
    T(store_id),
    T(slot_count),
    T(entry_count),
    T(slots_offset),
    T(entries_offset),
    T(file_bytes),
    T(slot_header_bytes),
    T(entry_bytes),
    T(hash_seed),
    T(created_ns),
    T(reserved0),
    T(header_checksum),
    T(clean),
    T(dead),
    T(hidden_tiers),
    T(reserved1),
    T(move_seq),
    T(reserved2),
    T(live_entries),
    T(slots_used),
    T(reserved3),
    S(seq),
    S(version),
    S(state),
    S(kind),
    S(generation),
    S(flags),
    S(key),
    S(object_id),
    S(sequence),
    S(size_bytes),
    S(checksum),
    S(parent),
    S(uid),
    S(bucket_id),
    S(sealed_at_ns),
    S(marks),
    S(reserved0),
    S(reserved1),
    S(header_checksum),
    E(seq),
    E(state),
    E(kind),
    E(tiers),
    E(flags),
    E(key),
    E(slot),
    E(generation),
    E(size_bytes),
    E(location),
    E(hits),
    E(last_access_s),
    E(reserved),
};
/* clang-format on */
static const size_t kvfs_field_count = sizeof kvfs_fields / sizeof kvfs_fields[0];

#undef T
#undef S
#undef E
#endif
