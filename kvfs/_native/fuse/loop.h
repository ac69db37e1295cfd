/* The native loop behind the mount: between /dev/fuse and the process's FUSE library.
 *
 * Responsibility: read every kernel request; answer those about sealed objects and known names here; queue
 * the frequent ones that need the store as calls (fl_take_calls), answered through fl_answer_*; relay the
 * rest over a SEQPACKET socket and rewrite the replies that need it (INIT, stable inode numbers,
 * passthrough). A call costs about a third of a relayed request: no library, no second thread on its way back.
 *
 * Invariants:
 * - Calls are queued, and requests relayed, in the order in which the kernel gave them: one thread at a time is the
 *   reader. One that is going to wait for a file's bytes makes another the reader first; what follows on the same
 *   file then waits for it (write_order.c). Who handles a relayed request takes the queued calls first.
 * - A thread that cannot go on while requests may come is reported (fl_failure).
 * - INTERRUPT ends the wait for a lock and is dropped else: nothing else behind this loop waits for long.
 * - A nodeid is never used again with other bytes; nodes hold slot and generation, and OPEN checks both
 *   against the shared table after it has the slot open.
 * - What the loop creates or renames by itself is queued as a call in the same step, before anybody can ask about it.
 * - Lookups answered here are counted here, and FORGET takes from that count first; the library's own count
 *   and this one add up to the kernel's.
 * - Of a listing's names only those with attributes, which the library answers, are lookups.
 * - One backing id per node while any handle is open; the second holder shares the first one's id.
 * - Invalidations are written by a thread of their own: the kernel may make that write wait for a lock
 *   whose holder waits for an answer from here.
 *
 * Concurrency: `listings_lock` guards the names that were read ahead for listings, and is held over one reply of them.
 * `nodes_lock` guards nodes, names, pending and the ring of opens; it is held over openat and the
 * backing ioctls (a few us) and over a bounded number of names, and never over a read, a write or a relay. No Python
 * anywhere.
 */
#ifndef KVFS_FUSE_LOOP_CORE_H
#define KVFS_FUSE_LOOP_CORE_H

#include <stdint.h>

#include "wire.h"

struct fuse_loop;

enum fl_state { FL_NONE, FL_OTHER, FL_DRAFT, FL_SEALED, FL_DEAD };

struct fl_config {
    int dev_fd;              /* /dev/fuse, mounted */
    int slots_dir_fd;        /* where slot files are: names are eight hex digits */
    const char *generations; /* generation of slot 0 in the mapped table, uint32 */
    uint64_t generation_stride;
    uint32_t slot_count;
    int passthrough;      /* wanted; fl_passthrough says what came of it */
    int threads;          /* at most: another one is made when all others are busy */
    uint32_t buffer_size; /* largest payload of a READ or WRITE */
    uint64_t largest_object;
    uint64_t attr_valid_s;
    uint64_t unresolved_names; /* names without a node kept here, at most */
};

struct fl_open_record {
    uint64_t nodeid;
    uint32_t uid, pid;
};

#define FL_CALL_NAME_MAX 255

/* Calls that are no request: what the loop has done, and answered, by itself. */
enum fl_done { FL_CREATED = 0x10000, FL_RENAMED };

/* LOOKUP, CREATE, RENAME, UNLINK; READDIRPLUS without attributes; FALLOCATE that found no room; RELEASE of a library handle, FORGET, FL_CREATED and
 * FL_RENAMED, which need no answer. */
struct fl_call {
    uint64_t unique, nodeid;
    uint64_t offset; /* FL_CREATED's handle; READDIRPLUS's place */
    /* RENAME's new parent, RELEASE's and READDIRPLUS's handle, FORGET's lookups, FALLOCATE's length, FL_CREATED's node */
    uint64_t other;
    uint32_t opcode, uid, gid, pid, flags, mode;
    uint32_t size;    /* READDIRPLUS: of the answer, at most */
    uint64_t when_ns; /* FL_CREATED and FL_RENAMED: when names of the directories changed */
    uint16_t name_length, new_length;
    char name[FL_CALL_NAME_MAX + 1], new_name[FL_CALL_NAME_MAX + 1];
};

struct fl_stats {
    uint64_t relayed, calls, native_opens, native_reads, native_writes, native_getattrs, native_lookups, native_creates,
        native_renames, native_listings, invalidations, dropped_records, most_names_moved;
};

int fl_create(const struct fl_config *config, struct fuse_loop **out);
void fl_destroy(struct fuse_loop *loop);
int fl_start(struct fuse_loop *loop);
int fl_is_drained(struct fuse_loop *loop); /* whether all that the kernel had queued is answered, relayed, or a call */
void fl_stop(struct fuse_loop *loop);      /* asks the threads to end and waits for them */
int fl_library_fd(struct fuse_loop *loop); /* the end of the socket for the FUSE library */
int fl_up_fd(struct fuse_loop *loop);      /* eventfd: readable once the kernel has taken the answer to INIT */
int fl_ended_fd(struct fuse_loop *loop);   /* eventfd: readable once the mount has ended */
/* Returns why the mount ended: an errno, and its place; 0: the kernel ended it. */
int fl_failure(struct fuse_loop *loop, const char **where);
int fl_passthrough(struct fuse_loop *loop);
void fl_get_stats(struct fuse_loop *loop, struct fl_stats *out);

int fl_node_set(struct fuse_loop *loop, uint64_t nodeid, enum fl_state state, uint32_t slot, uint32_t generation,
                const struct fw_attr *attr);
