// The choice of experts from router logits, made again by every block that needs it: it is cheaper than one more
// kernel.
#pragma once

#include "common.cuh"

constexpr int kExperts = 256;
constexpr int kChosen = 6;  // K

// The choices of NB rows, in shared memory.
template <int NB>
struct Routing {
    int experts[NB][kChosen];        // ascending: slot s of a row is its s-th chosen expert by index
    float weights[NB][kChosen];      // of the slots; they add up to 1
    uint32_t masks[8];               // bit e % 32 of word e / 32: some row chose expert e
    int list[NB * kChosen];          // the experts that some row chose, ascending
    int8_t slots[NB * kChosen][NB];  // of list entry i: the slot of row n that chose it, or -1
    int n_list;
};

// One of the choices of a row.
struct Choice {
    int expert;
    float weight;  // its score divided by the sum of the chosen
    int slot;      // its place among the chosen, which ascend by index
};

// One warp chooses for one row: the 6 largest sigmoid scores (ties: lowest index), put in ascending order of the index,
// in which the experts' outputs are added. Lanes below 6 hold a choice each.
__device__ __forceinline__ Choice choose_experts(const float* logits, int lane) {
    constexpr int kEach = kExperts / 32;  // expert 8 * lane + i
    const float4 low = reinterpret_cast<const float4*>(logits)[2 * lane];
    const float4 high = reinterpret_cast<const float4*>(logits)[2 * lane + 1];
    const float logit[kEach] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    // A score is not negative, so its bits order as it does; one more tells a score of 0 from a chosen one.
    uint32_t keys[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) keys[i] = __float_as_uint(1.0f / (1.0f + expf(-logit[i]))) + 1;

    int expert = 0;
    float score = 0.0f, sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kChosen; ++k) {
        uint32_t best = 0;
        int index = 0;
#pragma unroll
        for (int i = kEach - 1; i >= 0; --i) {
            if (keys[i] >= best) {
                best = keys[i];
                index = i;
            }
        }
        const uint32_t most = __reduce_max_sync(0xFFFFFFFFu, best);
        const int owner = __ffs(__ballot_sync(0xFFFFFFFFu, best == most)) - 1;
        const int chosen = __shfl_sync(0xFFFFFFFFu, 8 * lane + index, owner);
        const float value = __uint_as_float(most - 1);
        sum += value;
        if (lane == k) {
            expert = chosen;
            score = value;
        }
#pragma unroll
        for (int i = 0; i < kEach; ++i)
            if (lane == owner && i == index) keys[i] = 0;
    }
    int slot = 0;
#pragma unroll
    for (int k = 0; k < kChosen; ++k) slot += __shfl_sync(0xFFFFFFFFu, expert, k) < expert;
    return {expert, score / sum, slot};
}

// Fills `routing` for rows 0 .. rows-1. Needs at least NB warps; every thread of the block calls it; ends synchronised.
template <int NB>
__device__ __forceinline__ void route(Routing<NB>& routing, const float* logits, int rows) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x < 8) routing.masks[threadIdx.x] = 0;
    __syncthreads();
    if (warp < rows) {
        const Choice choice = choose_experts(logits + warp * kExperts, lane);
        if (lane < kChosen) {
            routing.experts[warp][choice.slot] = choice.expert;
            routing.weights[warp][choice.slot] = choice.weight;
            atomicOr(&routing.masks[choice.expert / 32], 1u << (choice.expert % 32));
        }
    }
    __syncthreads();
    if (warp == 0) {
        const uint32_t mask = routing.masks[lane % 8];
        int before = 0, all = 0;
#pragma unroll
        for (int w = 0; w < 8; ++w) {
            const int count = __popc(__shfl_sync(0xFFFFFFFFu, mask, w));
            before += w < lane ? count : 0;
            all += count;
        }
        if (lane < 8) {
            for (uint32_t rest = mask; rest; rest &= rest - 1) routing.list[before++] = 32 * lane + __ffs(rest) - 1;
        }
        if (lane == 0) routing.n_list = all;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < routing.n_list * NB; i += blockDim.x) {
        const int row = i % NB;
        int8_t slot = -1;
        if (row < rows) {
#pragma unroll
            for (int k = 0; k < kChosen; ++k)
                if (routing.experts[row][k] == routing.list[i / NB]) slot = int8_t(k);
        }
        routing.slots[i / NB][row] = slot;
    }
    __syncthreads();
}
