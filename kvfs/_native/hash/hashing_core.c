#include "hashing_core.h"

#include <errno.h>
#include <string.h>

#include "sha256.h"
#include "xxh3.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "tokens are hashed as little-endian words; a big-endian port needs byte swaps here"
#endif

/* A message is gathered here and hashed in one go: 16 + 2048 bytes of a block of 512 tokens fit. */
#define BUFFER_BYTES 4096
#define PREFETCH_TOKENS 1024

/* First bytes of a partial block's message, where a whole block's has its parent. */
static const uint8_t TAIL_TAG[16] = "kvfs tail hash 1";

struct stream {
    enum kvfs_algorithm algorithm;
    kvfs_sha256_blocks blocks;
    uint32_t sha[8];
    XXH3_state_t xxh; /* used from the second buffer on */
    uint64_t flushed;
    size_t held;
    uint8_t buffer[BUFFER_BYTES + 2 * KVFS_SHA256_BLOCK_BYTES]; /* room for SHA-256's padding */
};

static void stream_init(struct stream *s, enum kvfs_algorithm algorithm, kvfs_sha256_blocks blocks) {
    s->algorithm = algorithm;
    s->blocks = blocks;
}

static void stream_start(struct stream *s) {
    s->flushed = 0;
    s->held = 0;
    memcpy(s->sha, kvfs_sha256_initial, sizeof s->sha);
}

static void stream_flush(struct stream *s) {
    if (s->algorithm == KVFS_SHA256) {
        s->blocks(s->sha, s->buffer, s->held / KVFS_SHA256_BLOCK_BYTES);
    } else {
        if (s->flushed == 0) XXH3_128bits_reset(&s->xxh);
        XXH3_128bits_update(&s->xxh, s->buffer, s->held);
    }
    s->flushed += s->held;
    s->held = 0;
}

/* Where the next bytes go, at most *room of them; the caller adds to held what it wrote. */
static uint8_t *stream_room(struct stream *s, size_t *room) {
    if (s->held == BUFFER_BYTES) stream_flush(s);
    *room = BUFFER_BYTES - s->held;
    return s->buffer + s->held;
}

static void stream_add(struct stream *s, const void *data, size_t bytes) {
    const uint8_t *from = data;
    while (bytes > 0) {
        size_t room;
        uint8_t *to = stream_room(s, &room);
        size_t n = bytes < room ? bytes : room;
        memcpy(to, from, n);
        s->held += n;
        from += n;
        bytes -= n;
    }
}

static void finish_sha(struct stream *s, uint8_t *out, size_t out_words) {
    const uint64_t bits = (s->flushed + s->held) * 8;
    size_t end = (s->held + 8) / KVFS_SHA256_BLOCK_BYTES * KVFS_SHA256_BLOCK_BYTES + KVFS_SHA256_BLOCK_BYTES;
    s->buffer[s->held] = 0x80;
    memset(s->buffer + s->held + 1, 0, end - s->held - 9);
    kvfs_store_be32(s->buffer + end - 8, (uint32_t)(bits >> 32));
    kvfs_store_be32(s->buffer + end - 4, (uint32_t)bits);
    s->blocks(s->sha, s->buffer, end / KVFS_SHA256_BLOCK_BYTES);
    for (size_t i = 0; i < out_words; i++) kvfs_store_be32(out + 4 * i, s->sha[i]);
}

static void stream_finish(struct stream *s, uint8_t out[KVFS_HASH_BYTES]) {
    if (s->algorithm == KVFS_SHA256) {
        finish_sha(s, out, KVFS_HASH_BYTES / 4);
        return;
    }
    XXH128_canonical_t canonical;
    if (s->flushed == 0) {
        XXH128_canonicalFromHash(&canonical, XXH3_128bits(s->buffer, s->held));
    } else {
        stream_flush(s);
        XXH128_canonicalFromHash(&canonical, XXH3_128bits_digest(&s->xxh));
    }
    memcpy(out, canonical.digest, KVFS_HASH_BYTES);
}

static kvfs_sha256_blocks sha_blocks(enum kvfs_sha_engine engine) {
    kvfs_sha256_blocks fast = engine == KVFS_PORTABLE ? NULL : kvfs_sha256_accelerated();
    return fast != NULL ? fast : kvfs_sha256_portable;
}

int kvfs_sha_engine(enum kvfs_sha_engine wanted) {
    if (wanted == KVFS_PORTABLE) return KVFS_PORTABLE;
    if (kvfs_sha256_accelerated() != NULL) return KVFS_SHA_NI;
    return wanted == KVFS_SHA_NI ? -ENODEV : KVFS_PORTABLE;
}

/* The value of one token, or UINT64_MAX where it is negative. */
static uint64_t token_at(const struct kvfs_tokens *tokens, size_t i) {
    switch (tokens->item_bytes * 2 + tokens->is_signed) {
    case 4:
        return ((const uint16_t *)tokens->data)[i];
    case 5:
        return (uint64_t)(int64_t)((const int16_t *)tokens->data)[i];
    case 8:
        return ((const uint32_t *)tokens->data)[i];
    case 9:
        return (uint64_t)(int64_t)((const int32_t *)tokens->data)[i];
    default:
        return ((const uint64_t *)tokens->data)[i];
    }
}

