// general_project.cu: embedding and products with matrices of any type and size.
//
//   general_embed    delta[b] = bf16(scale * table[tokens[b]]), residual[b] = 0
//   general_project  out[b, offset + r] = scale * sum over k of matrix[r, k] x[b, k], rounded to bf16 unless f32
//
// in, out  see args_general.h
// launch   general_embed: grid (ceil(cols / 512), B); general_project: grid (ceil(rows / 8), ceil(B / 4)), half a
//          warp a row of the matrix and 4 of x; block 128
// order    that of src/cpu/reference/, whatever B is: the bits are the same
// bound    memory: the matrix once for 4 rows of x
// PDL      waits first, then triggers

#include "args_general.h"
#include "common.cuh"
#include "general.cuh"

namespace {

constexpr int kThreads = 128;
constexpr int kHalfWarps = kThreads / kSums;
constexpr int kMaxRows = 4;  // of x for half a warp; with 8, a step of 8 rows takes 954 us instead of 615 on an H200
constexpr int kRun = 64;     // values that half a warp of general_embed decodes: a block of the largest kind

// One row of the matrix and n rows of x, at most kRows, by half a warp.
template <int kRows>
__device__ __forceinline__ void project(const GeneralProjectArgs& args, uint32_t r, uint32_t first, uint32_t n) {
    const uint32_t lane = threadIdx.x % kSums;
    const __nv_bfloat16* x = static_cast<const __nv_bfloat16*>(args.x) + uint64_t(first) * args.cols;
    // Both halves of a warp add, so a half beyond the end does what the last one does.
    const uint8_t* row = row_of(args.matrix, 0, min(r, args.rows - 1));
    const float scale = scale_of(args.matrix, 0);
    float sums[kRows] = {};
    for_each_value(args.matrix.type, row, args.cols, lane, [&](uint32_t k, float w) {
#pragma unroll
        for (int b = 0; b < kRows; ++b) {
            if (b < n) sums[b] = add_product(sums[b], w, __bfloat162float(x[uint64_t(b) * args.cols + k]));
        }
    });
#pragma unroll
    for (int b = 0; b < kRows; ++b) {
        if (b >= n) break;
        const float y = half_warp_sum(sums[b]) * scale;
        const uint64_t at = uint64_t(first + b) * args.out_stride + args.offset + r;
        if (lane != 0 || r >= args.rows) continue;
        if (args.f32) {
            static_cast<float*>(args.out)[at] = y;
        } else {
            static_cast<__nv_bfloat16*>(args.out)[at] = __float2bfloat16_rn(y);
        }
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) general_embed(const __grid_constant__ GeneralEmbedArgs args) {
    const uint32_t first = (blockIdx.x * kHalfWarps + threadIdx.x / kSums) * kRun, lane = threadIdx.x % kSums;
    const uint32_t b = blockIdx.y;
    pdl_wait();
    pdl_launch();
    if (first >= args.cols) return;
    const uint32_t type = args.table.type;
    const uint32_t block_values = type == kNvfp4 ? 64 : type == kQ8_0 ? 32 : 1;
    const uint32_t block_bytes = type == kNvfp4 ? 36 : type == kQ8_0 ? 34 : type == kF32 ? 4 : 2;
    const uint8_t* run = row_of(args.table, 0, args.tokens[b]) + uint64_t(first / block_values) * block_bytes;
    const float scale = scale_of(args.table, 0);
    __nv_bfloat16* delta = static_cast<__nv_bfloat16*>(args.delta) + uint64_t(b) * args.cols + first;
    __nv_bfloat16* residual = static_cast<__nv_bfloat16*>(args.residual) + uint64_t(b) * args.cols + first;
    for_each_value(type, run, min(args.cols - first, uint32_t(kRun)), lane, [&](uint32_t k, float value) {
        delta[k] = __float2bfloat16_rn(value * scale);
        residual[k] = __float2bfloat16_rn(0.0f);
    });
}

extern "C" __global__ void __launch_bounds__(kThreads)
    general_project(const __grid_constant__ GeneralProjectArgs args) {
    const uint32_t r = blockIdx.x * kHalfWarps + threadIdx.x / kSums, first = blockIdx.y * kMaxRows;
    pdl_wait();
    pdl_launch();
    if (args.n == 1) {
        project<1>(args, r, 0, 1);
    } else {
        project<kMaxRows>(args, r, first, min(args.n - first, uint32_t(kMaxRows)));
    }
}
