/* Bytes between machines by UCX: RDMA where there is a card for it, else what UCX has, such as TCP.
 *
 * Responsibility: one context for all fabrics of a service; for each connection a worker, with the memory that pieces are
 * sent from or received into, and the peer's worker. Pieces are tagged messages; the connection says how many (fabric.h).
 *
 * Invariants:
 * - Messages, and no access to memory: in UCX 1.13 that would let whoever reaches a worker read and write all of the
 *   process, lets a peer write what it may read, and ends the process where a peer goes while it is answered. Tags begin at
 *   a number that the connection alone has carried.
 * - Pieces and nothing else are given to devices. They go after the worker, behind which no card writes any more.
 * - Nothing spins: a worker is run until nothing is due, armed, and waited for together with the connection's socket.
 * - UCX says that a peer is gone where the transport notices, and never that one has stopped: each wait has a deadline.
 * - A peer's address is copied into a buffer that is longer: UCX is told no length.
 *
 * Concurrency: one thread at a time for each fabric; a context is for all threads.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "ucx_core.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "shared/mutex.h"

#define AREA_BYTES (KVFS_FABRIC_PIECES * KVFS_FABRIC_PIECE_BYTES)
/* How long what was given up may take to end. What ends later meets a worker that is gone. */
#define ABANDON_NS 1000000000ll
#define ADDRESS_ROOM (2 * KVFS_UCX_ADDRESS_BYTES)

static int errno_of(ucs_status_t status) {
    switch (status) {
    case UCS_OK:
        return 0;
    case UCS_ERR_NO_MEMORY:
        return -ENOMEM;
    case UCS_ERR_NO_DEVICE:
    case UCS_ERR_NO_RESOURCE:
        return -ENODEV;
    case UCS_ERR_UNREACHABLE:
        return -EHOSTUNREACH;
    case UCS_ERR_INVALID_ADDR:
    case UCS_ERR_INVALID_PARAM:
    case UCS_ERR_MESSAGE_TRUNCATED:
        return -EPROTO;
    case UCS_ERR_CONNECTION_RESET:
    case UCS_ERR_ENDPOINT_TIMEOUT:
    case UCS_ERR_CANCELED:
        return -ECONNRESET;
    default:
        return -EIO;
    }
}

static int failed(ucs_status_t status, const char **reason) {
    if (status != UCS_OK) *reason = ucs_status_string(status);
    return errno_of(status);
}

/* --- contexts ---------------------------------------------------------------------------------------------------- */
int kvfs_ucx_open(struct kvfs_ucx_context **into, const char **reason) {
    const ucp_params_t params = {
        .field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED,
        .features = UCP_FEATURE_TAG | UCP_FEATURE_WAKEUP,
        .mt_workers_shared = 1,
    };
    ucp_config_t *config;
    struct kvfs_ucx_context *c = calloc(1, sizeof *c);
    if (c == NULL) return failed(UCS_ERR_NO_MEMORY, reason);
    ucs_status_t status = ucp_config_read(NULL, NULL, &config);
    if (status == UCS_OK) {
        status = ucp_init(&params, config, &c->context);
        ucp_config_release(config);
    }
    c->users = 1;
    if (status != UCS_OK) free(c);
    *into = status == UCS_OK ? c : NULL;
    return failed(status, reason);
}

void kvfs_ucx_release(struct kvfs_ucx_context *c) {
    if (c == NULL || __atomic_sub_fetch(&c->users, 1, __ATOMIC_ACQ_REL) > 0) return;
    ucp_cleanup(c->context);
    free(c);
}

