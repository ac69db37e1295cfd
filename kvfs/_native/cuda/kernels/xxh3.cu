/* XXH3-64 of objects in device memory: a thread block of 256 for each, 32 blocks of 1 KiB at a time, a thread a lane.
 * An object has more than 240 bytes.
 */
#include "xxh3_lanes.h"

#define ABREAST 32

extern "C" __global__ void __launch_bounds__(LANES *ABREAST)
    kvfs_xxh3(const uint64_t *addresses, const uint64_t *sizes, uint64_t *hashes)
{
    __shared__ uint64_t sums[ABREAST][LANES], lanes[LANES];
    const uint8_t *data = (const uint8_t *)addresses[blockIdx.x];
    uint64_t bytes = sizes[blockIdx.x], blocks = (bytes - 1) / BLOCK_BYTES;
    int lane = threadIdx.x % LANES, row = threadIdx.x / LANES;
    uint64_t value = xxh3_begin[lane];
    for (uint64_t first = 0; first < blocks; first += ABREAST) {
        if (first + row < blocks)
            sums[row][lane] = xxh3_sum(data + (first + row) * BLOCK_BYTES, STRIPES, lane);
        __syncthreads();
        for (int i = 0; row == 0 && i < ABREAST && first + i < blocks; i++)
            value = xxh3_chain(value, sums[i][lane], lane);
        __syncthreads();
    }
    if (row == 0)
        lanes[lane] = xxh3_tail(value, data, bytes, lane);
    __syncthreads();
    if (threadIdx.x == 0)
        hashes[blockIdx.x] = xxh3_merge(lanes, bytes);
}
