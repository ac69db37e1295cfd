/* Whether what a peer sent may be believed: every field has its limits, and whatever is outside of them is -EPROTO.
 *
 * Invariants: nothing is read but the structure given; no allocation, no state. Concurrency: any thread.
 */
#include "wire.h"

#include <errno.h>

int64_t kvfs_remote_check_request(const struct kvfs_remote_request *r) {
    const uint32_t flags = KVFS_REMOTE_URGENT | KVFS_REMOTE_BY_FABRIC;
    if (r->magic != KVFS_REMOTE_REQUEST || (r->flags & ~flags) || r->wait_ms > KVFS_REMOTE_WAIT_MS) return -EPROTO;
    if (r->kind == KVFS_REMOTE_READ && r->count > 0 && r->count <= KVFS_REMOTE_READS)
        return (int64_t)(r->count * sizeof(struct kvfs_remote_want));
    if (r->kind == KVFS_REMOTE_MATCH && r->count > 0 && r->count <= KVFS_REMOTE_MATCHES)
        return (int64_t)r->count * KVFS_KEY_BYTES;
    return -EPROTO;
}

int kvfs_remote_check_item(const struct kvfs_remote_item *item, uint64_t number, uint32_t index, uint64_t room_bytes) {
    if (item->magic != KVFS_REMOTE_ITEM || item->number != number || item->index != index || item->reserved)
        return -EPROTO;
    switch (item->status) {
    case KVFS_REMOTE_FOUND:
    case KVFS_REMOTE_PIECES:
        return item->size_bytes <= room_bytes ? 0 : -EPROTO;
    case KVFS_REMOTE_TOO_LARGE:
        return item->size_bytes > room_bytes ? 0 : -EPROTO;
    case KVFS_REMOTE_ABSENT:
    case KVFS_REMOTE_BUSY:
        return item->size_bytes == 0 ? 0 : -EPROTO;
    default:
        return -EPROTO;
    }
}

int kvfs_remote_check_matched(const struct kvfs_remote_matched *m, uint64_t number, uint32_t asked) {
    return m->magic == KVFS_REMOTE_MATCHED && m->number == number && m->count <= asked ? 0 : -EPROTO;
}

int kvfs_remote_check_taken(const struct kvfs_remote_taken *t, uint64_t before, uint64_t most) {
    const int is_taken = t->magic == KVFS_REMOTE_TAKEN && t->reserved == 0;
    return is_taken && t->count > before && t->count <= most ? 0 : -EPROTO;
}