/* --- waiting ----------------------------------------------------------------------------------------------------- */
/* Polls the worker's events and the socket, unless something is due already: as `wait` of fabric.h. */
static int wait_for_events(struct kvfs_ucx *u, int socket, short events, int64_t deadline_ns) {
    struct pollfd waits[] = {{.fd = u->events_fd, .events = POLLIN}, {.fd = socket, .events = events}};
    const int64_t left_ns = deadline_ns - kvfs_clock_ns(CLOCK_MONOTONIC);
    const ucs_status_t armed = ucp_worker_arm(u->worker);
    if (armed == UCS_ERR_BUSY) return left_ns > 0 ? 1 : -ETIMEDOUT;
    if (armed != UCS_OK) return errno_of(armed);
    if (left_ns <= 0) return -ETIMEDOUT;
    const struct timespec left = {.tv_sec = left_ns / 1000000000ll, .tv_nsec = left_ns % 1000000000ll};
    const int ready = ppoll(waits, 2, &left, NULL);
    if (ready < 0 && errno != EINTR) return -errno;
    if (ready == 0) return -ETIMEDOUT;
    return ready > 0 && waits[1].revents ? 0 : 1;
}

static int progress(struct kvfs_fabric *f) {
    int done = 0;
    while (ucp_worker_progress(((struct kvfs_ucx *)f)->worker)) done = 1;
    return done;
}

static int wait_for(struct kvfs_fabric *f, int socket, short events, int64_t deadline_ns) {
    struct kvfs_ucx *u = (struct kvfs_ucx *)f;
    const int done = progress(f);
    if (u->failed != UCS_OK) return errno_of(u->failed);
    if (done) return kvfs_clock_ns(CLOCK_MONOTONIC) < deadline_ns ? 1 : -ETIMEDOUT;
    return wait_for_events(u, socket, events, deadline_ns);
}

/* --- pieces ------------------------------------------------------------------------------------------------------ */
static void end(struct kvfs_ucx_place *place, void *request, ucs_status_t status) {
    place->status = status;
    place->request = NULL;
    ucp_request_free(request);
}

static void sent(void *request, ucs_status_t status, void *of) { end((struct kvfs_ucx_place *)of, request, status); }

static void received(void *request, ucs_status_t status, const ucp_tag_recv_info_t *info, void *of) {
    struct kvfs_ucx_place *place = (struct kvfs_ucx_place *)of;
    if (status == UCS_OK && info->length != place->bytes) status = UCS_ERR_INVALID_PARAM;
    end(place, request, status);
}

static ucp_request_param_t params_of(const struct kvfs_ucx *u, struct kvfs_ucx_place *place) {
    return (ucp_request_param_t){
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE |
                        (place == &u->greeting ? 0 : UCP_OP_ATTR_FIELD_MEMH),
        .user_data = place,
        .memory_type = UCS_MEMORY_TYPE_HOST,
        .memh = u->memory,
    };
}

/* Keeps a request, whose callback is still to come. What is done at once has none, or had it within the call: UCX begins a
 * receive, finds that all of its bytes are here, calls back, and returns what is freed by then. */
static int keep(struct kvfs_ucx_place *place, ucs_status_ptr_t request) {
    if (place->status != UCS_INPROGRESS) return errno_of(place->status);
    place->status = UCS_PTR_IS_PTR(request) ? UCS_OK : UCS_PTR_RAW_STATUS(request);
    place->request = UCS_PTR_IS_PTR(request) ? request : NULL;
    return errno_of(place->status);
}

static int send_some(struct kvfs_ucx *u, struct kvfs_ucx_place *place, const void *data, size_t bytes, uint64_t tag) {
    ucp_request_param_t params = params_of(u, place);
    params.cb.send = sent;
    if (u->peer == NULL || u->abandoned || place->request != NULL) return -EINVAL;
    place->status = UCS_INPROGRESS;
    return keep(place, ucp_tag_send_nbx(u->peer, data, bytes, tag, &params));
}

static int receive_some(struct kvfs_ucx *u, struct kvfs_ucx_place *place, void *into, size_t bytes, uint64_t tag) {
    ucp_tag_recv_info_t info = {.length = bytes};
    ucp_request_param_t params = params_of(u, place);
    params.op_attr_mask |= UCP_OP_ATTR_FIELD_RECV_INFO;
    params.recv_info.tag_info = &info;
    params.cb.recv = received;
    if (u->peer == NULL || u->abandoned || place->request != NULL) return -EINVAL;
    place->bytes = bytes;
    place->status = UCS_INPROGRESS;
    const int rc = keep(place, ucp_tag_recv_nbx(u->worker, into, bytes, tag, UINT64_MAX, &params));
    return rc == 0 && place->request == NULL && info.length != bytes ? -EPROTO : rc;
}

