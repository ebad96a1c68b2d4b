// Arithmetic with the bits of src/cpu/reference/: in its order of additions, and no product fused with an addition.
#pragma once

#include <cstdint>

// Partial sums of a dot product: lane i of half a warp has that of values i, i + 16, ...
constexpr uint32_t kSums = 16;

__device__ __forceinline__ float add_product(float sum, float a, float b) { return __fadd_rn(sum, __fmul_rn(a, b)); }

// The partial sums added pairwise; every lane gets the same bits. All lanes of the warp take part.
__device__ __forceinline__ float half_warp_sum(float x) {
#pragma unroll
    for (int i = kSums / 2; i > 0; i /= 2) x = __fadd_rn(x, __shfl_xor_sync(~0u, x, i));
    return x;
}

// The factor of an RMS norm over n values.
__device__ __forceinline__ float inverse_rms(float sum_of_squares, int n, float eps) {
    return __frcp_rn(__fsqrt_rn(__fadd_rn(__fdiv_rn(sum_of_squares, float(n)), eps)));
}

// src/cpu/reference/exp.rs says how.
__device__ __forceinline__ float reference_exp(float x) {
    constexpr float kWhole = 12582912.0f;
    const float shifted = __fadd_rn(__fmul_rn(x, 1.44269504f), kWhole), n = __fsub_rn(shifted, kWhole);
    const float high = __fsub_rn(x, __fmul_rn(n, 0.693145751953125f)), low = -__fmul_rn(n, 1.42860677e-6f);
    const float r = __fadd_rn(high, low);
    auto add = [&](float q, float c) { return __fadd_rn(__fmul_rn(q, r), c); };
    const float q = add(add(add(add(0.0013863668f, 0.008367609f), 0.04166724f), 0.16666533f), 0.5f);
    const float one_and_high = __fadd_rn(1.0f, high);
    const float lost = __fadd_rn(__fsub_rn(high, __fsub_rn(one_and_high, 1.0f)), low);
    const int whole = __float_as_int(shifted) - __float_as_int(kWhole);
    auto power = [](int n) { return __int_as_float((127 + n) << 23); };
    const float sum = __fadd_rn(one_and_high, __fadd_rn(__fmul_rn(__fmul_rn(r, r), q), lost));
    const float result = __fmul_rn(__fmul_rn(sum, power(whole >> 1)), power(whole - (whole >> 1)));
    return x < -104.0f ? 0.0f : x > 89.0f ? INFINITY : result;
}

__device__ __forceinline__ float reference_sigmoid(float x) {
    return __fdiv_rn(1.0f, __fadd_rn(1.0f, reference_exp(-x)));
}

__device__ __forceinline__ float reference_silu(float x) { return __fdiv_rn(x, __fadd_rn(1.0f, reference_exp(-x))); }
