// What the kernels of attention over many new tokens share: sizes, what a tile sees, and how q and the result lie.
//
// q of a row and head is 128 values in an order in which one lane's A fragments of four k-steps of an m16n8k16 or
// m64nNk16 product are 64 bytes in four parts: part (i, t) of 16 bytes, at 32 i + 8 t values, has pairs t and t + 4 of
// step 2 i, then those of step 2 i + 1, for lane t of four.
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
// Scores are in powers of two: log2(e) / sqrt(128). A sink is given as the q . k that has its score: sqrt(128) sink.
constexpr float kScoreScale = 0.08838834764831845f * 1.4426950408889634f;
constexpr float kSinkScale = 11.313708498984761f;

// The first position that some token of the tile sees.
__device__ __forceinline__ int first_visible(const PrefillTile& tile, uint32_t window) {
    return window == 0 ? 0 : max(0, int(tile.position + 1) - int(window));
}

// Writes one head of one row: this lane's columns 8 j + 2 t and the next, for j in 0..16, are `o[4 j + first]` and the
// next, times `scale`. The columns of even j within a panel are one part of it, those of odd j another.
__device__ __forceinline__ void store_attn(const PrefillAttentionArgs& args, int row, int head, int t,
                                           const float (&o)[64], int first, float scale) {
    __nv_bfloat16* attn = static_cast<__nv_bfloat16*>(args.attn);
#pragma unroll
    for (int panel = 0; panel < 2; ++panel)
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int j = 8 * panel + 2 * i + odd;
                words[i] = pack(o[4 * j + first] * scale, o[4 * j + first + 1] * scale);
            }
            const uint32_t column = head * kHeadDim + 64 * panel + 2 * (t + 4 * odd);
            *reinterpret_cast<uint4*>(attn + panel_at(args.panel_rows, row, column)) =
                make_uint4(words[0], words[1], words[2], words[3]);
        }
}
