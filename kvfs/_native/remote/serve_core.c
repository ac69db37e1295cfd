/* Serving blocks to other machines: a thread for each connection, from the shared table and the slots to the socket.
 *
 * Responsibility: a request in, its answers out, the bytes by sendfile from the slot's own pages, through a buffer
 * where a session encrypts them, or in pieces by a fabric (fabric.h). The event loop has accepted the connection and verified the peer before a thread begins;
 * it brings up what only NVMe has.
 *
 * Invariants:
 * - Only blocks are served, and only those of the bucket that is bound to the request's namespace. A named object's key
 *   is an absent block. In DRAM the slot's header names the bucket; below, the event loop is asked, which brings up no
 *   block of another one.
 * - The open descriptor is the lease, one for each connection at most; the generation is looked at after the open, as
 *   readers do. Bytes that the kernel still has queued when the slot is recycled stay as they were: sendfile sets the
 *   slot's access time, so that its pages are not used again (docs/architecture.md).
 * - A peer cannot hold anybody up: what it sends and takes is bounded in size and, once begun, in time. Whatever is
 *   outside of the wire's limits ends the connection.
 *
 * Concurrency: a connection's thread owns its socket's bytes; `lock` guards what threads share with the event loop,
 * and is never held over a system call on a socket or slot, nor is that of `hits`. Connections are opened and reaped by
 * the event loop alone.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "serve_core.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <unistd.h>

#include "shared/slots_core.h"

#define ATTEMPTS 8
#define PEER_WAIT_S 10 /* for the rest of a request that has begun, and for the peer to take what it asked for */
#define PEER_WAIT_NS (PEER_WAIT_S * 1000000000ll)
#define BYTES_AT_ONCE ((size_t)8 << 20)
#define PIECE_BYTES ((size_t)64 << 10)
#define SMALL_BYTES 65536u
#define INLINE_BYTES 16384u /* no more go over the connection where there is a fabric: two messages are as much */

static void notify(struct kvfs_remote_server *s) {
    const uint64_t one = 1;
    (void)!write(s->notify_fd, &one, sizeof one);
}

/* A socket's own call has waited as long as its timeout says (prepare). A session is waited for here, and a request over
 * it has to be whole in that time, however many records its bytes are in. */
static int wait_for_peer(const void *of, short events) {
    const struct kvfs_remote_connection *c = (const struct kvfs_remote_connection *)of;
    struct pollfd waits = {.fd = c->channel.fd, .events = events};
    if (c->channel.session == NULL) return -ETIMEDOUT;
    const int64_t spent_ns = events & POLLIN ? kvfs_clock_ns(CLOCK_MONOTONIC) - c->begun_ns : 0;
    const int64_t left_ms = (PEER_WAIT_NS - spent_ns) / 1000000;
    const int ready = left_ms > 0 ? poll(&waits, 1, (int)left_ms) : 0;
    if (ready < 0 && errno != EINTR) return -errno;
    return ready == 0 ? -ETIMEDOUT : 0;
}

static int receive_all(const struct kvfs_remote_connection *c, void *into, size_t bytes) {
    return kvfs_receive_all(&c->channel, into, bytes, 0, wait_for_peer, c);
}

static int send_all(const struct kvfs_remote_connection *c, const void *data, size_t bytes, int flags) {
    return kvfs_send_all(&c->channel, data, bytes, flags, wait_for_peer, c);
}

/* Into a session, which encrypts it. Read and not mapped: a slot that is recycled is cut to nothing under a mapping. */
static int send_copied(const struct kvfs_remote_connection *c, int slot, uint64_t bytes) {
    uint64_t offset = 0;
    int rc = 0;
    while (rc == 0 && offset < bytes) {
        const uint64_t left = bytes - offset;
        const ssize_t got = pread(slot, c->pieces, left < PIECE_BYTES ? (size_t)left : PIECE_BYTES, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return got == 0 ? -EIO : -errno;
        rc = send_all(c, c->pieces, (size_t)got, 0);
        offset += (uint64_t)got;
    }
    return rc;
}

/* The header announced `bytes`: a slot that is shorter ends the connection. */
static int send_slot(const struct kvfs_remote_connection *c, int slot, uint64_t bytes) {
    off_t offset = 0;
    if (c->channel.session != NULL) return send_copied(c, slot, bytes);
    while ((uint64_t)offset < bytes) {
        uint64_t left = bytes - (uint64_t)offset;
        ssize_t put = sendfile(c->channel.fd, slot, &offset, left < BYTES_AT_ONCE ? (size_t)left : BYTES_AT_ONCE);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) return put == 0 ? -EIO : errno == EAGAIN ? -ETIMEDOUT : -errno;
    }
    return 0;
}

