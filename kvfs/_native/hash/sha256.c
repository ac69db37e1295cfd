#include "sha256.h"

#include <string.h>

static const uint32_t K[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

const uint32_t kvfs_sha256_initial[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

static inline uint32_t rotate(uint32_t x, int n) { return (x >> n) | (x << (32 - n)); }

static inline uint32_t load_be32(const uint8_t *from) {
    return (uint32_t)from[0] << 24 | (uint32_t)from[1] << 16 | (uint32_t)from[2] << 8 | from[3];
}

/* One round, t of 16 in a row: the names of the eight variables turn, so that nothing is moved. */
#define AT(i) v[((i)-t) & 7]
#define ROUND(word)                                                                      \
    do {                                                                                 \
        const uint32_t a = AT(0), b = AT(1), c = AT(2), e = AT(4), f = AT(5), g = AT(6); \
        const uint32_t choose = g ^ (e & (f ^ g)), majority = (a & b) | (c & (a | b));   \
        const uint32_t sum1 = rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25);              \
        const uint32_t t1 = AT(7) + sum1 + choose + K[first + t] + (word);               \
        AT(3) += t1;                                                                     \
        AT(7) = t1 + (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + majority;          \
    } while (0)

/* w is a ring of the last 16 schedule words. */
static void portable_block(uint32_t state[8], const uint8_t *data) {
    uint32_t w[16], v[8];
    int first = 0;
    memcpy(v, state, sizeof v);
#pragma GCC unroll 16
    for (int t = 0; t < 16; t++) {
        w[t] = load_be32(data + 4 * t);
        ROUND(w[t]);
    }
    for (first = 16; first < 64; first += 16) {
#pragma GCC unroll 16
        for (int t = 0; t < 16; t++) {
            const uint32_t x = w[(t + 1) & 15], y = w[(t + 14) & 15];
            w[t] += (rotate(x, 7) ^ rotate(x, 18) ^ (x >> 3)) + w[(t + 9) & 15];
            w[t] += rotate(y, 17) ^ rotate(y, 19) ^ (y >> 10);
            ROUND(w[t]);
        }
    }
    for (int i = 0; i < 8; i++) state[i] += v[i];
}
#undef ROUND
#undef AT

void kvfs_sha256_portable(uint32_t state[8], const uint8_t *data, size_t blocks) {
    for (; blocks > 0; blocks--, data += 64) portable_block(state, data);
}

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

/* Four rounds a step; w holds the 16 schedule words that the next steps need, as a ring of four vectors. */
__attribute__((target("sha,sse4.1"))) static void sha_ni_blocks(uint32_t state[8], const uint8_t *data, size_t blocks) {
    const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0bLL, 0x0405060700010203LL);
    __m128i badc = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)state), 0xb1);
    __m128i hgfe = _mm_shuffle_epi32(_mm_loadu_si128((const __m128i *)(state + 4)), 0x1b);
    __m128i abef = _mm_alignr_epi8(badc, hgfe, 8), cdgh = _mm_blend_epi16(hgfe, badc, 0xf0);
    for (; blocks > 0; blocks--, data += 64) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[4];
        for (int i = 0; i < 4; i++) w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)data + i), big_endian);
#pragma GCC unroll 16
        for (int step = 0; step < 16; step++) {
            const int now = step & 3, last = (step + 3) & 3;
            __m128i sum = _mm_add_epi32(w[now], _mm_load_si128((const __m128i *)(K + 4 * step)));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
            if (step < 12) {
                __m128i next = _mm_sha256msg1_epu32(w[now], w[(step + 1) & 3]);
                next = _mm_add_epi32(next, _mm_alignr_epi8(w[last], w[(step + 2) & 3], 4));
                w[now] = _mm_sha256msg2_epu32(next, w[last]);
            }
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    __m128i feba = _mm_shuffle_epi32(abef, 0x1b), dchg = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128((__m128i *)(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

static int has_sha_extensions(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & bit_SSE4_1) || !(c & bit_SSSE3)) return 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_SHA) != 0;
}

/* Asked once: a virtual machine's CPUID goes to the hypervisor, which took 20 us. */
kvfs_sha256_blocks kvfs_sha256_accelerated(void) {
    static int known = -1;
    int has = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (has < 0) {
        has = has_sha_extensions();
        __atomic_store_n(&known, has, __ATOMIC_RELAXED);
    }
    return has ? sha_ni_blocks : NULL;
}
#else
kvfs_sha256_blocks kvfs_sha256_accelerated(void) { return NULL; }
#endif
