/* CRC-64/NVME (NVM Express NVM Command Set, "64b CRC Polynomial"): reflected, initially and finally inverted.
 *
 * With carry-less multiplication: a block of 128 bits is a polynomial X = L * x^64 + H, its first byte having the
 * highest powers. Moving it D bits ahead is L * x^(D+64) + H * x^D modulo P, which two multiplications by constants of
 * 64 bits do; what results is added to the block D bits further on. In reflected order a product comes out one bit
 * short, so the constants are x^(D+63) and x^(D-1). The last 16 bytes go through the table.
 *
 * Concurrency: the tables are made once; any thread.
 */
#include <pthread.h>
#include <string.h>

#include "receiver_core.h"

#define POLYNOMIAL 0x9a6c9329ac4bc9b5ull /* reflected */

struct fold {
    uint64_t low;  /* x^(D+63) mod P, for the first 8 bytes */
    uint64_t high; /* x^(D-1) mod P */
};

static uint64_t table[8][256];
static struct fold by_128, by_512, by_2048;
static int best = 1;
static pthread_once_t made = PTHREAD_ONCE_INIT;

/* One bit further: a factor of x, in reflected order. */
static uint64_t times_x(uint64_t value) { return (value >> 1) ^ (value & 1 ? POLYNOMIAL : 0); }

static uint64_t power_of_x(unsigned n) {
    uint64_t value = 1ull << 63; /* 1 */
    for (unsigned i = 0; i < n; i++) value = times_x(value);
    return value;
}

static struct fold fold_by(unsigned bits) { return (struct fold){power_of_x(bits + 63), power_of_x(bits - 1)}; }

