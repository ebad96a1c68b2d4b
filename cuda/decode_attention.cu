// decode_attention.cu: attention of one new token a sequence, for one layer.
//
//   q, k = rope(norm(q)), rope(norm(k))          each rounded to bf16; no rope where inv_freq is null
//   cache[position] = k, v
//   p[i] = exp(q . k[i] / sqrt(128) - m)         i from max(0, position - window + 1) to position, m the maximum of the
//   attn = sum p[i] v[i] / (sum p[i] + exp(sink - m))         scores and the sink
//
// in       qkv [B, 10 G, 128] bf16, positions [B], blocks [B, context / 64], norms, inv_freq, sinks: see
// args_attention.h in, out  kv    per block and layer: K [G, 64 positions, 128], V [G, 128, 64 positions], bf16 out
// attn  [B, 8 G, 128] bf16 p is rounded to bf16 for the product with v, relative to the maximum that its warp has seen;
// all else is fp32.
//
// launch   grid (max_splits, G, B), block 32 n for n in 4..=8; no dynamic shared memory. The blocks of positions that a
//          token sees are divided among splits(positions seen) thread blocks; the others leave at once. The last to
//          finish merges.
// order    tiles of 32 positions go to the warps in turn. Warps, then the new position, then splits merge in ascending
// order, and
//          the sink comes last. All of it depends on the token's own position alone.
// bound    memory: 512 bytes a position seen and KV head
// PDL      the first tile of each warp is loaded before the wait; triggers right after it
//
// Both products are m16n8k16, the 8 query heads of a group being n. A is read from global memory as it lies, 16 bytes a
// lane, because the order of k inside a product is free as long as B has the same. With lane = 4 g + t:
//   scores   K[16 positions, 128] q^T: of dims 32 s .. 32 s + 31, lane t holds 8 t .. 8 t + 7 in A and in B
//   output   V^T[16 dims, 32 positions] p^T: of the tile's 32 positions, lane t holds 8 t .. 8 t + 7
// A C fragment of scores has lane t's heads in columns, as movmatrix wants it to make the B fragment of the second
// product: its 8x8 part (j, i) must hold, in row r, position 8 (r / 2) + 4 j + 2 i + r % 2. So that row loads the key
// of this position.

#include <cuda_bf16.h>

#include "args_attention.h"
#include "common.cuh"
#include "fragment.cuh"
#include "math.cuh"
#include "rope.cuh"

