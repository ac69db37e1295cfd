/* Bytes between machines beside their connection: from memory of the one that serves into memory of the one that asks.
 *
 * Responsibility: what serving and reading threads want of such a transport: pieces of a bounded size, sent and received by
 * their number since the connection began. How many there are to be, both know from what goes over the connection (wire.h).
 *
 * Invariants: a fabric is an object of a module that nobody here is linked with (ucx_core.c). A piece's place is filled
 * again only once the peer has said that it has it. Pieces are the fabric's own memory on both sides, never a slot or a
 * draft: what a transport does late, or a peer does on purpose, is done to those.
 *
 * Concurrency: one thread at a time for each fabric. No call blocks but `wait`.
 */
#ifndef KVFS_REMOTE_FABRIC_H
#define KVFS_REMOTE_FABRIC_H

#include <stddef.h>
#include <stdint.h>

/* Names the capsule in which a fabric comes from its module. */
#define KVFS_FABRIC_CAPSULE "kvfs_fabric"

#define KVFS_FABRIC_PIECES 4u
#define KVFS_FABRIC_PIECE_BYTES ((size_t)256 << 10)

struct kvfs_fabric;

struct kvfs_fabric_calls {
    /* Does what is due: 1 where there was something. */
    int (*progress)(struct kvfs_fabric *f);
    /* Waits for `events` of the connection's socket or something to do, and does it: 0 once an event is there, 1 otherwise, -ETIMEDOUT at the deadline, or -errno of a transport that failed. */
    int (*wait)(struct kvfs_fabric *f, int socket, short events, int64_t deadline_ns);
    /* Begins to send a piece whose place is filled, or to receive one: 0 or -errno. */
    int (*send)(struct kvfs_fabric *f, uint64_t number, size_t bytes);
    int (*receive)(struct kvfs_fabric *f, uint64_t number, size_t bytes);
    /* 1 where nothing is done with the place of a piece any more, 0 while something is, or -errno of what was. */
    int (*is_done)(const struct kvfs_fabric *f, uint64_t number);
    /* Ends what is under way; nothing is begun after. */
    void (*abandon)(struct kvfs_fabric *f);
    void (*free)(struct kvfs_fabric *f);
};

struct kvfs_fabric {
    const struct kvfs_fabric_calls *calls;
    uint8_t *pieces; /* KVFS_FABRIC_PIECES of KVFS_FABRIC_PIECE_BYTES */
};

static inline uint8_t *kvfs_fabric_piece(const struct kvfs_fabric *f, uint64_t number) {
    return f->pieces + number % KVFS_FABRIC_PIECES * KVFS_FABRIC_PIECE_BYTES;
}

#endif
