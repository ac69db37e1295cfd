/* Reading blocks of another machine: one connection, and a thread that receives into drafts.
 *
 * Responsibility: a job in (a request, and the drafts for its answers), bytes received, hashed while the processor's
 * cache has them and written to the drafts, each compared with the checksum that came along.
 *
 * Invariants:
 * - What a peer says is checked before it counts (wire_core.c); an answer out of step ends the stream.
 * - Bytes by a fabric come into its own memory, and from there into a draft: what comes late reaches no draft.
 * - A job ends at its deadline, whatever the peer does, and at once when the socket is shut down.
 * - When a job is done all its descriptors are closed: nothing keeps a draft from its seal.
 *
 * Concurrency: a job is the thread's from kvfs_stream_begin to the notification, the event loop's at all other times;
 * `lock` guards the state that says whose. The socket may be shut down by the event loop at any time.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "stream_core.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include "s3/receiver_core.h"

#define BUFFER_BYTES ((size_t)256 << 10)

/* 0 once the channel is ready, -ETIMEDOUT at the deadline. */
static int wait_ready(const void *of, short events) {
    const struct kvfs_remote_stream *s = (const struct kvfs_remote_stream *)of;
    struct pollfd waits = {.fd = s->channel.fd, .events = events};
    int64_t left_ns = s->deadline_ns - kvfs_clock_ns(CLOCK_MONOTONIC);
    if (left_ns <= 0) return -ETIMEDOUT;
    const struct timespec left = {.tv_sec = left_ns / 1000000000ll, .tv_nsec = left_ns % 1000000000ll};
    int ready = ppoll(&waits, 1, &left, NULL);
    if (ready < 0 && errno != EINTR) return -errno;
    return ready == 0 ? -ETIMEDOUT : 0;
}

static int send_all(const struct kvfs_remote_stream *s, const void *data, size_t bytes) {
    return kvfs_send_all(&s->channel, data, bytes, MSG_DONTWAIT, wait_ready, s);
}

static int receive_all(const struct kvfs_remote_stream *s, void *into, size_t bytes) {
    return kvfs_receive_all(&s->channel, into, bytes, MSG_DONTWAIT, wait_ready, s);
}

/* The bytes of one block, into its draft. A draft that cannot be written ends the stream: its bytes are still to come. */
static int receive_block(struct kvfs_remote_stream *s, struct kvfs_remote_read *read, uint64_t *checksum) {
    struct kvfs_body body;
    uint64_t done = 0;
    int rc = kvfs_body_init(&body, 0);
    while (rc == 0 && done < read->size_bytes) {
        const uint64_t left = read->size_bytes - done;
        const size_t asked = left < BUFFER_BYTES ? (size_t)left : BUFFER_BYTES;
        const ssize_t got = kvfs_channel_receive(&s->channel, s->buffer, asked, MSG_DONTWAIT);
        if (got == -EAGAIN) {
            rc = wait_ready(s, kvfs_channel_wants(&s->channel, POLLIN));
        } else if (got <= 0) {
            rc = got == -EPROTO ? -EPROTO : -ECONNRESET;
        } else {
            rc = kvfs_body_take(&body, read->fd, done, s->buffer, (size_t)got);
            read->status = rc < 0 ? KVFS_REMOTE_NOT_WRITTEN : read->status;
            done += (uint64_t)got;
        }
    }
    if (rc == 0) *checksum = kvfs_body_xxh3(&body);
    kvfs_body_free(&body);
    return rc;
}

/* --- pieces of a fabric ------------------------------------------------------------------------------------------ */
static size_t bytes_of_piece(const struct kvfs_remote_read *read, uint64_t number) {
    const uint64_t left = read->size_bytes - number * KVFS_FABRIC_PIECE_BYTES;
    return left < KVFS_FABRIC_PIECE_BYTES ? (size_t)left : KVFS_FABRIC_PIECE_BYTES;
}

/* As many at once as the peer sends before it is told that some are here. */
static int begin_pieces(struct kvfs_remote_stream *s, const struct kvfs_remote_read *read, uint64_t first,
                        uint64_t last) {
    int rc = 0;
    for (; rc == 0 && s->begun < last && s->begun - s->taken < KVFS_FABRIC_PIECES; s->begun++)
        rc = s->fabric->calls->receive(s->fabric, s->begun, bytes_of_piece(read, s->begun - first));
    return rc;
}

