// Arithmetic that kernels share, with the roundings of src/cpu/reference/.
#pragma once

#include <cuda_bf16.h>

__device__ __forceinline__ float round_bf16(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

// Every lane gets the same bits.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(~0u, x, i);
    return x;
}

// The factor of an RMS norm over n values.
__device__ __forceinline__ float inverse_rms(float sum_of_squares, int n, float eps) {
    return __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(sum_of_squares, float(n)), eps)));
}

// x / (1 + e^-x)
__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
