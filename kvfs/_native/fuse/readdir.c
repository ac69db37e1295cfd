/* Listings: names of open directories that the library has read ahead, answered to READDIRPLUS one reply after another.
 * See loop.h.
 *
 * The library gives a handle the names from one offset on, as many as it can read in one go; a call asks it for the
 * next. They have no attributes, so that the kernel makes no nodes of them and counts no lookups. Names before `from`
 * have attributes and are the library's; a request for them drops the names read ahead, since the walk begins again.
 *
 * Concurrency: `listings_lock` guards all of it, over one reply's names at most.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "state.h"

#define LISTING_FILES (1u << FL_LISTING_FILE_BITS)
#define REPLY_BYTES 65536u /* of an answer to a call: more than the names that are read in one go take */

/* A name as the library packs it: fl_listed, then the name. */
static const char *after(const char *at) {
    return at + sizeof(struct fl_listed) + ((const struct fl_listed *)at)->length;
}

static struct fl_listing **listing_at(struct fuse_loop *loop, uint64_t fh) REQUIRES(loop->listings_lock) {
    struct fl_listing **at = &loop->listings[fh & (LISTING_FILES - 1)];
    while (*at != NULL && (*at)->fh != fh) at = &(*at)->next;
    return at;
}

static void drop_names(struct fl_listing *listing) {
    free(listing->names);
    listing->names = NULL;
    listing->place = NULL;
    listing->count = listing->ended = 0;
}

/* Whether what follows the first `offset` names of the directory is kept here, or that nothing follows them. */
static int covers(const struct fl_listing *listing, uint64_t offset) {
    if (listing->names == NULL || offset < listing->first) return 0;
    return offset - listing->first < listing->count + (uint64_t)(listing->ended != 0);
}

/* Packs the names behind `offset` as the kernel reads them; how many bytes. */
static uint32_t pack(struct fl_listing *listing, uint64_t offset, char *reply, uint32_t room) {
    uint32_t size = 0;
    if (listing->place == NULL || offset < listing->place_offset) {
        listing->place = listing->names;
        listing->place_offset = listing->first;
    }
    for (; listing->place_offset < offset; listing->place_offset++) listing->place = after(listing->place);
    const char *place = listing->place;
    for (uint64_t end = listing->first + listing->count; offset < end; place = after(place)) {
        struct fl_listed name;
        memcpy(&name, place, sizeof name);
        struct fw_direntplus entry = {.ino = name.ino, .off = ++offset, .namelen = name.length, .type = name.type};
        uint32_t length = (uint32_t)(sizeof entry + name.length + 7u) & ~7u;
        if (length > room - size) break;
        memset(reply + size + length - 8, 0, 8);
        memcpy(reply + size, &entry, sizeof entry);
        memcpy(reply + size + sizeof entry, place + sizeof name, name.length);
        size += length;
    }
    return size;
}

int fl_handle_readdir(struct fuse_loop *loop, struct fl_server *server, const struct fw_in_header *in,
                      const struct fw_read_in *body) {
    uint32_t size = body->size < loop->config.buffer_size ? body->size : loop->config.buffer_size;
    kvfs_lock(&loop->listings_lock);
    struct fl_listing *listing = *listing_at(loop, body->fh);
    if (listing != NULL && body->offset < listing->from) drop_names(listing);
    int ours = listing != NULL && covers(listing, body->offset);
    if (ours) size = pack(listing, body->offset, server->reply, size);
    kvfs_unlock(&loop->listings_lock);
    if (!ours) return 0;
    fl_answer(loop, in->unique, 0, server->reply, size);
    fl_count(&loop->stats.native_listings);
    return 1;
}

int fl_listing_wanted(struct fuse_loop *loop, const struct fw_read_in *body) {
    kvfs_lock(&loop->listings_lock);
    const struct fl_listing *listing = *listing_at(loop, body->fh);
    int wanted = listing != NULL && body->offset >= listing->from;
    kvfs_unlock(&loop->listings_lock);
    return wanted;
}

void fl_listings_free(struct fuse_loop *loop) UNCHECKED /* no thread any more */ {
    for (uint32_t i = 0; loop->listings != NULL && i < LISTING_FILES; i++) {
        for (struct fl_listing *listing = loop->listings[i], *next; listing != NULL; listing = next) {
            next = listing->next;
            free(listing->names);
            free(listing);
        }
    }
    free(loop->listings);
}

/* --- for the seam ----------------------------------------------------------------------------------- */

int fl_listing_open(struct fuse_loop *loop, uint64_t fh, uint64_t from) {
    struct fl_listing *listing = calloc(1, sizeof *listing);
    if (listing == NULL) return -ENOMEM;
    listing->fh = fh;
    listing->from = from;
    kvfs_lock(&loop->listings_lock);
    struct fl_listing **at = &loop->listings[fh & (LISTING_FILES - 1)];
    listing->next = *at;
    *at = listing;
    kvfs_unlock(&loop->listings_lock);
    return 0;
}

void fl_listing_close(struct fuse_loop *loop, uint64_t fh) {
    kvfs_lock(&loop->listings_lock);
    struct fl_listing **at = listing_at(loop, fh), *listing = *at;
    if (listing != NULL) {
        *at = listing->next;
        free(listing->names);
        free(listing);
    }
    kvfs_unlock(&loop->listings_lock);
}

int fl_listing_fill(struct fuse_loop *loop, uint64_t fh, uint64_t first, char *names, uint32_t count, int ended) {
    kvfs_lock(&loop->listings_lock);
    struct fl_listing *listing = *listing_at(loop, fh);
    if (listing != NULL) {
        drop_names(listing);
        listing->first = first;
        listing->names = names;
        listing->count = count;
        listing->ended = ended;
    }
    kvfs_unlock(&loop->listings_lock);
    return listing == NULL ? -ESTALE : 0;
}

void fl_answer_listing(struct fuse_loop *loop, uint64_t unique, uint64_t fh, uint64_t offset, uint32_t size) {
    char reply[REPLY_BYTES];
    kvfs_lock(&loop->listings_lock);
    struct fl_listing *listing = *listing_at(loop, fh);
    int ours = listing != NULL && covers(listing, offset);
    uint32_t packed = ours ? pack(listing, offset, reply, size < sizeof reply ? size : sizeof reply) : 0;
    kvfs_unlock(&loop->listings_lock);
    fl_answer(loop, unique, ours ? 0 : -ESTALE, reply, packed);
}
