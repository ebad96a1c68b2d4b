// decode_down.cu: the second half of a MoE layer.
//
//   y[n, s]  = round(scale_e * down_e act[n, s])            e = expert of slot s of row n
//   delta[n] = round(round(sum over s of w[n, s] * y[n, s]) + round(scale * shared_down act_shared[n]))
//
// in   scores [B, 256] f32; down [256, 128] tiles; scales [256] f32; shared_down [128, 2] tiles
//      act [B, 6, 512] bf16 by slot; act_shared [B, 1024] bf16
// out  delta [B, 2048] bf16
//
// launch   grid 128 or more, of which those from 128 on only wait: a block owns 16 outputs; 8 warps, from 4 rows on
//          12, take its tiles in turn, one of each listed expert, then the shared two. A warp stages the inputs of its
//          own tiles
// bound    memory: (distinct experts + 2) * 128 tiles; at one row the latency of the chain
// PDL      the experts are chosen, and the first tiles requested, before the wait: the scores are older than the kernel
//          that this one waits for. Triggers first
#include "gemv.cuh"
#include "routing.cuh"

namespace {

constexpr int kWidth = 512;
constexpr int kSharedWidth = 1024;
constexpr int kSharedTiles = kSharedWidth / kTileK;
constexpr int kStrips = kHidden / kTileRows;
constexpr int kParts = kChosen + kSharedTiles;  // sums of one output: slots, then tiles of the shared expert

// One row has 8 tiles.
__host__ __device__ constexpr int warps_of(int rows) { return rows < 4 ? 8 : 12; }

template <typename Tile, int NB>
__device__ __forceinline__ void decode_down(const DecodeDownArgs& args) {
    constexpr int kWarps = warps_of(NB);
    extern __shared__ __align__(16) uint8_t shared[];
    uint8_t* x_experts = shared;                                                     // [NB * 6] rows of 512
    uint8_t* x_shared = x_experts + NB * kChosen * x_stride(kWidth);                 // [NB] rows of 1024
    float* sums = reinterpret_cast<float*>(x_shared + NB * x_stride(kSharedWidth));  // [NB, kParts, 16]
    Routing<NB>& routing = *reinterpret_cast<Routing<NB>*>(sums + NB * kParts * 16);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int strip = blockIdx.x, rows = args.rows;
    // Early, while blocks that only wait are there.
    pdl_launch();
    if (strip >= kStrips) return pdl_wait();

    if (NB > 1) {
        routing.clear();
        __syncthreads();
    }
    if (warp < NB) route<NB>(routing, args.scores, warp, rows, 1, [](int) {});
    __syncthreads();
    const int n_list = NB == 1 ? kChosen : routing.n_list, n_tiles = n_list + kSharedTiles;
    auto tile_at = [&](int i) {
        return i < n_list ? args.down + (size_t(routing.list[i]) * kStrips + strip) * Tile::kBytes
                          : args.shared_down + (size_t(strip) * kSharedTiles + i - n_list) * Tile::kBytes;
    };
    auto slot_of = [&](int i, int row) { return int(routing.slots[i][row]); };
    // The shared expert's parts are added before its scale comes in.
    auto scale_of = [&](int i) {
        return i < n_list ? load_scale(args.scales + routing.list[i]) * Tile::kWeightScale : 1.0f;
    };
    Tile tile;
    float scale = 1.0f;
    if (warp < n_tiles) {
        load_tile(tile, tile_at(warp), lane);
        scale = scale_of(warp);
    }
    // Of one row, the inputs and the part of the warp's only tile: all that can be worked out before the wait is.
    uint8_t* own_x = nullptr;
    int own_part = 0;
    if constexpr (NB == 1) {
        static_assert(kWarps == kParts);
        const bool routed = warp < kChosen;
        const int slot = routed ? slot_of(warp, 0) : 0, part = warp - kChosen;
        const __nv_bfloat16* from = routed ? args.act + slot * kWidth : args.act_shared + kTileK * part;
        own_x = routed ? x_experts + slot * x_stride(kWidth) : x_shared + 2 * kTileK * part;
        own_part = routed ? slot : warp;
        pdl_wait();
        copy_parts<2>([&](int i, const uint4*& global, uint4*& shared) {
            global = reinterpret_cast<const uint4*>(from) + 32 * i + lane;
            shared = reinterpret_cast<uint4*>(own_x) + 32 * i + lane;
            return true;
        });
    } else {
        pdl_wait();
        // Each warp stages what its own tiles need: of an expert, the rows that chose it. A lane looks at one pair of
        // them.
        auto stage = [&](uint8_t* to, const __nv_bfloat16* from) {
            copy_async_16(to + 16 * lane, from + 8 * lane);
            copy_async_16(to + 512 + 16 * lane, from + 256 + 8 * lane);
        };
        constexpr int kPairs = 32 / NB;
        for (int first = warp; first < n_list; first += kPairs * kWarps) {
            const int entry = first + lane / NB * kWarps, row = lane % NB;
            const int own = entry < n_list ? slot_of(entry, row) : -1;
            for (uint32_t there = __ballot_sync(~0u, own >= 0); there; there &= there - 1) {
                const int from = __ffs(there) - 1, slot = from % NB * kChosen + __shfl_sync(~0u, own, from);
                stage(x_experts + slot * x_stride(kWidth), args.act + slot * kWidth);
            }
        }
        for (int part = 0; part < kSharedTiles; ++part) {
            if ((n_list + part) % kWarps != warp) continue;
            for (int row = 0; row < rows; ++row) {
                stage(x_shared + row * x_stride(kSharedWidth) + 2 * kTileK * part,
                      args.act_shared + row * kSharedWidth + kTileK * part);
            }
        }
        copy_async_join();
    }
    __syncwarp();

    for (int i = warp; i < n_tiles; i += kWarps) {
        const bool routed = i < n_list;
        const uint8_t* x = own_x;
        if constexpr (NB > 1) {
            // The lane's column of x: for an expert, the slot of row g that chose it. Other lanes take a row that did:
            // what they multiply is not used, but it must be there.
            const int row = g % NB, slot = routed ? slot_of(i, row) : row < rows ? 0 : -1;
            const uint32_t there = __ballot_sync(~0u, slot >= 0);
            const int own = routed ? (row * kChosen + slot) * x_stride(kWidth) : row * x_stride(kSharedWidth);
            const int offset = __shfl_sync(~0u, own, slot >= 0 ? lane : __ffs(there) - 1);
            x = (routed ? x_experts : x_shared + 2 * kTileK * (i - n_list)) + offset;
        }
        Accumulator sum;
        sum.clear();
        const bool more = NB > 1 && i + kWarps < n_tiles;
        multiply_tile(tile, sum, reinterpret_cast<const uint4*>(x + 32 * t), tile_at(i),
                      more ? tile_at(i + kWarps) : nullptr, lane);
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            const int column = 2 * t + q;
            if (column >= NB) continue;
            const int part = NB == 1 ? own_part : routed ? slot_of(i, column) : kChosen + i - n_list;
            if (part < 0) continue;
            float* to = sums + (column * kParts + part) * 16;
            const float low = sum.sum(q) * scale, high = sum.sum(2 + q) * scale;
            to[g] = routed ? round_bf16(low) : low;
            to[g + 8] = routed ? round_bf16(high) : high;
        }
        if (more) scale = scale_of(i + kWarps);
    }
    __syncthreads();

