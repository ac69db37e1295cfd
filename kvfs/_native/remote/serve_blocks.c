/* The blocks that requests name: whether they are there, and the namespace's. See serve_core.c.
 *
 * Responsibility: look a block up and open its slot; where it is below DRAM, have the event loop bring it up (a lift),
 * or say whether it is the namespace's (a question). Both sides of that: the waiting threads', and the event loop's.
 *
 * Invariants:
 * - Only blocks are served, and only those of the bucket that is bound to the request's namespace. A named object's key
 *   is an absent block. In DRAM the slot's header names the bucket; below, the event loop is asked, which brings up no
 *   block of another one.
 * - The generation is looked at after the open, as readers do.
 * - A question's keys are the waiting thread's memory: they are read under `lock` while it waits, and not after.
 *
 * Concurrency: connections' threads and the event loop. `lock` guards bindings, lifts and questions, and is never held
 * over a system call on a slot; `lifted` wakes all who wait for a lift or an answer.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "serve_state.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "shared/slots_core.h"

#define ATTEMPTS 8

/* --- looking blocks up ------------------------------------------------------------------------------------------- */
#define CAN_LIFT (KVFS_TIER_NVME | KVFS_TIER_UNVERIFIED)

/* 1 with the entry of a block that is in DRAM, or where it is brought up from in time. */
int kvfs_remote_look_up(const struct kvfs_table *t, const uint8_t *digest, struct kvfs_entry_view *view) {
    if (kvfs_table_lookup(t, digest, view) != 1 || view->kind != KVFS_KIND_BLOCK) return 0;
    if (view->tiers & KVFS_TIER_DRAM) return view->slot < t->slot_count && kvfs_visible(t, view) != 0;
    return (kvfs_visible(t, view) & CAN_LIFT) != 0;
}

int kvfs_remote_is_bound(struct kvfs_remote_connection *c, const uint8_t *namespace_digest, uint32_t bucket_id) {
    struct kvfs_remote_server *s = c->server;
    int bound = 0;
    if (bucket_id != 0 &&
        bucket_id == c->bound_bucket) /* as nearly always: the blocks of a request are in one bucket */
        return 1;
    kvfs_lock(&s->lock);
    for (uint32_t i = 0; i < s->binding_count && !bound; i++)
        bound = s->bindings[i].bucket_id == bucket_id &&
                memcmp(s->bindings[i].namespace_digest, namespace_digest, KVFS_KEY_BYTES) == 0;
    kvfs_unlock(&s->lock);
    if (bound) c->bound_bucket = bucket_id;
    return bound;
}

/* A descriptor of the block's slot, which is the lease, and its header; -ENOENT, -EAGAIN where it is below DRAM. */
static int open_block(struct kvfs_remote_server *s, const uint8_t *digest, struct kvfs_slot_header *header) {
    const struct kvfs_table *t = s->table;
    struct kvfs_entry_view view;
    for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
        if (!kvfs_remote_look_up(t, digest, &view)) return -ENOENT;
        if (!(view.tiers & KVFS_TIER_DRAM)) return -EAGAIN;
        int fd = kvfs_slot_open(s->dirfd, view.slot, O_RDONLY | O_NONBLOCK);
        if (fd < 0 && fd != -ENOENT && fd != -EWOULDBLOCK) return fd;
        if (fd < 0) continue;
        if (kvfs_table_generation(t, view.slot) == view.generation && kvfs_table_alive(t) &&
            kvfs_slot_header_read(t, view.slot, header) == 0 && header->generation == view.generation &&
            memcmp(header->key, digest, KVFS_KEY_BYTES) == 0)
            return fd;
        close(fd);
    }
    return -ENOENT;
}

static struct timespec timespec_of(int64_t ns) {
    return (struct timespec){.tv_sec = ns / 1000000000ll, .tv_nsec = ns % 1000000000ll};
}

