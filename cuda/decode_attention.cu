// decode_attention.cu: attention of one new token a sequence, for one layer.
//
//   decode_attention         a layer that sees all positions
//   decode_attention_window  a layer that sees the last `window`
//
//   q, k = rope(norm(q)), rope(norm(k))          each rounded to bf16; no rotation where rope is null
//   cache[position] = k, v
//   p[i] = exp(q . k[i] / sqrt(128) - m)         for the positions i seen, m the maximum of the scores and the sink
//   attn = sum p[i] v[i] / (sum p[i] + exp(sink - m))
//
// in       qkv [B, 10 G, 128] bf16, positions [B], blocks [B, context / 64], norms, rope, sinks: see args_attention.h
// in, out  kv    per block and layer: K [G, 64 positions, 128], V [G, 128, 64 positions], bf16
// out      attn  [B, 8 G, 128] bf16, with panel_rows in panels of panel.cuh
// p is rounded to bf16 for the product with v, relative to the maximum that its warp has seen; all else is fp32.
//
// launch   decode_attention: grid (G, any number) of 256 threads. The positions of a row are divided into up to
//          kAttentionParts parts, and the blocks of a KV head take parts of all rows in turn; at most 256 rows.
//          decode_attention_window: grid (8, G, B) of 160 threads in clusters of 8. Neither uses dynamic shared memory;
//          with few rows windows are launched with some, so that clusters spread out.
// order    Tiles of 32 or 16 positions go to the warps of a block or cluster in turn, behind the last tile the new
//          position; parts are whole rounds of warps. Warps, then blocks, then parts merge in ascending order, and the
//          sink comes last. All of it depends on the token's own position alone.
// bound    memory: 512 bytes a position seen and KV head; latency below some thousand positions
// PDL      the first tile of each warp is requested before the wait; triggers there, with a window right after it
//
// The products, and what of a tile a lane has, are those of decode_tile.cuh.
#include <cuda_bf16.h>

#include "args_attention.h"
#include "cluster.cuh"
#include "common.cuh"
#include "decode_cache.cuh"
#include "decode_merge.cuh"
#include "decode_tile.cuh"
#include "head_norm.cuh"

namespace {

// Blocks that share a part, warps of a block, and positions that a warp takes at a time. A long context needs many
// loads in flight. A window is a matter of latency: each warp has one tile, and the blocks leave room for others on
// their SM.
struct All {
    static constexpr int kCluster = 1, kWarps = 8, kTile = 32;
};
struct Window {
    static constexpr int kCluster = 8, kWarps = 5, kTile = 16;
};

// What a block attends to: a row, a KV head, and which of how many parts.
struct Work {
    uint32_t row, kv_head, part, parts;
};

template <typename Shape>
struct Shared {
    static constexpr int kRanks = cluster_blocks(Shape::kCluster);
    static constexpr int kHeads = kGroup / kRanks;  // that a block finishes
    Heads q;
    // Of the new position.
    alignas(16) __nv_bfloat16 k[kHeadDim];
    alignas(16) __nv_bfloat16 v[kHeadDim];
    float sink[kGroup];
    float max[Shape::kWarps][kGroup], sum[Shape::kWarps][kGroup];
    alignas(16) float out[Shape::kWarps][kGroup][kOutStride];
    // Of this block's heads, written by all blocks of the cluster.
    alignas(16) float4 rank_out[kHeads][kRanks][kHeadDim / 4];
    float2 rank_stats[kHeads][kRanks];
    ClusterBox box;
    Work work;
};

// A row's tiles from its first visible position to its last cached one, and the parts that they are divided into.
template <typename Shape>
struct Span {
    int position, start, first_tile, tiles, part_tiles;
    uint32_t parts;

    __device__ __forceinline__ Span(int position, int window) : position(position) {
        constexpr uint32_t kWarps = Shape::kWarps;
        start = window == 0 ? 0 : max(0, position + 1 - window);
        first_tile = start / Shape::kTile;
        tiles = start < position ? (position + Shape::kTile - 1) / Shape::kTile - first_tile : 0;
        parts = 1, part_tiles = tiles;
        if constexpr (Shape::kCluster == 1) {
            // In rounds, a tile for every warp. The part with the most decides, and every part has to be merged: as
            // few as leave none a round more.
            const uint32_t rounds = max((tiles + kWarps - 1) / kWarps, 1);
            const uint32_t most = (rounds + kAttentionParts - 1) / kAttentionParts;
            parts = (rounds + most - 1) / most;
            part_tiles = most * kWarps;
        }
    }

