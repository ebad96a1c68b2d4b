// RMS norms of rows into panels: how a warp brings 256 columns into their order, and the norm of a row by one block.
#pragma once

#include "common.cuh"
#include "gemv.cuh"
#include "panel.cuh"

constexpr int kPanelParts = 8;  // of 16 bytes, in a panel's row

// A lane holds columns 8 q to 8 q + 7 of a panel, q = lane % 8: words q / 2 of the four parts 4 (q % 2) + i. Afterwards
// it holds part 4 (q % 2) + q / 2 whole: a transposition of 4 x 4 words among the lanes of the same q % 2.
__device__ __forceinline__ uint4 part_of_panel(const uint4& words, int lane) {
    uint32_t w[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
        const bool upper = lane / 2 & bit;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & bit) continue;
            // The lower lane gives its word i + bit for the upper one's word i.
            const uint32_t got = __shfl_xor_sync(~0u, upper ? w[i] : w[i + bit], 2 * bit);
            if (upper) {
                w[i] = got;
            } else {
                w[i + bit] = got;
            }
        }
    }
    return make_uint4(w[0], w[1], w[2], w[3]);
}

// Where the part that `part_of_panel` leaves a lane with goes, in 16 bytes: group `group` of 256 columns of row `row`.
__device__ __forceinline__ size_t part_at(uint32_t panel_rows, uint32_t row, int group, int lane) {
    const int q = lane % 8, part = (4 * (q % 2) + q / 2) ^ row % 8, panel = 4 * group + lane / 8;
    return (size_t(panel) * panel_rows + row) * kPanelParts + part;
}

// The norm of one row by a block of 256 threads, thread i having values 8 i to 8 i + 7; the order of additions is that
// of Norm in gemv.cuh.
struct BlockNorm {
    static constexpr int kThreads = kNormWarps * 32;
    float weight[8];

    // Before the wait.
    __device__ __forceinline__ explicit BlockNorm(const float* from) {
        const float4* parts = reinterpret_cast<const float4*>(from) + 2 * threadIdx.x;
        const float4 low = __ldg(parts), high = __ldg(parts + 1);
        weight[0] = low.x, weight[1] = low.y, weight[2] = low.z, weight[3] = low.w;
        weight[4] = high.x, weight[5] = high.y, weight[6] = high.z, weight[7] = high.w;
    }

    // residual = round(s), normed = round(w * (s * rsqrt(mean(s^2) + eps))), s = delta + residual, which are the
    // thread's own. `sums` is shared memory.
    __device__ __forceinline__ void finish(const uint4& delta, const uint4& residual, float4 (&sums)[kNormWarps / 4],
                                           uint4* new_residual, uint4* normed, uint32_t panel_rows, uint32_t row,
                                           float eps) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        float s[8], sum = 0.0f;
        add_residual(s, delta, residual);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum = fmaf(s[i], s[i], sum);
        sum = warp_sum(sum);
        if (lane == 0) reinterpret_cast<float*>(sums)[warp] = sum;
        new_residual[size_t(row) * kThreads + threadIdx.x] = pack_8(s);
        __syncthreads();
        float total = 0.0f;
#pragma unroll
        for (const float4& four : sums) total = total + four.x + four.y + four.z + four.w;
        const float scale = 1.0f / sqrtf(total / kHidden + eps);
#pragma unroll
        for (int i = 0; i < 8; ++i) s[i] = weight[i] * (s[i] * scale);
        normed[part_at(panel_rows, row, warp, lane)] = part_of_panel(pack_8(s), lane);
    }
};
