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
//          for gate and half for up; general_experts_down: grid (ceil(rows / 2), B), block 256, 8 halves of warps a
//          row, which take the choices and the shared expert in turn
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
constexpr int kMaxChosen = 32;
constexpr int kTeam = 128;  // threads for a row of general_experts_down
constexpr int kDownRows = kThreads / kTeam;

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
    const float product = dot_row(matrix, expert, r, args.cols, x, threadIdx.x % kSums);
    const float up = __shfl_down_sync(~0u, product, kSums);
    __nv_bfloat16* act = static_cast<__nv_bfloat16*>(args.act) + (uint64_t(b) * chosen + j) * args.rows;
    if (threadIdx.x % 32 == 0) act[r] = __float2bfloat16_rn(reference_silu(product) * up);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    general_experts_down(const __grid_constant__ GeneralExpertsDownArgs args) {
    __shared__ float products[kDownRows][kMaxChosen + 1];
    const uint32_t team = threadIdx.x / kTeam, row = blockIdx.x * kDownRows + team, b = blockIdx.y;
    const uint32_t lane = threadIdx.x % kSums, r = min(row, args.rows - 1), n = args.n_chosen;
    pdl_wait();
    pdl_launch();
    // Half a warp takes a choice, or the shared expert, which is behind the last; beyond that, it does the same again.
    for (uint32_t first = 0; first <= n; first += kTeam / kSums) {
        const uint32_t mine = first + threadIdx.x % kTeam / kSums, j = min(mine, n);
        const uint64_t at = uint64_t(b) * n + j;
        const bool shared = j == n;
        const __nv_bfloat16* act = static_cast<const __nv_bfloat16*>(shared ? args.act_shared : args.act);
        const uint32_t cols = shared ? args.shared_cols : args.cols, expert = shared ? 0 : args.chosen[at];
        const GeneralMatrix& matrix = shared ? args.shared : args.experts;
        const float y = round_bf16(dot_row(matrix, expert, r, cols, act + (shared ? b : at) * cols, lane));
        if (lane == 0 && mine <= n) products[team][j] = shared ? y : __fmul_rn(args.weights[at], y);
    }
    __syncthreads();
    if (threadIdx.x % kTeam != 0 || row >= args.rows) return;
    float routed = 0;
    for (uint32_t j = 0; j < n; ++j) routed = __fadd_rn(routed, products[team][j]);
    __nv_bfloat16* delta = static_cast<__nv_bfloat16*>(args.delta) + uint64_t(b) * args.rows;
    delta[r] = __float2bfloat16_rn(round_bf16(routed) + products[team][n]);
}
