/* flock(2) and fcntl(2) locks, by file and not by node: the versions of a file that are open at once have one node
 * each, and a lock on one of them is a lock on all. See loop.h.
 *
 * Responsibility: who has which bytes, who waits, and when locks end: FLUSH ends an owner's (a close), RELEASE those
 * taken through its handle. A handle without FLUSH (a sealed file's, where none was ever locked) has a nodeid for a
 * number: what was taken through it ends with the last such handle of the node, or the process.
 *
 * Invariants: held locks of one kind and file conflict with none of another owner; who waits is answered once, in the
 * order in which they came where both could be; at most FL_LOCKS held and waited for together (ENOLCK).
 * Concurrency: `locks_lock`, taken with no other lock held; answers are written without it.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "state.h"

#define WAIT_CHAIN 32 /* waits behind waits looked at for a deadlock */

static struct fl_lock_file *file_of(struct fuse_loop *loop, uint64_t key) REQUIRES(loop->locks_lock) {
    return &loop->lock_files[(key * 0x9E3779B97F4A7C15ull) >> (64 - FL_LOCK_FILE_BITS)];
}

static int is_of(const struct fl_lock *lock, const struct fl_lock *other) {
    return lock->key == other->key && lock->whole == other->whole;
}

static int overlaps(const struct fl_lock *lock, const struct fl_lock *other) {
    return lock->start <= other->end && other->start <= lock->end;
}

/* Whether its process has ended without a FLUSH. */
static int is_left_behind(const struct fl_lock *lock) {
    return lock->quiet && lock->pid != 0 && kill((pid_t)lock->pid, 0) < 0 && errno == ESRCH;
}

static void drop(struct fuse_loop *loop, struct fl_lock **at) REQUIRES(loop->locks_lock) {
    struct fl_lock *lock = *at;
    *at = lock->next;
    free(lock);
    loop->lock_count--;
}

/* What keeps `wanted` from being granted, or NULL. */
static const struct fl_lock *conflict(struct fuse_loop *loop, const struct fl_lock *wanted) REQUIRES(loop->locks_lock) {
    struct fl_lock **at = &file_of(loop, wanted->key)->held;
    while (*at != NULL) {
        const struct fl_lock *held = *at;
        int conflicts = is_of(held, wanted) && held->owner != wanted->owner && overlaps(held, wanted) &&
                        (held->type == F_WRLCK || wanted->type == F_WRLCK);
        if (conflicts && !is_left_behind(held)) return held;
        if (conflicts)
            drop(loop, at);
        else
            at = &(*at)->next;
    }
    return NULL;
}

static struct fl_lock *copy_of(struct fuse_loop *loop, const struct fl_lock *lock) REQUIRES(loop->locks_lock) {
    struct fl_lock *copy = NULL;
    if (loop->lock_count < FL_LOCKS) copy = malloc(sizeof *copy);
    if (copy == NULL) return NULL;
    *copy = *lock;
    loop->lock_count++;
    return copy;
}

static void hold(struct fuse_loop *loop, struct fl_lock *lock) REQUIRES(loop->locks_lock) {
    struct fl_lock_file *file = file_of(loop, lock->key);
    lock->next = file->held;
    file->held = lock;
}

/* Gives the owner this range in this mode, F_UNLCK too, in place of what it has there. 0, or -ENOLCK: nothing changed. */
static int apply(struct fuse_loop *loop, const struct fl_lock *wanted) REQUIRES(loop->locks_lock) {
    struct fl_lock *made = copy_of(loop, wanted), *rest = made == NULL ? NULL : copy_of(loop, wanted);
    if (rest == NULL) {
        if (made != NULL) free(made), loop->lock_count--;
        return -ENOLCK;
    }
    struct fl_lock **at = &file_of(loop, wanted->key)->held;
    while (*at != NULL) {
        struct fl_lock *own = *at;
        int touches = own->start <= made->end + (made->end != UINT64_MAX) &&
                      made->start <= own->end + (own->end != UINT64_MAX);
        if (!is_of(own, made) || own->owner != made->owner || !touches) {
            at = &own->next;
        } else if (own->type == made->type) { /* one lock of both */
            if (own->start < made->start) made->start = own->start;
            if (own->end > made->end) made->end = own->end;
            made->quiet |= own->quiet;
            drop(loop, at);
        } else if (!overlaps(own, made)) {
            at = &own->next;
        } else if (own->start < made->start) { /* its head stays, and its tail */
            if (own->end > made->end) {
                *rest = *own;
                rest->start = made->end + 1;
                hold(loop, rest);
                rest = NULL;
            }
            own->end = made->start - 1;
            at = &own->next;
        } else if (own->end > made->end) {
            own->start = made->end + 1;
            at = &own->next;
        } else {
            drop(loop, at);
        }
    }
    if (rest != NULL) free(rest), loop->lock_count--;
    if (made->type == F_UNLCK)
        free(made), loop->lock_count--;
    else
        hold(loop, made);
    return 0;
}

