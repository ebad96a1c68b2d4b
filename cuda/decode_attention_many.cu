// decode_attention_many.cu: attention of one new token a sequence, for one layer of a step of many sequences.
//
//   decode_attention_many         a layer that sees all positions
//   decode_attention_many_window  a layer that sees the last `window`
//
// What decode_attention.cu computes, with the same arguments, inputs and outputs, and to the same roundings.
//
// launch   grid any number, at most 256 rows; on compute capability 9 to 11 block 512, kAttentionManyBytes of dynamic
//          shared memory, elsewhere block 320, kAttentionManySmallBytes. The positions that a row sees are one part
//          with a window, else up to kAttentionParts parts of whole tiles of 64 positions. The blocks take items in
//          turn: a part and a KV head.
// order    Tiles of a part go to pairs of warps in turn, half a tile to each warp; in front of those of the last warp
//          comes the new position. Warps, then parts merge in ascending order, and the sink comes last. All of it
//          depends on the token's own position alone.
// bound    memory: 512 bytes a position seen and KV head
// PDL      K and V are requested before the wait; triggers right after it
//
// Copies in flight fill the way to memory, and whoever asks it for something else waits for microseconds. So each kind
// of work has its warps, which are up to two items apart:
//   copy      K and V to shared memory
//   multiply  a pair of warps a tile of K and V
//   help      prepare q of an item, the new key and value; merge what all warps have of the item before
//   tell      that parts are there; merge them when they are all there
//
// The products, and what of a tile a lane has, are those of decode_tile.cuh. A tile lies in shared memory as in the
// cache, where two of a quarter warp's eight lanes always meet in a bank: at the rate at which memory delivers, shared
// memory is busy for half of the time.

#include <cuda_bf16.h>

#include "args_attention.h"
#include "barrier.cuh"
#include "common.cuh"
#include "copy_ring.cuh"
#include "decode_cache.cuh"
#include "decode_merge.cuh"
#include "decode_tile.cuh"
#include "head_norm.cuh"

namespace {

// Pairs of warps that multiply, and slots for K or V of a tile, as far as shared memory goes: a block can have 227 KB
// on some cards, 99 KB on others.
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
constexpr int kPairs = 4, kSlots = 8;
constexpr uint32_t kBytes = kAttentionManyBytes;
#else
constexpr int kPairs = 1, kSlots = 4;
constexpr uint32_t kBytes = kAttentionManySmallBytes;
#endif
constexpr int kWarps = 2 * kPairs;  // that multiply
constexpr int kHelpers = 4;         // that prepare and finish
constexpr int kTellers = 3;         // that merge parts
constexpr int kThreads = 32 * (kWarps + kHelpers + kTellers + 1);
constexpr int kHeads = kGroup / kHelpers;  // that a helper prepares, and finishes
constexpr int kHalf = kBlock / 2;
constexpr int kSlotBytes = kPartHead * 2;
// So all fillings of a slot are of one pair.
static_assert(kSlots % (2 * kPairs) == 0);
constexpr int kMostRows = 256;
// Tiles of a part, if kAttentionParts are enough: of fewer, what comes before and after them takes longer than their
// copies, and merging costs what cutting gains.
constexpr int kPartTiles = 16;

// A part of what a row sees, for a KV head.
struct Item {
    uint32_t row, kv_head, part, parts;
    int position, start;       // sees from start to position
    int first_tile, end_tile;  // of those behind start and before position
};

// The tiles of a row, and the parts that they are divided into.
struct Span {
    int start, first_tile;
    uint32_t tiles, parts;

    __device__ __forceinline__ Span(int position, int window) {
        start = window == 0 ? 0 : max(0, position + 1 - window);
        first_tile = start / kBlock;
        tiles = start < position ? (position + kBlock - 1) / kBlock - first_tile : 0;
        parts = 1;
        if (window == 0 && tiles > kPartTiles) {
            const uint32_t most = max(uint32_t(kPartTiles), (tiles + kAttentionParts - 1) / kAttentionParts);
            parts = (tiles + most - 1) / most;
        }
    }

