/* What the files of serving share: bounds of a connection, the blocks of a request, and the request. See serve_core.c.
 *
 * Concurrency: what takes a connection is called by its thread; the locks are taken inside.
 */
#ifndef KVFS_REMOTE_SERVE_STATE_H
#define KVFS_REMOTE_SERVE_STATE_H

#include <stddef.h>
#include <stdint.h>

#include "serve_core.h"

#define PEER_WAIT_S 10 /* for the rest of a request that has begun, and for the peer to take what it asked for */
#define PIECE_BYTES ((size_t)64 << 10) /* of a block, on their way into a session */

/* --- the event loop's notification: serve_core.c ----------------------------------------------------------------- */
void kvfs_remote_notify(struct kvfs_remote_server *s);

/* --- blocks: serve_blocks.c -------------------------------------------------------------------------------------- */
int kvfs_remote_look_up(const struct kvfs_table *t, const uint8_t *digest, struct kvfs_entry_view *view);
int kvfs_remote_is_bound(struct kvfs_remote_connection *c, const uint8_t *namespace_digest, uint32_t bucket_id);
uint32_t kvfs_remote_match(struct kvfs_remote_connection *c, const struct kvfs_remote_request *request,
                           const uint8_t *digests, uint64_t *sizes);
int kvfs_remote_ask_for(struct kvfs_remote_server *s, const uint8_t *digest, const uint8_t *namespace_digest);
int kvfs_remote_open_or_lift(struct kvfs_remote_connection *c, const uint8_t *digest, const uint8_t *namespace_digest,
                             struct kvfs_slot_header *header);

/* --- requests: serve_requests.c ---------------------------------------------------------------------------------- */
int kvfs_remote_serve_one(struct kvfs_remote_connection *c, uint64_t *body);

#endif
