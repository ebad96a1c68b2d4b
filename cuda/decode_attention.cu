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
//          decode_attention_window: grid (8, G, B) of 160 threads in clusters of 8. No dynamic shared memory.
// order    Tiles of 32 or 16 positions go to the warps of a block or cluster in turn, behind the last tile the new
//          position; parts are whole rounds of warps. Warps, then blocks, then parts merge in ascending order, and the
//          sink comes last. All of it depends on the token's own position alone.
// bound    memory: 512 bytes a position seen and KV head; latency below some thousand positions
// PDL      the first tile of each warp is requested before the wait; triggers before it, since decode_o has weights to
//          request meanwhile
//
// Both products are m16n8k16, the 8 query heads of a group being n. A is read from global memory as it lies, 16 bytes a
// lane, because the order of k inside a product is free as long as B has the same. With lane = 4 g + t:
//   scores   K[16 positions, 128] q^T: of dims 32 s .. 32 s + 31, lane t holds 8 t .. 8 t + 7 in A and in B
//   output   V^T[16 dims, 32 positions] p^T: of the tile's 32 positions, lane t holds 8 t .. 8 t + 7
// A C fragment of scores has lane t's heads in columns, as movmatrix wants it to make the B fragment of the second
// product: its 8x8 part (j, i) must hold, in row r, position 8 (r / 2) + 4 j + 2 i + r % 2. So that row loads the key
// of this position. Tiles of 16 have half of this: part i, position 4 (r / 2) + 2 i + r % 2.

#include <cuda_bf16.h>

#include "args_attention.h"
#include "cluster.cuh"
#include "common.cuh"
#include "fragment.cuh"
#include "head_norm.cuh"
#include "math.cuh"
#include "panel.cuh"
#include "rope.cuh"

namespace {

constexpr int kHeadDim = 128;
constexpr int kGroup = 8;
constexpr int kBlock = 64;
constexpr int kPartHead = kBlock * kHeadDim;  // values of K or V of a block, layer and head
constexpr int kPartial = kHeadDim + 4;        // sums of p v, their maximum, the sum of p
// Scores are in powers of two: log2(e) / sqrt(128).
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kScoreScale = 0.08838834764831845f * kLog2e;
// Below every score, and finite: what nothing was added to has weight zero beside anything.
constexpr float kLowest = -1e30f;

// Blocks that share a part, warps of a block, and positions that a warp takes at a time. A long context needs many
// loads in flight. A window is a matter of latency: each warp has one tile, and the blocks leave room for others on
// their SM.
struct All {
    static constexpr int kCluster = 1, kWarps = 8, kTile = 32;
};
struct Window {
    static constexpr int kCluster = 8, kWarps = 5, kTile = 16;
};

// q of the group.
struct Heads {
    // Padded by 64 bytes, so that two rows read by four lanes each hit 32 banks.
    alignas(16) __nv_bfloat16 rows[kGroup][kHeadDim + 32];

    __device__ __forceinline__ void put(int head, int first, const uint4& x) {
        *reinterpret_cast<uint4*>(&rows[head][first]) = x;
    }
    // Dims 32 s + 8 t .. + 7 of head g, anew for each tile: registers are for keys and values.
    __device__ __forceinline__ uint4 get(int s, int g, int t) const {
        uint4 x;
        asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                     : "r"(uint32_t(__cvta_generic_to_shared(&rows[g][32 * s + 8 * t])))
                     : "memory");
        return x;
    }
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
    // Padded by 4, so that the 8 rows and 4 column pairs of a fragment hit 32 banks.
    alignas(16) float out[Shape::kWarps][kGroup][kHeadDim + 4];
    // Of this block's heads, written by all blocks of the cluster.
    alignas(16) float4 rank_out[kHeads][kRanks][kHeadDim / 4];
    float2 rank_stats[kHeads][kRanks];
    ClusterBox box;
    Work work;
};