    // Where a part begins and the one before ends.
    __device__ __forceinline__ int begin(uint32_t part) const { return first_tile + part * tiles / parts; }
};

// All items of a launch by number: those of a row follow each other, and of each part those of all KV heads.
template <bool kWindow>
struct Items {
    const DecodeAttentionArgs& args;
    // Of each row, in shared memory: where global memory is busy, it answers after microseconds.
    int* positions;
    uint32_t* ends;  // without a window: how many parts it and those before have

    // By one warp.
    __device__ __forceinline__ void read(int lane) const {
        constexpr int kEach = kMostRows / 32;
        uint32_t parts[kEach], all = 0;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const uint32_t row = kEach * lane + i;
            const int position = row < args.rows ? args.positions[row] : 0;
            positions[row] = position;
            parts[i] = row < args.rows ? Span(position, 0).parts : 0;
            all += parts[i];
        }
        if constexpr (kWindow) return;
        uint32_t end = running_sum(all, lane) - all;
#pragma unroll
        for (int i = 0; i < kEach; ++i) ends[kEach * lane + i] = end += parts[i];
    }

    // Whether there are so many. For a whole warp, and the same for all its lanes.
    __device__ __forceinline__ bool get(uint32_t number, int lane, Item& item) const {
        const uint32_t at = number / args.kv_heads;
        item.kv_head = number % args.kv_heads;
        item.row = at;
        item.part = 0;
        if constexpr (!kWindow) {
            uint32_t before = 0;
#pragma unroll
            for (int i = 0; i < kMostRows; i += 32) before += ends[i + lane] <= at;
            item.row = __reduce_add_sync(~0u, before);
        }
        if (item.row >= args.rows) return false;
        if constexpr (!kWindow) item.part = at - (item.row == 0 ? 0 : ends[item.row - 1]);
        item.position = positions[item.row];
        const Span span(item.position, kWindow ? args.window : 0);
        item.start = span.start;
        item.parts = span.parts;
        item.first_tile = span.begin(item.part);
        item.end_tile = span.begin(item.part + 1);
        return true;
    }
};

// What is prepared for an item.
struct Stage {
    Heads q;
    // Of the new position.
    alignas(16) __nv_bfloat16 k[kHeadDim];
    alignas(16) __nv_bfloat16 v[kHeadDim];
    Item item;
};

// What warps have of an item, by their place in it.
struct Result {
    float max[kWarps][kGroup], sum[kWarps][kGroup];
    alignas(16) float out[kWarps][kGroup][kOutStride];
};

// Of items in turn, stage and result are the first and the second. A stage is prepared when the item two before is
// finished, so neither barrier is ever more than one phase ahead of who waits for it.
struct Shared {
    CopyRing<kSlots, kSlotBytes> ring;  // of K of a tile, then V of it
    Stage stages[2];
    Result results[2];
    Barrier prepared[2], multiplied[2];
    uint32_t left[kHelpers];  // items that each helper has left behind
};
static_assert(sizeof(Shared) == kBytes);

// The tiles of all items go to the pairs in turn: the first of an item's that is a pair's, behind `before` tiles. It
// decides about no bit, only about who has which.
__device__ __forceinline__ int first_of(int pair, uint32_t before) {
    return (pair + kPairs - before % kPairs) % kPairs;
}

// The block of an item's tile number `i` + lane.
__device__ __forceinline__ uint32_t block_of_tile(const DecodeAttentionArgs& args, const Item& item, int i, int lane) {
    const int tile = item.first_tile + i + lane;
    return tile < item.end_tile ? Cache(args, item.row, item.kv_head).block_of(tile * kBlock) : 0;
}

