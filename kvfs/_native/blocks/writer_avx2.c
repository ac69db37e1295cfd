/* XXH3-64 of a block's pieces, compiled for AVX2. */
#if defined(__x86_64__)
#include "hash/xxh3_avx2.h"

#include "writer_core.h"

uint64_t kvfs_xxh3_avx2(const struct iovec *vectors, ssize_t pieces) { return kvfs_xxh3_pieces(vectors, pieces); }
#endif
