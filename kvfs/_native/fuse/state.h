/* The loop's shared state: nodes, names, requests in flight, opens to report, invalidations to send.
 *
 * The functions of state.c and dentries.c are pure bookkeeping, no protocol and no I/O.
 * Concurrency: callers hold `nodes_lock`, except for the queues of calls and of notices, which have locks of their own.
 */
#ifndef KVFS_FUSE_LOOP_STATE_H
#define KVFS_FUSE_LOOP_STATE_H

#include <sched.h>
#include <stddef.h>

#include "loop.h"
#include "shared/mutex.h"

#define FL_NODE_INDEX_BITS 24 /* a nodeid is generation << 24 | index */
#define FL_CHUNK_BITS 12
#define FL_CHUNKS (1u << (FL_NODE_INDEX_BITS - FL_CHUNK_BITS))
#define FL_PENDING_BITS 14 /* relayed requests in flight: each blocks a thread of some process */
#define FL_OPEN_RECORDS 65536u
#define FL_NOTICES 65536u
#define FL_CALLS 1024u   /* more than that are relayed */
#define FL_SPARES 256u   /* limits.SPARE_DRAFTS */
#define FL_EXPECTED 256u /* threads whose look-ups and opens go to the library: limits.MAX_STALE_RETRIES */
#define FL_LOCKS 65536u  /* held and waited for */
#define FL_LOCK_FILE_BITS 10
#define FL_LOCKED_KEY_BITS 12
#define FL_LISTING_FILE_BITS 10
#define FL_NAME_MAX 255
#define FL_REQUEST_END 2u /* zeros behind a request: names in it end, two of RENAME at the most */
#define FL_MAX_THREADS 64
#define FL_AWAKE_CPUS 4 /* where there are more, none is kept awake */
#define FL_EDGE_CHUNK_BITS 12
#define FL_EDGE_CHUNKS (1u << 13) /* of buckets: two for each node that there can be */

struct fl_node {
    uint64_t nodeid;  /* 0: free */
    uint64_t lookups; /* counted here, not by the library */
    struct fw_attr attr;
    uint32_t slot, generation, opens;
    int32_t backing_id;                   /* 0: none */
    int fd;                               /* -1: none; only without passthrough */
    uint32_t tickets_taken, tickets_done; /* of requests that wait for the ones before them (write_order.c) */
    uint8_t state, killed, flushed;
    uint8_t asked;   /* the kernel may have its attributes: those of a directory are invalidated as they change */
    uint8_t settles; /* a writer's FLUSH, and a RENAME, go to the library, which answers when they are final */
    uint16_t room;   /* a directory whose names are all here: the longest name that fits in it. Else 0 */
    struct fl_edge *unresolved; /* its edges without a node */
    uint64_t lock_key;          /* what its locks are on, with other versions of its file. 0: its inode number */
};

/* A lock that is held, or waited for: `unique` is to be answered. */
struct fl_lock {
    struct fl_lock *next;
    uint64_t key, nodeid, unique, owner, handle, start, end;
    uint32_t type, pid;
    uint8_t whole; /* flock(2) */
    uint8_t quiet; /* taken through a handle whose closes are not reported */
};

/* Of all files with this hash. */
struct fl_lock_file {
    struct fl_lock *held, *waiting;
};

/* An open directory, and the names that were read ahead of its reader. */
struct fl_listing {
    struct fl_listing *next;
    uint64_t fh, from;
    uint64_t first; /* offset of the first name kept */
    char *names;
    uint32_t count;
    int ended;
    const char *place; /* of the last answer: where the name at `place_offset` is */
    uint64_t place_offset;
};

struct fl_pending {
    uint64_t unique; /* 0: free */
    uint64_t nodeid;
    uint32_t opcode;
};

struct fl_notice {
    uint64_t nodeid;
    int code;
    uint8_t length;
    char name[FL_NAME_MAX + 1];
};

/* A name. Without a node (`nodeid` 0) it is unresolved: there may be something, the library knows. */
struct fl_edge {
    struct fl_edge *next;
    struct fl_edge *unresolved_next, **unresolved_at; /* of its directory; unused with a node */
    uint64_t parent, nodeid, hash;
    uint32_t length;
    char name[];
};