// The warp that copies. What it reads is older than the kernel before.
template <bool kWindow>
__device__ __forceinline__ void copy(Shared& shared, const DecodeAttentionArgs& args, const Items<kWindow>& items,
                                     int lane) {
    uint32_t filling = 0, number = blockIdx.x;
    Item item, next;
    bool more = items.get(number, lane, item);
    uint32_t blocks = more ? block_of_tile(args, item, 0, lane) : 0;
    while (more) {
        // The next item's blocks are asked for now, and known when they are needed.
        number += gridDim.x;
        more = items.get(number, lane, next);
        const uint32_t next_blocks = more ? block_of_tile(args, next, 0, lane) : 0;
        const Cache cache(args, item.row, item.kv_head);
        for (int i = 0; i < item.end_tile - item.first_tile; ++i) {
            if (i > 0 && i % 32 == 0) blocks = block_of_tile(args, item, i, lane);
            const uint32_t block = __shfl_sync(~0u, blocks, i % 32);
            const int tile = item.first_tile + i;
            // Of K what is seen; V lies across.
            const int from = max(item.start - tile * kBlock, 0), to = min(item.position - tile * kBlock, kBlock);
            constexpr int kKeyBytes = 2 * kHeadDim;
            shared.ring.fill(filling++, from * kKeyBytes, cache.k(block, from), (to - from) * kKeyBytes, lane);
            shared.ring.fill(filling++, 0, cache.v(block, 0), kSlotBytes, lane);
        }
        item = next;
        blocks = next_blocks;
    }
}

// By all helpers, each two heads of q, and the last also the new key and value. Waits for the kernel before if `first`.
__device__ __forceinline__ void prepare(Stage& stage, const DecodeAttentionArgs& args, const Item& item, bool first,
                                        int helper, int lane) {
    const int head16 = kHeads * helper + lane / 16, lane16 = lane % 16;
    const uint32_t kv_heads = args.kv_heads;
    const bool has_new = helper == kHelpers - 1 && item.part == item.parts - 1;
    const Cache cache(args, item.row, item.kv_head);
    const float* rope = args.rope == nullptr ? nullptr : args.rope + item.row * kHeadDim;
    Turn turn;
    turn.load(args.q_norm, rope, lane16);
    float k_weight[8] = {};
    uint32_t block = 0;
    if (has_new) {
        read_8(args.k_norm + 8 * lane16, k_weight);
        block = cache.block_of(item.position);
    }
    if (first) {
        pdl_wait();
        pdl_launch();
    }

    const __nv_bfloat16* qkv = static_cast<const __nv_bfloat16*>(args.qkv) +
                               uint64_t(item.row) * (kGroup + 2) * kv_heads * kHeadDim + 8 * lane16;
    const uint4 q = *reinterpret_cast<const uint4*>(qkv + (kGroup * item.kv_head + head16) * kHeadDim);
    uint4 kv = make_uint4(0, 0, 0, 0);
    // k in half of the lanes, v in the other.
    if (has_new) {
        kv = *reinterpret_cast<const uint4*>(qkv + ((kGroup + lane / 16) * kv_heads + item.kv_head) * kHeadDim);
    }
    stage.q.put(head16, 8 * lane16, turn.apply(q, args.eps, rope != nullptr, lane16));
    if (has_new) {
        const uint4 k = norm_rope(kv, k_weight, args.eps, rope != nullptr, turn.cos, turn.sin, lane16);
        if (lane < 16) {
            *reinterpret_cast<uint4*>(&stage.k[8 * lane16]) = k;
            *reinterpret_cast<uint4*>(cache.k(block, item.position) + 8 * lane16) = k;
        } else {
            *reinterpret_cast<uint4*>(&stage.v[8 * lane16]) = kv;
        }
        __syncwarp();
        __nv_bfloat16* to = cache.v(block, item.position);
        for (int d = lane; d < kHeadDim; d += 32) to[d * kBlock] = stage.v[d];
    }
    if (helper == 0 && lane == 0) stage.item = item;
}

