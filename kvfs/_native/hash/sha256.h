/* SHA-256's block function (FIPS 180-4), twice: portable, and with the SHA extensions of x86-64.
 *
 * Responsibility: 64-byte blocks into a state; padding and buffering are the caller's. Which one runs is decided
 * from CPUID at run time.
 *
 * For prefix hashes alone, whose messages are short: a block of 16 tokens (80 bytes) takes 54 ns with the SHA extensions,
 * where a context of libcrypto that is used again takes 120; 64 tokens 161 and 275, 512 tokens 1,183 and 1,237
 * (OpenSSL 3.0). What authenticates comes from libcrypto. More figures are in docs/keys.md.
 */
#ifndef KVFS_SHA256_H
#define KVFS_SHA256_H

#include <stddef.h>
#include <stdint.h>

#define KVFS_SHA256_BLOCK_BYTES 64

typedef void (*kvfs_sha256_blocks)(uint32_t state[8], const uint8_t *data, size_t blocks);

extern const uint32_t kvfs_sha256_initial[8];

void kvfs_sha256_portable(uint32_t state[8], const uint8_t *data, size_t blocks);
/* NULL where the processor or the build has no SHA extensions. */
kvfs_sha256_blocks kvfs_sha256_accelerated(void);

static inline void kvfs_store_be32(uint8_t *to, uint32_t value) {
    to[0] = (uint8_t)(value >> 24);
    to[1] = (uint8_t)(value >> 16);
    to[2] = (uint8_t)(value >> 8);
    to[3] = (uint8_t)value;
}

#endif
