// prefill_route.cu: what turns rows into work for experts and back, all in a fixed order.
//
//   prefill_route         the 6 experts of each row and their weights; a bit for each row of 32 and expert
//   prefill_group         each expert's first sorted row (a multiple of 8; rows of an expert ascend), its tiles
//   prefill_gather        the panels' rows, copied to where their experts want them
//   prefill_gather_few    the same for up to 256 rows, beside prefill_group
//   prefill_combine       delta[n] = round(round(sum over slots s of w[n, s] * y[sorted row of n, s]) + shared[n])
//   prefill_combine_norm  the same, with the next layer's norm over it as in prefill_norm.cu instead of a delta
//
// in, out  as args_prefill.h
// launch   route: a block for 8 rows, a warp each, so that no scheduler has more than two; group: one block; gather: a
//          block for up to 8 rows; gather_few and combine: a block a row
// bound    memory: gather writes 6 rows and combine reads 7 for each. Few rows: latency
// PDL      what is older than the kernel in front is requested before the wait: where combine's rows lie and their
//          weights, the residual stream, and all that gather_few reads
#include "args_prefill.h"
#include "panel_norm.cuh"
#include "routing.cuh"

namespace {

constexpr int kMaskRows = 32;
constexpr int kRouteRows = 8;
constexpr int kRouterParts = 3;  // BF16 matrices that add up to the router
constexpr int kGroupThreads = 1024;
constexpr int kGroupParts = kGroupThreads / kExperts;
constexpr int kRowThreads = kHidden / 8;
constexpr int kFewMasks = 8;  // of an expert, at most, in prefill_gather_few

constexpr int kGatherRows = 8;  // a block, at most

// The columns that a tile of `rows` rows is multiplied with, of a kernel for up to `most`.
__device__ __forceinline__ uint32_t tile_width(uint32_t rows, uint32_t most) {
    if (most > 64) return rows > 160 && rows <= 208 ? (rows + 15) / 16 * 16 : (rows + 31) / 32 * 32;
    return rows > 32 ? 64 : rows > 16 ? 32 : rows > 8 ? 16 : 8;
}

// Eight outputs of a row from the 6 rows that experts made of it and the shared expert's.
struct Combination {
    uint32_t sorted[kChosen];
    float weights[kChosen];

    // Before the wait.
    __device__ __forceinline__ Combination(const uint32_t* all_sorted, const float* all_weights, uint32_t row) {
#pragma unroll
        for (int s = 0; s < kChosen; ++s) {
            sorted[s] = all_sorted[row * kChosen + s];
            weights[s] = all_weights[row * kChosen + s];
        }
    }

    __device__ __forceinline__ uint4 of(const __nv_bfloat16* y, const __nv_bfloat16* shared_rows, uint32_t row) const {
        const uint4* from = reinterpret_cast<const uint4*>(y) + threadIdx.x;
        uint4 slots[kChosen];
#pragma unroll
        for (int s = 0; s < kChosen; ++s) slots[s] = from[size_t(sorted[s]) * kRowThreads];
        const uint4 shared = reinterpret_cast<const uint4*>(shared_rows)[size_t(row) * kRowThreads + threadIdx.x];
        uint32_t words[4][kChosen];
#pragma unroll
        for (int s = 0; s < kChosen; ++s)
            words[0][s] = slots[s].x, words[1][s] = slots[s].y, words[2][s] = slots[s].z, words[3][s] = slots[s].w;
        return make_uint4(pair(words[0], shared.x), pair(words[1], shared.y), pair(words[2], shared.z),
                          pair(words[3], shared.w));
    }

private:
    __device__ __forceinline__ uint32_t pair(const uint32_t (&pairs)[kChosen], uint32_t shared) const {
        float low = 0.0f, high = 0.0f;
#pragma unroll
        for (int s = 0; s < kChosen; ++s) {
            low = fmaf(weights[s], bf16_low(pairs[s]), low);
            high = fmaf(weights[s], bf16_high(pairs[s]), high);
        }
        return pack_bf16(round_bf16(low) + bf16_low(shared), round_bf16(high) + bf16_high(shared));
    }
};

}  // namespace

extern "C" __global__ void __launch_bounds__(kRouteRows * 32)
    prefill_route(const __grid_constant__ PrefillRouteArgs args) {
    __shared__ uint32_t bits[kExperts];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t row = blockIdx.x * kRouteRows + warp;
    bits[threadIdx.x] = 0;
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
            atomicOr(&bits[choice.expert], 1u << warp);
        }
    }
    __syncthreads();
    // The block's byte of each mask.
    constexpr int kBlocks = kMaskRows / kRouteRows;
    const uint32_t mask = blockIdx.x / kBlocks * kExperts + threadIdx.x;
    reinterpret_cast<uint8_t*>(args.masks + mask)[blockIdx.x % kBlocks] = uint8_t(bits[threadIdx.x]);
}

