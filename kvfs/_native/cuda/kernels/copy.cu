/* Copies of many pieces, started as one: a copy engine takes microseconds to begin each, and a warp begins none.
 *
 * A warp takes every n-th piece. Either end may be the device's memory or registered memory of the host: what hides the
 * link's latency is bytes under way, 4 KiB a warp. The list of pieces may lie in registered memory, too: a warp reads 32
 * of them at once. Pieces are copied by the widest words that their addresses and sizes are multiples of.
 */
typedef unsigned long long uint64_t;

#define LANES 32
#define ABREAST 8
#define ALL_LANES 0xFFFFFFFFu

template <typename Word> static __device__ inline void copy_words(uint64_t to, uint64_t from, uint64_t bytes, int lane)
{
    uint64_t words = bytes / sizeof(Word);
    for (uint64_t first = lane; first < words; first += ABREAST * LANES) {
        Word held[ABREAST];
#pragma unroll
        for (int k = 0; k < ABREAST; k++)
            if (first + k * LANES < words)
                held[k] = ((const Word *)from)[first + k * LANES];
#pragma unroll
        for (int k = 0; k < ABREAST; k++)
            if (first + k * LANES < words)
                ((Word *)to)[first + k * LANES] = held[k];
    }
}

static __device__ inline void copy_piece(uint64_t to, uint64_t from, uint64_t bytes, int lane)
{
    unsigned int odd = (unsigned int)(to | from | bytes);
    if (odd % sizeof(uint4) == 0)
        copy_words<uint4>(to, from, bytes, lane);
    else if (odd % sizeof(unsigned int) == 0)
        copy_words<unsigned int>(to, from, bytes, lane);
    else
        copy_words<unsigned char>(to, from, bytes, lane);
}

/* struct kvfs_copy of copies_core.h. */
struct piece {
    uint64_t to, from, bytes;
};

extern "C" __global__ void __launch_bounds__(512) kvfs_copy(const struct piece *pieces, uint64_t count)
{
    int lane = threadIdx.x % LANES;
    uint64_t warps = (uint64_t)gridDim.x * (blockDim.x / LANES);
    uint64_t next = (uint64_t)blockIdx.x * (blockDim.x / LANES) + threadIdx.x / LANES;
    for (; next < count; next += LANES * warps) {
        uint64_t own = next + lane * warps;
        struct piece known = pieces[own < count ? own : next];
        for (int turn = 0; turn < LANES && next + turn * warps < count; turn++)
            copy_piece(__shfl_sync(ALL_LANES, known.to, turn), __shfl_sync(ALL_LANES, known.from, turn),
                       __shfl_sync(ALL_LANES, known.bytes, turn), lane);
    }
}
