/* The shared table as bytes: one header page, slot headers, index entries.
 *
 * Responsibility: layout only. `docs/formats.md` describes every field; `kvfs/formats.py` holds the same offsets
 * and a test compares the two. All integers are little endian. Growing a structure raises its version.
 */
#ifndef KVFS_FORMATS_H
#define KVFS_FORMATS_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "kvfs formats are little endian; a big-endian port needs byte swaps here"
#endif

#define KVFS_TABLE_MAGIC "KVFSTABL"
#define KVFS_TABLE_VERSION 1u
#define KVFS_SLOT_VERSION 1u
#define KVFS_KEY_BYTES 16
#define KVFS_TABLE_HEADER_BYTES 4096u
#define KVFS_SLOT_HEADER_BYTES 128u
#define KVFS_ENTRY_BYTES 64u
/* Bytes of the table header that its checksum covers: all that never changes after creation. */
#define KVFS_TABLE_FIXED_BYTES 120u

/* Upper bound of live entries, in percent. Linear probing costs 8.5 probes for a miss at 75, 50 at 90. */
#define KVFS_TABLE_MAX_LOAD_PERCENT 75u
/* How long a reader waits for a writer that stopped in mid-change (killed, or not scheduled). */
#define KVFS_READER_WAIT_NS 100000000ll

/* Of an object, and the bits of its tiers, as in `tiers.model`. */
enum { KVFS_KIND_OBJECT = 1, KVFS_KIND_BLOCK = 2 };
enum {
    KVFS_TIER_DRAM = 1,
    KVFS_TIER_HBM = 2,
    KVFS_TIER_NVME = 4,
    KVFS_TIER_REMOTE = 8,
    KVFS_TIER_COLD = 16,
    KVFS_TIER_UNVERIFIED = 32, /* in a slot that a start took over, whose payload is still to be hashed */
};

/* Bits of kvfs_index_entry.flags. */
#define KVFS_ENTRY_PINNED 1u

enum kvfs_entry_state { KVFS_ENTRY_EMPTY = 0, KVFS_ENTRY_LIVE = 1 };

enum kvfs_slot_state { KVFS_SLOT_FREE = 0, KVFS_SLOT_DRAFT = 1, KVFS_SLOT_SEALED = 2 };

/* Bits of kvfs_slot_header.marks. */
#define KVFS_MARK_HAS_CHECKSUM 1u

struct kvfs_table_header {
    uint8_t magic[8];
    uint32_t version;
    uint32_t header_bytes;
    uint8_t store_id[16];
    uint32_t slot_count;
    uint32_t entry_count; /* a power of two */
    uint64_t slots_offset;
    uint64_t entries_offset;
    uint64_t file_bytes;
    uint32_t slot_header_bytes;
    uint32_t entry_bytes;
    uint64_t hash_seed;
    uint64_t created_ns;
    uint8_t reserved0[32];
    uint64_t header_checksum; /* XXH3-64 of the bytes before it */
    /* What follows changes while the table lives. */
    uint32_t clean;        /* 1 after a clean close */
    uint32_t dead;         /* 1 once the service has replaced this table */
    uint32_t hidden_tiers; /* bits of tiers that cannot be read now: what only they have is a miss */
    uint8_t reserved1[52];
    uint32_t move_seq; /* odd while an entry moves */
    uint8_t reserved2[60];
    uint32_t live_entries;
    uint32_t slots_used; /* 1 + the highest slot whose header was ever written */
    uint8_t reserved3[3832];
};

struct kvfs_slot_header {
    uint32_t seq; /* odd while being written */
    uint16_t version;
    uint8_t state;
    uint8_t kind;
    uint32_t generation; /* odd: draft or free; even: sealed (0: never used) */
    uint32_t flags;
    uint8_t key[KVFS_KEY_BYTES];
    uint64_t object_id;
    uint64_t sequence;
    uint64_t size_bytes;
    uint64_t checksum; /* XXH3-64 of the payload, when marks says so */
    uint8_t parent[KVFS_KEY_BYTES];
    uint32_t uid;
    uint32_t bucket_id;
    int64_t sealed_at_ns;
    uint32_t marks;
    uint32_t reserved0;
    uint64_t reserved1[2];
    uint64_t header_checksum; /* XXH3-64 of bytes 4..119 */
};

struct kvfs_index_entry {
    uint32_t seq; /* odd while being written; one aligned 8-byte word with the next four fields */
    uint8_t state;
    uint8_t kind;
    uint8_t tiers;
    uint8_t flags;
    uint8_t key[KVFS_KEY_BYTES];
    uint32_t slot;
    uint32_t generation;
    uint64_t size_bytes;
    uint64_t location; /* NVMe; zero while unused */
    uint32_t hits;     /* this word changes without the seqlock */
    uint32_t last_access_s;
    uint64_t reserved;
};

static_assert(sizeof(struct kvfs_table_header) == KVFS_TABLE_HEADER_BYTES, "table header");
static_assert(offsetof(struct kvfs_table_header, header_checksum) == KVFS_TABLE_FIXED_BYTES, "fixed part");
static_assert(offsetof(struct kvfs_table_header, clean) == 128, "own cache line");
static_assert(offsetof(struct kvfs_table_header, move_seq) == 192, "own cache line");
static_assert(offsetof(struct kvfs_table_header, live_entries) == 256, "own cache line");
static_assert(sizeof(struct kvfs_slot_header) == KVFS_SLOT_HEADER_BYTES, "slot header");
static_assert(offsetof(struct kvfs_slot_header, header_checksum) == 120, "slot header checksum");
static_assert(sizeof(struct kvfs_index_entry) == KVFS_ENTRY_BYTES, "index entry");
static_assert(offsetof(struct kvfs_index_entry, hits) == 48, "hits and last access share a word");

#endif
