/* Prefix hashes: chains of truncated SHA-256 or of XXH3-128 over blocks of tokens.
 *
 * Responsibility: the bytes that are hashed, and the hash. docs/keys.md specifies both; kvfs/keys.py checks the
 * arguments. No allocation, no global state but what the processor can do, no GIL needed.
 */
#ifndef KVFS_HASHING_CORE_H
#define KVFS_HASHING_CORE_H

#include <stddef.h>
#include <stdint.h>

#define KVFS_HASH_BYTES 16

enum kvfs_algorithm { KVFS_SHA256 = 1, KVFS_XXH3_128 = 2 };

/* How SHA-256 is computed; KVFS_AUTO is the fastest that this processor has. */
enum kvfs_sha_engine { KVFS_AUTO = 0, KVFS_PORTABLE = 1, KVFS_SHA_NI = 2 };

struct kvfs_tokens {
    const void *data;
    size_t count;
    int item_bytes; /* 2, 4 or 8 */
    int is_signed;
};

/* Bytes that go into one block's hash after its tokens; one of these for each block. */
struct kvfs_extra {
    const void *data;
    size_t bytes;
};

struct kvfs_chain {
    enum kvfs_algorithm algorithm;
    enum kvfs_sha_engine engine;
    const uint8_t *parent; /* KVFS_HASH_BYTES */
    struct kvfs_tokens tokens;
    const struct kvfs_extra *extra; /* NULL, or one for each block */
};

/* Which engine `wanted` becomes here; -ENODEV when this processor has not got it. */
int kvfs_sha_engine(enum kvfs_sha_engine wanted);

/* Hash every whole block of block_tokens tokens into out (16 bytes each).
 * 0, or -ERANGE with *bad_index = the first token that is not a 32-bit unsigned number. */
int kvfs_hash_blocks(const struct kvfs_chain *chain, size_t block_tokens, uint8_t *out, size_t *bad_index);

/* Hash all tokens as one partial block into out (16 bytes); extra is NULL or one. Errors as above. */
int kvfs_hash_tail(const struct kvfs_chain *chain, uint8_t *out, size_t *bad_index);

/* Plain SHA-256, for tests of the engines. */
void kvfs_sha256(enum kvfs_sha_engine engine, const void *data, size_t bytes, uint8_t out[32]);

uint64_t kvfs_hashing_xxh3_64(const void *data, size_t bytes);

#endif