namespace {

constexpr int kHeadDim = 128;
constexpr int kGroup = 8;
constexpr int kBlock = 64;
constexpr int kTile = 32;
constexpr int kMaxWarps = 8;
constexpr int kPartHead = kBlock * kHeadDim;              // values of K or V of a block, layer and head
constexpr int kPartial = kGroup * kHeadDim + 2 * kGroup;  // sums of p v, then maxima, then sums of p
// Scores are in powers of two: log2(e) / sqrt(128).
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kScoreScale = 0.08838834764831845f * kLog2e;

struct Shared {
    // Padded by 16 bytes, for reads of 8 rows at once.
    alignas(16) __nv_bfloat16 q[kGroup][kHeadDim + 8];
    alignas(16) __nv_bfloat16 k[kHeadDim];
    alignas(16) float v[kHeadDim];
    alignas(16) float q_norm[kHeadDim];
    alignas(16) float k_norm[kHeadDim];
    alignas(16) float cos[kHeadDim / 2];
    alignas(16) float sin[kHeadDim / 2];
    float sink[kGroup];
    float new_score[kGroup];
    float max[kMaxWarps][kGroup], sum[kMaxWarps][kGroup];
    // Padded by 4, so that the 8 rows and 4 column pairs of a fragment hit 32 banks.
    alignas(16) float out[kMaxWarps][kGroup][kHeadDim + 4];
    bool is_last;
};

// What one warp holds of a tile.
struct Tile {
    uint4 k[2][2][4];  // [j][i][s]: dims 32 s + 8 t .. of the key in row g of part (j, i)
    uint4 v[8][2];     // [m][h]: positions 8 t .. of dim 16 m + 8 h + g
};

// Over 16 lanes; every lane gets the same bits.
__device__ __forceinline__ float sum_16(float x) {
#pragma unroll
    for (int lane = 8; lane > 0; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
    return x;
}

// Both tables of a tile at `k_part` (its 32 positions of the K part) and `v_part` (of the V part).
__device__ __forceinline__ void load_k(Tile& tile, const __nv_bfloat16* k_part, int g, int t) {
    const __nv_bfloat16* from = k_part + (8 * (g / 2) + g % 2) * kHeadDim + 8 * t;
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int s = 0; s < 4; ++s) tile.k[j][i][s] = load_once(from + (4 * j + 2 * i) * kHeadDim + 32 * s);
}

__device__ __forceinline__ void load_v(Tile& tile, const __nv_bfloat16* v_part, int g, int t) {
    const __nv_bfloat16* from = v_part + g * kBlock + 8 * t;
#pragma unroll
    for (int m = 0; m < 8; ++m)
#pragma unroll
        for (int h = 0; h < 2; ++h) tile.v[m][h] = load_once(from + (16 * m + 8 * h) * kBlock);
}

// The norm of one head, 8 values a lane of 16, and its rotation where `rope`.
__device__ __forceinline__ uint4 norm_rope(const uint4& raw, const float* weight, float eps, bool rope,
                                           const Shared& shared, int lane16) {
    float x[8];
    unpack(raw, x);
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += x[i] * x[i];
    const float scale = inverse_rms(sum_16(squares), kHeadDim, eps);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = round_bf16(weight[8 * lane16 + i] * (x[i] * scale));
    if (rope) {
        const int first = 8 * lane16 % (kHeadDim / 2);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float other = __shfl_xor_sync(~0u, x[i], 8);
            x[i] = rotate(x[i], lane16 < 8 ? -other : other, shared.cos[first + i], shared.sin[first + i]);
        }
    }
    return make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
}

// bf16(acc / (sum + exp2(sink - max))), through the larger maximum; 4 dims of one head.
__device__ __forceinline__ void store_attn(const DecodeAttentionArgs& args, float sink, int head, int chunk, float4 acc,
                                           float max, float sum) {
    const int n_heads = kGroup * gridDim.y;
    const int h = kGroup * blockIdx.y + head;
    const float top = fmaxf(max, sink);
    const float share = exp2_fast(max - top);
    const float scale = share / (sum * share + exp2_fast(sink - top));
    uint2 out = make_uint2(pack(acc.x * scale, acc.y * scale), pack(acc.z * scale, acc.w * scale));
    __nv_bfloat16* attn = static_cast<__nv_bfloat16*>(args.attn);
    *reinterpret_cast<uint2*>(attn + (uint64_t(blockIdx.z) * n_heads + h) * kHeadDim + 4 * chunk) = out;
}

__device__ __forceinline__ void add_scaled(float4& acc, const float4& x, float weight) {
    acc.x += x.x * weight;
    acc.y += x.y * weight;
    acc.z += x.z * weight;
    acc.w += x.w * weight;
}