static int send_piece(struct kvfs_fabric *f, uint64_t number, size_t bytes) {
    struct kvfs_ucx *u = (struct kvfs_ucx *)f;
    return send_some(u, &u->places[number % KVFS_FABRIC_PIECES], kvfs_fabric_piece(f, number), bytes,
                     u->tag + 1 + number);
}

static int receive_piece(struct kvfs_fabric *f, uint64_t number, size_t bytes) {
    struct kvfs_ucx *u = (struct kvfs_ucx *)f;
    return receive_some(u, &u->places[number % KVFS_FABRIC_PIECES], kvfs_fabric_piece(f, number), bytes,
                        u->tag + 1 + number);
}

static int is_done(const struct kvfs_fabric *f, uint64_t number) {
    const struct kvfs_ucx_place *place = &((const struct kvfs_ucx *)f)->places[number % KVFS_FABRIC_PIECES];
    if (place->request != NULL) return 0;
    return place->status == UCS_OK ? 1 : errno_of(place->status);
}

static int is_busy(const struct kvfs_ucx *u) {
    int busy = !u->is_closed || u->greeting.request != NULL;
    for (uint32_t i = 0; i < KVFS_FABRIC_PIECES; i++) busy |= u->places[i].request != NULL;
    return busy;
}

static void closed(void *request, ucs_status_t status, void *of) {
    ((struct kvfs_ucx *)of)->is_closed = 1;
    (void)status;
    ucp_request_free(request);
}

static void cancel(struct kvfs_ucx *u, struct kvfs_ucx_place *place) {
    if (place->request != NULL) ucp_request_cancel(u->worker, place->request);
}

static void abandon(struct kvfs_fabric *f) {
    struct kvfs_ucx *u = (struct kvfs_ucx *)f;
    const int64_t until_ns = kvfs_clock_ns(CLOCK_MONOTONIC) + ABANDON_NS;
    const ucp_request_param_t params = {
        .op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS,
        .flags = UCP_EP_CLOSE_FLAG_FORCE,
        .cb.send = closed,
        .user_data = u,
    };
    int rc = 0;
    if (u->peer == NULL || u->abandoned) return;
    u->abandoned = 1;
    const ucs_status_ptr_t request = ucp_ep_close_nbx(u->peer, &params);
    if (!UCS_PTR_IS_PTR(request)) u->is_closed = 1;
    cancel(u, &u->greeting);
    for (uint32_t i = 0; i < KVFS_FABRIC_PIECES; i++) cancel(u, &u->places[i]);
    while (rc >= 0 && is_busy(u)) {
        (void)progress(f);
        if (is_busy(u)) rc = wait_for_events(u, -1, 0, until_ns);
    }
}

/* --- fabrics ----------------------------------------------------------------------------------------------------- */
static const struct kvfs_fabric_calls CALLS = {progress, wait_for, send_piece,   receive_piece,
                                               is_done,  abandon,  kvfs_ucx_free};

static ucs_status_t make_worker(struct kvfs_ucx *u) {
    /* Made by one thread and used by another: never by two at once. */
    const ucp_worker_params_t params = {
        .field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
        .thread_mode = UCS_THREAD_MODE_SERIALIZED,
    };
    ucs_status_t status = ucp_worker_create(u->context->context, &params, &u->worker);
    if (status == UCS_OK) status = ucp_worker_get_efd(u->worker, &u->events_fd);
    return status;
}

