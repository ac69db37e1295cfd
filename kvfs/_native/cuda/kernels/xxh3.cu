/* XXH3-64 of objects in device memory, each by a thread block of 288. An object has more than 240 bytes.
 *
 * Eight warps sum blocks of 1 KiB, 32 at a time, while the ninth chains the sums of the 32 before: the chain, the same
 * few operations for one block after the other, is what bounds one object. A warp reads a block as four rows of 256
 * bytes, and those of the next round while it sums; a thread has one lane, and gets its neighbour's word by a shuffle.
 */
#include "xxh3_lanes.h"

#define WARP 32
#define SUMMING 8 /* warps */
#define EACH 4    /* blocks of one of these */
#define TOGETHER (SUMMING * EACH)
#define ROWS 4 /* of a block: 4 stripes each */
#define ALL 0xFFFFFFFFu

/* All warps, whichever of the kernel's two halves they are in. */
static __device__ inline void meet(void)
{
    asm volatile("bar.sync 1, %0;" ::"n"(WARP *(SUMMING + 1)) : "memory");
}

struct keys {
    uint64_t of_row[ROWS];
};

/* Word of its lane in the stripe that this thread has of a row. */
template <bool aligned> static __device__ inline uint64_t word_of(const uint8_t *block, int row)
{
    const uint8_t *p = block + row * (ROWS * 64) + threadIdx.x % WARP * 8;
    return aligned ? *(const xxh3_word *)p : xxh3_read(p);
}

static __device__ inline uint64_t term(uint64_t word, uint64_t secret)
{
    uint64_t key = word ^ secret;
    return __shfl_xor_sync(ALL, word, 1) + (key & 0xFFFFFFFFu) * (key >> 32);
}

/* The sum over the four stripes that threads of one lane have. */
static __device__ inline uint64_t across(uint64_t sum)
{
    sum += __shfl_xor_sync(ALL, sum, 8);
    return sum + __shfl_xor_sync(ALL, sum, 16);
}

template <bool aligned>
static __device__ inline void read_block(const uint8_t *block, uint64_t (&words)[ROWS])
{
#pragma unroll
    for (int row = 0; row < ROWS; row++)
        words[row] = word_of<aligned>(block, row);
}

/* The sums of a summing warp's blocks, round after round: of each, EACH * SUMMING blocks behind the round's before. */
template <bool aligned>
static __device__ inline void sum_rounds(const uint8_t *data, uint64_t blocks, struct keys keys,
                                         uint64_t (*sums)[TOGETHER][LANES])
{
    int first = threadIdx.x / WARP * EACH;
    uint64_t words[EACH][ROWS];
#pragma unroll
    for (int k = 0; k < EACH; k++)
        if (first + k < blocks)
            read_block<aligned>(data + (uint64_t)(first + k) * BLOCK_BYTES, words[k]);
    for (uint64_t round = 0; round * TOGETHER < blocks; round++) {
        uint64_t(*own)[LANES] = sums[round % 2] + first;
#pragma unroll
        for (int k = 0; k < EACH; k++) {
            uint64_t block = round * TOGETHER + first + k;
            if (block >= blocks)
                continue;
            uint64_t sum = 0;
#pragma unroll
            for (int row = 0; row < ROWS; row++)
                sum += term(words[k][row], keys.of_row[row]);
            if (block + TOGETHER < blocks)
                read_block<aligned>(data + (block + TOGETHER) * BLOCK_BYTES, words[k]);
            sum = across(sum);
            if (threadIdx.x % WARP < LANES)
                own[k][threadIdx.x % LANES] = sum;
        }
        meet();
    }
    meet();
}

/* The sum of the whole stripes behind the last whole block, at most 15. */
static __device__ inline uint64_t sum_stripes(const uint8_t *block, int stripes, struct keys keys)
{
    int own = threadIdx.x % WARP / LANES;
    uint64_t sum = 0;
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
        bool there = row * ROWS + own < stripes;
        uint64_t word = there ? word_of<false>(block, row) : 0, one = term(word, keys.of_row[row]);
        sum += there ? one : 0;
    }
    return across(sum);
}

/* The lane after a whole block, and `sum` added: in 32-bit halves, where the next sum goes into the multiplication. */
static __device__ inline uint64_t chain(uint64_t value, uint64_t secret, uint64_t sum)
{
    uint32_t low = (uint32_t)value ^ (uint32_t)(value >> 32) >> 15 ^ (uint32_t)secret;
    uint32_t high = (uint32_t)(value >> 32) ^ (uint32_t)(secret >> 32);
    uint64_t product = (uint64_t)low * PRIME32_1 + sum;
    return (uint64_t)((uint32_t)(product >> 32) + high * PRIME32_1) << 32 | (uint32_t)product;
}

/* The lane after all whole blocks, each round's sums behind those who make them. */
static __device__ inline uint64_t chain_rounds(uint64_t blocks, int lane, const uint64_t (*sums)[TOGETHER][LANES])
{
    uint64_t value = xxh3_begin[lane], secret = xxh3_read(xxh3_secret + 128 + 8 * lane);
    meet();
    for (uint64_t round = 0; round * TOGETHER < blocks; round++) {
        uint64_t left = blocks - round * TOGETHER;
        int there = left < TOGETHER ? (int)left : TOGETHER;
        value += sums[round % 2][0][lane];
#pragma unroll 8
        for (int i = 1; i < there; i++)
            value = chain(value, secret, sums[round % 2][i][lane]);
        value = chain(value, secret, 0);
        meet();
    }
    return value;
}

extern "C" __global__ void __launch_bounds__(WARP *(SUMMING + 1))
    kvfs_xxh3(const uint64_t *addresses, const uint64_t *sizes, uint64_t *hashes)
{
    __shared__ uint64_t sums[2][TOGETHER][LANES], lanes[LANES];
    const uint8_t *data = (const uint8_t *)addresses[blockIdx.x];
    uint64_t bytes = sizes[blockIdx.x], blocks = (bytes - 1) / BLOCK_BYTES, whole = blocks * BLOCK_BYTES;
    int lane = threadIdx.x % LANES;
    struct keys keys;
    for (int row = 0; row < ROWS; row++)
        keys.of_row[row] = xxh3_read(xxh3_secret + 8 * (row * ROWS + threadIdx.x % WARP / LANES + lane));
    if (threadIdx.x / WARP < SUMMING) {
        if ((uint64_t)data % 8 == 0)
            sum_rounds<true>(data, blocks, keys, sums);
        else
            sum_rounds<false>(data, blocks, keys, sums);
        return;
    }
    uint64_t tail = sum_stripes(data + whole, (int)((bytes - 1 - whole) / 64), keys);
    tail += xxh3_stripe(data + bytes - 64, xxh3_secret + 121, lane);
    uint64_t value = chain_rounds(blocks, lane, sums) + tail;
    if (threadIdx.x % WARP < LANES)
        lanes[lane] = value;
    __syncwarp();
    if (threadIdx.x % WARP == 0)
        hashes[blockIdx.x] = xxh3_merge(lanes, bytes);
}
