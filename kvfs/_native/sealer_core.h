/* Sealing blocks without the event loop. See sealer_core.c. */
#ifndef KVFS_SEALER_CORE_H
#define KVFS_SEALER_CORE_H

#include <pthread.h>
#include <stdint.h>

#include "table_core.h"

#define KVFS_SEALS_AT_ONCE 64
#define KVFS_SEAL_HAS_CHECKSUM 1u

/* docs/sessions.md, "Block seal" and "Result". */
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

enum kvfs_seal_outcome {
    KVFS_SEAL_NEW = 0,
    KVFS_SEAL_THERE = 1,     /* the block was there: the draft goes back */
    KVFS_SEAL_UNINDEXED = 2, /* the table is full: the sealed slot goes back */
};

/* What was done to a draft, until the event loop has heard of it. */
struct kvfs_sealed {
    uint32_t slot;
    uint32_t generation; /* of the draft */
    uint32_t channel;
    uint32_t outcome;
    uint8_t key[KVFS_KEY_BYTES];
    uint8_t parent[KVFS_KEY_BYTES];
    uint64_t object_id;
    uint64_t size_bytes;
    uint64_t physical_bytes;
    int64_t sealed_at_ns;
    uint32_t has_checksum;
};

/* Whose draft a slot is: the exact pair, since a generation is handed out once. */
struct kvfs_grant {
    uint32_t generation;
    uint32_t channel;
};

/* One session's: a socket, and the thread that answers it. */
struct kvfs_seal_channel {
    struct kvfs_sealer *sealer;
    pthread_t thread;
    int used;
    int fd;
    uint32_t number;
    uint32_t uid;
    uint32_t bucket_id;
};

/* The table's writer lives in another module. */
struct kvfs_table_writer {
    int (*put)(struct kvfs_table *t, const uint8_t *key, const struct kvfs_entry_value *value);
    int (*publish)(struct kvfs_table *t, uint32_t slot, uint32_t draft, const struct kvfs_slot_header *header);
};

struct kvfs_sealer {
    struct kvfs_table *table;
    struct kvfs_table_writer writer;
    int dirfd;
    uint64_t largest_bytes;
    pthread_mutex_t lock; /* guards everything below but the channels, which are the event loop's */
    int told_fd; /* readable while `ring` has what the event loop was not told of */
    int started;
    struct kvfs_grant *grants; /* by slot */
    struct kvfs_seal_channel *channels;
    uint32_t channel_count;
    struct kvfs_sealed *ring;
    uint32_t ring_room;
    uint32_t head;
    uint32_t count;
    uint64_t next_id;
    uint64_t end_id;
    uint64_t sealed;
    uint64_t refused;
};

int kvfs_sealer_start(struct kvfs_sealer *s, uint32_t channels, uint32_t room);
void kvfs_sealer_stop(struct kvfs_sealer *s);
int64_t kvfs_sealer_open(struct kvfs_sealer *s, int fd, uint32_t uid, uint32_t bucket_id);
void kvfs_sealer_close(struct kvfs_sealer *s, uint32_t channel);
void kvfs_sealer_grant(struct kvfs_sealer *s, uint32_t slot, uint32_t generation, uint32_t channel);
void kvfs_sealer_revoke(struct kvfs_sealer *s, uint32_t slot);
void kvfs_sealer_give_ids(struct kvfs_sealer *s, uint64_t first, uint64_t count);
uint64_t kvfs_sealer_ids_left(struct kvfs_sealer *s);
uint32_t kvfs_sealer_take(struct kvfs_sealer *s, struct kvfs_sealed *into, uint32_t most);

#endif
