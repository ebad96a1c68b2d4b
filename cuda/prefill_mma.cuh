// The products of prefill.cuh with mma.sync, for every card from sm_80: up to 64 columns at once, x in a ring of panels
// in shared memory that all threads fill.
#pragma once

#include "bulk.cuh"
#include "copy_async.cuh"
#include "prefill.cuh"

struct AnyCard {
    static constexpr int kMost = 64;
    static constexpr int kThreads = 32 * kBlockStrips;
    static constexpr int kBlocks = 1;  // on a multiprocessor, at least
    static constexpr int kStages = 4;
    static constexpr int kStageBytes = kMost * kPanelRowBytes;
};

// Asks for the first `rows` rows of a panel, a multiple of 8; a group of its own also if there is nothing to ask for.
__device__ __forceinline__ void ask_panel(uint32_t to, const uint8_t* from, uint32_t rows) {
    for (uint32_t i = threadIdx.x; i < rows * (kPanelRowBytes / 16); i += AnyCard::kThreads)
        copy_async_16(to + 16 * i, from + 16 * i);
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// d += chunk, for the columns 8 c that `rows` reaches.
__device__ __forceinline__ void multiply_panel(float (&d)[AnyCard::kMost / 8][4], const uint32_t (&a)[4][4],
                                               uint32_t panel, uint32_t rows, int lane) {
#pragma unroll
    for (int c = 0; c < AnyCard::kMost / 8; c += 2) {
        if (8 * c >= rows) break;
        // Lane 8 m + r asks for row r of matrix m: parts 2 j and 2 j + 1 of columns 8 c, then of 8 c + 8.
        const uint32_t row = panel + (8 * (c + lane / 16) + lane % 8) * kPanelRowBytes;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            uint32_t b[4];
            load_matrices(b, row + ((2 * j + lane / 8 % 2) ^ lane % 8) * 16);
            mma(d[c], a[j], b[0], b[1]);
            mma(d[c + 1], a[j], b[2], b[3]);
        }
    }
}

template <typename Stream, typename Ending, typename Work>
__device__ __forceinline__ void prefill_any_card(const typename Work::Args& args) {
    constexpr int kMost = AnyCard::kMost, kStages = AnyCard::kStages;
    extern __shared__ __align__(1024) uint8_t shared[];
    uint8_t* ending = shared + kStages * AnyCard::kStageBytes;
    const Work work{args};
    const int strip = Ending::strip(threadIdx.x / 32), lane = threadIdx.x % 32;
    const uint32_t stages = shared_address(shared), units = work.units(1);
    auto stage = [&](int panel) { return stages + panel % kStages * AnyCard::kStageBytes; };

    pdl_wait();
    pdl_launch();
    Stream weights;
    for (uint32_t i = blockIdx.x; i < units; i += gridDim.x) {
        const Unit unit = work.at(i, 1, 0);
        const uint8_t* tile = work.template weights<Stream>(unit, strip);
        const int k_tiles = work.k_tiles(unit), panels = kChunks * k_tiles;
        const uint32_t rows = (unit.rows + 7) / 8 * 8;
        weights.prime(tile, lane);
#pragma unroll
        for (int p = 0; p < kStages - 1; ++p) ask_panel(stage(p), work.x(unit, p, unit.row), rows);
        float d[kMost / 8][4] = {};
#pragma unroll 1
        for (int kt = 0; kt < k_tiles; ++kt) {
            // After the last tile it is asked for once more, in vain.
            const uint8_t* next = kt + 1 < k_tiles ? tile + Stream::kBytes : tile;
            weights.begin(next, lane);
#pragma unroll
            for (int c = 0; c < kChunks; ++c) {
                const int panel = kChunks * kt + c, ahead = panel + kStages - 1;
                uint32_t a[4][4];
                weights.fragments(c, a);
                asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
                // The panel has come for all, and all are done with the one before, whose stage is filled again.
                __syncthreads();
                ask_panel(stage(ahead), work.x(unit, min(ahead, panels - 1), unit.row), ahead < panels ? rows : 0);
                multiply_panel(d, a, stage(panel), rows, lane);
                weights.refill(c, tile, next, lane);
            }
            tile = next;
        }
        float sums[kMost / 2];
#pragma unroll
        for (int c = 0; c < kMost / 2; ++c) sums[c] = d[c / 4][c % 4];
        const Place at(0);
        float2 scales = work.scales(unit, strip);
        scales.x *= Stream::kWeightScale;
        scales.y *= Stream::kWeightScale;
        Ending::template write<kMost>(sums, work, unit, scales, at, ending);
        __syncthreads();
    }
}