// What one warp holds of a tile of 16 J positions. Cleared where it is not loaded: the compiler would carry it from one
// part of a block to the next, in registers that others need meanwhile.
template <int J>
struct Tile {
    uint4 k[J][2][4];         // [j][i][s]: dims 32 s + 8 t .. of the key in row g of part (j, i)
    uint32_t v[8][2][2 * J];  // [m][h]: positions 4 J t .. of dim 16 m + 8 h + g

    __device__ __forceinline__ void clear() { *this = {}; }

    // From the tile's part of K, then of V.
    __device__ __forceinline__ void load_k(const __nv_bfloat16* part, int g, int t) {
        const __nv_bfloat16* from = part + (4 * J * (g / 2) + g % 2) * kHeadDim + 8 * t;
#pragma unroll
        for (int j = 0; j < J; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i)
#pragma unroll
                for (int s = 0; s < 4; ++s) k[j][i][s] = load_once(from + (4 * j + 2 * i) * kHeadDim + 32 * s);
    }

    __device__ __forceinline__ void load_v(const __nv_bfloat16* part, int g, int t) {
        const __nv_bfloat16* from = part + g * kBlock + 4 * J * t;
#pragma unroll
        for (int m = 0; m < 8; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) load_once(v[m][h], from + (16 * m + 8 * h) * kBlock);
    }
};

// Where a KV head of a row lies.
struct Cache {
    const DecodeAttentionArgs& args;
    uint32_t blocks, head;  // offsets in args.blocks and args.kv

    __device__ __forceinline__ Cache(const DecodeAttentionArgs& args, uint32_t row, uint32_t kv_head)
        : args(args), blocks(row * args.table_stride), head(kv_head * kPartHead) {}
    __device__ __forceinline__ __nv_bfloat16* at(uint32_t block, uint32_t offset) const {
        return static_cast<__nv_bfloat16*>(args.kv) + (block * args.block_stride + (head + offset));
    }
    __device__ __forceinline__ __nv_bfloat16* k(uint32_t block, uint32_t position) const {
        return at(block, position % kBlock * kHeadDim);
    }
    __device__ __forceinline__ __nv_bfloat16* v(uint32_t block, uint32_t position) const {
        return at(block, args.kv_heads * kPartHead + position % kBlock);
    }
    __device__ __forceinline__ uint32_t block_of(uint32_t position) const {
        return args.blocks[blocks + position / kBlock];
    }
};

__device__ __forceinline__ void read_8(const float* from, float (&to)[8]) {
    const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

// What a lane of 16 needs for its 8 values of a head.
struct Turn {
    float weight[8], cos[8], sin[8];

    __device__ __forceinline__ void load(const float* norm, const float* rope, int lane16) {
        const int half = 8 * lane16 % (kHeadDim / 2);
        read_8(norm + 8 * lane16, weight);
        if (rope != nullptr) {
            read_8(rope + half, cos);
            read_8(rope + kHeadDim / 2 + half, sin);
        } else {
            // As in Tile.
#pragma unroll
            for (int i = 0; i < 8; ++i) cos[i] = sin[i] = 0;
        }
    }

    // Norm and, with `rope`, rotation.
    __device__ __forceinline__ uint4 apply(const uint4& raw, float eps, bool rope, int lane16) const {
        float x[8];
        unpack(raw, x);
        float squares = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) squares += x[i] * x[i];
        const float scale = rsqrtf(sum_16(squares) * (1.0f / kHeadDim) + eps);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = round_bf16(weight[i] * (x[i] * scale));
        if (rope) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float other = __shfl_xor_sync(~0u, x[i], 8);
                x[i] = rotate(x[i], lane16 < 8 ? -other : other, cos[i], sin[i]);
            }
        }
        return make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
    }
};

// What a warp has attended to: of heads 2 t and 2 t + 1, in powers of two.
struct Softmax {
    float top[2];     // the largest score
    float sum[2];     // over this lane's positions
    float out[8][4];  // [m]: dim 16 m + g of both heads, dim 16 m + g + 8 of both