/* Writes the next piece to the draft, if it is here: 1, 0 where it is not yet, or -errno. */
static int take_piece(struct kvfs_remote_stream *s, struct kvfs_remote_read *read, struct kvfs_body *body,
                      uint64_t first) {
    const int here = s->fabric->calls->is_done(s->fabric, s->taken);
    if (here <= 0) return here;
    const uint64_t number = s->taken - first;
    int rc = kvfs_body_take(body, read->fd, number * KVFS_FABRIC_PIECE_BYTES, kvfs_fabric_piece(s->fabric, s->taken),
                            bytes_of_piece(read, number));
    read->status = rc < 0 ? KVFS_REMOTE_NOT_WRITTEN : read->status;
    const struct kvfs_remote_taken said = {KVFS_REMOTE_TAKEN, 0, ++s->taken};
    if (rc == 0) rc = send_all(s, &said, sizeof said);
    return rc < 0 ? rc : 1;
}

/* The bytes of one block by the fabric, into its draft. */
static int receive_pieces(struct kvfs_remote_stream *s, struct kvfs_remote_read *read, uint64_t *checksum) {
    struct kvfs_body body;
    const uint64_t first = s->taken;
    const uint64_t last = first + (read->size_bytes + KVFS_FABRIC_PIECE_BYTES - 1) / KVFS_FABRIC_PIECE_BYTES;
    int rc = kvfs_body_init(&body, 0);
    while (rc >= 0 && s->taken < last) {
        rc = begin_pieces(s, read, first, last);
        if (rc == 0) rc = take_piece(s, read, &body, first);
        if (rc == 0) /* the peer has nothing to say meanwhile, and its next items wait */
            rc = s->fabric->calls->wait(s->fabric, s->channel.fd, POLLRDHUP, s->deadline_ns) ?: -ECONNRESET;
    }
    if (rc >= 0) *checksum = kvfs_body_xxh3(&body);
    kvfs_body_free(&body);
    if (rc < 0) s->fabric->calls->abandon(s->fabric);
    return rc < 0 ? rc : 0;
}

static void close_draft(struct kvfs_remote_read *read) {
    if (read->fd >= 0) close(read->fd);
    read->fd = -1;
}

static int receive_item(struct kvfs_remote_stream *s, uint32_t index) {
    struct kvfs_remote_read *read = &s->reads[index];
    struct kvfs_remote_item item;
    uint64_t checksum = 0;
    int rc = receive_all(s, &item, sizeof item);
    if (rc == 0) rc = kvfs_remote_check_item(&item, s->request.number, index, read->want.room_bytes);
    if (rc == 0 && item.status == KVFS_REMOTE_PIECES && s->fabric == NULL) rc = -EPROTO;
    if (rc < 0) return rc;
    read->size_bytes = item.size_bytes;
    read->checksum = item.checksum;
    memcpy(read->parent, item.parent, KVFS_KEY_BYTES);
    if (item.status == KVFS_REMOTE_FOUND || item.status == KVFS_REMOTE_PIECES) {
        const int is_whole = item.status == KVFS_REMOTE_FOUND;
        rc = is_whole ? receive_block(s, read, &checksum) : receive_pieces(s, read, &checksum);
        if (rc < 0) return rc;
        item.status = checksum == item.checksum ? KVFS_REMOTE_FOUND : KVFS_REMOTE_MISMATCH;
    }
    read->status = item.status;
    close_draft(read);
    return 0;
}

static int read_blocks(struct kvfs_remote_stream *s) {
    int rc = send_all(s, s->unsent, s->unsent_bytes);
    for (uint32_t i = 0; rc == 0 && i < s->request.count; i++) rc = receive_item(s, i);
    for (uint32_t i = 0; i < s->request.count; i++) close_draft(&s->reads[i]);
    return rc;
}

static int match(struct kvfs_remote_stream *s) {
    struct kvfs_remote_matched head;
    int rc = send_all(s, s->unsent, s->unsent_bytes);
    if (rc == 0) rc = receive_all(s, &head, sizeof head);
    if (rc == 0) rc = kvfs_remote_check_matched(&head, s->request.number, s->request.count);
    if (rc == 0) rc = receive_all(s, s->sizes, head.count * sizeof *s->sizes);
    s->matched = rc == 0 ? head.count : 0;
    return rc;
}

/* The request goes out here as far as the socket takes it, which it nearly always does: the peer begins while the thread
 * wakes. */
