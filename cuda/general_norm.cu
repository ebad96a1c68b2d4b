// general_norm.cu: residual add and RMS norm of any width.
//
//   s = delta + residual_in; residual_out = bf16(s); normed = bf16(weight * (s * rsqrt(mean(s^2) + eps)))
//
// in, out  see args_general.h
// launch   grid B, block 256
// order    a lane adds the squares of 8 consecutive values; 32 lanes add by xor 16, 8, 4, 2, 1; these sums of 256
// values are
//          added in ascending order
// bound    latency
// PDL      waits first, then triggers

#include "args_general.h"
#include "common.cuh"
#include "math.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kRun = 8;
constexpr int kGroup = 32 * kRun;
constexpr int kMaxGroups = (1 << 20) / kGroup;  // of the widest model that a config may describe

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) general_norm(const __grid_constant__ GeneralNormArgs args) {
    __shared__ float group_sums[kMaxGroups];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int cols = args.cols, groups = (cols + kGroup - 1) / kGroup;
    const uint64_t first = uint64_t(blockIdx.x) * args.cols;
    const __nv_bfloat16* delta = static_cast<const __nv_bfloat16*>(args.delta) + first;
    const __nv_bfloat16* residual = static_cast<const __nv_bfloat16*>(args.residual_in) + first;
    auto sum_at = [&](int i) { return __bfloat162float(delta[i]) + __bfloat162float(residual[i]); };
    pdl_wait();
    pdl_launch();

    for (int group = warp; group < groups; group += kWarps) {
        float squares = 0;
        for (int i = 0; i < kRun; ++i) {
            const int at = group * kGroup + lane * kRun + i;
            if (at >= cols) break;
            const float s = sum_at(at);
            squares += s * s;
        }
        squares = warp_sum(squares);
        if (lane == 0) group_sums[group] = squares;
    }
    __syncthreads();
    float squares = 0;
    for (int group = 0; group < groups; ++group) squares += group_sums[group];
    const float scale = inverse_rms(squares, cols, args.eps);

    __nv_bfloat16* residual_out = static_cast<__nv_bfloat16*>(args.residual_out) + first;
    __nv_bfloat16* normed = static_cast<__nv_bfloat16*>(args.normed) + first;
    for (int i = threadIdx.x; i < cols; i += kThreads) {
        const float s = sum_at(i);
        residual_out[i] = __float2bfloat16_rn(s);
        normed[i] = __float2bfloat16_rn(args.weight[i] * (s * scale));
    }
}
