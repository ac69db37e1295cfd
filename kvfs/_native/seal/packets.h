/* The packets of a seal channel, as `docs/sessions.md` has them: "Block seal" and "Result". */
#ifndef KVFS_SEAL_PACKETS_H
#define KVFS_SEAL_PACKETS_H

#include "shared/formats.h"

#define KVFS_SEALS_AT_ONCE 64
#define KVFS_SEAL_HAS_CHECKSUM 1u

struct kvfs_seal_request {
    uint32_t slot;
    uint32_t generation;
    uint8_t key[KVFS_KEY_BYTES];
    uint8_t parent[KVFS_KEY_BYTES];
    uint32_t flags;
    uint32_t processor; /* the writer's, plus 1; 0: not said */
    uint64_t checksum;
};

struct kvfs_seal_result {
    int32_t status;
    uint32_t reserved;
    uint64_t size_bytes;
};

static_assert(sizeof(struct kvfs_seal_request) == 56, "a block seal on the wire");
static_assert(sizeof(struct kvfs_seal_result) == 16, "a result on the wire");

#endif
