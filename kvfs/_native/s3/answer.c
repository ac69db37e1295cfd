#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <unistd.h>

#include "fast_path.h"
#include "shared/slots_core.h"

/* The head of a 200, or 0 where it does not fit. The order of the lines is that of gateway/app/handler.py. */
static size_t format(const struct kvfs_s3_answering *a, const struct kvfs_s3_head *head,
                     const struct kvfs_s3_object *object, uint32_t hits) {
    struct kvfs_text checksum = object->checksum;
    if (head->value[KVFS_S3_CHECKSUM_MODE].at == NULL) checksum.size = 0;
    int bytes = snprintf((char *)a->out, a->room,
                         "HTTP/1.1 200 OK\r\nx-amz-request-id: %016llX\r\nx-amz-id-2: %016llX\r\n%.*s"
                         "x-kvfs-tier: dram\r\nx-kvfs-hits: %u\r\n%.*sContent-Length: %llu\r\nDate: %.*s\r\n\r\n",
                         (unsigned long long)a->request_id, (unsigned long long)a->request_id,
                         (int)object->headers.size, object->headers.at, hits, (int)checksum.size, checksum.at,
                         (unsigned long long)object->size_bytes, (int)a->date.size, a->date.at);
    return bytes > 0 && (size_t)bytes < a->room ? (size_t)bytes : 0;
}

/* Bytes sent, 0 where the socket is full, or -1. */
static ssize_t send_some(int socket, const uint8_t *at, size_t bytes, int flags) {
    ssize_t sent = send(socket, at, bytes, flags | MSG_DONTWAIT | MSG_NOSIGNAL);
    return sent >= 0 ? sent : errno == EAGAIN || errno == EINTR ? 0 : -1;
}

static int send_small(const struct kvfs_s3_answering *a, size_t bytes, struct kvfs_s3_rest *rest) {
    ssize_t sent = send_some(a->socket, a->out, bytes, 0);
    if (sent < 0) return KVFS_S3_GONE;
    rest->from = (size_t)sent;
    rest->to = bytes;
    return (size_t)sent == bytes ? KVFS_S3_SENT : KVFS_S3_PART;
}

/* The head, and of the file as much as the socket takes, or one reader may have of the event loop's time. */
static int send_file(const struct kvfs_s3_answering *a, size_t head_bytes, struct kvfs_s3_rest *rest) {
    ssize_t sent = send_some(a->socket, a->out, head_bytes, MSG_MORE);
    if (sent < 0) return KVFS_S3_GONE;
    rest->from = (size_t)sent;
    rest->to = head_bytes;
    uint64_t may = rest->left < a->chunk_bytes ? rest->left : a->chunk_bytes;
    while (rest->from == rest->to && may > 0) {
        off_t offset = (off_t)rest->offset;
        sent = sendfile(a->socket, rest->fd, &offset, may);
        if (sent < 0 && errno != EAGAIN && errno != EINTR) return KVFS_S3_GONE;
        if (sent == 0) /* shorter than its object: the announced length cannot be sent */
            return KVFS_S3_GONE;
        if (sent < 0) break;
        rest->offset += (uint64_t)sent;
        rest->left -= (uint64_t)sent;
        may -= (uint64_t)sent;
    }
    return rest->left == 0 ? KVFS_S3_SENT : KVFS_S3_PART;
}

/* Opens the slot for reading if it still is the one that was looked up, else -1. The descriptor is the lease. */
static int open_sealed(const struct kvfs_s3_answering *a, const struct kvfs_entry_view *entry) {
    int fd = kvfs_slot_open(a->dirfd, entry->slot, O_RDONLY | O_NONBLOCK);
    if (fd >= 0 && kvfs_table_generation(a->table, entry->slot) != entry->generation) {
        close(fd);
        return -1;
    }
    return fd;
}

int kvfs_s3_answer(const struct kvfs_s3_answering *a, const struct kvfs_s3_head *head,
                   const struct kvfs_s3_object *object, struct kvfs_s3_rest *rest) {
    struct kvfs_entry_view entry;
    rest->fd = -1;
    rest->offset = 0;
    rest->left = 0;
    if (kvfs_table_lookup(a->table, object->key, &entry) != 1 || !(entry.tiers & KVFS_TIER_DRAM) ||
        entry.size_bytes != object->size_bytes || entry.slot >= a->table->slot_count)
        return KVFS_S3_NOT_OURS;
    size_t bytes = format(a, head, object, entry.hits);
    if (bytes == 0) return KVFS_S3_NOT_OURS;
    if (head->method == KVFS_S3_HEAD) return send_small(a, bytes, rest);
    int fd = open_sealed(a, &entry);
    if (fd < 0) return KVFS_S3_NOT_OURS;
    int outcome;
    if (object->size_bytes <= a->small_bytes && object->size_bytes <= a->room - bytes) {
        ssize_t got = pread(fd, a->out + bytes, object->size_bytes, 0);
        outcome = KVFS_S3_NOT_OURS;
        if (got >= 0 && (uint64_t)got == object->size_bytes) outcome = send_small(a, bytes + (size_t)got, rest);
    } else {
        rest->fd = fd;
        rest->left = object->size_bytes;
        outcome = send_file(a, bytes, rest);
    }
    if (outcome == KVFS_S3_PART && rest->fd >= 0) return outcome;
    rest->fd = -1;
    close(fd);
    return outcome;
}