// One warp a head: 4 dims a lane, and the lane of a split's number holds its maximum and sum.
__device__ __forceinline__ void merge_splits(const DecodeAttentionArgs& args, const float* partial, int splits,
                                             float sink, int head, int lane) {
    const float* stats = partial + lane * kPartial + kGroup * kHeadDim + head;
    const float split_max = lane < splits ? __ldcg(stats) : -INFINITY;
    const float split_sum = lane < splits ? __ldcg(stats + kGroup) : 0;
    float max = split_max;
#pragma unroll
    for (int i = 16; i > 0; i /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, i));
    const float weight = exp2_fast(split_max - max);

    constexpr int kInFlight = 16;
    float4 acc = make_float4(0, 0, 0, 0);
    float sum = 0;
    for (int first = 0; first < splits; first += kInFlight) {
        float4 x[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            const float* from = partial + (first + i) * kPartial + head * kHeadDim + 4 * lane;
            x[i] = first + i < splits ? __ldcg(reinterpret_cast<const float4*>(from)) : make_float4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
            const float w = __shfl_sync(~0u, weight, first + i);
            sum += __shfl_sync(~0u, split_sum, first + i) * w;
            add_scaled(acc, x[i], w);
        }
    }
    store_attn(args, sink, head, lane, acc, max, sum);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(32 * kMaxWarps, 1)
    decode_attention(const __grid_constant__ DecodeAttentionArgs args) {
    __shared__ Shared shared;
    const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int g = lane / 4, t = lane % 4;
    const int n_kv_heads = gridDim.y, kv_head = blockIdx.y, row = blockIdx.z;

    // What this thread block attends to: whole blocks, cut to the positions before the new one that it sees.
    const int position = args.positions[row];
    const int start = args.window == 0 ? 0 : max(0, position + 1 - int(args.window));
    const int seen = position + 1 - start;
    const int splits = min(int(args.max_splits), (seen + int(args.split_positions) - 1) / int(args.split_positions));
    const int split = blockIdx.x;
    if (split >= splits) return;
    const int first_block = start / kBlock, n_blocks = position / kBlock + 1 - first_block;
    const int begin_block = first_block + split * n_blocks / splits;
    const int end_block = first_block + (split + 1) * n_blocks / splits;
    const int begin_tile = max(begin_block * (kBlock / kTile), start / kTile);
    const int end_tile = start < position ? min(end_block * (kBlock / kTile), (position + kTile - 1) / kTile) : 0;
    const bool has_new = split == splits - 1;

    const uint32_t* blocks = args.blocks + uint64_t(row) * args.table_stride;
    __nv_bfloat16* kv = static_cast<__nv_bfloat16*>(args.kv) + kv_head * kPartHead;
    const int v_offset = n_kv_heads * kPartHead;
    auto part = [&](uint32_t block) { return kv + block * args.block_stride; };
    auto k_of = [&](uint32_t block, int tile) { return part(block) + tile % 2 * kTile * kHeadDim; };
    auto v_of = [&](uint32_t block, int tile) { return part(block) + v_offset + tile % 2 * kTile; };

    int tile_index = begin_tile + warp;
    uint32_t block = 0, next_block = 0;
    Tile tile;
    if (tile_index < end_tile) {
        block = blocks[tile_index / 2];
        load_k(tile, k_of(block, tile_index), g, t);
        load_v(tile, v_of(block, tile_index), g, t);
    }
    if (tile_index + warps < end_tile) next_block = blocks[(tile_index + warps) / 2];
    const uint32_t new_block = has_new ? blocks[position / kBlock] : 0;
    if (threadIdx.x < kHeadDim) {
        shared.q_norm[threadIdx.x] = args.q_norm[threadIdx.x];
        shared.k_norm[threadIdx.x] = args.k_norm[threadIdx.x];
    }
    if (threadIdx.x < kGroup) shared.sink[threadIdx.x] = args.sinks[kGroup * kv_head + threadIdx.x] * kLog2e;
    const bool rope = args.inv_freq != nullptr;
    if (rope && threadIdx.x < kHeadDim / 2) {
        rope_angle(position, args.inv_freq[threadIdx.x], shared.cos[threadIdx.x], shared.sin[threadIdx.x]);
    }
    __syncthreads();

    pdl_wait();
    pdl_launch();

    // q of the group and, where the new position is ours, its k: a head for every 16 lanes.
    const int group16 = threadIdx.x / 16, lane16 = threadIdx.x % 16;
    const __nv_bfloat16* qkv =
        static_cast<const __nv_bfloat16*>(args.qkv) + uint64_t(row) * (kGroup + 2) * n_kv_heads * kHeadDim;
    const __nv_bfloat16* new_k = qkv + (kGroup * n_kv_heads + kv_head) * kHeadDim;
    const __nv_bfloat16* new_v = new_k + n_kv_heads * kHeadDim;
    if (has_new && threadIdx.x < kHeadDim) {
        const __nv_bfloat16 v = new_v[threadIdx.x];
        shared.v[threadIdx.x] = __bfloat162float(v);
        part(new_block)[v_offset + threadIdx.x * kBlock + position % kBlock] = v;
    }
    // Whole warps take part, so that the shuffles inside have all lanes.
    for (int head = group16; head / 2 * 2 < kGroup + has_new; head += 2 * warps) {
        const bool is_q = head < kGroup;
        const __nv_bfloat16* from = is_q ? qkv + (kGroup * kv_head + head) * kHeadDim : new_k;
        const uint4 raw = *reinterpret_cast<const uint4*>(from + 8 * lane16);
        const uint4 x = norm_rope(raw, is_q ? shared.q_norm : shared.k_norm, args.eps, rope, shared, lane16);
        if (is_q) {
            *reinterpret_cast<uint4*>(&shared.q[head][8 * lane16]) = x;
        } else if (head == kGroup && has_new) {
            *reinterpret_cast<uint4*>(&shared.k[8 * lane16]) = x;
            __nv_bfloat16* to = part(new_block) + position % kBlock * kHeadDim + 8 * lane16;
            *reinterpret_cast<uint4*>(to) = x;
        }
    }
    __syncthreads();

    // The new position's scores, apart from the tiles: what they load of it is stale, and masked.
    if (has_new) {
        for (int head = group16; head < kGroup; head += 2 * warps) {
            float q[8], k[8], dot = 0;
            unpack(*reinterpret_cast<const uint4*>(&shared.q[head][8 * lane16]), q);
            unpack(*reinterpret_cast<const uint4*>(&shared.k[8 * lane16]), k);
#pragma unroll
            for (int i = 0; i < 8; ++i) dot += q[i] * k[i];
            dot = sum_16(dot);
            if (lane16 == 0) shared.new_score[head] = dot * kScoreScale;
        }
    }

    uint4 q[4];
#pragma unroll
    for (int s = 0; s < 4; ++s) q[s] = *reinterpret_cast<const uint4*>(&shared.q[g][32 * s + 8 * t]);

    // Of heads 2 t and 2 t + 1; sums of this lane's positions only.
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
    float out[8][4] = {};  // [m]: dim 16 m + g of both heads, dim 16 m + g + 8 of both
    for (; tile_index < end_tile; tile_index += warps) {
        float score[2][4] = {};  // [j]: row g of part (j, 0) for both heads, row g of part (j, 1)
#pragma unroll
        for (int s = 0; s < 4; ++s)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const uint4 &a = tile.k[j][0][s], &b = tile.k[j][1][s];
                mma(score[j], a.x, b.x, a.y, b.y, q[s].x, q[s].y);
                mma(score[j], a.z, b.z, a.w, b.w, q[s].z, q[s].w);
            }
        const bool more = tile_index + warps < end_tile;
        const uint32_t following = next_block;
        if (more) {
            load_k(tile, k_of(following, tile_index + warps), g, t);
            if (tile_index + 2 * warps < end_tile) next_block = blocks[(tile_index + 2 * warps) / 2];
        }

        const int first = tile_index * kTile;
        const bool whole = first >= start && first + kTile <= position;
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int at = first + 8 * (g / 2) + g % 2 + 4 * j + 2 * (c / 2);
                score[j][c] = whole || (at >= start && at < position) ? score[j][c] * kScoreScale : -INFINITY;
            }
        float rescale[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float max = fmaxf(fmaxf(score[0][h], score[0][2 + h]), fmaxf(score[1][h], score[1][2 + h]));
#pragma unroll
            for (int i = 16; i > 2; i /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, i));
            max = fmaxf(max, top[h]);
            rescale[h] = exp2_fast(top[h] - max);
            top[h] = max;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                score[j][h] = exp2_fast(score[j][h] - max);
                score[j][2 + h] = exp2_fast(score[j][2 + h] - max);
            }
            sum[h] = sum[h] * rescale[h] + ((score[0][h] + score[0][2 + h]) + (score[1][h] + score[1][2 + h]));
        }
        uint32_t p[2][2];