    // Where a part begins and the one before ends.
    __device__ __forceinline__ int begin(int part) const { return first_tile + min(part * part_tiles, tiles); }
};

// Attention of a row and KV head to a part of what it sees. The first of a block waits for the kernel before. Begins
// after all threads of the block have met.
template <typename Shape>
__device__ __forceinline__ void attend(Shared<Shape>& shared, const DecodeAttentionArgs& args, const Span<Shape>& span,
                                       const Work& work, bool first) {
    using S = Shared<Shape>;
    constexpr int kTile = Shape::kTile, kWarps = Shape::kWarps, kRanks = S::kRanks, kSlots = kRanks * kWarps,
                  kStep = kSlots * kTile;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int rank = kRanks == 1 ? 0 : blockIdx.x % kRanks;
    const uint32_t kv_heads = args.kv_heads;
    const int start = span.start;

    const Cache cache(args, work.row, work.kv_head);
    const int first_tile = span.begin(work.part), end_tile = span.begin(work.part + 1);
    // Positions: of this warp's next tile, and behind the last of this part.
    int at = (first_tile + rank * kWarps + warp) * kTile;
    const int end = min(end_tile * kTile, span.position);

    // A head for every 16 lanes: q of the group, then k.
    const int head16 = threadIdx.x / 16, lane16 = threadIdx.x % 16;
    const bool is_q = head16 < kGroup;
    const float* rope = args.rope == nullptr ? nullptr : args.rope + work.row * kHeadDim;
    // The table first: what follows fills the time until the block is known.
    uint32_t block = 0, next_block = 0;
    if (at < end) block = cache.block_of(at);
    if (at + kStep < end) next_block = cache.block_of(at + kStep);
    Turn turn;
    turn.load(is_q ? args.q_norm : args.k_norm, rope, lane16);
    const float sink = threadIdx.x < kGroup ? args.sinks[kGroup * work.kv_head + threadIdx.x] : 0;
    Tile<kTile / 16> tile;
    if (at < end) {
        tile.load_k(cache.k(block, at), g, t);
        tile.load_v(cache.v(block, at), g, t);
    } else {
        tile.clear();
    }
    // Behind the last tile comes the new position.
    const int behind = (end_tile - first_tile) % kSlots - rank * kWarps;
    const bool has_new = work.part == work.parts - 1 && behind >= 0 && behind < kWarps;
    const uint32_t new_block = has_new ? cache.block_of(span.position) : 0;
    if (first) {
        // decode_o gets a block on every multiprocessor if decode_qkv has left them; where this kernel fills them, it
        // can come early.
        if (Shape::kCluster == 1) pdl_launch();
        pdl_wait();
        if (Shape::kCluster > 1) pdl_launch();
    }

    const __nv_bfloat16* qkv =
        static_cast<const __nv_bfloat16*>(args.qkv) + uint64_t(work.row) * (kGroup + 2) * kv_heads * kHeadDim;
    static_assert(2 * kWarps > kGroup);
    if (warp < kGroup / 2 + has_new) {
        // q of the group, k, and v in a warp with k.
        const int head = is_q ? kGroup * work.kv_head + head16 : head16 * kv_heads + work.kv_head;
        const uint4 raw = *reinterpret_cast<const uint4*>(qkv + head * kHeadDim + 8 * lane16);
        const uint4 x = turn.apply(raw, args.eps, rope != nullptr, lane16);
        if (is_q) {
            shared.q.put(head16, 8 * lane16, x);
        } else if (head16 == kGroup) {
            *reinterpret_cast<uint4*>(&shared.k[8 * lane16]) = x;
            *reinterpret_cast<uint4*>(cache.k(new_block, span.position) + 8 * lane16) = x;
        } else {
            *reinterpret_cast<uint4*>(&shared.v[8 * lane16]) = raw;
        }
    }
    if (threadIdx.x < kGroup) shared.sink[threadIdx.x] = sink * kLog2e;
    if (threadIdx.x == 0) shared.work = work;
    __syncthreads();

    Softmax soft;
    if (has_new && warp == behind) {
        // Apart from the tiles: what they load of it is stale, and masked.
        soft.start(dot(shared.q, shared.k, g, t), shared.v, g, t);
        __nv_bfloat16* to = cache.v(new_block, span.position);
        for (int d = lane; d < kHeadDim; d += 32) to[d * kBlock] = shared.v[d];
    } else {
        soft.clear();
    }
    for (; at < end; at += kStep) {
        float score[kTile / 16][4];
        multiply_k(score, tile, shared.q, g, t);
        const int next = at + kStep;
        block = next_block;
        if (next < end) {
            tile.load_k(cache.k(block, next), g, t);
            if (next + kStep < end) next_block = cache.block_of(next + kStep);
        }
        uint32_t p[kTile / 16][2];
        soften(soft, score, p, at, start, end, g);
        if (at < start || at + kTile > end) mask_v(tile, at, start, end, t);
        multiply_v(soft, tile, p);
        if (next < end) tile.load_v(cache.v(block, next), g, t);
    }

    // The block's warps.
    soft.leave(shared.max[warp], shared.sum[warp], shared.out[warp], g, t);
    __syncthreads();
    // Anew: registers were for keys and values.
    const Work done = shared.work;
    auto of_warps = [&](int head) {
        return merge<kWarps>([&](int w) { return *reinterpret_cast<const float4*>(&shared.out[w][head][4 * lane]); },
                             [&](int w) { return make_float2(shared.max[w][head], shared.sum[w][head]); });
    };
    if constexpr (kRanks > 1) {
        // The cluster's blocks: each finishes its share of the heads.
        cluster_wait();
        for (int head = warp; head < kGroup; head += kWarps) {
            const Merged x = of_warps(head);
            const int to = head / S::kHeads, i = head % S::kHeads;
            shared.box.put(&shared.rank_out[i][rank][lane], x.out, to);
            if (lane == 0) shared.box.put(&shared.rank_stats[i][rank], make_float2(x.max, x.sum), to);
        }
        for (int i = warp; i < S::kHeads; i += kWarps) {
            shared.box.wait(0);
            const Merged x = merge<kRanks>([&](int r) { return shared.rank_out[i][r][lane]; },
                                           [&](int r) { return shared.rank_stats[i][r]; });
            const int head = rank * S::kHeads + i;
            store_attn(args, x, shared.sink[head], done.row, kGroup * done.kv_head + head, lane);
        }
        return;
    }

    // The parts: of each head, the last to be there finds the others' in memory.
    const Parts parts(args, done.row, done.kv_head);
    for (int head = warp; head < kGroup; head += kWarps) {
        Merged x = of_warps(head);
        if (done.parts > 1 && !parts.merge(x, head, done.part, done.parts, lane)) continue;
        store_attn(args, x, shared.sink[head], done.row, kGroup * done.kv_head + head, lane);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * All::kWarps, 1)
    decode_attention(const __grid_constant__ DecodeAttentionArgs args) {
    constexpr int kMostRows = 32 * All::kWarps;
    __shared__ Shared<All> shared;
    __shared__ int positions[kMostRows];
    __shared__ uint32_t ends[kMostRows], totals[All::kWarps];

    // Parts of all rows up to and including this thread's.
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t parts = 0;
    if (threadIdx.x < args.rows) {
        positions[threadIdx.x] = args.positions[threadIdx.x];
        parts = Span<All>(positions[threadIdx.x], 0).parts;
    }
    parts = running_sum(parts, lane);
    if (lane == 31) totals[warp] = parts;
    __syncthreads();
    for (int w = 0; w < warp; ++w) parts += totals[w];
    ends[threadIdx.x] = parts;

    for (uint32_t at = blockIdx.y;; at += gridDim.y) {
        const uint32_t row = __syncthreads_count(ends[threadIdx.x] <= at);
        if (row >= args.rows) return;
        const Span<All> span(positions[row], 0);
        const uint32_t part = at - (row == 0 ? 0 : ends[row - 1]);
        attend(shared, args, span, Work{row, blockIdx.x, part, span.parts}, at == blockIdx.y);
    }
}

extern "C" __global__ void FLINT_CLUSTER(Window::kCluster) __launch_bounds__(32 * Window::kWarps, 3)
    decode_attention_window(const __grid_constant__ DecodeAttentionArgs args) {
    using S = Shared<Window>;
    __shared__ S shared;
    // Without clusters, one block does it all.
    if (blockIdx.x >= S::kRanks) return;
    if (S::kRanks > 1) {
        if (threadIdx.x == 0) shared.box.open(kGroup * (kHeadDim + 2) * sizeof(float));
        cluster_arrive_relaxed();
    }
    const Span<Window> span(args.positions[blockIdx.z], args.window);
    attend(shared, args, span, Work{blockIdx.z, blockIdx.y, 0, 1}, true);
}
