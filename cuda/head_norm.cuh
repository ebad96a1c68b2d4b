// Norm and rotation of one head of 128 values by 16 lanes, 8 values a lane.
#pragma once

#include <cuda_bf16.h>

#include "fragment.cuh"
#include "math.cuh"
#include "rope.cuh"

// Over 16 lanes; every lane gets the same bits.
__device__ __forceinline__ float sum_16(float x) {
#pragma unroll
    for (int lane = 8; lane > 0; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
    return x;
}

// The norm of a head and, where `rope`, its rotation. `weight` [128]; `cos` and `sin` [8] are those of this lane's
// dims, modulo 64. All lanes of the warp take part.
__device__ __forceinline__ uint4 norm_rope(const uint4& raw, const float* weight, float eps, bool rope,
                                           const float* cos, const float* sin, int lane16) {
    float x[8];
    unpack(raw, x);
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += x[i] * x[i];
    const float scale = inverse_rms(sum_16(squares), 128, eps);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = round_bf16(weight[8 * lane16 + i] * (x[i] * scale));
    if (rope) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float other = __shfl_xor_sync(~0u, x[i], 8);
            x[i] = rotate(x[i], lane16 < 8 ? -other : other, cos[i], sin[i]);
        }
    }
    return make_uint4(pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
}