    __device__ __forceinline__ void clear() {
        top[0] = top[1] = -INFINITY;
        sum[0] = sum[1] = 0;
#pragma unroll
        for (int m = 0; m < 8; ++m)
#pragma unroll
            for (int c = 0; c < 4; ++c) out[m][c] = 0;
    }

    // Nothing but one position, whose value is `v` and whose score with head g is `score`.
    __device__ __forceinline__ void start(float score, const __nv_bfloat16* v, int g, int t) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            top[h] = __shfl_sync(~0u, score, 4 * (2 * t + h));
            sum[h] = g == 0 ? 1 : 0;
        }
#pragma unroll
        for (int m = 0; m < 8; ++m)
#pragma unroll
            for (int c = 0; c < 4; ++c) out[m][c] = __bfloat162float(v[16 * m + 8 * (c / 2) + g]);
    }
};

// q . k for head g, in powers of two; every lane of a head gets the same bits.
__device__ __forceinline__ float dot(const Heads& q, const __nv_bfloat16* k, int g, int t) {
    float sums[4] = {};
#pragma unroll
    for (int s = 0; s < 4; ++s) {
        float a[8], b[8];
        unpack(q.get(s, g, t), a);
        unpack(*reinterpret_cast<const uint4*>(k + 32 * s + 8 * t), b);
#pragma unroll
        for (int i = 0; i < 8; ++i) sums[s] += a[i] * b[i];
    }
    float sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    sum += __shfl_xor_sync(~0u, sum, 1);
    return (sum + __shfl_xor_sync(~0u, sum, 2)) * kScoreScale;
}

// Scores of a tile, [j]: row g of part (j, 0) for both heads, row g of part (j, 1).
template <int J>
__device__ __forceinline__ void multiply_k(float (&score)[J][4], const Tile<J>& tile, const Heads& q, int g, int t) {
#pragma unroll
    for (int j = 0; j < J; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) score[j][c] = 0;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
        const uint4 x = q.get(s, g, t);
#pragma unroll
        for (int j = 0; j < J; ++j) {
            const uint4 &a = tile.k[j][0][s], &b = tile.k[j][1][s];
            mma(score[j], a.x, b.x, a.y, b.y, x.x, x.y);
            mma(score[j], a.z, b.z, a.w, b.w, x.z, x.w);
        }
    }
}

// Turns scores into B of the second product, and rescales what was added before. Positions from `first` on; those
// outside `start` to `end` do not count.
template <int J>
__device__ __forceinline__ void soften(Softmax& soft, float (&score)[J][4], uint32_t (&p)[J][2], int first, int start,
                                       int end, int g) {
    const bool whole = first >= start && first + 16 * J <= end;
#pragma unroll
    for (int j = 0; j < J; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            const int at = first + 4 * J * (g / 2) + g % 2 + 4 * j + 2 * (c / 2);
            score[j][c] = whole || (at >= start && at < end) ? score[j][c] * kScoreScale : -INFINITY;
        }
    float rescale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float max = -INFINITY;
#pragma unroll
        for (int j = 0; j < J; ++j) max = fmaxf(max, fmaxf(score[j][h], score[j][2 + h]));
#pragma unroll
        for (int i = 16; i > 2; i /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, i));
        max = fmaxf(max, soft.top[h]);
        rescale[h] = exp2_fast(soft.top[h] - max);
        soft.top[h] = max;
        float sum = 0;
#pragma unroll
        for (int j = 0; j < J; ++j) {
            score[j][h] = exp2_fast(score[j][h] - max);
            score[j][2 + h] = exp2_fast(score[j][2 + h] - max);
            sum += score[j][h] + score[j][2 + h];
        }
        soft.sum[h] = soft.sum[h] * rescale[h] + sum;
    }