static void send_first(struct kvfs_remote_stream *s) {
    const uint32_t count = s->request.count;
    uint8_t *to = s->out + sizeof s->request;
    memcpy(s->out, &s->request, sizeof s->request);
    if (s->request.kind == KVFS_REMOTE_MATCH) memcpy(to, s->digests, (size_t)count * KVFS_KEY_BYTES);
    for (uint32_t i = 0; s->request.kind == KVFS_REMOTE_READ && i < count; i++)
        memcpy(to + i * sizeof(struct kvfs_remote_want), &s->reads[i].want, sizeof(struct kvfs_remote_want));
    s->unsent = s->out;
    s->unsent_bytes = sizeof s->request + (size_t)kvfs_remote_check_request(&s->request);
    const ssize_t put = kvfs_channel_send(&s->channel, s->out, s->unsent_bytes, MSG_DONTWAIT);
    if (put > 0) {
        s->unsent += put;
        s->unsent_bytes -= (size_t)put;
    }
}

static void *thread_main(void *argument) {
    struct kvfs_remote_stream *s = (struct kvfs_remote_stream *)argument;
    const uint64_t one = 1;
    kvfs_lock(&s->lock);
    while (s->state != KVFS_STREAM_CLOSING) {
        if (s->state != KVFS_STREAM_BUSY) {
            kvfs_wait(&s->wake, &s->lock);
            continue;
        }
        kvfs_unlock(&s->lock);
        int rc = s->request.kind == KVFS_REMOTE_READ ? read_blocks(s) : match(s);
        kvfs_lock(&s->lock);
        s->result = rc;
        if (s->state == KVFS_STREAM_BUSY) s->state = KVFS_STREAM_DONE;
        (void)!write(s->notify_fd, &one, sizeof one);
    }
    kvfs_unlock(&s->lock);
    return NULL;
}

static void free_all(struct kvfs_remote_stream *s) UNCHECKED /* no thread any more */
{
    free(s->buffer);
    if (s->notify_fd >= 0) close(s->notify_fd);
    pthread_cond_destroy(&s->wake);
    kvfs_mutex_destroy(&s->lock);
}

int kvfs_stream_start(struct kvfs_remote_stream *s, struct kvfs_channel channel, struct kvfs_fabric *fabric)
    UNCHECKED /* no thread yet */
{
    s->channel = channel;
    s->fabric = fabric;
    for (uint32_t i = 0; i < KVFS_REMOTE_READS; i++) s->reads[i].fd = -1;
    kvfs_mutex_init(&s->lock);
    kvfs_cond_init(&s->wake);
    s->buffer = malloc(BUFFER_BYTES);
    s->notify_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int rc = s->buffer == NULL ? -ENOMEM : s->notify_fd < 0 ? -errno : 0;
    if (rc == 0) rc = kvfs_thread_start(&s->thread, thread_main, s, KVFS_SMALL_STACK_BYTES);
    s->started = rc == 0;
    if (rc < 0) free_all(s);
    return rc;
}

/* Begins a job, and hands it to the thread. The stream is idle. */
void kvfs_stream_begin(struct kvfs_remote_stream *s) {
    send_first(s);
    kvfs_lock(&s->lock);
    s->state = KVFS_STREAM_BUSY;
    pthread_cond_signal(&s->wake);
    kvfs_unlock(&s->lock);
}

/* 1 where the job is done, and the event loop's again; 0 where it is still under way. */
int kvfs_stream_take(struct kvfs_remote_stream *s) {
    uint64_t seen;
    kvfs_lock(&s->lock);
    int done = s->state == KVFS_STREAM_DONE;
    if (done) {
        s->state = KVFS_STREAM_IDLE;
        (void)!read(s->notify_fd, &seen, sizeof seen);
    }
    kvfs_unlock(&s->lock);
    return done;
}

/* Ends the thread, a job with it, and closes the channel, and the fabric. */
void kvfs_stream_stop(struct kvfs_remote_stream *s) {
    if (!s->started) return;
    s->started = 0;
    shutdown(s->channel.fd, SHUT_RDWR);
    kvfs_lock(&s->lock);
    s->state = KVFS_STREAM_CLOSING;
    pthread_cond_signal(&s->wake);
    kvfs_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    for (uint32_t i = 0; i < KVFS_REMOTE_READS; i++) /* of a job that it had not begun */
        close_draft(&s->reads[i]);
    if (s->fabric != NULL) s->fabric->calls->free(s->fabric);
    kvfs_channel_close(&s->channel);
    free_all(s);
}
