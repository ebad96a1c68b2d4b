// The two products of decode's attention, and the softmax between them, for the 8 query heads of a KV head.
//
// Both are m16n8k16, the heads being n. A is read as the KV cache has it, 16 bytes a lane, because the order of k
// inside a product is free as long as B has the same. With lane = 4 g + t:
//   scores   K[16 positions, 128] q^T: of dims 32 s .. 32 s + 31, lane t holds 8 t .. 8 t + 7 in A and in B
//   output   V^T[16 dims, 32 positions] p^T: of the tile's 32 positions, lane t holds 8 t .. 8 t + 7
// A C fragment of scores has lane t's heads in columns, as movmatrix wants it to make the B fragment of the second
// product: its 8x8 part (j, i) must hold, in row r, position 8 (r / 2) + 4 j + 2 i + r % 2. So that row loads the key
// of this position. Tiles of 16 have half of this: part i, position 4 (r / 2) + 2 i + r % 2.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "common.cuh"
#include "decode_cache.cuh"
#include "fragment.cuh"

// Scores are in powers of two: log2(e) / sqrt(128).
constexpr float kLog2e = 1.4426950408889634f;
constexpr float kScoreScale = 0.08838834764831845f * kLog2e;

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

    // From a part of K in shared memory, the dims of one s: all that one step of the product needs.
    __device__ __forceinline__ void read_k(const __nv_bfloat16* part, int s, int g, int t) {
        const __nv_bfloat16* from = part + (4 * J * (g / 2) + g % 2) * kHeadDim + 8 * t + 32 * s;
#pragma unroll
        for (int j = 0; j < J; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) k[j][i][s] = *reinterpret_cast<const uint4*>(from + (4 * j + 2 * i) * kHeadDim);
    }
};

// Floats between the heads of a warp's sums in shared memory: padded by 4, so that the 8 rows and 4 column pairs of a
// fragment hit 32 banks.
constexpr int kOutStride = kHeadDim + 4;

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

    // To shared memory, for who merges what warps have.
    __device__ __forceinline__ void leave(float (&tops)[kGroup], float (&sums)[kGroup],
                                          float (&outs)[kGroup][kOutStride], int g, int t) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float all = sum[h];
#pragma unroll
            for (int i = 4; i < 32; i *= 2) all += __shfl_xor_sync(~0u, all, i);
            if (g == 0) {
                tops[2 * t + h] = top[h];
                sums[2 * t + h] = all;
            }
#pragma unroll
            for (int m = 0; m < 8; ++m) {
                outs[2 * t + h][16 * m + g] = out[m][h];
                outs[2 * t + h][16 * m + g + 8] = out[m][2 + h];
            }
        }
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

template <int J>
__device__ __forceinline__ void clear(float (&score)[J][4]) {
#pragma unroll
    for (int j = 0; j < J; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) score[j][c] = 0;
}

// Of the dims of one s, x being those of q.
template <int J>
__device__ __forceinline__ void multiply_k(float (&score)[J][4], const Tile<J>& tile, const uint4& x, int s) {
#pragma unroll
    for (int j = 0; j < J; ++j) {
        const uint4 &a = tile.k[j][0][s], &b = tile.k[j][1][s];
        mma(score[j], a.x, b.x, a.y, b.y, x.x, x.y);
        mma(score[j], a.z, b.z, a.w, b.w, x.z, x.w);
    }
}

// Scores of a tile, [j]: row g of part (j, 0) for both heads, row g of part (j, 1).
template <int J>
__device__ __forceinline__ void multiply_k(float (&score)[J][4], const Tile<J>& tile, const Heads& q, int g, int t) {
    clear(score);
#pragma unroll
    for (int s = 0; s < 4; ++s) multiply_k(score, tile, q.get(s, g, t), s);
}

// The same of a tile whose part of K is in shared memory.
template <int J>
__device__ __forceinline__ void multiply_k(float (&score)[J][4], const __nv_bfloat16* part, const Heads& q, int g,
                                           int t) {
    clear(score);
    Tile<J> tile;
    tile.read_k(part, 0, g, t);
#pragma unroll
    for (int s = 0; s < 4; ++s) {
        const uint4 x = q.get(s, g, t);
        if (s + 1 < 4) tile.read_k(part, s + 1, g, t);
        multiply_k(score, tile, x, s);
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

// Both for a tile of 32 positions whose part of V is in shared memory.
__device__ __forceinline__ void multiply_v(Softmax& soft, const __nv_bfloat16* part, const uint32_t (&p)[2][2],
                                           int first, int start, int end, int g, int t) {
    const __nv_bfloat16* from = part + g * kBlock + 8 * t;
    uint32_t mask[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        const int at = first + 8 * t + 2 * w;
        mask[w] = (at >= start && at < end ? 0xFFFFu : 0) | (at + 1 >= start && at + 1 < end ? 0xFFFF0000u : 0);
    }
#pragma unroll
    for (int m = 0; m < 8; ++m) {
        const uint4 a = *reinterpret_cast<const uint4*>(from + 16 * m * kBlock);
        const uint4 b = *reinterpret_cast<const uint4*>(from + (16 * m + 8) * kBlock);
        mma(soft.out[m], a.x & mask[0], b.x & mask[0], a.y & mask[1], b.y & mask[1], p[0][0], p[0][1]);
        mma(soft.out[m], a.z & mask[2], b.z & mask[2], a.w & mask[3], b.w & mask[3], p[1][0], p[1][1]);
    }
}
