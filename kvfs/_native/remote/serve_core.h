/* Serving blocks to other machines without the event loop. See serve_core.c. */
#ifndef KVFS_REMOTE_SERVE_CORE_H
#define KVFS_REMOTE_SERVE_CORE_H

#include <stdint.h>

#include "remote/channel.h"
#include "remote/fabric.h"
#include "shared/hits.h"
#include "shared/mutex.h"
#include "shared/table_core.h"
#include "wire.h"

/* A bucket that is bound to a namespace: of all blocks only those in it are served for that. */
struct kvfs_remote_binding {
    uint8_t namespace_digest[KVFS_KEY_BYTES];
    uint32_t bucket_id;
};

/* Blocks below DRAM that a MATCH asks for: the event loop says how many of them, from the first on, are in the bucket of
 * the namespace. The keys are the waiting thread's own. */
struct kvfs_remote_question {
    const uint8_t *namespace_digest, *digests;
    uint32_t count;
    uint64_t number; /* tells an answer to this question from one that is too late */
    uint32_t found;
    uint8_t waits;
};

/* A block that a lower tier has and the event loop is to bring up, if it is the namespace's. */
struct kvfs_remote_lift {
    uint8_t digest[KVFS_KEY_BYTES];
    uint8_t namespace_digest[KVFS_KEY_BYTES];
    uint8_t used, taken;
};

struct kvfs_remote_counts {
    uint64_t requests, matches, found, absent, too_large, busy, bytes, broken;
};

struct kvfs_remote_connection;

struct kvfs_remote_server {
    const struct kvfs_table *table;
    int (*hash)(int fd, uint64_t *checksum, uint64_t *bytes);
    int dirfd;
    int notify_fd; /* readable while lifts, questions or ended connections wait for the event loop */
    int started;
    int64_t lift_wait_ns;
    int idle_ms; /* a connection that blocks were read over ends after so long without a request */
    struct kvfs_remote_connection *connections; /* the event loop's, as is their number */
    uint32_t connection_count, lift_room;
    struct kvfs_hits hits; /* blocks that were sent whole */
    struct kvfs_mutex lock;
    pthread_cond_t lifted; /* or a question was answered */
    struct kvfs_remote_binding *bindings GUARDED_BY(lock);
    uint32_t binding_count GUARDED_BY(lock);
    struct kvfs_remote_lift *lifts GUARDED_BY(lock);
    struct kvfs_remote_counts counts GUARDED_BY(lock);
    int stopping GUARDED_BY(lock);
};

struct kvfs_remote_connection {
    struct kvfs_remote_server *server;
    pthread_t thread;
    int used; /* the event loop's */
    struct kvfs_channel channel;
    uint8_t *pieces;            /* of blocks, on their way into a session; NULL without one */
    struct kvfs_fabric *fabric; /* NULL: all bytes go over the channel */
    uint32_t number;
    /* The thread's, for the request that it answers. */
    int64_t begun_ns;            /* when its first byte was there */
    uint32_t bound_bucket;       /* that of the last block, 0 before there was one */
    uint64_t sent;               /* bit i: the i-th block of a READ was sent whole */
    int has_read;                /* in this request or an earlier one */
    int by_fabric;               /* what is larger than INLINE_BYTES of serve_requests.c */
    uint64_t sent_pieces, taken; /* by the fabric, since the connection began */
    int64_t deadline_ns;         /* the asker waits no longer */
    int64_t below_deadline_ns;   /* until then it waits for what is below DRAM, for all its blocks together */
    struct kvfs_remote_question question GUARDED_BY(server->lock);
    int ended GUARDED_BY(server->lock); /* 0, or 1 once the thread has done its last step */
    int error GUARDED_BY(server->lock); /* why it ended: 0 or -errno */
};

/* `table`, `hash`, `dirfd`, `lift_wait_ns` and `idle_ms` are set, all else is zero. */
int kvfs_remote_start(struct kvfs_remote_server *s, uint32_t connections, uint32_t lifts, uint32_t hits);
void kvfs_remote_stop(struct kvfs_remote_server *s);
int64_t kvfs_remote_open(struct kvfs_remote_server *s, struct kvfs_channel channel, struct kvfs_fabric *fabric);
int kvfs_remote_reap(struct kvfs_remote_server *s, uint32_t number, int *error);
int kvfs_remote_bind(struct kvfs_remote_server *s, const struct kvfs_remote_binding *bindings, uint32_t count);
uint32_t kvfs_remote_take_lifts(struct kvfs_remote_server *s, uint8_t *pairs, uint32_t most);
void kvfs_remote_lifted(struct kvfs_remote_server *s, const uint8_t *digest, const uint8_t *namespace_digest);
uint64_t kvfs_remote_take_question(struct kvfs_remote_server *s, uint32_t connection, uint8_t *keys, uint32_t *count);
void kvfs_remote_answer(struct kvfs_remote_server *s, uint32_t connection, uint64_t number, uint32_t found);
void kvfs_remote_read_counts(struct kvfs_remote_server *s, struct kvfs_remote_counts *into);

#endif
