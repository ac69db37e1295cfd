/* Sealing blocks without the event loop. See sealer_core.c. */
#ifndef KVFS_SEALER_CORE_H
#define KVFS_SEALER_CORE_H

#include <stdint.h>

#include "packets.h"
#include "shared/mutex.h"
#include "shared/table_core.h"

enum kvfs_seal_outcome {
    KVFS_SEAL_NEW = 0,
    KVFS_SEAL_THERE = 1,     /* the block was there: the draft is to be aborted */
    KVFS_SEAL_UNINDEXED = 2, /* the table is full: the sealed slot is to be recycled */
};

/* The outcome of a seal, until the event loop takes it. */
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
    int notify_fd; /* readable while `ring` has what the event loop was not notified of */
    int started;
    struct kvfs_seal_channel *channels; /* the event loop's, as is their number */
    uint32_t channel_count, ring_room;
    struct kvfs_mutex lock;
    struct kvfs_grant *grants GUARDED_BY(lock); /* by slot */
    struct kvfs_sealed *ring GUARDED_BY(lock);
    uint32_t head GUARDED_BY(lock);
    uint32_t count GUARDED_BY(lock); /* read without, atomically */
    uint64_t next_id GUARDED_BY(lock), end_id GUARDED_BY(lock);
};

int kvfs_sealer_start(struct kvfs_sealer *s, uint32_t channels, uint32_t room);
void kvfs_sealer_stop(struct kvfs_sealer *s);
int64_t kvfs_sealer_open(struct kvfs_sealer *s, int fd, uint32_t uid, uint32_t bucket_id);
void kvfs_sealer_close(struct kvfs_sealer *s, uint32_t channel);
void kvfs_sealer_grant(struct kvfs_sealer *s, uint32_t slot, uint32_t generation, uint32_t channel);
void kvfs_sealer_revoke(struct kvfs_sealer *s, uint32_t slot);
void kvfs_sealer_give_ids(struct kvfs_sealer *s, uint64_t first, uint64_t count);
uint64_t kvfs_sealer_ids_left(struct kvfs_sealer *s);
uint32_t kvfs_sealer_pending(const struct kvfs_sealer *s);
uint32_t kvfs_sealer_take(struct kvfs_sealer *s, struct kvfs_sealed *into, uint32_t most);

#endif
