/* XXH3-64 as a stream, compiled for AVX2. */
#if defined(__x86_64__)
#include "hash/xxh3_avx2.h"

void kvfs_xxh3_reset_avx2(void *state) {
    XXH3_INITSTATE((XXH3_state_t *)state);
    XXH3_64bits_reset(state);
}

void kvfs_xxh3_update_avx2(void *state, const void *data, size_t bytes) { XXH3_64bits_update(state, data, bytes); }

uint64_t kvfs_xxh3_digest_avx2(const void *state) { return XXH3_64bits_digest(state); }
#endif
