// prefill_norm.cu: residual add and RMS norm of many rows, into the panels that the next product reads.
//
//   s = delta + residual; residual = round(s); normed = round(w * (s * rsqrt(mean(s^2) + eps)))
//
// in   delta, residual [T, 2048] bf16; weight [2048] f32
// out  residual in place; normed in panels of panel.cuh, rows 0 to T - 1 of panel_rows
//
// launch   prefill_norm: grid ceil(T / 8), 256 threads, a warp a row; prefill_norm_few: grid T, 256 threads, a block a
//          row. Both give the same bits
// order    that of Norm in gemv.cuh, so the bits are those of decode: a lane squares and adds 8 values in
//          order, 32 lanes add by shuffles, the 8 sums of a row are added in order
// bound    memory: 16 KiB a row; 134 MB at T = 8,192 took 37 us on an H200, 3.6 TB/s, whatever the block size was. Few
//          rows: latency
// PDL      waits before it reads what kernels wrote; what follows reads its output, so it triggers at once
#include "args_prefill_rows.h"
#include "panel_norm.cuh"

namespace {
constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kParts = kHidden / 8;  // of 16 bytes, in a row
}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) prefill_norm(const __grid_constant__ PrefillNormArgs args) {
    const int lane = threadIdx.x % 32;
    const uint32_t row = blockIdx.x * kWarps + threadIdx.x / 32;
    pdl_wait();
    pdl_launch();
    if (row >= args.rows) return;

    const uint4* delta = reinterpret_cast<const uint4*>(args.delta) + size_t(row) * kParts;
    uint4* residual = reinterpret_cast<uint4*>(args.residual) + size_t(row) * kParts;
    float s[kNormWarps][8];
#pragma unroll
    for (int group = 0; group < kNormWarps; ++group) {
        add_residual(s[group], delta[32 * group + lane], residual[32 * group + lane]);
    }
    float total = 0.0f;
#pragma unroll
    for (int group = 0; group < kNormWarps; ++group) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) sum = fmaf(s[group][i], s[group][i], sum);
        total += warp_sum(sum);
        residual[32 * group + lane] = pack_8(s[group]);
    }
    const float scale = 1.0f / sqrtf(total / kHidden + args.eps);

    const float4* weight = reinterpret_cast<const float4*>(args.weight);
    uint4* normed = reinterpret_cast<uint4*>(args.normed);
#pragma unroll
    for (int group = 0; group < kNormWarps; ++group) {
        const float4 low = weight[2 * (32 * group + lane)], high = weight[2 * (32 * group + lane) + 1];
        const float w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) s[group][i] = w[i] * (s[group][i] * scale);
        normed[part_at(args.panel_rows, row, group, lane)] = part_of_panel(pack_8(s[group]), lane);
    }
}

extern "C" __global__ void __launch_bounds__(BlockNorm::kThreads)
    prefill_norm_few(const __grid_constant__ PrefillNormArgs args) {
    __shared__ float4 sums[kNormWarps / 4];
    const uint32_t row = blockIdx.x;
    const BlockNorm norm(args.weight);
    pdl_wait();
    pdl_launch();
    const size_t at = size_t(row) * BlockNorm::kThreads + threadIdx.x;
    uint4* residual = reinterpret_cast<uint4*>(args.residual);
    norm.finish(reinterpret_cast<const uint4*>(args.delta)[at], residual[at], sums, residual,
                reinterpret_cast<uint4*>(args.normed), args.panel_rows, row, args.eps);
}