#define COPY_WORDS(type)                        \
    for (size_t i = 0; i < count; i++) {        \
        type value = ((const type *)from)[i];   \
        seen |= (uint64_t)value;                \
        word = (uint32_t)value;                 \
        memcpy(to + 4 * i, &word, sizeof word); \
    }

/* Write count tokens from first as canonical words; whether each of them is a 32-bit unsigned number. The OR of
 * all values tells: a bit beyond the type's good ones is set in it exactly if it is set in one of them. */
static int canonical_words(const struct kvfs_tokens *tokens, size_t first, size_t count, uint8_t *to) {
    const uint8_t *from = (const uint8_t *)tokens->data + first * (size_t)tokens->item_bytes;
    uint64_t seen = 0;
    uint32_t word;
    switch (tokens->item_bytes * 2 + tokens->is_signed) {
    case 4:
        COPY_WORDS(uint16_t)
        return 1;
    case 5:
        COPY_WORDS(uint16_t)
        return seen <= INT16_MAX;
    case 8:
        memcpy(to, from, count * 4);
        return 1;
    case 9:
        COPY_WORDS(uint32_t)
        return seen <= INT32_MAX;
    default:
        COPY_WORDS(uint64_t)
        return seen <= UINT32_MAX;
    }
}

static int bad_token(const struct kvfs_tokens *tokens, size_t first, size_t *bad_index) {
    while (token_at(tokens, first) <= UINT32_MAX) first++;
    *bad_index = first;
    return -ERANGE;
}

static int add_tokens(struct stream *s, const struct kvfs_tokens *tokens, size_t first, size_t count,
                      size_t *bad_index) {
    while (count > 0) {
        size_t room;
        uint8_t *to = stream_room(s, &room);
        size_t n = count < room / 4 ? count : room / 4;
        if (!canonical_words(tokens, first, n, to)) return bad_token(tokens, first, bad_index);
        s->held += 4 * n;
        first += n;
        count -= n;
    }
    return 0;
}

/* Ask for the tokens of the next block while this one is hashed: the hash waits for itself, not for memory, so
 * this is free, where the copy into the buffer would stop for each cache line. */
static void prefetch_tokens(const struct kvfs_tokens *tokens, size_t first, size_t count) {
    const size_t end = first + count < tokens->count ? first + count : tokens->count;
    const char *from = (const char *)tokens->data + first * (size_t)tokens->item_bytes;
    const char *to = (const char *)tokens->data + end * (size_t)tokens->item_bytes;
    for (; from < to; from += 64) __builtin_prefetch(from);
}

int kvfs_hash_blocks(const struct kvfs_chain *chain, size_t block_tokens, uint8_t *out, size_t *bad_index) {
    const size_t blocks = chain->tokens.count / block_tokens;
    const uint8_t *parent = chain->parent;
    struct stream s;
    stream_init(&s, chain->algorithm, sha_blocks(chain->engine));
    for (size_t i = 0; i < blocks; i++, out += KVFS_HASH_BYTES) {
        stream_start(&s);
        stream_add(&s, parent, KVFS_HASH_BYTES);
        int rc = add_tokens(&s, &chain->tokens, i * block_tokens, block_tokens, bad_index);
        if (rc < 0) return rc;
        if (chain->extra != NULL && chain->extra[i].bytes > 0)
            stream_add(&s, chain->extra[i].data, chain->extra[i].bytes);
        if (block_tokens <= PREFETCH_TOKENS) prefetch_tokens(&chain->tokens, (i + 1) * block_tokens, block_tokens);
        stream_finish(&s, out);
        parent = out;
    }
    return 0;
}

int kvfs_hash_tail(const struct kvfs_chain *chain, uint8_t *out, size_t *bad_index) {
    const uint32_t count = (uint32_t)chain->tokens.count;
    struct stream s;
    stream_init(&s, chain->algorithm, sha_blocks(chain->engine));
    stream_start(&s);
    stream_add(&s, TAIL_TAG, sizeof TAIL_TAG);
    stream_add(&s, chain->parent, KVFS_HASH_BYTES);
    stream_add(&s, &count, sizeof count);
    int rc = add_tokens(&s, &chain->tokens, 0, count, bad_index);
    if (rc < 0) return rc;
    if (chain->extra != NULL && chain->extra->bytes > 0) stream_add(&s, chain->extra->data, chain->extra->bytes);
    stream_finish(&s, out);
    return 0;
}

void kvfs_sha256(enum kvfs_sha_engine engine, const void *data, size_t bytes, uint8_t out[32]) {
    struct stream s;
    stream_init(&s, KVFS_SHA256, sha_blocks(engine));
    stream_start(&s);
    stream_add(&s, data, bytes);
    finish_sha(&s, out, 8);
}

uint64_t kvfs_hashing_xxh3_64(const void *data, size_t bytes) { return kvfs_xxh3_64(data, bytes); }
