/* Reading blocks of another machine into drafts. See stream_core.c. */
#ifndef KVFS_REMOTE_STREAM_CORE_H
#define KVFS_REMOTE_STREAM_CORE_H

#include <stdint.h>

#include "remote/channel.h"
#include "remote/fabric.h"
#include "shared/mutex.h"
#include "wire.h"

/* Besides those of the wire. */
enum {
    KVFS_REMOTE_NOT_ANSWERED = 16,
    KVFS_REMOTE_MISMATCH = 17, /* the bytes are not those of the checksum */
    KVFS_REMOTE_NOT_WRITTEN = 18,
};

/* A want and its draft, open for writing; `fd` is closed when it is answered, and at the end in any case. */
struct kvfs_remote_read {
    struct kvfs_remote_want want;
    int fd;
    uint32_t status;
    uint64_t size_bytes, checksum;
    uint8_t parent[KVFS_KEY_BYTES];
};

enum { KVFS_STREAM_IDLE, KVFS_STREAM_BUSY, KVFS_STREAM_DONE, KVFS_STREAM_CLOSING };

struct kvfs_remote_stream {
    struct kvfs_channel channel;
    struct kvfs_fabric *fabric; /* NULL: all bytes come over the channel */
    int notify_fd;              /* readable once a job is done */
    int started;
    pthread_t thread;
    uint8_t *buffer;
    struct kvfs_mutex lock;
    pthread_cond_t wake;
    int state GUARDED_BY(lock);
    /* The thread's while the stream is busy, else the event loop's. */
    struct kvfs_remote_request request;
    int64_t deadline_ns;
    struct kvfs_remote_read reads[KVFS_REMOTE_READS];
    uint8_t digests[KVFS_REMOTE_MATCHES * KVFS_KEY_BYTES];
    uint64_t sizes[KVFS_REMOTE_MATCHES];
    uint32_t matched;
    uint64_t begun, taken; /* pieces of the fabric, since the connection began */
    uint8_t out[sizeof(struct kvfs_remote_request) + KVFS_REMOTE_MATCHES * KVFS_KEY_BYTES];
    const uint8_t *unsent;
    size_t unsent_bytes;
    int result; /* 0, or -errno: the stream is of no use any more */
};

/* Takes over the channel and the fabric, unless it fails; all else is zero. */
int kvfs_stream_start(struct kvfs_remote_stream *s, struct kvfs_channel channel, struct kvfs_fabric *fabric);
void kvfs_stream_begin(struct kvfs_remote_stream *s);
int kvfs_stream_take(struct kvfs_remote_stream *s);
void kvfs_stream_stop(struct kvfs_remote_stream *s);

#endif