#pragma unroll
    for (int j = 0; j < J; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i) p[j][i] = transpose(pack_bf16(score[j][2 * i], score[j][2 * i + 1]));
#pragma unroll
    for (int m = 0; m < 8; ++m)
#pragma unroll
        for (int c = 0; c < 4; ++c) soft.out[m][c] *= rescale[c % 2];
}

// p is zero where v was never written, but zero times NaN is not.
template <int J>
__device__ __forceinline__ void mask_v(Tile<J>& tile, int first, int start, int end, int t) {
#pragma unroll
    for (int w = 0; w < 2 * J; ++w) {
        const int at = first + 4 * J * t + 2 * w;
        const uint32_t mask =
            (at >= start && at < end ? 0xFFFFu : 0) | (at + 1 >= start && at + 1 < end ? 0xFFFF0000u : 0);
#pragma unroll
        for (int m = 0; m < 8; ++m)
#pragma unroll
            for (int h = 0; h < 2; ++h) tile.v[m][h][w] &= mask;
    }
}

template <int J>
__device__ __forceinline__ void multiply_v(Softmax& soft, const Tile<J>& tile, const uint32_t (&p)[J][2]) {
#pragma unroll
    for (int m = 0; m < 8; ++m)
#pragma unroll
        for (int j = 0; j < J; ++j) {
            const uint32_t *a = &tile.v[m][0][2 * j], *b = &tile.v[m][1][2 * j];
            mma(soft.out[m], a[0], b[0], a[1], b[1], p[j][0], p[j][1]);
        }
}

// Sums of p v over some positions for 4 dims of a head, with their maximum and their sum of p.
struct Merged {
    float4 out;
    float max;
    float sum;
};

__device__ __forceinline__ void add_scaled(float4& to, const float4& out, float weight) {
    to.x += out.x * weight;
    to.y += out.y * weight;
    to.z += out.z * weight;
    to.w += out.w * weight;
}

// Of kN results whose sums of p v and whose maxima with sums of p the functions give.
template <int kN, typename Out, typename Stats>
__device__ __forceinline__ Merged merge(Out out_of, Stats stats_of) {
    float4 x[kN];
    float2 stats[kN];
    Merged to{make_float4(0, 0, 0, 0), kLowest, 0};
#pragma unroll
    for (int i = 0; i < kN; ++i) {
        x[i] = out_of(i);
        stats[i] = stats_of(i);
        to.max = fmaxf(to.max, stats[i].x);
    }
#pragma unroll
    for (int i = 0; i < kN; ++i) {
        const float weight = exp2_fast(stats[i].x - to.max);
        to.sum += stats[i].y * weight;
        add_scaled(to.out, x[i], weight);
    }
    return to;
}

// Of the parts of a head, kPartial values each, the next kGroup * kPartial further on. A lane holds the maximum and the
// sum of p of every 32nd part.
__device__ __forceinline__ Merged merge_parts(const float* partial, int parts) {
    // Asked for anew, or addresses made of it would fill registers from before the first part.
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    constexpr int kInFlight = 16, kStep = kGroup * kPartial, kHeld = (kAttentionParts + 31) / 32;
    auto out_of = [&](int part) { return __ldcg(reinterpret_cast<const float4*>(partial + part * kStep) + lane); };
    float2 stats[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
        const int part = 32 * i + lane;
        stats[i] = make_float2(kLowest, 0);
        if (part < parts) stats[i] = __ldcg(reinterpret_cast<const float2*>(partial + part * kStep + kHeadDim));
    }
    float4 x[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) x[i] = i < parts ? out_of(i) : make_float4(0, 0, 0, 0);
    Merged to{make_float4(0, 0, 0, 0), kLowest, 0};
#pragma unroll
    for (int i = 0; i < kHeld; ++i) to.max = fmaxf(to.max, stats[i].x);
#pragma unroll
    for (int i = 16; i > 0; i /= 2) to.max = fmaxf(to.max, __shfl_xor_sync(~0u, to.max, i));
    float weight[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
        weight[i] = exp2_fast(stats[i].x - to.max);
        to.sum += stats[i].y * weight[i];
    }
    to.sum = warp_sum(to.sum);
#pragma unroll
    for (int held = 0; held < kHeld; ++held) {
#pragma unroll 1
        for (int first = 32 * held; first < 32 * held + 32; first += kInFlight) {
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                const int part = first + i;
                if (part >= parts) return to;
                add_scaled(to.out, x[i], __shfl_sync(~0u, weight[held], part % 32));
                if (part + kInFlight < parts) x[i] = out_of(part + kInFlight);
            }
        }
    }
    return to;
}

