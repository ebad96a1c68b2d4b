// Arithmetic that kernels share, with the roundings of src/cpu/reference/.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

__device__ __forceinline__ float round_bf16(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

// Every lane gets the same bits.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(~0u, x, i);
    return x;
}

// Of the lanes up to and including this one.
template <typename T>
__device__ __forceinline__ T running_sum(T x, uint32_t lane) {
#pragma unroll
    for (uint32_t i = 1; i < 32; i *= 2) {
        const T lower = __shfl_up_sync(~0u, x, i);
        if (lane >= i) x += lower;
    }
    return x;
}

// x / (1 + e^-x)
__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
