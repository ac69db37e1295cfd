/* What another machine says against any bytes: a stream whose peer sends the input ends, and believes nothing outside of
 * the wire's limits; and the request's check, as a server makes it.
 */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "remote/stream_core.h"

#define ROOM_BYTES 512u
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

static void run(const uint8_t *data, size_t size, uint16_t kind) {
    static struct kvfs_remote_stream stream;
    int ends[2];
    memset(&stream, 0, sizeof stream);
    check(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    check(kvfs_stream_start(&stream, (struct kvfs_channel){.fd = ends[0]}, NULL) == 0);
    check(write(ends[1], data, size) == (ssize_t)size && shutdown(ends[1], SHUT_WR) == 0);
    stream.request = (struct kvfs_remote_request){
        .magic = KVFS_REMOTE_REQUEST, .kind = kind, .count = BLOCKS, .wait_ms = 1000, .number = 1};
    stream.deadline_ns = kvfs_clock_ns(CLOCK_MONOTONIC) + 5000000000ll;
    int drafts[BLOCKS];
    for (uint32_t i = 0; kind == KVFS_REMOTE_READ && i < BLOCKS; i++) {
        drafts[i] = memfd_create("draft", MFD_CLOEXEC);
        stream.reads[i] = (struct kvfs_remote_read){
            .want = {.room_bytes = ROOM_BYTES}, .fd = dup(drafts[i]), .status = KVFS_REMOTE_NOT_ANSWERED};
    }
    kvfs_stream_begin(&stream);
    while (!kvfs_stream_take(&stream)) usleep(10);
    check(stream.matched <= BLOCKS);
    for (uint32_t i = 0; kind == KVFS_REMOTE_READ && i < BLOCKS; i++) {
        const struct kvfs_remote_read *read = &stream.reads[i];
        check(read->fd == -1 && lseek(drafts[i], 0, SEEK_END) <= (off_t)ROOM_BYTES);
        check(read->status != KVFS_REMOTE_FOUND || lseek(drafts[i], 0, SEEK_END) == (off_t)read->size_bytes);
        close(drafts[i]);
    }
    kvfs_stream_stop(&stream);
    close(ends[1]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    check_requests(data, size);
    run(data, size, KVFS_REMOTE_READ);
    run(data, size, KVFS_REMOTE_MATCH);
    return 0;
}