#pragma unroll
        for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) p[j][i] = transpose(pack(score[j][2 * i], score[j][2 * i + 1]));

        if (!whole) {
            // p is zero where v was never written, but zero times NaN is not.
            uint32_t mask[4];
#pragma unroll
            for (int w = 0; w < 4; ++w) {
                const int at = first + 8 * t + 2 * w;
                mask[w] = (at >= start && at < position ? 0xFFFFu : 0) |
                          (at + 1 >= start && at + 1 < position ? 0xFFFF0000u : 0);
            }
#pragma unroll
            for (int m = 0; m < 8; ++m)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    uint4& v = tile.v[m][h];
                    v = make_uint4(v.x & mask[0], v.y & mask[1], v.z & mask[2], v.w & mask[3]);
                }
        }
#pragma unroll
        for (int m = 0; m < 8; ++m) {
#pragma unroll
            for (int c = 0; c < 4; ++c) out[m][c] *= rescale[c % 2];
            const uint4 &a = tile.v[m][0], &b = tile.v[m][1];
            mma(out[m], a.x, b.x, a.y, b.y, p[0][0], p[0][1]);
            mma(out[m], a.z, b.z, a.w, b.w, p[1][0], p[1][1]);
        }
        if (more) load_v(tile, v_of(following, tile_index + warps), g, t);
    }

    const int active = min(warps, max(0, end_tile - begin_tile));
    if (warp < active) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
