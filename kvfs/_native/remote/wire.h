/* What machines say to each other once both have proved the secret, as bytes. docs/formats.md describes every field;
 * tests compare sizes with tiers/remote/wire.py. All integers are little endian.
 */
#ifndef KVFS_REMOTE_WIRE_H
#define KVFS_REMOTE_WIRE_H

#include <assert.h>
#include <stddef.h>
#include <stdint.h>

#include "shared/formats.h"

#define KVFS_REMOTE_REQUEST 0x5152564bu /* "KVRQ" */
#define KVFS_REMOTE_ITEM 0x5449564bu    /* "KVIT" */
#define KVFS_REMOTE_MATCHED 0x414d564bu /* "KVMA" */
#define KVFS_REMOTE_TAKEN 0x5450564bu   /* "KVPT" */

#define KVFS_REMOTE_READS 64u     /* blocks of one READ */
#define KVFS_REMOTE_MATCHES 1024u /* digests of one MATCH */
#define KVFS_REMOTE_WAIT_MS 60000u

enum { KVFS_REMOTE_READ = 1, KVFS_REMOTE_MATCH = 2 };

/* Bits of a request's flags. */
#define KVFS_REMOTE_URGENT 1u
#define KVFS_REMOTE_BY_FABRIC 2u /* the asker takes blocks as pieces */

enum kvfs_remote_status {
    KVFS_REMOTE_FOUND = 0,
    KVFS_REMOTE_ABSENT = 1,
    KVFS_REMOTE_TOO_LARGE = 2, /* longer than the asker's room; `size_bytes` says how long */
    KVFS_REMOTE_BUSY = 3,      /* not brought up in time */
    KVFS_REMOTE_PIECES = 4,    /* found; its bytes are pieces of a fabric */
};

/* READ: `count` wants follow. MATCH: `count` digests. */
struct kvfs_remote_request {
    uint32_t magic;
    uint16_t kind;
    uint16_t flags;
    uint32_t count;
    uint32_t wait_ms; /* the asker waits no longer */
    uint64_t number;
    uint8_t namespace_digest[KVFS_KEY_BYTES];
};

struct kvfs_remote_want {
    uint8_t digest[KVFS_KEY_BYTES];
    uint64_t room_bytes;
};

/* Answers a READ, once for each want and in their order; with FOUND, `size_bytes` bytes follow, with PIECES
 * they come by the fabric. */
struct kvfs_remote_item {
    uint32_t magic;
    uint32_t status;
    uint64_t number; /* of the request */
    uint32_t index;
    uint32_t generation;
    uint64_t size_bytes;
    uint64_t checksum; /* XXH3-64 of the bytes */
    uint8_t parent[KVFS_KEY_BYTES];
    uint64_t reserved;
};

/* Answers a MATCH: `count` sizes of 8 bytes follow. */
struct kvfs_remote_matched {
    uint32_t magic;
    uint32_t count;
    uint64_t number;
};

/* The asker says how many pieces it has received since the connection began. */
struct kvfs_remote_taken {
    uint32_t magic;
    uint32_t reserved;
    uint64_t count;
};

static_assert(sizeof(struct kvfs_remote_taken) == 16, "taken");
static_assert(sizeof(struct kvfs_remote_request) == 40, "request");
static_assert(sizeof(struct kvfs_remote_want) == 24, "want");
static_assert(sizeof(struct kvfs_remote_item) == 64, "item");
static_assert(sizeof(struct kvfs_remote_matched) == 16, "matched");

/* How many bytes follow a request's head, or -EPROTO. */
int64_t kvfs_remote_check_request(const struct kvfs_remote_request *r);
/* 0 where `item` answers the want of this number, index and room, else -EPROTO. */
int kvfs_remote_check_item(const struct kvfs_remote_item *item, uint64_t number, uint32_t index, uint64_t room_bytes);
/* 0 where `m` answers a MATCH of so many digests, else -EPROTO. */
int kvfs_remote_check_matched(const struct kvfs_remote_matched *m, uint64_t number, uint32_t asked);

/* 0 where `t` says more than `before` and no more than `most`, else -EPROTO. */
int kvfs_remote_check_taken(const struct kvfs_remote_taken *t, uint64_t before, uint64_t most);

#endif
