/* The requests of a connection: received, checked and answered, one at a time. See serve_core.c.
 *
 * Responsibility: a request in, its answers out, the bytes by sendfile from the slot's own pages, through a buffer
 * where a session encrypts them, or in pieces by a fabric (fabric.h).
 *
 * Invariants:
 * - The open descriptor of a slot is the lease, one for each connection at most. Bytes that the kernel still has queued
 *   when the slot is recycled stay as they were: sendfile sets the slot's access time, so that its pages are not used
 *   again (docs/architecture.md).
 * - A peer cannot hold anybody up: what it sends and takes is bounded in size and, once begun, in time. Whatever is
 *   outside of the wire's limits ends the connection.
 *
 * Concurrency: all of it runs in the connection's own thread. `lock` is held to count, and that of `hits` to note hits,
 * never over a system call on a socket or slot.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "serve_state.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <unistd.h>

#include "shared/slots_core.h"

#define PEER_WAIT_NS (PEER_WAIT_S * 1000000000ll)
#define BYTES_AT_ONCE ((size_t)8 << 20)
#define SMALL_BYTES 65536u
#define INLINE_BYTES 16384u /* no more go over the connection where there is a fabric: two messages are as much */

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
        slot = kvfs_remote_open_or_lift(c, want->digest, request->namespace_digest, &header);
    if (slot < 0)
        item.status = slot == -ENOENT ? KVFS_REMOTE_ABSENT : KVFS_REMOTE_BUSY;
    else if (!kvfs_remote_is_bound(c, request->namespace_digest, header.bucket_id))
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
        if (kvfs_remote_look_up(s->table, wants[i].digest, &view) && !(view.tiers & KVFS_TIER_DRAM))
            (void)kvfs_remote_ask_for(s, wants[i].digest, request->namespace_digest);
    int rc = 0;
    const int small = !c->by_fabric && has_small(request, wants);
    if (small) set_cork(c->channel.fd, 1);
    for (uint32_t i = 0; rc == 0 && i < request->count; i++) rc = answer_want(c, request, i, &wants[i]);
    if (small) set_cork(c->channel.fd, 0);
    if (rc == 0) rc = wait_taken(c, 0);
    note_hits(c, wants, request->count);
    return rc;
}

static int serve_match(struct kvfs_remote_connection *c, const struct kvfs_remote_request *request,
                       const uint8_t *digests) {
    struct kvfs_remote_matched head = {.magic = KVFS_REMOTE_MATCHED, .number = request->number};
    uint64_t sizes[KVFS_REMOTE_MATCHES];
    head.count = kvfs_remote_match(c, request, digests, sizes);
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
int kvfs_remote_serve_one(struct kvfs_remote_connection *c, uint64_t *body) {
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
