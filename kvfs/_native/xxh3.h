/* XXH3-64, inlined from libxxhash's header so that no shared library is needed at run time. */
#ifndef KVFS_XXH3_H
#define KVFS_XXH3_H

#define XXH_INLINE_ALL
#include <xxhash.h>

static inline uint64_t kvfs_xxh3_64(const void *data, size_t bytes) { return XXH3_64bits(data, bytes); }

#endif