/* Moves all waiting locks of a file that can be granted now to `granted`; they are answered later. */
static void grant(struct fuse_loop *loop, uint64_t key, struct fl_lock **granted) REQUIRES(loop->locks_lock) {
    struct fl_lock **at = &file_of(loop, key)->waiting, **end = granted;
    while (*end != NULL) end = &(*end)->next;
    while (*at != NULL) {
        struct fl_lock *waiter = *at;
        if (waiter->key != key || conflict(loop, waiter) != NULL || apply(loop, waiter) < 0) {
            at = &waiter->next;
            continue;
        }
        *at = waiter->next;
        waiter->next = NULL;
        *end = waiter;
        end = &waiter->next;
        loop->lock_count--;
        loop->wait_count--;
        at = &file_of(loop, key)->waiting; /* what it had here it has no longer: one before it may wait for that */
    }
}

static void answer_all(struct fuse_loop *loop, struct fl_lock *granted) {
    while (granted != NULL) {
        struct fl_lock *next = granted->next;
        fl_answer(loop, granted->unique, 0, NULL, 0);
        free(granted);
        granted = next;
    }
}

static const struct fl_lock *wait_of(struct fuse_loop *loop, uint64_t owner) REQUIRES(loop->locks_lock) {
    for (uint32_t i = 0; i < 1u << FL_LOCK_FILE_BITS; i++)
        for (const struct fl_lock *waiter = loop->lock_files[i].waiting; waiter != NULL; waiter = waiter->next)
            if (!waiter->whole && waiter->owner == owner) return waiter;
    return NULL;
}

/* Whether the owner of a lock that `wanted` waits for waits, directly or not, for the owner of `wanted`. */
static int is_circle(struct fuse_loop *loop, const struct fl_lock *wanted) REQUIRES(loop->locks_lock) {
    const struct fl_lock *waits = wanted;
    for (int i = 0; i < WAIT_CHAIN && waits != NULL && loop->wait_count != 0; i++) {
        const struct fl_lock *holder = conflict(loop, waits);
        if (holder == NULL) return 0;
        if (holder->owner == wanted->owner) return 1;
        waits = wait_of(loop, holder->owner);
    }
    return 0;
}

/* Puts the request among those that wait; its answer comes with the lock, or with INTERRUPT. 0, or -errno. */
static int wait_for_lock(struct fuse_loop *loop, const struct fl_lock *wanted, struct fl_lock **granted)
    REQUIRES(loop->locks_lock) {
    if (!wanted->whole && is_circle(loop, wanted)) return -EDEADLK;
    struct fl_lock *waiter = copy_of(loop, wanted);
    if (waiter == NULL) return -ENOLCK;
    if (wanted
            ->whole) { /* as flock(2) says: what it had goes first, so that two who want more do not wait for each other */
        struct fl_lock none = *wanted;
        none.type = F_UNLCK;
        apply(loop, &none);
    }
    struct fl_lock **end = &file_of(loop, wanted->key)->waiting;
    while (*end != NULL) end = &(*end)->next;
    waiter->next = NULL;
    *end = waiter;
    loop->wait_count++;
    grant(loop, wanted->key, granted); /* others, or itself: its own lock may have been in the way */
    return 0;
}

static uint64_t key_of(struct fuse_loop *loop, uint64_t nodeid) {
    kvfs_lock(&loop->nodes_lock);
    const struct fl_node *node = fl_find(loop, nodeid);
    uint64_t key = node == NULL ? nodeid : node->lock_key != 0 ? node->lock_key : node->attr.ino;
    kvfs_unlock(&loop->nodes_lock);
    return key;
}

static uint64_t *said_of(struct fuse_loop *loop, uint64_t key) {
    return &loop->locked_keys[(key * 0x9E3779B97F4A7C15ull) >> (64 - FL_LOCKED_KEY_BITS)];
}

/* Whether closing a handle of the node has to be reported: its file was locked. `nodes_lock` is held. */
int fl_reports_close(struct fuse_loop *loop, const struct fl_node *node) {
    uint64_t key = node->lock_key != 0 ? node->lock_key : node->attr.ino;
    return __atomic_load_n(said_of(loop, key), __ATOMIC_RELAXED) == key;
}

static struct fl_lock lock_in(struct fuse_loop *loop, const struct fw_in_header *in, const struct fw_lk_in *body) {
    struct fl_lock lock = {.key = key_of(loop, in->nodeid), .nodeid = in->nodeid, .unique = in->unique};
    lock.owner = body->owner;
    lock.handle = body->fh;
    lock.start = body->start;
    lock.end = body->end;
    lock.type = body->type;
    lock.pid = body->pid;
    lock.whole = (body->lk_flags & FW_LK_FLOCK) != 0;
    lock.quiet = !lock.whole && (body->fh & FL_NATIVE_HANDLE) != 0;
    if (lock.whole) lock.start = 0, lock.end = UINT64_MAX;
    return lock;
}

