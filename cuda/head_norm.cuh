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

// The norm of a head and, where `rope`, its rotation. `weight` [8], `cos` and `sin` [8] are those of this lane's dims,
// the angles' modulo 64. All lanes of the warp take part.
__device__ __forceinline__ uint4 norm_rope(const uint4& raw, const float (&weight)[8], float eps, bool rope,
                                           const float (&cos)[8], const float (&sin)[8], int lane16) {
    float x[8];
    unpack(raw, x);
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) squares += x[i] * x[i];
    const float scale = rsqrtf(sum_16(squares) * (1.0f / 128) + eps);
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

__device__ __forceinline__ void read_8(const float* from, float (&to)[8]) {
    const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
    to[0] = a.x, to[1] = a.y, to[2] = a.z, to[3] = a.w, to[4] = b.x, to[5] = b.y, to[6] = b.z, to[7] = b.w;
}

// What a lane of 16 needs for its 8 values of a head, where the angles are in memory.
struct Turn {
    float weight[8], cos[8], sin[8];

    // `norm` [128]; `rope` [2, 64] cosines and sines, or null: no rotation.
    __device__ __forceinline__ void load(const float* norm, const float* rope, int lane16) {
        const int half = 8 * lane16 % 64;
        read_8(norm + 8 * lane16, weight);
        if (rope != nullptr) {
            read_8(rope + half, cos);
            read_8(rope + 64 + half, sin);
        } else {
            // Or the compiler would carry them from one use to the next, in registers that others need meanwhile.
#pragma unroll
            for (int i = 0; i < 8; ++i) cos[i] = sin[i] = 0;
        }
    }

    __device__ __forceinline__ uint4 apply(const uint4& raw, float eps, bool rope, int lane16) const {
        return norm_rope(raw, weight, eps, rope, cos, sin, lane16);
    }
};
