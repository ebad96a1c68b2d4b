// general_norm.cu: residual add and RMS norm of any width.
//
//   s = delta + residual_in; residual_out = bf16(s); normed = bf16(weight * (s * rsqrt(mean(s^2) + eps)))
//
// in, out  see args_general.h
// launch   grid B, block 256
// order    that of src/cpu/reference/: the bits are the same
// bound    latency
// PDL      waits first, then triggers

#include "args_general.h"
#include "common.cuh"
#include "reference.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kPart = 4096;  // values whose squares are in shared memory

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) general_norm(const __grid_constant__ GeneralNormArgs args) {
    __shared__ float squares[kPart];
    const int cols = args.cols;
    const uint64_t first = uint64_t(blockIdx.x) * args.cols;
    const __nv_bfloat16* delta = static_cast<const __nv_bfloat16*>(args.delta) + first;
    const __nv_bfloat16* residual = static_cast<const __nv_bfloat16*>(args.residual_in) + first;
    auto sum_at = [&](int i) { return __bfloat162float(delta[i]) + __bfloat162float(residual[i]); };
    pdl_wait();
    pdl_launch();

    // All threads square; then each half warp adds all squares, so that every thread has the sum.
    float sum = 0;
    for (int part = 0; part < cols; part += kPart) {
        const int n = min(cols - part, kPart);
        if (part > 0) __syncthreads();
        for (int i = threadIdx.x; i < n; i += kThreads) {
            const float s = sum_at(part + i);
            squares[i] = __fmul_rn(s, s);
        }
        __syncthreads();
#pragma unroll 4
        for (int i = threadIdx.x % kSums; i < n; i += kSums) sum = __fadd_rn(sum, squares[i]);
    }
    const float scale = inverse_rms(half_warp_sum(sum), cols, args.eps);

    __nv_bfloat16* residual_out = static_cast<__nv_bfloat16*>(args.residual_out) + first;
    __nv_bfloat16* normed = static_cast<__nv_bfloat16*>(args.normed) + first;
    for (int i = threadIdx.x; i < cols; i += kThreads) {
        const float s = sum_at(i);
        residual_out[i] = __float2bfloat16_rn(s);
        normed[i] = __float2bfloat16_rn(args.weight[i] * (s * scale));
    }
}
