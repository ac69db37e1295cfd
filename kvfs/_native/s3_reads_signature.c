/* AWS Signature Version 4 of a plain request; gateway/signing.py has the rules and is the reference. */
#include <string.h>

#include "s3_reads_core.h"
#include "sha256.h"

static kvfs_sha256_blocks sha_blocks(void)
{
    kvfs_sha256_blocks fast = kvfs_sha256_accelerated();
    return fast != NULL ? fast : kvfs_sha256_portable;
}

/* Ends a SHA-256 of which `before` bytes are in `state`; `data` has room for two more blocks behind its bytes. */
static void finish(uint32_t state[8], size_t before, uint8_t *data, size_t bytes, uint8_t out[32])
{
    const uint64_t bits = (uint64_t)(before + bytes) * 8;
    size_t end = (bytes + 8) / KVFS_SHA256_BLOCK_BYTES * KVFS_SHA256_BLOCK_BYTES + KVFS_SHA256_BLOCK_BYTES;
    data[bytes] = 0x80;
    memset(data + bytes + 1, 0, end - bytes - 9);
    kvfs_store_be32(data + end - 8, (uint32_t)(bits >> 32));
    kvfs_store_be32(data + end - 4, (uint32_t)bits);
    sha_blocks()(state, data, end / KVFS_SHA256_BLOCK_BYTES);
    for (int i = 0; i < 8; i++)
        kvfs_store_be32(out + 4 * i, state[i]);
}

void kvfs_s3_signer_key(struct kvfs_s3_signer *signer, const uint8_t key[32])
{
    uint8_t block[KVFS_SHA256_BLOCK_BYTES];
    for (int half = 0; half < 2; half++) {
        const uint8_t pad = half ? 0x5c : 0x36;
        uint32_t *state = half ? signer->outer : signer->inner;
        for (size_t i = 0; i < sizeof block; i++)
            block[i] = (uint8_t)((i < 32 ? key[i] : 0) ^ pad);
        memcpy(state, kvfs_sha256_initial, sizeof signer->inner);
        sha_blocks()(state, block, 1);
    }
    explicit_bzero(block, sizeof block);
}

static void hex_of(const uint8_t digest[32], uint8_t out[64])
{
    static const char digits[] = "0123456789abcdef";
    for (int i = 0; i < 32; i++) {
        out[2 * i] = (uint8_t)digits[digest[i] >> 4];
        out[2 * i + 1] = (uint8_t)digits[digest[i] & 15];
    }
}

/* --- time -------------------------------------------------------------------------------------------------- */
static int number(const uint8_t *at, int digits)
{
    int value = 0;
    for (int i = 0; i < digits; i++) {
        if (at[i] < '0' || at[i] > '9')
            return -1;
        value = 10 * value + at[i] - '0';
    }
    return value;
}

/* Seconds since 1970 of 20260102T030405Z; -1 for what is none, or before 1970. */
static int64_t seconds_of(struct kvfs_text text)
{
    static const int before[] = {0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334};
    if (text.size != 16 || text.at[8] != 'T' || text.at[15] != 'Z')
        return -1;
    int year = number(text.at, 4), month = number(text.at + 4, 2), day = number(text.at + 6, 2);
    int hour = number(text.at + 9, 2), minute = number(text.at + 11, 2), second = number(text.at + 13, 2);
    if (year < 1970 || month < 1 || month > 12 || day < 1 || hour < 0 || hour > 23 || minute < 0 || minute > 59 ||
        second < 0 || second > 59)
        return -1;
    int leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
    int length = month == 2 ? 28 + leap : 30 + ((month + (month > 7)) & 1);
    if (day > length)
        return -1;
    int64_t past = year - 1;
    int64_t days = past * 365 + past / 4 - past / 100 + past / 400 - 719162;
    days += before[month - 1] + (month > 2 ? leap : 0) + day - 1;
    return ((days * 24 + hour) * 60 + minute) * 60 + second;
}

static int time_is_right(const struct kvfs_s3_head *head, const struct kvfs_s3_signer *signer, double now_s,
                         double skew_s)
{
    struct kvfs_text stamp = head->value[KVFS_S3_DATE];
    int64_t at = seconds_of(stamp);
    if (at < 0 || now_s - (double)at > skew_s || (double)at - now_s > skew_s)
        return 0;
    return signer->scope.size > 8 && memcmp(stamp.at, signer->scope.at, 8) == 0;
}

