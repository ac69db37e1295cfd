/* What another machine says against any bytes: a stream whose peer sends the input ends, and believes nothing outside of
 * the wire's limits; with a fabric it asks for no piece twice, for none past the window and for none after an end; and the
 * request's check, as a server makes it.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "remote/stream_core.h"

#define ROOM_BYTES 512u
#define PIECES_ROOM_BYTES ((KVFS_FABRIC_PIECES + 1) * KVFS_FABRIC_PIECE_BYTES)
#define BLOCKS 3u

static void check(int holds) {
    if (!holds) abort();
}

static void check_requests(const uint8_t *data, size_t size) {
    struct kvfs_remote_request request;
    for (; size >= sizeof request; data += 8, size -= 8) {
        memcpy(&request, data, sizeof request);
        int64_t bytes = kvfs_remote_check_request(&request);
        check(bytes < 0 || (bytes > 0 && bytes <= KVFS_REMOTE_MATCHES * KVFS_KEY_BYTES));
    }
}

/* --- a fabric whose pieces all have the same bytes --------------------------------------------------------------- */
enum { LATE = 1, BREAKS = 2, ENDS = 4 }; /* bits of `how`: a piece comes at the second look, breaks, or never comes */

struct pieces {
    struct kvfs_fabric fabric;
    uint64_t next, taken, looked;
    int abandoned, freed;
    uint8_t how;
};

static int look(struct kvfs_fabric *f) {
    (void)f;
    return 0;
}

static int await(struct kvfs_fabric *f, int socket, short events, int64_t deadline_ns) {
    (void)socket, (void)events, (void)deadline_ns;
    return ((struct pieces *)f)->how & ENDS ? -ETIMEDOUT : 1;
}

static int refuse(struct kvfs_fabric *f, uint64_t number, size_t bytes) {
    (void)f, (void)number, (void)bytes;
    abort(); /* who asks sends no piece */
}

static int receive(struct kvfs_fabric *f, uint64_t number, size_t bytes) {
    struct pieces *p = (struct pieces *)f;
    check(!p->abandoned && number == p->next++ && number - p->taken < KVFS_FABRIC_PIECES);
    check(bytes > 0 && bytes <= KVFS_FABRIC_PIECE_BYTES);
    memset(kvfs_fabric_piece(f, number), p->how, bytes);
    return 0;
}

static int is_done(const struct kvfs_fabric *f, uint64_t number) {
    struct pieces *p = (struct pieces *)f;
    check(!p->abandoned && number == p->taken && number < p->next);
    if (p->how & LATE && p->looked++ % 2 == 0) return 0;
    if (p->how & BREAKS && number == 2) return -EIO;
    p->taken++;
    return 1;
}

static void abandon(struct kvfs_fabric *f) { ((struct pieces *)f)->abandoned = 1; }

static void end(struct kvfs_fabric *f) { check(((struct pieces *)f)->freed++ == 0); }

static struct kvfs_fabric *start_pieces(struct pieces *p, uint8_t how) {
    static const struct kvfs_fabric_calls calls = {look, await, refuse, receive, is_done, abandon, end};
    static uint8_t places[KVFS_FABRIC_PIECES * KVFS_FABRIC_PIECE_BYTES];
    *p = (struct pieces){.fabric = {.calls = &calls, .pieces = places}, .how = how};
    return &p->fabric;
}

static void run(const uint8_t *data, size_t size, uint16_t kind, struct kvfs_fabric *fabric) {
    static struct kvfs_remote_stream stream;
    const size_t room_bytes = fabric == NULL ? ROOM_BYTES : PIECES_ROOM_BYTES;
    int ends[2];
    memset(&stream, 0, sizeof stream);
    check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    check(kvfs_stream_start(&stream, (struct kvfs_channel){.fd = ends[0]}, fabric) == 0);
    check(write(ends[1], data, size) == (ssize_t)size && shutdown(ends[1], SHUT_WR) == 0);
    stream.request = (struct kvfs_remote_request){
        .magic = KVFS_REMOTE_REQUEST, .kind = kind, .count = BLOCKS, .wait_ms = 1000, .number = 1};
    stream.deadline_ns = kvfs_clock_ns(CLOCK_MONOTONIC) + 5000000000ll;
    int drafts[BLOCKS];
    for (uint32_t i = 0; kind == KVFS_REMOTE_READ && i < BLOCKS; i++) {
        drafts[i] = memfd_create("draft", MFD_CLOEXEC);
        stream.reads[i] = (struct kvfs_remote_read){
            .want = {.room_bytes = room_bytes}, .fd = dup(drafts[i]), .status = KVFS_REMOTE_NOT_ANSWERED};
    }
    kvfs_stream_begin(&stream);
    while (!kvfs_stream_take(&stream)) usleep(10);
    check(stream.matched <= BLOCKS);
    for (uint32_t i = 0; kind == KVFS_REMOTE_READ && i < BLOCKS; i++) {
        const struct kvfs_remote_read *read = &stream.reads[i];
        check(read->fd == -1 && lseek(drafts[i], 0, SEEK_END) <= (off_t)room_bytes);
        check(read->status != KVFS_REMOTE_FOUND || lseek(drafts[i], 0, SEEK_END) == (off_t)read->size_bytes);
        close(drafts[i]);
    }
    kvfs_stream_stop(&stream);
    close(ends[1]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    check_requests(data, size);
    run(data, size, KVFS_REMOTE_READ, NULL);
    run(data, size, KVFS_REMOTE_MATCH, NULL);
    struct pieces pieces;
    run(data, size, KVFS_REMOTE_READ, start_pieces(&pieces, size ? data[size - 1] : 0));
    check(pieces.freed == 1);
    return 0;
}
