// The choice of experts from router scores, made again by every block that needs it: it is cheaper than one more
// kernel.
#pragma once

#include "common.cuh"

constexpr int kExperts = 256;
constexpr int kChosen = 6;  // K

// The choices of NB rows, in shared memory.
template <int NB>
struct Routing {
    float weights[NB][kChosen];      // of slot s of a row, its s-th chosen expert by index; they add up to 1
    uint32_t masks[8];               // bit e % 32 of word e / 32: some row chose expert e
    int list[NB * kChosen];          // the experts that some row chose, ascending; of one row, by falling score
    int8_t slots[NB * kChosen][NB];  // of list entry i: the slot of row n that chose it, or -1
    int n_list;

    // By every thread, before the choice; a barrier lies between.
    __device__ __forceinline__ void clear() {
        if (NB == 1) return;
        if (threadIdx.x < 8) masks[threadIdx.x] = 0;
        for (int i = threadIdx.x; i < NB * kChosen * NB; i += blockDim.x) slots[i / NB][i % NB] = -1;
    }
};

// The larger one first.
__device__ __forceinline__ void order(uint32_t& a, uint32_t& b) {
    const uint32_t low = min(a, b);
    a = max(a, b);
    b = low;
}

// One of the choices of a row.
struct Choice {
    int expert;
    float weight;  // its score divided by the sum of the chosen
    int slot;      // its place among the chosen, which ascend by index
};

// One warp chooses for one row: the 6 largest scores (ties: lowest index), put in ascending order of the index, in
// which the experts' outputs are added. Scores are sigmoids, so from 0 to 1; lane L has those of experts 8 L .. 8 L
// + 7. Lane k gets the choice with the k-th largest, and all lanes call known(k, expert) as soon as it is made.
template <typename Known>
__device__ __forceinline__ Choice choose_experts(const float (&scores)[8], int lane, Known known) {
    // Two lists of four in falling order. The bits of a score order as it does and are at most 0x3F800000: one more,
    // which tells it from an empty place, times four leaves two bits that make a list's keys distinct, the lower index
    // first.
    uint32_t keys[2][4];
#pragma unroll
    for (int list = 0; list < 2; ++list) {
        uint32_t (&k)[4] = keys[list];
#pragma unroll
        for (int i = 0; i < 4; ++i) k[i] = (__float_as_uint(scores[4 * list + i]) + 1) * 4 + (3 - i);
        order(k[0], k[1]);
        order(k[2], k[3]);
        order(k[0], k[2]);
        order(k[1], k[3]);
        order(k[1], k[2]);
    }
    uint32_t lower_lanes;
    asm("mov.u32 %0, %%lanemask_lt;" : "=r"(lower_lanes));
    int expert = 0;
    float score = 0.0f, sum = 0.0f;
#pragma unroll
    for (int k = 0; k < kChosen; ++k) {
        const uint32_t heads[2] = {keys[0][0] | 3, keys[1][0] | 3};
        const uint32_t best = max(heads[0], heads[1]);
        const uint32_t most = __reduce_max_sync(~0u, best);
        const uint32_t equal = __ballot_sync(~0u, best == most);
        const bool first = heads[0] == best, mine = best == most && (equal & lower_lanes) == 0;
        const int own = 8 * lane + (first ? 3 - keys[0][0] % 4 : 7 - keys[1][0] % 4);
        const int chosen = __shfl_sync(~0u, own, __ffs(equal) - 1);
        known(k, chosen);
        const float value = __uint_as_float(most / 4 - 1);
        sum += value;
        if (lane == k) {
            expert = chosen;
            score = value;
        }
#pragma unroll
        for (int list = 0; list < 2; ++list) {
            const bool pop = mine && first == (list == 0);
#pragma unroll
            for (int i = 0; i < 4; ++i) keys[list][i] = pop ? (i < 3 ? keys[list][i + 1] : 0) : keys[list][i];
        }
    }
    int slot = 0;
#pragma unroll
    for (int k = 0; k < kChosen; ++k) slot += __shfl_sync(~0u, expert, k) < expert;
    return {expert, score / sum, slot};
}

// One warp a row, NB in all, call it; barrier `barrier` is theirs. The list of all choices is there once they have all
// returned; of one row, entry k once known(k) is called.
template <int NB, typename Known>
__device__ __forceinline__ void route(Routing<NB>& routing, const float* scores, int row, int rows, int barrier,
                                      Known known) {
    const int lane = threadIdx.x % 32;
    Choice choice = {};
    const bool chose = row < rows && lane < kChosen;
    if (row < rows) {
        const float4* from = reinterpret_cast<const float4*>(scores + row * kExperts) + 2 * lane;
        const float4 low = __ldcg(from), high = __ldcg(from + 1);
        const float own[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        choice = choose_experts(own, lane, [&](int k, int expert) {
            if (NB == 1 && lane == 0) routing.list[k] = expert;
            known(k);
        });
    }
    const int expert = choice.expert, word = expert / 32;
    if (chose) routing.weights[row][choice.slot] = choice.weight;
    if constexpr (NB == 1) {
        if (chose) routing.slots[lane][0] = int8_t(choice.slot);
    } else {
        if (chose) atomicOr(&routing.masks[word], 1u << (expert % 32));
        asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(NB * 32) : "memory");
        int before = 0, all = 0;
#pragma unroll
        for (int w = 0; w < 8; ++w) {
            const uint32_t mask = routing.masks[w];
            all += __popc(mask);
            before += __popc(w < word ? mask : w == word ? mask & ((1u << (expert % 32)) - 1) : 0);
        }
        if (chose) {
            routing.list[before] = expert;  // by every row that chose it
            routing.slots[before][row] = int8_t(choice.slot);
        }
        if (row == 0 && lane == 0) routing.n_list = all;
    }
}