/* How many blocks below DRAM, from the first on, are the namespace's; 0 where the event loop does not say so in time. */
static uint32_t count_below(struct kvfs_remote_connection *c, const uint8_t *namespace_digest, const uint8_t *digests,
                            uint32_t count) {
    const struct timespec until = timespec_of(c->below_deadline_ns);
    int rc = 0;
    kvfs_lock(&c->server->lock);
    c->question = (struct kvfs_remote_question){namespace_digest, digests, count, c->question.number + 1, 0, 1};
    kvfs_remote_notify(c->server);
    while (rc == 0 && !c->server->stopping && c->question.waits)
        rc = kvfs_wait_until(&c->server->lifted, &c->server->lock, &until);
    c->question.waits = 0;
    const uint32_t found = c->question.found;
    kvfs_unlock(&c->server->lock);
    return found;
}

/* How many blocks of the request's namespace are there, from the first on, and their sizes. */
uint32_t kvfs_remote_match(struct kvfs_remote_connection *c, const struct kvfs_remote_request *request,
                           const uint8_t *digests, uint64_t *sizes) {
    uint8_t below[KVFS_REMOTE_MATCHES * KVFS_KEY_BYTES];
    uint32_t places[KVFS_REMOTE_MATCHES], below_count = 0, count = 0;
    struct kvfs_slot_header header;
    struct kvfs_entry_view view;
    const struct kvfs_table *t = c->server->table;
    for (; count < request->count; count++) {
        const uint8_t *digest = digests + (size_t)count * KVFS_KEY_BYTES;
        if (!kvfs_remote_look_up(t, digest, &view)) break;
        if (!(view.tiers & KVFS_TIER_DRAM)) {
            memcpy(below + (size_t)below_count * KVFS_KEY_BYTES, digest, KVFS_KEY_BYTES);
            places[below_count++] = count;
        } else if (kvfs_slot_header_read(t, view.slot, &header) == 0 &&
                   !kvfs_remote_is_bound(c, request->namespace_digest, header.bucket_id)) {
            break;
        }
        sizes[count] = view.size_bytes;
    }
    if (below_count == 0) return count;
    const uint32_t own = count_below(c, request->namespace_digest, below, below_count);
    return own < below_count ? places[own] : count;
}

/* --- bringing blocks up ------------------------------------------------------------------------------------------ */
static struct kvfs_remote_lift *find_lift(struct kvfs_remote_server *s, const uint8_t *digest,
                                          const uint8_t *namespace_digest) REQUIRES(s->lock) {
    for (uint32_t i = 0; i < s->lift_room; i++)
        if (s->lifts[i].used && memcmp(s->lifts[i].digest, digest, KVFS_KEY_BYTES) == 0 &&
            memcmp(s->lifts[i].namespace_digest, namespace_digest, KVFS_KEY_BYTES) == 0)
            return &s->lifts[i];
    return NULL;
}

/* Asks the event loop for a block of a namespace; -EBUSY where too many wait. */
int kvfs_remote_ask_for(struct kvfs_remote_server *s, const uint8_t *digest, const uint8_t *namespace_digest) {
    int rc = 0, news = 0;
    kvfs_lock(&s->lock);
    if (find_lift(s, digest, namespace_digest) == NULL) {
        uint32_t i = 0;
        while (i < s->lift_room && s->lifts[i].used) i++;
        if (i < s->lift_room) {
            s->lifts[i] = (struct kvfs_remote_lift){.used = 1};
            memcpy(s->lifts[i].digest, digest, KVFS_KEY_BYTES);
            memcpy(s->lifts[i].namespace_digest, namespace_digest, KVFS_KEY_BYTES);
            news = 1;
        } else {
            rc = -EBUSY;
        }
    }
    kvfs_unlock(&s->lock);
    if (news) kvfs_remote_notify(s);
    return rc;
}

/* Waits until the event loop is through with a block. 0, or -EBUSY at the deadline. */
static int wait_for(struct kvfs_remote_server *s, const uint8_t *digest, const uint8_t *namespace_digest,
                    int64_t deadline_ns) {
    const struct timespec until = timespec_of(deadline_ns);
    int rc = 0;
    kvfs_lock(&s->lock);
    while (rc == 0 && !s->stopping && find_lift(s, digest, namespace_digest) != NULL)
        rc = kvfs_wait_until(&s->lifted, &s->lock, &until);
    if (s->stopping) rc = -EBUSY;
    kvfs_unlock(&s->lock);
    return rc == 0 ? 0 : -EBUSY;
}