    for (int i = threadIdx.x; i < 16 * NB; i += kWarps * 32) {
        const int column = i / 16, row = i % 16;
        if (column >= rows) break;
        const float* from = sums + column * kParts * 16 + row;
        float routed = 0.0f, shared_sum = 0.0f;
#pragma unroll
        for (int s = 0; s < kChosen; ++s) routed = fmaf(routing.weights[column][s], from[s * 16], routed);
#pragma unroll
        for (int s = 0; s < kSharedTiles; ++s) shared_sum += from[(kChosen + s) * 16];
        const float shared_out = round_bf16(shared_sum * Tile::kWeightScale * args.shared_scale);
        args.delta[column * kHidden + strip * 16 + row] = __float2bfloat16_rn(round_bf16(routed) + shared_out);
    }
}

}  // namespace

// The bound leaves room for a block of the kernel before or after, as far as BF16 tiles allow.
#define DECODE_DOWN(FORMAT, TILE, NB, BESIDE)                                      \
    extern "C" __global__ void __launch_bounds__(warps_of(NB) * 32 + BESIDE)       \
        decode_down_##FORMAT##_##NB(const __grid_constant__ DecodeDownArgs args) { \
        decode_down<TILE, NB>(args);                                               \
    }

DECODE_DOWN(nvfp4, Nvfp4Tile, 1, 384)
DECODE_DOWN(nvfp4, Nvfp4Tile, 2, 384)
DECODE_DOWN(nvfp4, Nvfp4Tile, 4, 384)
DECODE_DOWN(nvfp4, Nvfp4Tile, 8, 384)
DECODE_DOWN(bf16, Bf16Tile, 1, 384)
DECODE_DOWN(bf16, Bf16Tile, 2, 256)
DECODE_DOWN(bf16, Bf16Tile, 4, 128)
DECODE_DOWN(bf16, Bf16Tile, 8, 128)
