// prefill_route.cu: what turns rows into work for experts and back, all in a fixed order.
//
//   prefill_route    the 6 experts of each row and their weights; a bit for each row of 32 and expert
//   prefill_group    each expert's first sorted row (a multiple of 8; rows of an expert ascend), its tiles
//   prefill_gather   the panels' rows, copied to where their experts want them
//   prefill_combine  delta[n] = round(round(sum over slots s of w[n, s] * y[sorted row of n, s]) + shared[n])
//
// in, out  as args_prefill.h
// launch   route: a block for 32 rows, a warp each; group: one block; gather: a block for up to 8 rows; combine:
//          a block a row
// bound    memory: gather writes 6 rows and combine reads 7 for each
// PDL      nothing before the wait
#include "args_prefill.h"
#include "panel.cuh"
#include "routing.cuh"

namespace {

constexpr int kHidden = 2048;
constexpr int kRouteRows = 32;
constexpr int kRouterParts = 3;  // BF16 matrices that add up to the router
constexpr int kGroupThreads = 1024;
constexpr int kGroupParts = kGroupThreads / kExperts;
constexpr int kRowThreads = kHidden / 8;

constexpr int kGatherRows = 8;  // a block, at most

// The columns that a tile of `rows` rows is multiplied with, of a kernel for up to `most`.
__device__ __forceinline__ uint32_t tile_width(uint32_t rows, uint32_t most) {
    if (most > 64) return rows > 160 && rows <= 208 ? (rows + 15) / 16 * 16 : (rows + 31) / 32 * 32;
    return rows > 32 ? 64 : rows > 16 ? 32 : rows > 8 ? 16 : 8;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kRouteRows * 32)
    prefill_route(const __grid_constant__ PrefillRouteArgs args) {
    __shared__ uint32_t masks[kExperts];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t row = blockIdx.x * kRouteRows + warp;
    if (threadIdx.x < kExperts) masks[threadIdx.x] = 0;
    pdl_wait();
    pdl_launch();
    __syncthreads();
    if (row < args.rows) {
        const float* parts = args.logits + size_t(row) * kRouterParts * kExperts;
        LaneScores scores(parts, lane);
#pragma unroll
        for (int part = 1; part < kRouterParts; ++part) {
            const LaneScores more(parts + part * kExperts, lane);
#pragma unroll
            for (int i = 0; i < 8; ++i) scores.values[i] += more.values[i];
        }
#pragma unroll
        for (float& score : scores.values) score = sigmoid(score);
        const Choice choice = choose_experts(scores, lane, [](int, int) {});
        if (lane < kChosen) {
            args.experts[row * kChosen + choice.slot] = choice.expert;
            args.weights[row * kChosen + choice.slot] = choice.weight;
            atomicOr(&masks[choice.expert], 1u << warp);
        }
    }
    __syncthreads();
    if (threadIdx.x < kExperts) args.masks[blockIdx.x * kExperts + threadIdx.x] = masks[threadIdx.x];
}

// Thread (part, e) counts expert e's rows in its part of the masks.
extern "C" __global__ void __launch_bounds__(kGroupThreads)
    prefill_group(const __grid_constant__ PrefillGroupArgs args) {
    __shared__ uint32_t counts[kGroupParts][kExperts];
    __shared__ uint2 sums[kExperts / 32];
    __shared__ uint32_t starts[kExperts];
    const int part = threadIdx.x / kExperts, expert = threadIdx.x % kExperts, lane = threadIdx.x % 32;
    const uint32_t masks = (args.rows + kRouteRows - 1) / kRouteRows;
    const uint32_t begin = part * masks / kGroupParts, end = (part + 1) * masks / kGroupParts;
    pdl_wait();
    pdl_launch();

    uint32_t count = 0;
#pragma unroll 32
    for (uint32_t b = begin; b < end; ++b) count += __popc(args.masks[b * kExperts + expert]);
    counts[part][expert] = count;
    __syncthreads();

    uint32_t rows = 0, tiles = 0;
    uint2 before = {};  // rows, in eights, and tiles of the experts up to this
    if (part == 0) {
        for (int p = 0; p < kGroupParts; ++p) rows += counts[p][expert];
        tiles = (rows + args.most_columns - 1) / args.most_columns;
        before = make_uint2((rows + 7) / 8, tiles);
#pragma unroll
        for (int i = 1; i < 32; i *= 2) {
            const uint32_t x = __shfl_up_sync(~0u, before.x, i), y = __shfl_up_sync(~0u, before.y, i);
            if (lane >= i) before.x += x, before.y += y;
        }
        if (lane == 31) sums[expert / 32] = before;
    }
    __syncthreads();
    if (part == 0) {
        for (int w = 0; w < expert / 32; ++w) before.x += sums[w].x, before.y += sums[w].y;
        const uint32_t start = 8 * (before.x - (rows + 7) / 8);
        starts[expert] = start;
        if (expert == kExperts - 1) *args.n_tiles = before.y;
        // As even as eights allow; the last is the smallest, and not empty.
        const uint32_t each = tiles ? ((rows + tiles - 1) / tiles + 7) / 8 * 8 : 0;
        for (uint32_t i = 0; i < tiles; ++i) {
            const uint32_t of_tile = min(each, rows - i * each);
            args.tiles[before.y - tiles + i] = {uint32_t(expert), start + i * each, of_tile,
                                                tile_width(of_tile, args.most_columns)};
        }
    }
    __syncthreads();

    uint32_t place = starts[expert];
    for (int p = 0; p < part; ++p) place += counts[p][expert];
#pragma unroll 32
    for (uint32_t b = begin; b < end; ++b) {
        args.places[b * kExperts + expert] = place;
        place += __popc(args.masks[b * kExperts + expert]);
    }
}

// Thread i takes part i % 8 of the rows in panel i / 8.
extern "C" __global__ void __launch_bounds__(kRowThreads)
    prefill_gather(const __grid_constant__ PrefillGatherArgs args) {
    __shared__ uint32_t places[kGatherRows][kChosen];
    const uint32_t each = (args.rows + gridDim.x - 1) / gridDim.x, first = min(blockIdx.x * each, args.rows);
    const uint32_t rows = min(args.rows - first, each);
    const uint32_t panel = threadIdx.x / 8, part = threadIdx.x % 8;
    pdl_wait();
    pdl_launch();
    const uint4* x = reinterpret_cast<const uint4*>(args.x) + (size_t(panel) * args.panel_rows + first) * 8;
    uint4 bits[kGatherRows];
#pragma unroll
    for (int r = 0; r < kGatherRows; ++r)
        if (r < rows) bits[r] = x[8 * r + (part ^ (first + r) % 8)];
    if (threadIdx.x < rows * kChosen) {
        const uint32_t row = first + threadIdx.x / kChosen, i = first * kChosen + threadIdx.x;
        const uint32_t choice = row / kRouteRows * kExperts + args.experts[i];
        const uint32_t place = args.places[choice] + __popc(args.masks[choice] & ((1u << row % kRouteRows) - 1));
        args.sorted[i] = place;
        (&places[0][0])[threadIdx.x] = place;
    }
    __syncthreads();
    uint4* out = reinterpret_cast<uint4*>(args.out) + size_t(panel) * args.sorted_rows * 8;
#pragma unroll
    for (int r = 0; r < kGatherRows; ++r) {
        if (r >= rows) break;
#pragma unroll
        for (int s = 0; s < kChosen; ++s) {
            const uint32_t place = places[r][s];
            out[size_t(place) * 8 + (part ^ place % 8)] = bits[r];
        }
    }
}

// Thread i takes outputs 8 i to 8 i + 7.
extern "C" __global__ void __launch_bounds__(kRowThreads)
    prefill_combine(const __grid_constant__ PrefillCombineArgs args) {
    const uint32_t row = blockIdx.x;
    pdl_wait();
    pdl_launch();
    const uint4* y = reinterpret_cast<const uint4*>(args.y) + threadIdx.x;
    uint4 slots[kChosen];
    float weights[kChosen];
#pragma unroll
    for (int s = 0; s < kChosen; ++s) {
        slots[s] = y[size_t(args.sorted[row * kChosen + s]) * (kHidden / 8)];
        weights[s] = args.weights[row * kChosen + s];
    }
    const size_t at = size_t(row) * (kHidden / 8) + threadIdx.x;
    const uint4 shared = reinterpret_cast<const uint4*>(args.shared)[at];
    auto combine = [&](uint32_t (&pairs)[kChosen], uint32_t shared) {
        float low = 0.0f, high = 0.0f;
#pragma unroll
        for (int s = 0; s < kChosen; ++s) {
            low = fmaf(weights[s], bf16_low(pairs[s]), low);
            high = fmaf(weights[s], bf16_high(pairs[s]), high);
        }
        return pack_bf16(round_bf16(low) + bf16_low(shared), round_bf16(high) + bf16_high(shared));
    };
    uint32_t words[4][kChosen];
#pragma unroll
    for (int s = 0; s < kChosen; ++s)
        words[0][s] = slots[s].x, words[1][s] = slots[s].y, words[2][s] = slots[s].z, words[3][s] = slots[s].w;
    reinterpret_cast<uint4*>(args.delta)[at] = make_uint4(combine(words[0], shared.x), combine(words[1], shared.y),
                                                          combine(words[2], shared.z), combine(words[3], shared.w));
}