#pragma unroll
            for (int i = 4; i < 32; i *= 2) sum[h] += __shfl_xor_sync(~0u, sum[h], i);
            if (g == 0) {
                shared.max[warp][2 * t + h] = top[h];
                shared.sum[warp][2 * t + h] = sum[h];
            }
#pragma unroll
            for (int m = 0; m < 8; ++m) {
                shared.out[warp][2 * t + h][16 * m + g] = out[m][h];
                shared.out[warp][2 * t + h][16 * m + g + 8] = out[m][2 + h];
            }
        }
    }
    __syncthreads();

    float* partial = args.partial + (uint64_t(row) * n_kv_heads + kv_head) * args.max_splits * kPartial;
    for (int head = warp; head < kGroup; head += warps) {
        const float new_score = has_new ? shared.new_score[head] : -INFINITY;
        float max = new_score;
#pragma unroll
        for (int w = 0; w < kMaxWarps; ++w) {
            if (w < active) max = fmaxf(max, shared.max[w][head]);
        }
        float4 acc = make_float4(0, 0, 0, 0);
        float sum = 0;
#pragma unroll 2
        for (int w = 0; w < active; ++w) {
            const float weight = exp2_fast(shared.max[w][head] - max);
            sum += shared.sum[w][head] * weight;
            add_scaled(acc, *reinterpret_cast<const float4*>(&shared.out[w][head][4 * lane]), weight);
        }
        if (has_new) {
            const float weight = exp2_fast(new_score - max);
            sum += weight;
            add_scaled(acc, *reinterpret_cast<const float4*>(&shared.v[4 * lane]), weight);
        }
        if (splits == 1) {
            store_attn(args, shared.sink[head], head, lane, acc, max, sum);
        } else {
            float* to = partial + split * kPartial;
            __stcg(reinterpret_cast<float4*>(to + head * kHeadDim + 4 * lane), acc);
            if (lane == 0) {
                __stcg(to + kGroup * kHeadDim + head, max);
                __stcg(to + kGroup * kHeadDim + kGroup + head, sum);
            }
        }
    }
    if (splits == 1) return;

    __threadfence();
    __syncthreads();
    uint32_t* counter = args.counters + row * n_kv_heads + kv_head;
    if (threadIdx.x == 0) {
        shared.is_last = atomicAdd(counter, 1u) == uint32_t(splits - 1);
        if (shared.is_last) *counter = 0;
    }
    __syncthreads();
    if (!shared.is_last) return;
    __threadfence();
    for (int head = warp; head < kGroup; head += warps) {
        merge_splits(args, partial, splits, shared.sink[head], head, lane);
    }
}