/* --- pieces of a fabric ------------------------------------------------------------------------------------------ */
static int receive_taken(struct kvfs_remote_connection *c) {
    struct kvfs_remote_taken said;
    int rc = receive_all(c, &said, sizeof said);
    if (rc == 0) rc = kvfs_remote_check_taken(&said, c->taken, c->sent_pieces);
    if (rc == 0) c->taken = said.count;
    return rc;
}

/* Waits until the peer has all pieces but `most`. */
static int wait_taken(struct kvfs_remote_connection *c, uint64_t most) {
    int rc = 0;
    while (rc >= 0 && c->sent_pieces - c->taken > most) {
        rc = c->fabric->calls->wait(c->fabric, c->channel.fd, POLLIN, c->deadline_ns);
        if (rc == 0) rc = receive_taken(c);
    }
    return rc < 0 ? rc : 0;
}

/* Waits until a piece that the peer has is nothing to the fabric any more, either. */
static int wait_free(struct kvfs_remote_connection *c, uint64_t number) {
    int rc = 0;
    while (rc >= 0 && (rc = c->fabric->calls->is_done(c->fabric, number)) == 0)
        rc = c->fabric->calls->wait(c->fabric, c->channel.fd, POLLRDHUP, c->deadline_ns) ?: -ECONNRESET;
    return rc < 0 ? rc : 0;
}

