/* XXH3-64, inlined from libxxhash's header so that no shared library is needed at run time. */
#ifndef KVFS_XXH3_H
#define KVFS_XXH3_H

#define XXH_INLINE_ALL
#include <sys/types.h>
#include <sys/uio.h>
#include <xxhash.h>

static inline uint64_t kvfs_xxh3_64(const void *data, size_t bytes) { return XXH3_64bits(data, bytes); }

static inline uint64_t kvfs_xxh3_pieces(const struct iovec *vectors, ssize_t pieces) {
    if (pieces == 1) return kvfs_xxh3_64(vectors->iov_base, vectors->iov_len);
    XXH3_state_t state;
    XXH3_64bits_reset(&state);
    for (ssize_t i = 0; i < pieces; i++) XXH3_64bits_update(&state, vectors[i].iov_base, vectors[i].iov_len);
    return XXH3_64bits_digest(&state);
}

#endif
