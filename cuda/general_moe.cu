// general_moe.cu: router, SwiGLU and experts of any number and size.
//
//   general_router        the K largest sigmoid(logits), ties to the lowest index, in ascending order of the index;
//                         weights = scores / their sum
//   general_swiglu        act[b, j] = bf16(silu(gate x[b]) * (up x[b])), of one pair of matrices or of experts[b, j]
//   general_experts_down  delta[b] = bf16(bf16(sum over j of weights[b, j] * y[b, j]) + bf16(shared act_shared[b])),
//                         y[b, j] = bf16(experts[chosen[b, j]] act[b, j]), the sum in fp32 in ascending j
//
// in, out  see args_general.h
// launch   general_router: grid B, block 32; general_swiglu: grid (ceil(rows / 8), K, B), block 256, a warp a row, half
//          for gate and half for up; general_experts_down: grid (ceil(rows / 8), B), block 256, a warp a row, its
//          halves taking turns at the choices
// order    that of src/cpu/reference/: the bits are the same
// bound    memory: the matrices of every choice
// PDL      all wait first, then trigger

#include "args_general.h"
#include "common.cuh"
#include "general.cuh"
#include "math.cuh"

namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxExperts = 1024;

}  // namespace

extern "C" __global__ void __launch_bounds__(32) general_router(const __grid_constant__ GeneralRouterArgs args) {
    __shared__ uint32_t order[kMaxExperts];
    const uint32_t lane = threadIdx.x, b = blockIdx.x;
    pdl_wait();
    pdl_launch();

    // Scores are not negative, so their bits are in their order; 0 is what has been taken. A lane touches only its own.
    const float* logits = args.logits + uint64_t(b) * args.n_experts;
    for (uint32_t e = lane; e < args.n_experts; e += 32) {
        order[e] = __float_as_uint(reference_sigmoid(logits[e])) + 1;
    }
    float sum = 0, score = 0;
    uint32_t expert = 0;
    for (uint32_t j = 0; j < args.chosen; ++j) {
        uint64_t best = 0;
        for (uint32_t e = lane; e < args.n_experts; e += 32) {
            const uint64_t key = uint64_t(order[e]) << 32 | (kMaxExperts - e);
            if (key > best) best = key;
        }
#pragma unroll
        for (int i = 16; i > 0; i /= 2) {
            const uint64_t other = __shfl_xor_sync(~0u, best, i);
            if (other > best) best = other;
        }
        const uint32_t taken = kMaxExperts - uint32_t(best);
        const float taken_score = __uint_as_float(uint32_t(best >> 32) - 1);
        sum += taken_score;
        if (lane == j) {
            expert = taken;
            score = taken_score;
        }
        if (taken % 32 == lane) order[taken] = 0;
    }
    uint32_t lower = 0;
    for (uint32_t j = 0; j < args.chosen; ++j) lower += __shfl_sync(~0u, expert, j) < expert;
    if (lane < args.chosen) {
        args.experts[uint64_t(b) * args.chosen + lower] = expert;
        args.weights[uint64_t(b) * args.chosen + lower] = score / sum;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads) general_swiglu(const __grid_constant__ GeneralSwigluArgs args) {
    const uint32_t r = blockIdx.x * kWarps + threadIdx.x / 32, half = threadIdx.x / kSums % 2;
    const uint32_t j = blockIdx.y, b = blockIdx.z, chosen = gridDim.y;
    pdl_wait();
    pdl_launch();
    if (r >= args.rows) return;
    const uint32_t expert = args.experts == nullptr ? 0 : args.experts[b * chosen + j];
    const __nv_bfloat16* x = static_cast<const __nv_bfloat16*>(args.x) + uint64_t(b) * args.cols;
    const GeneralMatrix& matrix = half == 0 ? args.gate : args.up;
    const float gate = dot_row(matrix, expert, r, args.cols, x, threadIdx.x % kSums);
    const float up = __shfl_down_sync(~0u, gate, kSums);
    __nv_bfloat16* act = static_cast<__nv_bfloat16*>(args.act) + (uint64_t(b) * chosen + j) * args.rows;
    if (threadIdx.x % 32 == 0) act[r] = __float2bfloat16_rn(reference_silu(gate) * up);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    general_experts_down(const __grid_constant__ GeneralExpertsDownArgs args) {
    const uint32_t r = blockIdx.x * kWarps + threadIdx.x / 32, b = blockIdx.y;
    const uint32_t half = threadIdx.x / kSums % 2, lane = threadIdx.x % kSums;
    pdl_wait();
    pdl_launch();
    if (r >= args.rows) return;
    const __nv_bfloat16* act_shared =
        static_cast<const __nv_bfloat16*>(args.act_shared) + uint64_t(b) * args.shared_cols;
    const float shared = round_bf16(dot_row(args.shared, 0, r, args.shared_cols, act_shared, lane));
    const __nv_bfloat16* act = static_cast<const __nv_bfloat16*>(args.act);
    float routed = 0;
    for (uint32_t j = 0; j < args.n_chosen; j += 2) {
        // Behind the last, both halves take the same.
        const uint64_t at = uint64_t(b) * args.n_chosen + min(j + half, args.n_chosen - 1);
        const float y = round_bf16(dot_row(args.experts, args.chosen[at], r, args.cols, act + at * args.cols, lane));
        const float product = __fmul_rn(args.weights[at], y);
        routed = __fadd_rn(routed, __shfl_sync(~0u, product, 0));
        if (j + 1 < args.n_chosen) routed = __fadd_rn(routed, __shfl_sync(~0u, product, kSums));
    }
    __nv_bfloat16* delta = static_cast<__nv_bfloat16*>(args.delta) + uint64_t(b) * args.rows;
    if (threadIdx.x % 32 == 0) delta[r] = __float2bfloat16_rn(round_bf16(routed) + shared);
}