static int read_whole(int slot, uint8_t *into, size_t bytes, uint64_t offset) {
    size_t done = 0;
    while (done < bytes) {
        const ssize_t got = pread(slot, into + done, bytes - done, (off_t)(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return got == 0 ? -EIO : -errno;
        done += (size_t)got;
    }
    return 0;
}

static int send_pieces(struct kvfs_remote_connection *c, int slot, uint64_t bytes) {
    uint64_t offset = 0;
    int rc = 0;
    while (rc == 0 && offset < bytes) {
        const uint64_t left = bytes - offset;
        const size_t some = left < KVFS_FABRIC_PIECE_BYTES ? (size_t)left : KVFS_FABRIC_PIECE_BYTES;
        rc = wait_taken(c, KVFS_FABRIC_PIECES - 1);
        if (rc == 0) rc = wait_free(c, c->sent_pieces);
        if (rc == 0) rc = read_whole(slot, kvfs_fabric_piece(c->fabric, c->sent_pieces), some, offset);
        if (rc == 0) rc = c->fabric->calls->send(c->fabric, c->sent_pieces, some);
        if (rc < 0) return rc;
        (void)c->fabric->calls->progress(c->fabric);
        c->sent_pieces++;
        offset += some;
    }
    return rc;
}

/* The bytes of a block, whose item says how they come. */
static int send_bytes(struct kvfs_remote_connection *c, int slot, const struct kvfs_remote_item *item) {
    if (item->status == KVFS_REMOTE_PIECES) return send_pieces(c, slot, item->size_bytes);
    return item->status == KVFS_REMOTE_FOUND ? send_slot(c, slot, item->size_bytes) : 0;
}

/* --- looking blocks up ------------------------------------------------------------------------------------------- */
#define CAN_LIFT (KVFS_TIER_NVME | KVFS_TIER_UNVERIFIED)

/* 1 with the entry of a block that is in DRAM, or where it is brought up from in time. */
static int look_up(const struct kvfs_table *t, const uint8_t *digest, struct kvfs_entry_view *view) {
    if (kvfs_table_lookup(t, digest, view) != 1 || view->kind != KVFS_KIND_BLOCK) return 0;
    if (view->tiers & KVFS_TIER_DRAM) return view->slot < t->slot_count && kvfs_visible(t, view) != 0;
    return (kvfs_visible(t, view) & CAN_LIFT) != 0;
}

static int is_bound(struct kvfs_remote_connection *c, const uint8_t *namespace_digest, uint32_t bucket_id) {
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
        if (!look_up(t, digest, &view)) return -ENOENT;
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
    notify(c->server);
    while (rc == 0 && !c->server->stopping && c->question.waits)
        rc = kvfs_wait_until(&c->server->lifted, &c->server->lock, &until);
    c->question.waits = 0;
    const uint32_t found = c->question.found;
    kvfs_unlock(&c->server->lock);
    return found;
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
static int ask_for(struct kvfs_remote_server *s, const uint8_t *digest, const uint8_t *namespace_digest) {
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
    if (news) notify(s);
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

static int open_or_lift(struct kvfs_remote_connection *c, const uint8_t *digest, const uint8_t *namespace_digest,
                        struct kvfs_slot_header *header) {
    struct kvfs_remote_server *s = c->server;
    int fd = open_block(s, digest, header);
    if (fd != -EAGAIN) return fd;
    if (ask_for(s, digest, namespace_digest) < 0 || wait_for(s, digest, namespace_digest, c->below_deadline_ns) < 0)
        return -EBUSY;
    fd = open_block(s, digest, header);
    return fd == -EAGAIN ? -EBUSY : fd;
}

/* --- requests ---------------------------------------------------------------------------------------------------- */
static void count_item(struct kvfs_remote_server *s, const struct kvfs_remote_item *item) {
    kvfs_lock(&s->lock);
    struct kvfs_remote_counts *c = &s->counts;
    uint64_t *by_status[] = {&c->found, &c->absent, &c->too_large, &c->busy};
    *by_status[item->status] += 1;
    c->bytes += item->status == KVFS_REMOTE_FOUND ? item->size_bytes : 0;
    kvfs_unlock(&s->lock);
}

/* Fills in an item whose block is open: the checksum of its seal, or one that is computed here where that is still due. */
static int describe(struct kvfs_remote_server *s, int slot, const struct kvfs_slot_header *header,
                    const struct kvfs_remote_want *want, struct kvfs_remote_item *item) {
    uint64_t bytes = header->size_bytes;
    item->size_bytes = header->size_bytes;
    item->generation = header->generation;
    item->checksum = header->checksum;
    memcpy(item->parent, header->parent, KVFS_KEY_BYTES);
    if (header->size_bytes > want->room_bytes) return KVFS_REMOTE_TOO_LARGE;
    if (!(header->marks & KVFS_MARK_HAS_CHECKSUM) && s->hash(slot, &item->checksum, &bytes) < 0)
        return KVFS_REMOTE_BUSY;
    return bytes == header->size_bytes ? KVFS_REMOTE_FOUND : KVFS_REMOTE_BUSY;
}

static int answer_want(struct kvfs_remote_connection *c, const struct kvfs_remote_request *request, uint32_t index,
                       const struct kvfs_remote_want *want) {
    struct kvfs_remote_server *s = c->server;
    struct kvfs_remote_item item = {.magic = KVFS_REMOTE_ITEM, .number = request->number, .index = index};
    struct kvfs_slot_header header;
    int slot = -EBUSY, rc = 0;
    if (kvfs_clock_ns(CLOCK_MONOTONIC) < c->deadline_ns)
        slot = open_or_lift(c, want->digest, request->namespace_digest, &header);
    if (slot < 0)
        item.status = slot == -ENOENT ? KVFS_REMOTE_ABSENT : KVFS_REMOTE_BUSY;
    else if (!is_bound(c, request->namespace_digest, header.bucket_id))
        item.status = KVFS_REMOTE_ABSENT;
    else
        item.status = (uint32_t)describe(s, slot, &header, want, &item);
    if (item.status == KVFS_REMOTE_BUSY) item.size_bytes = 0;
    const int found = item.status == KVFS_REMOTE_FOUND;
    if (found && c->by_fabric && item.size_bytes > INLINE_BYTES) item.status = KVFS_REMOTE_PIECES;
    /* The peer reads no bytes of the connection before it has the pieces that it waits for. */
    if (item.status == KVFS_REMOTE_FOUND) rc = wait_taken(c, 0);
    const int more = item.status == KVFS_REMOTE_FOUND && item.size_bytes;
    if (rc == 0) rc = send_all(c, &item, sizeof item, more ? MSG_MORE : 0);
    if (rc == 0) rc = send_bytes(c, slot, &item);
    if (slot >= 0) close(slot);
    if (rc == 0) {
        if (found) item.status = KVFS_REMOTE_FOUND;
        count_item(s, &item);
        c->sent |= (uint64_t)found << index;
    }
    return rc;
}

/* The blocks of a READ that went out whole are hits like those of clients. Once for all of them, behind the last: blocks
 * of one prompt stay together, as the order of eviction wants them, and no send waits. */
static void note_hits(struct kvfs_remote_connection *c, const struct kvfs_remote_want *wants, uint32_t count) {
    static_assert(KVFS_REMOTE_READS <= 64, "a bit for each block of a READ");
    kvfs_lock(&c->server->hits.lock);
    for (uint32_t i = 0; i < count; i++)
        if (c->sent >> i & 1) kvfs_hits_note(&c->server->hits, wants[i].digest);
    kvfs_unlock(&c->server->hits.lock);
}

/* Small blocks go out together. Larger ones fill segments anyway, and a cork wakes the reader earlier and oftener:
 * 1 MiB over loopback took 600 us with it and 290 without. */
static int has_small(const struct kvfs_remote_request *request, const struct kvfs_remote_want *wants) {
    return request->count > 1 && wants[0].room_bytes <= SMALL_BYTES;
}

static void set_cork(int fd, int on) { (void)setsockopt(fd, IPPROTO_TCP, TCP_CORK, &on, sizeof on); }

static int serve_read(struct kvfs_remote_connection *c, const struct kvfs_remote_request *request,
                      const struct kvfs_remote_want *wants) {
    struct kvfs_remote_server *s = c->server;
    struct kvfs_entry_view view;
    for (uint32_t i = 1; i < request->count; i++) /* side by side, while the first is sent */
        if (look_up(s->table, wants[i].digest, &view) && !(view.tiers & KVFS_TIER_DRAM))
            (void)ask_for(s, wants[i].digest, request->namespace_digest);
    int rc = 0;
    const int small = !c->by_fabric && has_small(request, wants);
    if (small) set_cork(c->channel.fd, 1);
    for (uint32_t i = 0; rc == 0 && i < request->count; i++) rc = answer_want(c, request, i, &wants[i]);
    if (small) set_cork(c->channel.fd, 0);
    if (rc == 0) rc = wait_taken(c, 0);
    note_hits(c, wants, request->count);
    return rc;
}

/* How many blocks of the request's namespace are there, from the first on, and their sizes. */
static uint32_t match(struct kvfs_remote_connection *c, const struct kvfs_remote_request *request,
                      const uint8_t *digests, uint64_t *sizes) {
    uint8_t below[KVFS_REMOTE_MATCHES * KVFS_KEY_BYTES];
    uint32_t places[KVFS_REMOTE_MATCHES], below_count = 0, count = 0;
    struct kvfs_slot_header header;
    struct kvfs_entry_view view;
    const struct kvfs_table *t = c->server->table;
    for (; count < request->count; count++) {
        const uint8_t *digest = digests + (size_t)count * KVFS_KEY_BYTES;
        if (!look_up(t, digest, &view)) break;
        if (!(view.tiers & KVFS_TIER_DRAM)) {
            memcpy(below + (size_t)below_count * KVFS_KEY_BYTES, digest, KVFS_KEY_BYTES);
            places[below_count++] = count;
        } else if (kvfs_slot_header_read(t, view.slot, &header) == 0 &&
                   !is_bound(c, request->namespace_digest, header.bucket_id)) {
            break;
        }
        sizes[count] = view.size_bytes;
    }
    if (below_count == 0) return count;
    const uint32_t own = count_below(c, request->namespace_digest, below, below_count);
    return own < below_count ? places[own] : count;
}

static int serve_match(struct kvfs_remote_connection *c, const struct kvfs_remote_request *request,
                       const uint8_t *digests) {
    struct kvfs_remote_matched head = {.magic = KVFS_REMOTE_MATCHED, .number = request->number};
    uint64_t sizes[KVFS_REMOTE_MATCHES];
    head.count = match(c, request, digests, sizes);
    int rc = send_all(c, &head, sizeof head, head.count ? MSG_MORE : 0);
    if (rc == 0) rc = send_all(c, sizes, head.count * sizeof *sizes, 0);
    kvfs_lock(&c->server->lock);
    c->server->counts.matches++;
    kvfs_unlock(&c->server->lock);
    return rc;
}

/* Sets what holds for this request. An answer that says less, as it waits no longer for what is below DRAM, is to come
 * before the asker gives up on all of it. */
static void begin_request(struct kvfs_remote_connection *c, const struct kvfs_remote_request *request) {
    const int64_t now_ns = kvfs_clock_ns(CLOCK_MONOTONIC);
    const int64_t half_ns = (int64_t)request->wait_ms * 500000ll;
    c->bound_bucket = 0;
    c->sent = 0;
    c->has_read |= request->kind == KVFS_REMOTE_READ;
    c->by_fabric = (request->flags & KVFS_REMOTE_BY_FABRIC) != 0;
    c->deadline_ns = now_ns + 2 * half_ns;
    c->below_deadline_ns = now_ns + (half_ns < c->server->lift_wait_ns ? half_ns : c->server->lift_wait_ns);
}

static int wait_with_fabric(const struct kvfs_remote_connection *c) {
    const int64_t until_ns = c->has_read ? kvfs_clock_ns(CLOCK_MONOTONIC) + c->server->idle_ms * 1000000ll : INT64_MAX;
    int rc;
    while ((rc = c->fabric->calls->wait(c->fabric, c->channel.fd, POLLIN, until_ns)) == 1)
        ;
    if (rc == -ETIMEDOUT || rc == -ECONNRESET) return 0; /* a peer's end shows here, too */
    return rc < 0 ? rc : 1;
}

/* Waits for bytes of the peer, or its end: 1, 0 where it has been idle for too long, or -errno. What only MATCHes came
 * over stays: a machine has one such connection, and no time to open it when it asks. */
static int wait_for_request(const struct kvfs_remote_connection *c) {
    struct pollfd waits = {.fd = c->channel.fd, .events = POLLIN};
    int ready;
    if (kvfs_channel_has_bytes(&c->channel)) return 1;
    if (c->fabric != NULL) return wait_with_fabric(c);
    while ((ready = poll(&waits, 1, c->has_read ? c->server->idle_ms : -1)) < 0)
        if (errno != EINTR) return -errno;
    return ready;
}

/* One request: 0, 1 at the end of the stream or where nothing comes any more, or -errno. */
static int serve_one(struct kvfs_remote_connection *c, uint64_t *body) {
    struct kvfs_remote_request request;
    int rc = wait_for_request(c);
    if (rc <= 0) return rc == 0 ? 1 : rc;
    c->begun_ns = kvfs_clock_ns(CLOCK_MONOTONIC);
    const ssize_t got = kvfs_receive_some(&c->channel, &request, sizeof request, 0, wait_for_peer, c);
    if (got <= 0) return got == 0 ? 1 : (int)got;
    rc = receive_all(c, (uint8_t *)&request + got, sizeof request - (size_t)got);
    if (rc < 0) return rc;
    int64_t bytes = kvfs_remote_check_request(&request);
    if (bytes < 0) return (int)bytes;
    if (c->fabric == NULL && (request.flags & KVFS_REMOTE_BY_FABRIC)) return -EPROTO;
    rc = receive_all(c, body, (size_t)bytes);
    if (rc < 0) return rc;
    begin_request(c, &request);
    kvfs_lock(&c->server->lock);
    c->server->counts.requests++;
    kvfs_unlock(&c->server->lock);
    return request.kind == KVFS_REMOTE_READ ? serve_read(c, &request, (const struct kvfs_remote_want *)body)
                                            : serve_match(c, &request, (const uint8_t *)body);
}

static void *thread_main(void *argument) {
    struct kvfs_remote_connection *c = (struct kvfs_remote_connection *)argument;
    uint64_t body[KVFS_REMOTE_MATCHES * KVFS_KEY_BYTES / sizeof(uint64_t)];
    int rc = 0;
    while (rc == 0) rc = serve_one(c, body);
    shutdown(c->channel.fd, SHUT_RDWR);
    if (c->fabric != NULL) c->fabric->calls->free(c->fabric); /* takes some ms */
    kvfs_lock(&c->server->lock);
    c->error = rc < 0 ? rc : 0;
    c->server->counts.broken += rc == -EPROTO;
    c->ended = 1;
    kvfs_unlock(&c->server->lock);
    notify(c->server);
    return NULL;
}

/* --- the event loop's side --------------------------------------------------------------------------------------- */
static void free_all(struct kvfs_remote_server *s) UNCHECKED /* no thread any more */
{
    if (s->notify_fd >= 0) close(s->notify_fd);
    free(s->connections);
    free(s->bindings);
    free(s->lifts);
    kvfs_hits_free(&s->hits);
    pthread_cond_destroy(&s->lifted);
    kvfs_mutex_destroy(&s->lock);
}

int kvfs_remote_start(struct kvfs_remote_server *s, uint32_t connections, uint32_t lifts, uint32_t hits)
    UNCHECKED /* no thread yet */
{
    s->connection_count = connections;
    s->lift_room = lifts;
    kvfs_mutex_init(&s->lock);
    kvfs_cond_init(&s->lifted);
    s->connections = calloc(connections, sizeof *s->connections);
    s->lifts = calloc(lifts, sizeof *s->lifts);
    s->notify_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int rc = !s->connections || !s->lifts ? -ENOMEM : s->notify_fd < 0 ? -errno : 0;
    const int hits_rc = kvfs_hits_init(&s->hits, hits);
    rc = rc < 0 ? rc : hits_rc;
    s->started = rc == 0;
    if (rc < 0) free_all(s);
    return rc;
}

static void close_connection(struct kvfs_remote_connection *c) {
    kvfs_channel_close(&c->channel);
    free(c->pieces);
}

void kvfs_remote_stop(struct kvfs_remote_server *s) {
    if (!s->started) return;
    s->started = 0;
    kvfs_lock(&s->lock);
    s->stopping = 1;
    pthread_cond_broadcast(&s->lifted);
    kvfs_unlock(&s->lock);
    for (uint32_t i = 0; i < s->connection_count; i++)
        if (s->connections[i].used) shutdown(s->connections[i].channel.fd, SHUT_RDWR);
    for (uint32_t i = 0; i < s->connection_count; i++)
        if (s->connections[i].used) {
            pthread_join(s->connections[i].thread, NULL);
            close_connection(&s->connections[i]);
        }
    free_all(s);
}

/* The thread waits in its calls, within these bounds; keepalive finds peers that are gone while nothing is sent. */
static int prepare(int fd) {
    const struct timeval wait = {.tv_sec = PEER_WAIT_S};
    const int on = 1, idle_s = 30, interval_s = 10, probes = 3, unacknowledged_ms = PEER_WAIT_S * 1000;
    if (fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK) != 0 ||
        setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof wait) != 0 ||
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &wait, sizeof wait) != 0)
        return -errno;
    (void)setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof idle_s);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof interval_s);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    (void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &unacknowledged_ms, sizeof unacknowledged_ms);
    return 0;
}

