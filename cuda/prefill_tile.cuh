// What the kernels of attention over many new tokens share: sizes, the rows of a tile that a thread has, their softmax,
// and how q and the result lie.
//
// A tile and KV head are 128 rows, row 8 i + h being head h of token i; a warp has 16 of them, in C fragments of
// m16n8k16 or m64nNk16. So lane 4 g + t has head g of two neighbouring tokens, and of their scores s or output o the
// columns 8 j + 2 t and the next: values 4 j and 4 j + 1 are the first token's, 4 j + 2 and 4 j + 3 the second's.
//
// q of a row and head is 128 values in an order in which one lane's A fragments are 64 bytes in four parts: part (i, t)
// of 16 bytes, at 32 i + 8 t values, has pairs t and t + 4 of 16 inputs from 32 i on, then those of the next 16.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "args_prefill_attention.h"
#include "fragment.cuh"
#include "panel.cuh"

constexpr int kHeadDim = 128;
constexpr int kGroup = 8;  // query heads of a KV head
constexpr int kBlock = 64;
constexpr int kTileTokens = 16;
constexpr int kPartHead = kBlock * kHeadDim;  // values of K or V of a block, layer and head
// Scores are in powers of two: log2(e) / sqrt(128). A sink is taken as the q . k that has its score.
constexpr float kScoreScale = 0.08838834764831845f * 1.4426950408889634f;
constexpr float kSinkScale = 11.313708498984761f;

// The first position that some token of the tile sees.
__device__ __forceinline__ int first_visible(const PrefillTile& tile, uint32_t window) {
    return window == 0 ? 0 : max(0, int(tile.position + 1) - int(window));
}

// Begins a copy of 16 bytes to shared memory, of which those from `bytes` on become zeros.
__device__ __forceinline__ void copy_16(uint32_t to, const __nv_bfloat16* from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// Of a warp's two tokens, the first is `token` of the tile. Past the tile's end they are copies of its last, and are
// not stored.
struct TileRows {
    int head, stored;  // of all query heads; 0 to 2 tokens
    int row[2], position[2];
    int first;  // position of the first if it was not past the end; the same for all lanes

    __device__ __forceinline__ TileRows(const PrefillTile& tile, int kv_head, int token, int g)
        : head(kGroup * kv_head + g), stored(int(tile.rows) - token), first(tile.position + token) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int place = min(token + r, int(tile.rows) - 1);
            row[r] = tile.row + place;
            position[r] = tile.position + place;
        }
    }

    // The A fragments of 16 inputs each.
    __device__ __forceinline__ void load_q(const PrefillAttentionArgs& args, int t, uint32_t (&q)[8][4]) const {
        const uint64_t stride = (kGroup + 2) * args.n_kv_heads * kHeadDim;
        const __nv_bfloat16* from = static_cast<const __nv_bfloat16*>(args.qkv) + head * kHeadDim + 8 * t;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint4 a = *reinterpret_cast<const uint4*>(from + row[0] * stride + 32 * i);
            const uint4 b = *reinterpret_cast<const uint4*>(from + row[1] * stride + 32 * i);
            q[2 * i][0] = a.x, q[2 * i][1] = b.x, q[2 * i][2] = a.y, q[2 * i][3] = b.y;
            q[2 * i + 1][0] = a.z, q[2 * i + 1][1] = b.z, q[2 * i + 1][2] = a.w, q[2 * i + 1][3] = b.w;
        }
    }

    // Hides what the tokens do not see of the n / 4 * 8 positions from `begin` on.
    template <int n>
    __device__ __forceinline__ void mask(float (&s)[n], int begin, uint32_t window, int t) const {
        // Positions that are seen: those whose distance is below this.
        const uint32_t reach = window == 0 ? 1u << 31 : window;
        if (begin + 2 * n - 1 <= first && uint32_t(first + 1 - begin) < reach) return;
#pragma unroll
        for (int j = 0; j < n / 4; ++j)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int at = begin + 8 * j + 2 * t + c % 2;
                if (uint32_t(position[c / 2] - at) >= reach) s[4 * j + c] = -INFINITY;
            }
    }
};

// The softmax of two rows while it runs. The sink is there from the beginning, so the maximum is always finite.
struct Softmax {
    float max[2];
    float sum[2];      // of this lane's columns; lane t == 0 has the sink's too
    float rescale[2];  // of what was summed before the last step

    __device__ __forceinline__ Softmax(float sink, int t) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            max[r] = sink * kSinkScale;
            sum[r] = t == 0 ? 1 : 0;
        }
    }

    // p in place of the scores, relative to the maximum so far.
    template <int n>
    __device__ __forceinline__ void step(float (&s)[n]) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float tops[4] = {max[r], max[r], max[r], max[r]};
#pragma unroll
            for (int j = 0; j < n / 4; ++j)
#pragma unroll
                for (int c = 0; c < 2; ++c) tops[2 * c + j % 2] = fmaxf(tops[2 * c + j % 2], s[4 * j + 2 * r + c]);
            float top = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[2], tops[3]));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            rescale[r] = exp2_fast((max[r] - top) * kScoreScale);
            max[r] = top;
            const float shift = top * kScoreScale;
            float sums[4] = {};
#pragma unroll
            for (int j = 0; j < n / 4; ++j)
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    float& p = s[4 * j + 2 * r + c];
                    p = exp2_fast(__fmaf_rn(p, kScoreScale, -shift));
                    sums[2 * c + j % 2] += p;
                }
            sum[r] = sum[r] * rescale[r] + ((sums[0] + sums[1]) + (sums[2] + sums[3]));
        }
    }
};

// Writes o over the sum of p. The columns of even j within a panel are one part of it, those of odd j another.
__device__ __forceinline__ void store_attn(const PrefillAttentionArgs& args, const TileRows& rows,
                                           const Softmax& softmax, const float (&o)[64], int t) {
    __nv_bfloat16* attn = static_cast<__nv_bfloat16*>(args.attn);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float sum = softmax.sum[r];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const float scale = 1 / sum;
        if (r >= rows.stored) continue;
#pragma unroll
        for (int panel = 0; panel < 2; ++panel)
#pragma unroll
            for (int odd = 0; odd < 2; ++odd) {
                uint32_t words[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float* pair = o + 4 * (8 * panel + 2 * i + odd) + 2 * r;
                    words[i] = pack_bf16(pair[0] * scale, pair[1] * scale);
                }
                const uint32_t column = rows.head * kHeadDim + 64 * panel + 2 * (t + 4 * odd);
                *reinterpret_cast<uint4*>(attn + panel_at(args.panel_rows, rows.row[r], column)) =
                    make_uint4(words[0], words[1], words[2], words[3]);
            }
    }
}