int kvfs_remote_open_or_lift(struct kvfs_remote_connection *c, const uint8_t *digest, const uint8_t *namespace_digest,
                             struct kvfs_slot_header *header) {
    struct kvfs_remote_server *s = c->server;
    int fd = open_block(s, digest, header);
    if (fd != -EAGAIN) return fd;
    if (kvfs_remote_ask_for(s, digest, namespace_digest) < 0 ||
        wait_for(s, digest, namespace_digest, c->below_deadline_ns) < 0)
        return -EBUSY;
    fd = open_block(s, digest, header);
    return fd == -EAGAIN ? -EBUSY : fd;
}

/* --- the event loop's side --------------------------------------------------------------------------------------- */
int kvfs_remote_bind(struct kvfs_remote_server *s, const struct kvfs_remote_binding *bindings, uint32_t count) {
    struct kvfs_remote_binding *copy = malloc((count + 1) * sizeof *copy);
    if (copy == NULL) return -ENOMEM;
    memcpy(copy, bindings, count * sizeof *copy);
    kvfs_lock(&s->lock);
    struct kvfs_remote_binding *before = s->bindings;
    s->bindings = copy;
    s->binding_count = count;
    kvfs_unlock(&s->lock);
    free(before);
    return 0;
}

/* Moves out the blocks that nobody has begun to bring up, digest and namespace of each; clears the notification. */
uint32_t kvfs_remote_take_lifts(struct kvfs_remote_server *s, uint8_t *pairs, uint32_t most) {
    uint64_t seen;
    uint32_t n = 0;
    (void)!read(s->notify_fd, &seen, sizeof seen);
    kvfs_lock(&s->lock);
    for (uint32_t i = 0; i < s->lift_room && n < most; i++)
        if (s->lifts[i].used && !s->lifts[i].taken) {
            s->lifts[i].taken = 1;
            memcpy(pairs + (size_t)n * 2 * KVFS_KEY_BYTES, s->lifts[i].digest, KVFS_KEY_BYTES);
            memcpy(pairs + ((size_t)n++ * 2 + 1) * KVFS_KEY_BYTES, s->lifts[i].namespace_digest, KVFS_KEY_BYTES);
        }
    kvfs_unlock(&s->lock);
    return n;
}

/* Ends the wait for a block, whether it was brought up or not. */
void kvfs_remote_lifted(struct kvfs_remote_server *s, const uint8_t *digest, const uint8_t *namespace_digest) {
    kvfs_lock(&s->lock);
    struct kvfs_remote_lift *lift = find_lift(s, digest, namespace_digest);
    if (lift != NULL) lift->used = 0;
    pthread_cond_broadcast(&s->lifted);
    kvfs_unlock(&s->lock);
}

/* Copies a connection's question out: the namespace, and behind it the digests, with room for KVFS_REMOTE_MATCHES. The
 * question's number, or 0 where none waits. */
uint64_t kvfs_remote_take_question(struct kvfs_remote_server *s, uint32_t connection, uint8_t *keys, uint32_t *count) {
    uint64_t number = 0;
    if (connection >= s->connection_count || !s->connections[connection].used) return 0;
    struct kvfs_remote_connection *c = &s->connections[connection];
    kvfs_lock(&c->server->lock);
    if (c->question.waits) {
        number = c->question.number;
        *count = c->question.count;
        memcpy(keys, c->question.namespace_digest, KVFS_KEY_BYTES);
        memcpy(keys + KVFS_KEY_BYTES, c->question.digests, (size_t)c->question.count * KVFS_KEY_BYTES);
    }
    kvfs_unlock(&c->server->lock);
    return number;
}

/* Answers a question that was taken, unless its time is up. */
void kvfs_remote_answer(struct kvfs_remote_server *s, uint32_t connection, uint64_t number, uint32_t found) {
    if (connection >= s->connection_count || !s->connections[connection].used) return;
    struct kvfs_remote_connection *c = &s->connections[connection];
    kvfs_lock(&c->server->lock);
    if (c->question.waits && c->question.number == number) {
        c->question.found = found;
        c->question.waits = 0;
        pthread_cond_broadcast(&c->server->lifted);
    }
    kvfs_unlock(&c->server->lock);
}