// One of the warps that tell other blocks of the parts that this one has left, and merge a row's if they were the last.
// A fence takes microseconds where copies are on their way: here nobody waits for it.
__device__ __forceinline__ void tell(const Shared& shared, const DecodeAttentionArgs& args, const Items<false>& items,
                                     int teller, int lane) {
    Item item;
    for (uint32_t told = 0; items.get(blockIdx.x + told * gridDim.x, lane, item);) {
        uint32_t left = ~0u;
        if (lane < kHelpers) {
            asm volatile("atom.acquire.cta.shared.add.u32 %0, [%1], 0;"
                         : "=r"(left)
                         : "r"(shared_address(&shared.left[lane]))
                         : "memory");
        }
        left = min(__reduce_min_sync(~0u, left) - told, 32u);
        if (left == 0) {
            __nanosleep(200);
            continue;
        }
        // An item a lane.
        uint32_t row = 0, kv_head = 0, parts = 1;
        for (uint32_t i = 0; i < left; ++i) {
            items.get(blockIdx.x + (told + i) * gridDim.x, lane, item);
            if (lane == i) row = item.row, kv_head = item.kv_head, parts = item.parts;
        }
        told += left;
        if (__all_sync(~0u, parts == 1)) continue;
        __syncwarp();
        fence_gpu();
        bool last = false;
        if (parts > 1) last = atomicAdd(Parts(args, row, kv_head).counters + teller, 1u) == parts - 1;
        uint32_t lasts = __ballot_sync(~0u, last);
        if (lasts == 0) continue;
        fence_gpu();
        __syncwarp();
        for (; lasts != 0; lasts &= lasts - 1) {
            const int from = __ffs(lasts) - 1;
            const uint32_t of_row = __shfl_sync(~0u, row, from), of_head = __shfl_sync(~0u, kv_head, from),
                           n = __shfl_sync(~0u, parts, from);
            const Parts all(args, of_row, of_head);
            if (lane == 0) all.counters[teller] = 0;
#pragma unroll 1
            for (int head = teller; head < kGroup; head += kTellers) {
                const float sink = args.sinks[kGroup * of_head + head] * kLog2e;
                const Merged x = merge_parts(all.partial + head * kPartial, n);
                store_attn(args, x, sink, of_row, kGroup * of_head + head, lane);
            }
        }
    }
}

// One of the warps that prepare an item, and then finish the one before: two heads of each.
template <bool kWindow>
__device__ __forceinline__ void help(Shared& shared, const DecodeAttentionArgs& args, const Items<kWindow>& items,
                                     int helper, int lane) {
    Item item, next;
    float sinks[kHeads] = {}, next_sinks[kHeads] = {};
    bool more = items.get(blockIdx.x, lane, next);
    for (uint32_t n = 0;; ++n) {
        Stage& stage = shared.stages[n % 2];
        if (more) {
#pragma unroll
            for (int i = 0; i < kHeads; ++i) {
                next_sinks[i] = args.sinks[kGroup * next.kv_head + helper + kHelpers * i] * kLog2e;
            }
            prepare(stage, args, next, n == 0, helper, lane);
        } else if (helper == 0 && lane == 0) {
            stage.item.parts = 0;
        }
        shared.prepared[n % 2].arrive(lane);
        if (n > 0) {
            const Result& result = shared.results[(n - 1) % 2];
            shared.multiplied[(n - 1) % 2].wait((n - 1) / 2);
#pragma unroll
            for (int i = 0; i < kHeads; ++i) {
                const int head = helper + kHelpers * i;
                const Merged x = merge<kWarps>(
                    [&](int w) { return *reinterpret_cast<const float4*>(&result.out[w][head][4 * lane]); },
                    [&](int w) { return make_float2(result.max[w][head], result.sum[w][head]); });
                if (kWindow || item.parts == 1) {
                    store_attn(args, x, sinks[i], item.row, kGroup * item.kv_head + head, lane);
                } else {
                    Parts(args, item.row, item.kv_head).leave(x, head, item.part, lane);
                }
            }
            if (!kWindow) {
                __syncwarp();
                if (lane == 0) {
                    asm volatile("red.release.cta.shared.add.u32 [%0], 1;" ::"r"(shared_address(&shared.left[helper]))
                                 : "memory");
                }
            }
        }
        if (!more) return;
        item = next;
#pragma unroll
        for (int i = 0; i < kHeads; ++i) sinks[i] = next_sinks[i];
        more = items.get(blockIdx.x + (n + 1) * gridDim.x, lane, next);
    }
}