/* Takes over a channel whose peer was verified, and a fabric if there is one; the connection's number, its own until it is
 * reaped; or -errno. */
int64_t kvfs_remote_open(struct kvfs_remote_server *s, struct kvfs_channel channel, struct kvfs_fabric *fabric)
    UNCHECKED /* its thread begins with the last step */
{
    uint32_t number = 0;
    while (number < s->connection_count && s->connections[number].used) number++;
    if (number == s->connection_count) return -EMFILE;
    struct kvfs_remote_connection *c = &s->connections[number];
    *c = (struct kvfs_remote_connection){.server = s, .channel = channel, .fabric = fabric, .number = number};
    int rc = prepare(channel.fd);
    if (rc == 0 && channel.session != NULL) {
        c->pieces = malloc(PIECE_BYTES);
        rc = c->pieces == NULL ? -ENOMEM : 0;
    }
    if (rc == 0) rc = kvfs_thread_start(&c->thread, thread_main, c, KVFS_SMALL_STACK_BYTES);
    c->used = rc == 0;
    if (rc < 0) free(c->pieces);
    return rc < 0 ? (int64_t)rc : (int64_t)number;
}

/* 1 where the connection has ended, and is closed now; 0 where it goes on. */
int kvfs_remote_reap(struct kvfs_remote_server *s, uint32_t number, int *error) {
    if (number >= s->connection_count || !s->connections[number].used) return 0;
    struct kvfs_remote_connection *c = &s->connections[number];
    kvfs_lock(&c->server->lock);
    int ended = c->ended;
    *error = c->error;
    kvfs_unlock(&c->server->lock);
    if (ended) {
        pthread_join(c->thread, NULL);
        close_connection(c);
        c->used = 0;
    }
    return ended;
}

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

void kvfs_remote_read_counts(struct kvfs_remote_server *s, struct kvfs_remote_counts *into) {
    kvfs_lock(&s->lock);
    *into = s->counts;
    kvfs_unlock(&s->lock);
}