int fl_handle_getlk(struct fuse_loop *loop, const struct fw_in_header *in, const struct fw_lk_in *body) {
    struct fl_lock wanted = lock_in(loop, in, body);
    struct fw_lk_out out = {.type = F_UNLCK};
    kvfs_lock(&loop->locks_lock);
    const struct fl_lock *held = conflict(loop, &wanted);
    if (held != NULL) out = (struct fw_lk_out){held->start, held->end, held->type, held->pid};
    kvfs_unlock(&loop->locks_lock);
    fl_answer(loop, in->unique, 0, &out, sizeof out);
    return 1;
}

int fl_handle_setlk(struct fuse_loop *loop, const struct fw_in_header *in, const struct fw_lk_in *body) {
    struct fl_lock wanted = lock_in(loop, in, body), *granted = NULL;
    int status = -EINVAL, waits = 0;
    kvfs_lock(&loop->locks_lock);
    if (wanted.start > wanted.end || (wanted.type != F_RDLCK && wanted.type != F_WRLCK && wanted.type != F_UNLCK)) {
        status = -EINVAL;
    } else if (wanted.type != F_UNLCK && conflict(loop, &wanted) != NULL) {
        status = in->opcode == FW_SETLK ? -EAGAIN : wait_for_lock(loop, &wanted, &granted);
        waits = status == 0;
    } else {
        status = apply(loop, &wanted);
        if (status == 0) grant(loop, wanted.key, &granted);
    }
    if (wanted.quiet && wanted.type != F_UNLCK)
        __atomic_store_n(said_of(loop, wanted.key), wanted.key, __ATOMIC_RELAXED);
    kvfs_unlock(&loop->locks_lock);
    if (!waits) fl_answer(loop, in->unique, status, NULL, 0);
    answer_all(loop, granted);
    return 1;
}

/* Ends held locks of one file: an owner's of one kind, or those taken through a handle. */
static void end_locks(struct fuse_loop *loop, uint64_t nodeid, const uint64_t *owner, int whole,
                      const uint64_t *handle) {
    if (__atomic_load_n(&loop->lock_count, __ATOMIC_RELAXED) == 0) return;
    uint64_t key = key_of(loop, nodeid);
    struct fl_lock *granted = NULL;
    kvfs_lock(&loop->locks_lock);
    for (struct fl_lock **at = &file_of(loop, key)->held; *at != NULL;) {
        const struct fl_lock *lock = *at;
        int ends = lock->key == key && ((owner != NULL && lock->whole == whole && lock->owner == *owner) ||
                                        (handle != NULL && lock->nodeid == nodeid && lock->handle == *handle));
        if (ends)
            drop(loop, at);
        else
            at = &(*at)->next;
    }
    grant(loop, key, &granted);
    kvfs_unlock(&loop->locks_lock);
    answer_all(loop, granted);
}

void fl_locks_flush(struct fuse_loop *loop, uint64_t nodeid, uint64_t owner) {
    end_locks(loop, nodeid, &owner, 0, NULL);
}

void fl_locks_release(struct fuse_loop *loop, uint64_t nodeid, const struct fw_release_in *body, int last) {
    const uint64_t *owner = body->release_flags & FW_RELEASE_FLOCK_UNLOCK ? &body->lock_owner : NULL;
    end_locks(loop, nodeid, owner, 1, last ? &body->fh : NULL);
}

/* INTERRUPT ends the wait for a lock. Nothing else waits here. */
int fl_handle_interrupt(struct fuse_loop *loop, uint64_t unique) {
    if (__atomic_load_n(&loop->wait_count, __ATOMIC_RELAXED) == 0) return 1;
    struct fl_lock *found = NULL;
    kvfs_lock(&loop->locks_lock);
    for (uint32_t i = 0; i < 1u << FL_LOCK_FILE_BITS && found == NULL; i++)
        for (struct fl_lock **at = &loop->lock_files[i].waiting; *at != NULL && found == NULL;) {
            if ((*at)->unique == unique) {
                found = *at;
                *at = found->next;
                loop->wait_count--;
                loop->lock_count--;
            } else {
                at = &(*at)->next;
            }
        }
    kvfs_unlock(&loop->locks_lock);
    if (found != NULL) fl_answer(loop, unique, -EINTR, NULL, 0);
    free(found);
    return 1;
}

int fl_node_locks(struct fuse_loop *loop, uint64_t nodeid, uint64_t key) {
    kvfs_lock(&loop->nodes_lock);
    struct fl_node *node = fl_find(loop, nodeid);
    if (node != NULL) node->lock_key = key;
    kvfs_unlock(&loop->nodes_lock);
    return node == NULL ? -ESTALE : 0;
}

void fl_locks_free(struct fuse_loop *loop) UNCHECKED /* no thread any more */ {
    for (uint32_t i = 0; loop->lock_files != NULL && i < 1u << FL_LOCK_FILE_BITS; i++) {
        while (loop->lock_files[i].held != NULL) drop(loop, &loop->lock_files[i].held);
        while (loop->lock_files[i].waiting != NULL) drop(loop, &loop->lock_files[i].waiting);
    }
    free(loop->lock_files);
    free(loop->locked_keys);
}