// One of the warps that multiply.
__device__ __forceinline__ void multiply(Shared& shared, int warp, int lane) {
    const int g = lane / 4, t = lane % 4, pair = warp / 2, half = warp % 2;
    uint32_t before = 0;  // tiles of items before
    for (uint32_t n = 0;; ++n) {
        const Stage& stage = shared.stages[n % 2];
        shared.prepared[n % 2].wait(n / 2);
        const Item item = stage.item;
        if (item.parts == 0) return;
        const int first = first_of(pair, before), place = 2 * first + half;
        Softmax soft;
        if (place == kWarps - 1 && item.part == item.parts - 1) {
            // Apart from the tiles: what they have of it is stale, and masked.
            soft.start(dot(stage.q, stage.k, g, t), stage.v, g, t);
        } else {
            soft.clear();
        }
        const int tiles = item.end_tile - item.first_tile;
        const int end = min(item.end_tile * kBlock, item.position);
        for (int i = first; i < tiles; i += kPairs) {
            const uint32_t filling = 2 * (before + i);
            const int at = (item.first_tile + i) * kBlock + half * kHalf;
            const bool seen = at + kHalf > item.start && at < end;
            float score[2][4];
            uint32_t p[2][2];
            const auto* k = reinterpret_cast<const __nv_bfloat16*>(shared.ring.read(filling));
            if (seen) multiply_k(score, k + half * kHalf * kHeadDim, stage.q, g, t);
            shared.ring.release(filling, lane);
            if (seen) soften(soft, score, p, at, item.start, end, g);
            const auto* v = reinterpret_cast<const __nv_bfloat16*>(shared.ring.read(filling + 1));
            if (seen) multiply_v(soft, v + half * kHalf, p, at, item.start, end, g, t);
            shared.ring.release(filling + 1, lane);
        }
        before += tiles;

        Result& result = shared.results[n % 2];
        soft.leave(result.max[place], result.sum[place], result.out[place], g, t);
        shared.multiplied[n % 2].arrive(lane);
    }
}

template <bool kWindow>
__device__ __forceinline__ void run(const DecodeAttentionArgs& args) {
    extern __shared__ __align__(128) uint8_t dynamic[];
    __shared__ int positions[kMostRows];
    __shared__ uint32_t ends[kWindow ? 1 : kMostRows];
    Shared& shared = *reinterpret_cast<Shared*>(dynamic);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const Items<kWindow> items{args, positions, ends};
    if (threadIdx.x == 32) {
        for (int i = 0; i < 2; ++i) {
            shared.prepared[i].init_warps(kHelpers);
            shared.multiplied[i].init_warps(kWarps);
        }
        for (int i = 0; i < kHelpers; ++i) shared.left[i] = 0;
        shared.ring.init(2);
    }
    if (warp == 0) items.read(lane);
    __syncthreads();
    if (warp < kWarps) {
        multiply(shared, warp, lane);
    } else if (warp < kWarps + kHelpers) {
        help(shared, args, items, warp - kWarps, lane);
    } else if (warp == kWarps + kHelpers) {
        copy(shared, args, items, lane);
    } else if constexpr (!kWindow) {
        tell(shared, args, items, warp - kWarps - kHelpers - 1, lane);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    decode_attention_many(const __grid_constant__ DecodeAttentionArgs args) {
    run<false>(args);
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    decode_attention_many_window(const __grid_constant__ DecodeAttentionArgs args) {
    run<true>(args);
}
