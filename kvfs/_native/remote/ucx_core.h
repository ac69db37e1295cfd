/* Bytes between machines by UCX. See ucx_core.c. */
#ifndef KVFS_REMOTE_UCX_CORE_H
#define KVFS_REMOTE_UCX_CORE_H

#include <stddef.h>
#include <stdint.h>
#include <ucp/api/ucp.h>

#include "remote/fabric.h"

/* The longest address that a peer may name. */
#define KVFS_UCX_ADDRESS_BYTES 16384u

struct kvfs_ucx_context {
    ucp_context_h context;
    int users; /* atomic: who made it, and each fabric of it */
};

struct kvfs_ucx_place {
    void *request; /* NULL: nothing is under way */
    size_t bytes;
    ucs_status_t status; /* of the last piece that was here; UCS_INPROGRESS while one is begun */
};

struct kvfs_ucx {
    struct kvfs_fabric fabric; /* first: who has it has this */
    struct kvfs_ucx_context *context;
    ucp_worker_h worker;
    ucp_ep_h peer;    /* NULL before it is known */
    ucp_mem_h memory; /* the pieces */
    ucp_address_t *address;
    size_t address_bytes;
    uint64_t tag; /* of the piece before the first */
    int events_fd;
    int abandoned, is_closed;
    ucs_status_t failed; /* of the peer, once it is */
    struct kvfs_ucx_place places[KVFS_FABRIC_PIECES];
    uint64_t hello;
    struct kvfs_ucx_place greeting;
};

/* Each: 0, or -errno, and what UCX said. */
int kvfs_ucx_open(struct kvfs_ucx_context **into, const char **reason);
void kvfs_ucx_release(struct kvfs_ucx_context *c);
/* A fabric without a peer, whose address is its own. */
int kvfs_ucx_make(struct kvfs_ucx_context *c, struct kvfs_ucx **into, const char **reason);
/* Names the peer and the tag of what goes between both. The end that serves begins to send some bytes, for which the other
 * one waits here. */
int kvfs_ucx_connect(struct kvfs_ucx *u, const void *address, size_t bytes, uint64_t tag, const char **reason);
int kvfs_ucx_greet(struct kvfs_ucx *u, const char **reason);
int kvfs_ucx_await_greeting(struct kvfs_ucx *u, int64_t wait_ns, const char **reason);
void kvfs_ucx_free(struct kvfs_fabric *f);

#endif