static void make(void) {
    for (unsigned byte = 0; byte < 256; byte++) {
        uint64_t value = byte;
        for (int bit = 0; bit < 8; bit++) value = times_x(value);
        table[0][byte] = value;
    }
    for (unsigned byte = 0; byte < 256; byte++)
        for (int k = 1; k < 8; k++) table[k][byte] = (table[k - 1][byte] >> 8) ^ table[0][table[k - 1][byte] & 255];
    by_128 = fold_by(128);
    by_512 = fold_by(512);
    by_2048 = fold_by(2048);
#if defined(__x86_64__)
    if (__builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1")) best = 2;
    if (best == 2 && __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512f")) best = 3;
#endif
}

static uint64_t by_table(uint64_t state, const uint8_t *data, size_t bytes) {
    for (; bytes >= 8; bytes -= 8, data += 8) {
        uint64_t word;
        memcpy(&word, data, 8);
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
        word = __builtin_bswap64(word);
#endif
        state ^= word;
        state = table[7][state & 255] ^ table[6][state >> 8 & 255] ^ table[5][state >> 16 & 255] ^
                table[4][state >> 24 & 255] ^ table[3][state >> 32 & 255] ^ table[2][state >> 40 & 255] ^
                table[1][state >> 48 & 255] ^ table[0][state >> 56];
    }
    for (; bytes > 0; bytes--, data++) state = (state >> 8) ^ table[0][(state ^ *data) & 255];
    return state;
}

#if defined(__x86_64__)
#include <immintrin.h>

__attribute__((target("pclmul,sse4.1"))) static inline __m128i fold_128(__m128i block, __m128i k, __m128i next) {
    __m128i low = _mm_clmulepi64_si128(block, k, 0x00), high = _mm_clmulepi64_si128(block, k, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

__attribute__((target("pclmul,sse4.1"))) static inline __m128i constants(struct fold by) {
    return _mm_set_epi64x((long long)by.high, (long long)by.low);
}

/* The rest of a message of which `block` stands for all that came before `data`. */
__attribute__((target("pclmul,sse4.1"))) static uint64_t finish_128(__m128i block, const uint8_t *data, size_t bytes) {
    const __m128i k = constants(by_128);
    uint8_t last[16];
    for (; bytes >= 16; bytes -= 16, data += 16) block = fold_128(block, k, _mm_loadu_si128((const __m128i *)data));
    _mm_storeu_si128((__m128i *)last, block);
    return by_table(by_table(0, last, 16), data, bytes);
}

/* At least 64 bytes. */
__attribute__((target("pclmul,sse4.1"))) static uint64_t by_128_bits(uint64_t state, const uint8_t *data,
                                                                     size_t bytes) {
    const __m128i *from = (const __m128i *)data;
    __m128i a = _mm_xor_si128(_mm_loadu_si128(from), _mm_set_epi64x(0, (long long)state));
    __m128i b = _mm_loadu_si128(from + 1), c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    const __m128i k = constants(by_512);
    for (data += 64, bytes -= 64; bytes >= 64; data += 64, bytes -= 64) {
        from = (const __m128i *)data;
        a = fold_128(a, k, _mm_loadu_si128(from));
        b = fold_128(b, k, _mm_loadu_si128(from + 1));
        c = fold_128(c, k, _mm_loadu_si128(from + 2));
        d = fold_128(d, k, _mm_loadu_si128(from + 3));
    }
    const __m128i one = constants(by_128);
    return finish_128(fold_128(fold_128(fold_128(a, one, b), one, c), one, d), data, bytes);
}

#define WIDE __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.1")))

WIDE static inline __m512i fold_512(__m512i block, __m512i k, __m512i next) {
    __m512i low = _mm512_clmulepi64_epi128(block, k, 0x00), high = _mm512_clmulepi64_epi128(block, k, 0x11);
    return _mm512_ternarylogic_epi64(low, high, next, 0x96);
}

WIDE static inline __m512i wide(struct fold by) { return _mm512_broadcast_i32x4(constants(by)); }

/* At least 256 bytes. */
WIDE static uint64_t by_512_bits(uint64_t state, const uint8_t *data, size_t bytes) {
    __m512i a = _mm512_loadu_si512(data), b = _mm512_loadu_si512(data + 64);
    __m512i c = _mm512_loadu_si512(data + 128), d = _mm512_loadu_si512(data + 192);
    a = _mm512_xor_si512(a, _mm512_zextsi128_si512(_mm_set_epi64x(0, (long long)state)));
    __m512i k = wide(by_2048);
    for (data += 256, bytes -= 256; bytes >= 256; data += 256, bytes -= 256) {
        a = fold_512(a, k, _mm512_loadu_si512(data));
        b = fold_512(b, k, _mm512_loadu_si512(data + 64));
        c = fold_512(c, k, _mm512_loadu_si512(data + 128));
        d = fold_512(d, k, _mm512_loadu_si512(data + 192));
    }
    k = wide(by_512);
    a = fold_512(fold_512(fold_512(a, k, b), k, c), k, d);
    const __m128i one = constants(by_128);
    __m128i block = _mm512_castsi512_si128(a);
    block = fold_128(block, one, _mm512_extracti32x4_epi32(a, 1));
    block = fold_128(block, one, _mm512_extracti32x4_epi32(a, 2));
    block = fold_128(block, one, _mm512_extracti32x4_epi32(a, 3));
    return finish_128(block, data, bytes);
}
#endif

int kvfs_crc64nvme_engine(int wanted) {
    pthread_once(&made, make);
    return wanted == 0 ? best : wanted <= best ? wanted : -1;
}

uint64_t kvfs_crc64nvme(uint64_t crc, const uint8_t *data, size_t bytes, int engine) {
    engine = kvfs_crc64nvme_engine(engine);
#if defined(__x86_64__)
    if (engine == 3 && bytes >= 256) return ~by_512_bits(~crc, data, bytes);
    if (engine >= 2 && bytes >= 64) return ~by_128_bits(~crc, data, bytes);
#endif
    return ~by_table(~crc, data, bytes);
}
