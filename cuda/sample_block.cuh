// The blocks of decode_sample.cu that share a row: their shared memory, how their warps tell each other what they
// found, and how they go over the row's logits.
#pragma once

#include "args_sample.h"
#include "cluster.cuh"
#include "common.cuh"
#include "copy_async.cuh"
#include "sampling.cuh"

namespace {

constexpr uint32_t kAll = 0xFFFFFFFFu;
constexpr uint32_t kThreads = 512;
constexpr uint32_t kWarps = kThreads / 32;
constexpr uint32_t kClusterBlocks = cluster_blocks(8);
constexpr uint32_t kClusterWarps = kClusterBlocks * kWarps;
// The most keys that a block gives to a list.
constexpr uint32_t kListEach = kThreads / kClusterBlocks;
constexpr uint32_t kBins = 256;
static_assert(kBins % 32 == 0 && kBins <= kThreads && offsetof(SampleRow, flags) % 16 == 0 && sizeof(SampleRow) == 64);

// What a warp tells all blocks.
struct alignas(16) Told {
    uint64_t word[4];
};

// The last four fields of a row, of which kernels write `output` and `records`.
struct Counts {
    uint32_t flags, top_n, output, records;
};
static_assert(offsetof(SampleRow, flags) + sizeof(Counts) == sizeof(SampleRow) &&
              offsetof(SampleRow, output) - offsetof(SampleRow, flags) == offsetof(Counts, output));

struct Shared {
    ClusterBox box[2];
    Told board[2][kClusterWarps];  // by all warps, in this meeting and the last
    alignas(16) SampleRow row;     // what requests write of it: the counts may be old
    alignas(16) Counts counts;     // as the kernels before left them
    SampleRecord* record;
    uint32_t position;
    uint64_t random;
    uint64_t warps[kWarps];
    Key bound;
    Key gathered[kClusterBlocks][kListEach];  // of block 0: keys from all blocks
    union {
        struct {
            Key mine[kListEach];  // this block's share of the list
            Key list[kThreads];
            uint64_t weights[kThreads];
            uint64_t before[kThreads];
            uint32_t place[kThreads];
        };
        // All blocks' sums, when there is no list.
        uint64_t mass[kClusterBlocks][kBins];
    };
    uint32_t count[kClusterBlocks][kBins];
    uint32_t pieces[4][kBins];  // this block's sums
    uint64_t bin_need;
    uint32_t bin;
    uint32_t listed;
    uint32_t token;
};

struct Block {
    Shared& s;
    uint32_t rank;
    uint32_t lane;
    uint32_t warp;
    uint32_t meetings;

    // Of the last meeting.
    __device__ __forceinline__ const Told* told() const { return s.board[(meetings - 1) % 2]; }
};

__device__ __forceinline__ Key larger(Key a, Key b) { return a > b ? a : b; }

__device__ __forceinline__ Key warp_max(Key x) {
    const uint32_t high = __reduce_max_sync(kAll, uint32_t(x >> 32));
    return Key(high) << 32 | __reduce_max_sync(kAll, uint32_t(x >> 32) == high ? uint32_t(x) : 0);
}

__device__ __forceinline__ uint64_t warp_add(uint64_t x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(kAll, x, offset);
    return x;
}

// Of sums that are below 2^54: up to 2^13 weights of at most 2^40.
__device__ __forceinline__ uint64_t warp_add_sums(uint64_t x) {
    constexpr uint32_t kLow = (1u << 27) - 1;
    return (uint64_t(__reduce_add_sync(kAll, uint32_t(x >> 27))) << 27) + __reduce_add_sync(kAll, uint32_t(x) & kLow);
}

// In which lane the running sum of `x` exceeds `r`, which is below the sum of all; `r` less what stands before it.
__device__ __forceinline__ uint32_t pick(uint32_t lane, uint64_t x, uint64_t& r) {
    const uint64_t sum = running_sum(x, lane);
    const uint32_t found = __ffs(__ballot_sync(kAll, sum > r)) - 1;
    r -= __shfl_sync(kAll, sum - x, found);
    return found;
}

// One half of a meeting: the warp tells three words to all blocks; `more` bytes come into this block's box beside them.
// What a thread reads of the meeting before the last, it has read.
__device__ void tell(Block& b, uint64_t x, uint64_t y = 0, uint64_t z = 0, uint32_t more = 0) {
    const uint32_t turn = b.meetings % 2;
    Told& told = b.s.board[turn][b.rank * kWarps + b.warp];
    if constexpr (kClusterBlocks == 1) {
        if (b.lane == 0) told = {{x, y, z, 0}};
    } else {
        // Two boxes, because who has all of one meeting may tell of the next while others still wait.
        const ClusterBox& box = b.s.box[turn];
        if (threadIdx.x == 0) b.s.box[turn].expect(uint32_t(sizeof(b.s.board[turn])) + more);
        const bool second = b.lane >= kClusterBlocks;
        if (b.lane < 2 * kClusterBlocks) {
            box.put(&told.word[second ? 2 : 0], second ? z : x, second ? 0 : y, b.lane % kClusterBlocks);
        }
    }
}

// The other half: waits until all warps of all blocks have told.
__device__ __forceinline__ void listen(Block& b) {
    if constexpr (kClusterBlocks == 1) {
        __syncthreads();
    } else {
        b.s.box[b.meetings % 2].wait(b.meetings / 2 % 2);
    }
    ++b.meetings;
}

// Over word `i` of what all warps told.
__device__ __forceinline__ Key told_max(const Block& b, uint32_t i) {
    Key x = 0;
#pragma unroll
    for (uint32_t w = b.lane; w < kClusterWarps; w += 32) x = larger(x, b.told()[w].word[i]);
    return warp_max(x);
}
__device__ __forceinline__ uint64_t told_sum(const Block& b, uint32_t i) {
    uint64_t x = 0;
#pragma unroll
    for (uint32_t w = b.lane; w < kClusterWarps; w += 32) x += b.told()[w].word[i];
    return warp_add(x);
}

// What a block works on: the row's tokens from `first` on.
struct Slice {
    const float* values;
    uint32_t first;
    uint32_t n;
};

// Calls f(logit, i) for every step-th of `values` from `begin` + `offset` on, with several loads in flight. Beyond
// `end` logits are minus infinity; as many calls are made whatever `offset` is.
template <typename F>
__device__ __forceinline__ void walk(const float* values, uint32_t begin, uint32_t end, uint32_t step, uint32_t offset,
                                     const F& f) {
    constexpr uint32_t kFlight = 4;
#pragma unroll 1
    for (uint32_t base = begin; base < end; base += kFlight * step) {
        const float* from = values + base + offset;
        const int left = int(end - base - offset);
        float logits[kFlight];
#pragma unroll
        for (uint32_t j = 0; j < kFlight; ++j) logits[j] = int(j * step) < left ? from[j * step] : -INFINITY;
#pragma unroll
        for (uint32_t j = 0; j < kFlight; ++j) f(logits[j], base + j * step + offset);
    }
}

// The part of `n` things that a warp takes, of whose parts each follows the last one's.
struct Part {
    uint32_t begin;
    uint32_t end;
};
__device__ __forceinline__ Part part_of(uint32_t warp, Part all) {
    const uint32_t each = (all.end - all.begin + kWarps - 1) / kWarps;
    const uint32_t begin = min(all.begin + warp * each, all.end);
    return {begin, min(begin + each, all.end)};
}

}  // namespace