static ucs_status_t make_pieces(struct kvfs_ucx *u) {
    void *area = mmap(NULL, AREA_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (area == MAP_FAILED) return UCS_ERR_NO_MEMORY;
    /* A child that is forked shares no page of it: the card would go on with the one, and the parent with another. */
    (void)madvise(area, AREA_BYTES, MADV_DONTFORK);
    u->fabric.pieces = (uint8_t *)area;
    const ucp_mem_map_params_t params = {
        .field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH |
                      UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        .address = area,
        .length = AREA_BYTES,
        .memory_type = UCS_MEMORY_TYPE_HOST,
    };
    return ucp_mem_map(u->context->context, &params, &u->memory);
}

int kvfs_ucx_make(struct kvfs_ucx_context *c, struct kvfs_ucx **into, const char **reason) {
    struct kvfs_ucx *u = calloc(1, sizeof *u);
    if (u == NULL) return failed(UCS_ERR_NO_MEMORY, reason);
    u->fabric.calls = &CALLS;
    u->context = c;
    __atomic_add_fetch(&c->users, 1, __ATOMIC_ACQ_REL);
    ucs_status_t status = make_worker(u);
    if (status == UCS_OK) status = make_pieces(u);
    if (status == UCS_OK) status = ucp_worker_get_address(u->worker, &u->address, &u->address_bytes);
    if (status == UCS_OK && u->address_bytes > KVFS_UCX_ADDRESS_BYTES) status = UCS_ERR_EXCEEDS_LIMIT;
    if (status != UCS_OK) kvfs_ucx_free(&u->fabric);
    *into = status == UCS_OK ? u : NULL;
    return failed(status, reason);
}

static void peer_failed(void *of, ucp_ep_h peer, ucs_status_t status) {
    (void)peer;
    ((struct kvfs_ucx *)of)->failed = status;
}

int kvfs_ucx_connect(struct kvfs_ucx *u, const void *address, size_t bytes, uint64_t tag, const char **reason) {
    if (u->peer != NULL || bytes == 0 || bytes > KVFS_UCX_ADDRESS_BYTES) return failed(UCS_ERR_INVALID_PARAM, reason);
    uint8_t *room = calloc(1, ADDRESS_ROOM);
    if (room == NULL) return failed(UCS_ERR_NO_MEMORY, reason);
    memcpy(room, address, bytes);
    const ucp_ep_params_t params = {
        .field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER,
        .address = (const ucp_address_t *)room,
        .err_mode = UCP_ERR_HANDLING_MODE_PEER,
        .err_handler = {.cb = peer_failed, .arg = u},
    };
    const ucs_status_t status = ucp_ep_create(u->worker, &params, &u->peer);
    free(room);
    if (status != UCS_OK) u->peer = NULL;
    u->tag = tag;
    return failed(status, reason);
}

int kvfs_ucx_greet(struct kvfs_ucx *u, const char **reason) {
    const int rc = send_some(u, &u->greeting, &u->hello, sizeof u->hello, u->tag);
    if (rc < 0) *reason = ucs_status_string(u->greeting.status);
    return rc;
}

/* Where networks, rights or devices are in the way, it shows here. */
int kvfs_ucx_await_greeting(struct kvfs_ucx *u, int64_t wait_ns, const char **reason) {
    const int64_t until_ns = kvfs_clock_ns(CLOCK_MONOTONIC) + wait_ns;
    int rc = receive_some(u, &u->greeting, &u->hello, sizeof u->hello, u->tag);
    while (rc >= 0 && u->greeting.request != NULL) rc = wait_for(&u->fabric, -1, 0, until_ns);
    if (u->failed != UCS_OK) return failed(u->failed, reason);
    if (rc == -ETIMEDOUT) return failed(UCS_ERR_TIMED_OUT, reason) ?: rc;
    return rc < 0 ? failed(UCS_ERR_IO_ERROR, reason) : failed(u->greeting.status, reason);
}

void kvfs_ucx_free(struct kvfs_fabric *f) {
    struct kvfs_ucx *u = (struct kvfs_ucx *)f;
    abandon(f);
    if (u->address != NULL) ucp_worker_release_address(u->worker, u->address);
    if (u->worker != NULL) ucp_worker_destroy(u->worker);
    if (u->memory != NULL) ucp_mem_unmap(u->context->context, u->memory);
    if (u->fabric.pieces != NULL) munmap(u->fabric.pieces, AREA_BYTES);
    kvfs_ucx_release(u->context);
    free(u);
}
