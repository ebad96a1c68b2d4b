// sample_greedy.cu: the most likely token of each row becomes the input of the next step.
//
//   tokens[n] = argmax over v < vocab of logits[n, v]       ties: the lowest v; a NaN is never chosen
//   positions[n] += 1
//
// in   logits [B, logits_stride] f32
// out  tokens, positions [B] u32, on the device; host_tokens [ring, 8] u32 in host memory: the same token in line
//      (position of the row before this kernel) % ring, so that the host reads it while later steps run
//
// launch   grid (32, B), block 512; the last block of a row to finish writes its result
// bound    memory: B * vocab * 4 bytes, from L2
// PDL      waits before reading logits; triggers right after

#include "args_sample.h"
#include "common.cuh"

namespace {

constexpr int kBlocks = 32;
constexpr int kThreads = 512;
constexpr int kHostRows = 8;

// Orders as (value, -index) does. NaN is less than every number, and zero is less than all keys.
__device__ __forceinline__ uint64_t key(float value, uint32_t index) {
    const uint32_t bits = __float_as_uint(value);
    const uint32_t ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return uint64_t(isnan(value) ? 0 : ordered) << 32 | uint32_t(~index);
}

__device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }

__device__ __forceinline__ uint64_t warp_max(uint64_t x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x = larger(x, __shfl_xor_sync(0xFFFFFFFFu, x, offset));
    return x;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    sample_greedy(const __grid_constant__ SampleGreedyArgs args) {
    __shared__ uint64_t warps[kThreads / 32];
    const uint32_t row = blockIdx.y;
    const float* logits = args.logits + uint64_t(row) * args.logits_stride;
    pdl_wait();
    pdl_launch();

    uint64_t best = 0;
    for (uint32_t v = blockIdx.x * kThreads + threadIdx.x; v < args.vocab; v += kBlocks * kThreads)
        best = larger(best, key(logits[v], v));
    best = warp_max(best);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    best = warp_max(threadIdx.x < kThreads / 32 ? warps[threadIdx.x] : 0);
    if (threadIdx.x != 0) return;

    atomicMax(reinterpret_cast<unsigned long long*>(args.best + row), best);
    __threadfence();
    if (atomicAdd(args.counters + row, 1) + 1 < kBlocks) return;

    __threadfence();
    const uint32_t token = ~static_cast<uint32_t>(atomicExch(reinterpret_cast<unsigned long long*>(args.best + row), 0));
    args.counters[row] = 0;
    const uint32_t position = args.positions[row];
    args.tokens[row] = token;
    args.positions[row] = position + 1;
    args.host_tokens[position % args.ring * kHostRows + row] = token;
}