/* A draft made ahead of its CREATE: a node with an open backing, without a name. */
struct fl_spare {
    uint64_t nodeid, fh;
};

/* A handle that this loop gave out: the library's handles are small counters. */
#define FL_NATIVE_HANDLE (1ull << 63)

/* A thread that serves requests. */
struct fl_server {
    struct fuse_loop *loop;
    char *request, *reply; /* buffers */
    int reads;             /* it is the one that takes requests from the device */
    int64_t idle_since_ns; /* when it found no request waiting; 0: there was one at its last look */
    int avoided_cpu;       /* as of `watcher_cpu` */
};

struct fuse_loop {
    struct fl_config config;
    int sockets[2]; /* ours, the library's */
    int stop_fd, ended_fd, up_fd, calls_fd;
    int passthrough, passthrough_used, relay_opens;
    uint32_t offered_flags, offered_flags2;
    uint32_t request_size;
    uint64_t largest_object;
    pthread_cond_t notice_ready, reader_free, ticket_done;

    struct kvfs_mutex nodes_lock;
    struct fl_node *chunks[FL_CHUNKS] GUARDED_BY(nodes_lock);
    struct fl_edge **edges[FL_EDGE_CHUNKS] GUARDED_BY(nodes_lock);
    uint64_t edge_count GUARDED_BY(nodes_lock), edge_buckets GUARDED_BY(nodes_lock);
    uint64_t edge_round GUARDED_BY(nodes_lock); /* a power of two, up to `edge_buckets` */
    uint64_t unresolved_count GUARDED_BY(nodes_lock);
    struct fl_spare spares[FL_SPARES] GUARDED_BY(nodes_lock);
    uint32_t spare_count GUARDED_BY(nodes_lock);
    uint64_t misses GUARDED_BY(nodes_lock); /* to report */
    uint32_t expected[FL_EXPECTED] GUARDED_BY(nodes_lock);
    uint32_t expected_count GUARDED_BY(nodes_lock);
    struct fl_pending *pending GUARDED_BY(nodes_lock);
    uint32_t pending_count GUARDED_BY(nodes_lock);
    struct fl_open_record *records GUARDED_BY(nodes_lock);
    uint32_t record_first GUARDED_BY(nodes_lock), record_count GUARDED_BY(nodes_lock);

    struct kvfs_mutex locks_lock;
    struct fl_lock_file *lock_files GUARDED_BY(locks_lock);
    uint64_t *locked_keys; /* of files that were locked without FLUSH, by hash; the newest stays. Atomic */
    uint32_t lock_count GUARDED_BY(locks_lock), wait_count GUARDED_BY(locks_lock);

    struct kvfs_mutex listings_lock;
    struct fl_listing **listings GUARDED_BY(listings_lock); /* by hash of the handle */

    struct kvfs_mutex calls_lock;
    struct fl_call *calls GUARDED_BY(calls_lock);
    uint32_t call_first GUARDED_BY(calls_lock);
    uint32_t call_count GUARDED_BY(calls_lock); /* read without, atomically */
    int calls_notified GUARDED_BY(calls_lock);  /* calls_fd is readable */
    int calls_watched GUARDED_BY(calls_lock);   /* or need not be */

    struct kvfs_mutex notice_lock;
    struct fl_notice *notices GUARDED_BY(notice_lock);
    uint32_t notice_first GUARDED_BY(notice_lock), notice_count GUARDED_BY(notice_lock);
    int notice_overflow GUARDED_BY(notice_lock), notice_stop GUARDED_BY(notice_lock);

    struct kvfs_mutex reader_lock;
    int reader_waits; /* atomic: the reader found nothing to read */
    int has_reader GUARDED_BY(reader_lock), idle GUARDED_BY(reader_lock), servers GUARDED_BY(reader_lock);
    int stopping GUARDED_BY(reader_lock); /* read without, atomically */
    int failure GUARDED_BY(reader_lock);  /* an errno */
    const char *failed_at GUARDED_BY(reader_lock);
    pthread_t threads[FL_MAX_THREADS + 2 + FL_AWAKE_CPUS] GUARDED_BY(reader_lock);
    int running GUARDED_BY(reader_lock);