// What this thread wrote before, and what it knows of others', is seen by who sees what it writes after; and the
// reverse.
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// bf16(out / (sum + exp2(sink - max))), through the larger maximum, for dims 4 lane to 4 lane + 3 of a head.
__device__ __forceinline__ void store_attn(const DecodeAttentionArgs& args, const Merged& x, float sink, uint32_t row,
                                           uint32_t head, int lane) {
    const float top = fmaxf(x.max, sink);
    const float share = exp2_fast(x.max - top);
    const float scale = share / (x.sum * share + exp2_fast(sink - top));
    const uint32_t low = pack_bf16(x.out.x * scale, x.out.y * scale),
                   high = pack_bf16(x.out.z * scale, x.out.w * scale);
    const uint32_t column = head * kHeadDim + 4 * lane, cols = kGroup * args.kv_heads * kHeadDim;
    const bool panels = args.panel_rows != 0;
    const uint32_t at = panels ? uint32_t(panel_at(args.panel_rows, row, column)) : row * cols + column;
    __nv_bfloat16* to = static_cast<__nv_bfloat16*>(args.attn);
    *reinterpret_cast<uint32_t*>(to + at) = low;
    // Of a panel, the next pair lies in the next part, whose place the swizzle turns with that of this one.
    *reinterpret_cast<uint32_t*>(to + (at ^ (panels ? 8 : 2))) = high;
}

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
        pdl_launch();
        pdl_wait();
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
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        float sum = soft.sum[h];
#pragma unroll
        for (int i = 4; i < 32; i *= 2) sum += __shfl_xor_sync(~0u, sum, i);
        if (g == 0) {
            shared.max[warp][2 * t + h] = soft.top[h];
            shared.sum[warp][2 * t + h] = sum;
        }
#pragma unroll
        for (int m = 0; m < 8; ++m) {
            shared.out[warp][2 * t + h][16 * m + g] = soft.out[m][h];
            shared.out[warp][2 * t + h][16 * m + g + 8] = soft.out[m][2 + h];
        }
    }
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
    const uint64_t group = uint64_t(done.row) * args.kv_heads + done.kv_head;
    float* partial = args.partial + group * kAttentionParts * kGroup * kPartial;
    for (int head = warp; head < kGroup; head += kWarps) {
        Merged x = of_warps(head);
        if (done.parts > 1) {
            float* to = partial + (done.part * kGroup + head) * kPartial;
            __stcg(reinterpret_cast<float4*>(to) + lane, x.out);
            if (lane == 0) __stcg(reinterpret_cast<float2*>(to + kHeadDim), make_float2(x.max, x.sum));
            __syncwarp();
            fence_gpu();
            uint32_t* counter = args.counters + group * kGroup + head;
            const uint32_t before = lane == 0 ? atomicAdd(counter, 1u) : 0;
            if (__shfl_sync(~0u, before, 0) != done.parts - 1) continue;
            fence_gpu();
            __syncwarp();
            if (lane == 0) *counter = 0;
            x = merge_parts(partial + head * kPartial, done.parts);
        }
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
#pragma unroll
    for (int i = 1; i < 32; i *= 2) {
        const uint32_t lower = __shfl_up_sync(~0u, parts, i);
        if (lane >= i) parts += lower;
    }
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