/* --- the signature ----------------------------------------------------------------------------------------- */
struct writer {
    uint8_t *at;
    uint8_t *end;
};

static void put(struct writer *w, const void *from, size_t size)
{
    if ((size_t)(w->end - w->at) < size) {
        w->at = w->end; /* full: seen at the end */
        return;
    }
    memcpy(w->at, from, size);
    w->at += size;
}

static void put_text(struct writer *w, struct kvfs_text text) { put(w, text.at, text.size); }

/* `host` and every x-amz- field but the payload's hash, which is signed in its own place. */
static int all_is_signed(const struct kvfs_s3_head *head, uint32_t found)
{
    static const int wanted[] = {KVFS_S3_HOST, KVFS_S3_DATE, KVFS_S3_CHECKSUM_MODE, KVFS_S3_CRC64,
                                 KVFS_S3_ALGORITHM};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        if (head->value[wanted[i]].at != NULL && !(found >> wanted[i] & 1))
            return 0;
    return 1;
}

static size_t canonical(const struct kvfs_s3_head *head, const struct kvfs_s3_signer *signer, uint8_t *scratch,
                        size_t room)
{
    static const char *const methods[] = {[KVFS_S3_GET] = "GET\n", [KVFS_S3_HEAD] = "HEAD\n", [KVFS_S3_PUT] = "PUT\n"};
    struct writer w = {scratch, scratch + room};
    uint32_t found = 0;
    put(&w, methods[head->method], strlen(methods[head->method]));
    put_text(&w, head->target);
    put(&w, "\n\n", 2); /* no query */
    for (uint32_t i = 0; i < signer->count; i++) {
        struct kvfs_text value = head->value[signer->names[i]];
        if (value.at == NULL)
            return 0;
        found |= 1u << signer->names[i];
        put_text(&w, kvfs_s3_field_name(signer->names[i]));
        put(&w, ":", 1);
        put_text(&w, value);
        put(&w, "\n", 1);
    }
    put(&w, "\n", 1);
    put_text(&w, signer->signed_headers);
    put(&w, "\n", 1);
    put_text(&w, head->value[KVFS_S3_PAYLOAD]);
    return all_is_signed(head, found) && w.at < w.end ? (size_t)(w.at - scratch) : 0;
}

#define STRING_TO_SIGN_BYTES 512

int kvfs_s3_verify(const struct kvfs_s3_head *head, const struct kvfs_s3_signer *signer, double now_s, double skew_s,
                   uint8_t *scratch, size_t room)
{
    static const char algorithm[] = "AWS4-HMAC-SHA256\n";
    uint8_t digest[32 + 2 * KVFS_SHA256_BLOCK_BYTES], text[STRING_TO_SIGN_BYTES + 2 * KVFS_SHA256_BLOCK_BYTES];
    uint8_t wanted[64], differs = 0;
    uint32_t state[8];
    if (!time_is_right(head, signer, now_s, skew_s) || room < 2 * KVFS_SHA256_BLOCK_BYTES)
        return 0;
    size_t bytes = canonical(head, signer, scratch, room - 2 * KVFS_SHA256_BLOCK_BYTES);
    if (bytes == 0)
        return 0;
    memcpy(state, kvfs_sha256_initial, sizeof state);
    finish(state, 0, scratch, bytes, digest);

    struct writer w = {text, text + STRING_TO_SIGN_BYTES};
    put(&w, algorithm, sizeof algorithm - 1);
    put_text(&w, head->value[KVFS_S3_DATE]);
    put(&w, "\n", 1);
    put_text(&w, signer->scope);
    put(&w, "\n", 1);
    hex_of(digest, wanted);
    put(&w, wanted, 64);
    if (w.at == w.end)
        return 0;
    memcpy(state, signer->inner, sizeof state);
    finish(state, KVFS_SHA256_BLOCK_BYTES, text, (size_t)(w.at - text), digest);
    memcpy(state, signer->outer, sizeof state);
    finish(state, KVFS_SHA256_BLOCK_BYTES, digest, 32, digest);
    hex_of(digest, wanted);
    for (int i = 0; i < 64; i++)
        differs |= wanted[i] ^ head->signature.at[i];
    return differs == 0;
}