// Thread (part, e) counts expert e's rows in its part of the masks.
extern "C" __global__ void __launch_bounds__(kGroupThreads)
    prefill_group(const __grid_constant__ PrefillGroupArgs args) {
    __shared__ uint32_t counts[kGroupParts][kExperts];
    __shared__ uint2 sums[kExperts / 32];
    __shared__ uint32_t starts[kExperts];
    const int part = threadIdx.x / kExperts, expert = threadIdx.x % kExperts, lane = threadIdx.x % 32;
    const uint32_t masks = (args.rows + kMaskRows - 1) / kMaskRows;
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
        const uint32_t choice = row / kMaskRows * kExperts + args.experts[i];
        const uint32_t place = args.places[choice] + __popc(args.masks[choice] & ((1u << row % kMaskRows) - 1));
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

// Thread i takes part i % 8 of the block's row in panel i / 8, and finds where expert i's rows begin. What it reads is
// older than prefill_group.
extern "C" __global__ void __launch_bounds__(kRowThreads)
    prefill_gather_few(const __grid_constant__ PrefillGatherArgs args) {
    static_assert(kRowThreads == kExperts);
    __shared__ uint32_t sums[kExperts / 32];
    __shared__ uint32_t places[kExperts];
    const uint32_t row = blockIdx.x, expert = threadIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t panel = threadIdx.x / 8, part = threadIdx.x % 8;
    const uint4* x = reinterpret_cast<const uint4*>(args.x) + (size_t(panel) * args.panel_rows + row) * 8;
    const uint4 bits = x[part ^ row % 8];
    const uint32_t n_masks = (args.rows + kMaskRows - 1) / kMaskRows;
    uint32_t masks[kFewMasks], chosen[kChosen];
#pragma unroll
    for (int b = 0; b < kFewMasks; ++b) masks[b] = b < n_masks ? args.masks[b * kExperts + expert] : 0;
#pragma unroll
    for (int s = 0; s < kChosen; ++s) chosen[s] = args.experts[row * kChosen + s];
    pdl_wait();
    pdl_launch();

    uint32_t rows = 0, before = 0;  // of the expert; those that come before the block's
#pragma unroll
    for (int b = 0; b < kFewMasks; ++b) {
        const int lower = int(row) - b * kMaskRows;  // rows of the mask that come before
        rows += __popc(masks[b]);
        before += __popc(masks[b] & (lower >= kMaskRows ? ~0u : (1u << max(lower, 0)) - 1));
    }
    const uint32_t eights = (rows + 7) / 8;
    uint32_t up_to = running_sum(eights, lane);
    if (lane == 31) sums[warp] = up_to;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kExperts / 32; ++w) up_to += w < warp ? sums[w] : 0;
    places[expert] = 8 * (up_to - eights) + before;
    __syncthreads();
    uint4* out = reinterpret_cast<uint4*>(args.out) + size_t(panel) * args.sorted_rows * 8;
#pragma unroll
    for (int s = 0; s < kChosen; ++s) {
        const uint32_t place = places[chosen[s]];
        if (threadIdx.x == s) args.sorted[row * kChosen + s] = place;
        out[size_t(place) * 8 + (part ^ place % 8)] = bits;
    }
}

// Thread i takes outputs 8 i to 8 i + 7.
extern "C" __global__ void __launch_bounds__(kRowThreads)
    prefill_combine(const __grid_constant__ PrefillCombineArgs args) {
    const uint32_t row = blockIdx.x;
    const Combination combination(args.sorted, args.weights, row);
    pdl_wait();
    pdl_launch();
    reinterpret_cast<uint4*>(args.delta)[size_t(row) * kRowThreads + threadIdx.x] =
        combination.of(args.y, args.shared, row);
}

// The same. The residual stream is older than the kernel in front.
extern "C" __global__ void __launch_bounds__(kRowThreads)
    prefill_combine_norm(const __grid_constant__ PrefillCombineNormArgs args) {
    static_assert(kRowThreads == BlockNorm::kThreads);
    __shared__ float4 sums[kNormWarps / 4];
    const uint32_t row = blockIdx.x;
    uint4* residual = reinterpret_cast<uint4*>(args.residual);
    const Combination combination(args.sorted, args.weights, row);
    const BlockNorm norm(args.norm_weight);
    const uint4 before = residual[size_t(row) * kRowThreads + threadIdx.x];
    pdl_wait();
    pdl_launch();
    norm.finish(combination.of(args.y, args.shared, row), before, sums, residual, reinterpret_cast<uint4*>(args.normed),
                args.panel_rows, row, args.eps);
}