    int awake_threads, awake_stop; /* atomic */
    int asleep;                    /* of those threads; atomic */
    uint32_t awake_round;          /* changes where they are to wake; atomic, a futex */
    int64_t awake_until_ns;        /* atomic */
    cpu_set_t processors;          /* that threads may run on; set before they start, as is the next */
    int avoids_watcher;
    int watcher_cpu; /* processor of the thread that watches for calls, from 1 on; 0: none. Atomic */

    struct fl_stats stats; /* counted atomically */
    char *replies;         /* the buffer of the thread that writes them */
};

static inline void fl_count(uint64_t *counter) { __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

/* Whether requests of this kind may be answered without the library. */
static inline int fl_answers(uint32_t opcode) {
    switch (opcode) {
    case FW_LOOKUP:
    case FW_FORGET:
    case FW_BATCH_FORGET:
    case FW_GETATTR:
    case FW_OPEN:
    case FW_RELEASE:
    case FW_READ:
    case FW_WRITE:
    case FW_GETXATTR:
    case FW_FALLOCATE:
    case FW_LSEEK:
    case FW_FLUSH:
    case FW_INTERRUPT:
    case FW_GETLK:
    case FW_SETLK:
    case FW_SETLKW:
    case FW_CREATE:
    case FW_RENAME:
    case FW_RENAME2:
    case FW_READDIRPLUS:
        return 1;
    default:
        return 0;
    }
}

struct fl_node *fl_find(struct fuse_loop *loop, uint64_t nodeid) REQUIRES(loop->nodes_lock);
int fl_is_expected(struct fuse_loop *loop, uint32_t thread) REQUIRES(loop->nodes_lock);
int fl_pending_add(struct fuse_loop *loop, uint64_t unique, uint32_t opcode, uint64_t nodeid)
    REQUIRES(loop->nodes_lock);
int fl_pending_take(struct fuse_loop *loop, uint64_t unique, struct fl_pending *out) REQUIRES(loop->nodes_lock);
void fl_record_open(struct fuse_loop *loop, uint64_t nodeid, uint32_t uid, uint32_t pid) REQUIRES(loop->nodes_lock);
int fl_call_put(struct fuse_loop *loop, const struct fl_call *call); /* -EAGAIN: no room */
/* Makes calls_fd readable while there are `least` calls. Where somebody waits for an answer, after the answer: waking
 * a thread on another processor costs the waker, too (5 to 15 us on a virtual one). */
void fl_calls_notify(struct fuse_loop *loop, uint32_t least);
int fl_calls_quiet(struct fuse_loop *loop); /* whether there are calls that nobody was notified of */
int fl_notice_wait(struct fuse_loop *loop, struct fl_notice *out);
void fl_notice_stop(struct fuse_loop *loop);

/* dentries.c */
struct fl_edge *fl_edge_find(struct fuse_loop *loop, uint64_t parent, const char *name, uint32_t length)
    REQUIRES(loop->nodes_lock);
int fl_edge_set(struct fuse_loop *loop, uint64_t parent, const char *name, uint32_t length, uint64_t nodeid)
    REQUIRES(loop->nodes_lock);
void fl_edge_drop(struct fuse_loop *loop, uint64_t parent, const char *name, uint32_t length)
    REQUIRES(loop->nodes_lock);
int fl_names_known(const struct fl_node *directory, uint32_t length);
void fl_names_unknown(struct fuse_loop *loop, uint64_t nodeid)
    REQUIRES(loop->nodes_lock); /* releases nodes_lock now and then */
int fl_edges_make(struct fuse_loop *loop);
void fl_edges_free(struct fuse_loop *loop);

/* threads.c */
struct iovec;
void *fl_serve(void *server);
int fl_write_reply(struct fuse_loop *loop, const struct iovec *parts, int count); /* 0, or -errno */
void fl_answer(struct fuse_loop *loop, uint64_t unique, int error, const void *body, uint32_t size);

/* handlers.c */
int fl_handle_natively(struct fuse_loop *loop, struct fl_server *server, struct fw_in_header *in);
int fl_current_attr(struct fuse_loop *loop, const struct fl_node *node, struct fw_attr *attr, uint64_t *valid_s)
    REQUIRES(loop->nodes_lock);
int fl_attach_backing(struct fuse_loop *loop, struct fl_node *node, int fd);
void fl_detach_backing(struct fuse_loop *loop, struct fl_node *node);

/* mutations.c */
int fl_handle_create(struct fuse_loop *loop, const struct fw_in_header *in, const struct fw_create_in *body);
int fl_handle_rename(const struct fl_server *server, const struct fw_in_header *in, uint64_t new_parent, uint32_t flags,
                     const char *names);

/* locks.c */
int fl_handle_getlk(struct fuse_loop *loop, const struct fw_in_header *in, const struct fw_lk_in *body);
int fl_handle_setlk(struct fuse_loop *loop, const struct fw_in_header *in, const struct fw_lk_in *body);
int fl_handle_interrupt(struct fuse_loop *loop, uint64_t unique);
int fl_reports_close(struct fuse_loop *loop, const struct fl_node *node) REQUIRES(loop->nodes_lock);
void fl_locks_flush(struct fuse_loop *loop, uint64_t nodeid, uint64_t owner);
/* `last`: the handle's number stands for no open file any more. */
void fl_locks_release(struct fuse_loop *loop, uint64_t nodeid, const struct fw_release_in *body, int last);
void fl_locks_free(struct fuse_loop *loop);

/* readdir.c */
int fl_handle_readdir(struct fuse_loop *loop, struct fl_server *server, const struct fw_in_header *in,
                      const struct fw_read_in *body);
int fl_listing_wanted(struct fuse_loop *loop, const struct fw_read_in *body); /* whether it is a call */
void fl_listings_free(struct fuse_loop *loop);

/* upcalls.c */
int fl_queue_call(struct fuse_loop *loop, const struct fw_in_header *in);

/* replies.c */
void fl_patch_open(struct fuse_loop *loop, uint64_t nodeid, struct fw_open_out *out) REQUIRES(loop->nodes_lock);
void fl_patch_reply(struct fuse_loop *loop, const struct fl_pending *request, char *body, uint32_t size)
    REQUIRES(loop->nodes_lock);

/* awake.c */
void fl_awake_start(struct fuse_loop *loop) REQUIRES(loop->reader_lock);
void fl_awake_stop(struct fuse_loop *loop);
void fl_note_watcher(struct fuse_loop *loop,
                     int watches); /* by the thread that watches for calls, as long as it does */
void fl_note_idle(struct fl_server *server);
void fl_note_request(struct fl_server *server); /* read without waiting, or soon after: it is one of a burst */

/* write_order.c */
int fl_thread_add(struct fuse_loop *loop, void *(*run)(void *), void *argument) REQUIRES(loop->reader_lock);
int fl_server_add(struct fuse_loop *loop) REQUIRES(loop->reader_lock);
void fl_server_free(struct fl_server *server);
int fl_become_reader(struct fl_server *server); /* waits; 0 when the loop ends */
void fl_step_aside(struct fl_server *server);
void fl_end(struct fuse_loop *loop, const char *where, int error); /* error 0: as it should be */
/* A place in the order of those who mean one file's bytes. */
struct fl_ticket {
    uint64_t nodeid; /* 0: none */
    uint32_t number;
};
struct fl_ticket fl_ticket_take(struct fl_node *node);
void fl_ticket_wait(struct fuse_loop *loop, struct fl_ticket ticket);
void fl_ticket_end(struct fuse_loop *loop, struct fl_ticket ticket);
/* Waits until what came before the request and changes the same file is done: its ticket, which the caller ends. */
struct fl_ticket fl_keep_order(struct fl_server *server, const struct fw_in_header *in);

#endif