/* Drops a node that the library no longer needs, unless lookups of it are counted here; returns their number. A FORGET
 * call reports the end of those. */
uint64_t fl_node_drop(struct fuse_loop *loop, uint64_t nodeid);
int fl_link(struct fuse_loop *loop, uint64_t parent, const char *name, uint32_t length, uint64_t nodeid);
/* Takes the name away from this node; a name that leads to another node by now stays. */
void fl_unlink(struct fuse_loop *loop, uint64_t parent, const char *name, uint32_t length, uint64_t nodeid);
/* Makes LOOKUP of the name, which led to `nodeid` (0: to none), a call: something may have it. */
void fl_mark_unresolved(struct fuse_loop *loop, uint64_t parent, const char *name, uint32_t length, uint64_t nodeid);
void fl_clear_unresolved(struct fuse_loop *loop, uint64_t parent, const char *name, uint32_t length);
int fl_is_free(struct fuse_loop *loop, uint64_t parent, const char *name, uint32_t length); /* 0: nobody knows */
/* A directory in which nothing exists but what is linked, and `names` (separated by '/', 0 at the end), and in which
 * names of `room` bytes can be made. `room` 0: its names are not known any more. */
int fl_know_names(struct fuse_loop *loop, uint64_t nodeid, uint32_t room, const char *names);
/* A node that FL_DRAFT was set for, to be given to a CREATE, with `fd` as its backing. -ENOSPC: there are FL_SPARES. */
int fl_spare_add(struct fuse_loop *loop, uint64_t nodeid, uint64_t fh, int fd);
uint32_t fl_spare_count(struct fuse_loop *loop);
uint64_t fl_spare_take(struct fuse_loop *loop);   /* one that is given to none, dropped: its nodeid, or 0 */
uint64_t fl_drain_misses(struct fuse_loop *loop); /* LOOKUPs of nothing answered here since the last time */
/* Opens a directory whose READDIRPLUS from the offset `from` on is answered without attributes from names that the
 * library has read ahead (fl_listing_fill); else it is a call. */
int fl_listing_open(struct fuse_loop *loop, uint64_t fh, uint64_t from);
void fl_listing_close(struct fuse_loop *loop, uint64_t fh);
/* A name in `names`, packed one behind the other. */
struct __attribute__((packed)) fl_listed {
    uint64_t ino;
    uint8_t type, length; /* DT_*; of the name, which follows */
};
/* The `count` names behind the first `first`; `ended`: nothing follows. Takes over `names`, which is from malloc and not
 * NULL, unless it fails. */
int fl_listing_fill(struct fuse_loop *loop, uint64_t fh, uint64_t first, char *names, uint32_t count, int ended);
void fl_answer_listing(struct fuse_loop *loop, uint64_t unique, uint64_t fh, uint64_t offset, uint32_t size);
int fl_calls_waiting(struct fuse_loop *loop);
void fl_watch_calls(struct fuse_loop *loop, int watched); /* while somebody watches, calls_fd stays as it is */
int fl_await_calls(struct fuse_loop *loop,
                   uint64_t timeout_ns); /* spins until calls are waiting: 1; 0 after the time */
int fl_acquire(struct fuse_loop *loop, uint64_t nodeid, int fd); /* new count of opens, or -errno */
int fl_release(struct fuse_loop *loop, uint64_t nodeid);         /* count of opens left, or -errno */
int fl_opens(struct fuse_loop *loop, uint64_t nodeid);
/* Names of a directory changed then: its mtime and ctime. 1: the kernel may have others. */
int fl_touch(struct fuse_loop *loop, uint64_t nodeid, uint64_t when_ns);
/* Locks of this node are on `key`, as those of the version of its file that it took the place of. */
int fl_node_locks(struct fuse_loop *loop, uint64_t nodeid, uint64_t key);
/* Whether LOOKUP and OPEN of this thread go to the library: it was answered ESTALE, and looks a name up again. */
int fl_expect(struct fuse_loop *loop, uint32_t thread, int expected);
int fl_calls_fd(struct fuse_loop *loop); /* eventfd: readable while calls are queued */
uint32_t fl_take_calls(struct fuse_loop *loop, struct fl_call *out, uint32_t capacity);
void fl_answer_status(struct fuse_loop *loop, uint64_t unique, int status);
int fl_answer_entry(struct fuse_loop *loop, uint64_t unique, uint64_t nodeid);
int fl_answer_created(struct fuse_loop *loop, uint64_t unique, uint64_t nodeid, uint64_t fh);
int fl_allocate(struct fuse_loop *loop, uint64_t nodeid, uint32_t mode, uint64_t offset, uint64_t length);
int fl_probe(struct fuse_loop *loop, int fd); /* 1: passthrough works; 0: it is off from now on */
/* Whether a writer's FLUSH of the node is left to the library. */
int fl_node_settles(struct fuse_loop *loop, uint64_t nodeid, int settles);
int fl_killed(struct fuse_loop *loop,
              uint64_t nodeid); /* whether the last FLUSH came from a process dying by a signal */
int fl_flushed(struct fuse_loop *loop, uint64_t nodeid); /* whether a handle of it was closed */
int fl_died_by_signal(uint32_t pid);
void fl_relay_opens(struct fuse_loop *loop, int relay);
uint32_t fl_drain_opens(struct fuse_loop *loop, struct fl_open_record *out, uint32_t capacity);
int fl_invalidate_entry(struct fuse_loop *loop, uint64_t parent, const char *name, uint32_t length);
int fl_invalidate_attr(struct fuse_loop *loop, uint64_t nodeid);

#endif
