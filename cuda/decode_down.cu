// decode_down.cu: the second half of a MoE layer.
//
//   y[n, s]  = round(scale_e * down_e act[n, s])            e = expert of slot s of row n
//   delta[n] = round(round(sum over s of w[n, s] * y[n, s]) + round(scale * shared_down act_shared[n]))
//
// in   logits [B, 256] f32; down [256, 128] tiles; scales [256] f32; shared_down [128, 2] tiles
//      act [B, 6, 512] bf16 by slot; act_shared [B, 1024] bf16
// out  delta [B, 2048] bf16
//
// launch   grid 128: a block owns 16 outputs; 8 warps take its tiles in turn, one of each listed expert, then the
// shared two bound    memory: (distinct experts + 2) * 128 tiles; at one row the latency of the chain PDL      the
// experts are chosen, and the first tiles requested, before the wait: the logits are older than the kernel
//          that this one waits for
#include "gemv.cuh"
#include "routing.cuh"

namespace {

constexpr int kWidth = 512;
constexpr int kSharedWidth = 1024;
constexpr int kSharedTiles = kSharedWidth / kTileK;
constexpr int kStrips = kHidden / kTileRows;
constexpr int kWarps = 8;
constexpr int kParts = kChosen + kSharedTiles;  // sums of one output: slots, then tiles of the shared expert

template <typename Tile, int NB>
__device__ __forceinline__ void decode_down(const DecodeDownArgs& args) {
    extern __shared__ __align__(16) uint8_t shared[];
    uint8_t* x_experts = shared;                                                     // [NB * 6] rows of 512
    uint8_t* x_shared = x_experts + NB * kChosen * x_stride(kWidth);                 // [NB] rows of 1024
    float* sums = reinterpret_cast<float*>(x_shared + NB * x_stride(kSharedWidth));  // [NB, kParts, 16]
    Routing<NB>& routing = *reinterpret_cast<Routing<NB>*>(sums + NB * kParts * 16);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int strip = blockIdx.x;

    route<NB>(routing, args.logits, args.rows);
    const int n_list = routing.n_list, n_tiles = n_list + kSharedTiles;
    auto tile_at = [&](int i) {
        return i < n_list ? args.down + (size_t(routing.list[i]) * kStrips + strip) * Tile::kBytes
                          : args.shared_down + (size_t(strip) * kSharedTiles + i - n_list) * Tile::kBytes;
    };
    Tile tile;
    int i = warp;
    if (i < n_tiles) load_tile(tile, tile_at(i), lane);
    pdl_wait();
    pdl_launch();
    stage_x<NB * kChosen, kWarps * 32>(x_experts, args.act, kWidth, args.rows * kChosen);
    stage_x<NB, kWarps * 32>(x_shared, args.act_shared, kSharedWidth, args.rows);
    copy_async_join();
    __syncthreads();

    for (; i < n_tiles; i += kWarps) {
        const bool routed = i < n_list;
        // The lane's column of x: for an expert, the slot of row g that chose it, or any when none did.
        const int row = g % NB;
        const uint8_t* x = routed ? x_experts + (row * kChosen + max(int(routing.slots[i][row]), 0)) * x_stride(kWidth)
                                  : x_shared + row * x_stride(kSharedWidth) + 2 * kTileK * (i - n_list);
        Accumulator sum;
        sum.clear();
        const uint8_t* next = i + kWarps < n_tiles ? tile_at(i + kWarps) : nullptr;
        multiply_tile(tile, sum, reinterpret_cast<const uint4*>(x + 32 * t), next, lane);
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            const int column = 2 * t + q;
            if (column >= NB) continue;
            const int part = routed ? routing.slots[i][column] : kChosen + i - n_list;
            if (part < 0) continue;
            float* to = sums + (column * kParts + part) * 16;
            to[g] = sum.sum(q);
            to[g + 8] = sum.sum(2 + q);
        }
    }
    __syncthreads();

    for (int i = threadIdx.x; i < 16 * NB; i += kWarps * 32) {
        const int column = i / 16, row = i % 16;
        if (column >= int(args.rows)) break;
        const float* from = sums + column * kParts * 16 + row;
        float routed = 0.0f, shared_sum = 0.0f;
#pragma unroll
        for (int s = 0; s < kChosen; ++s) {
            const float scale = args.scales[routing.experts[column][s]] * Tile::kWeightScale;
            routed = fmaf(routing.weights[column][s], round_bf16(from[s * 16] * scale), routed);
        }
#pragma unroll
        for (int s = 0; s < kSharedTiles; ++s) shared_sum += from[(kChosen + s) * 16];
        const float shared_out = round_bf16(shared_sum * Tile::kWeightScale * args.shared_scale);
        args.delta[column * kHidden + strip * 16 + row] = __float2bfloat16_rn(round_bf16(routed) + shared_out);
    }
}

}  // namespace

#define DECODE_DOWN(FORMAT, TILE, NB)                                              \
    extern "C" __global__ void __launch_bounds__(kWarps * 32)                      \
        decode_down_##FORMAT##_##NB(const __grid_constant__ DecodeDownArgs args) { \
        decode_down<TILE, NB>(args);                                               \
    }

DECODE_DOWN(nvfp4, Nvfp4Tile, 1)
DECODE_DOWN(nvfp4, Nvfp4Tile, 2)
DECODE_DOWN(nvfp4, Nvfp4Tile, 4)
DECODE_DOWN(nvfp4, Nvfp4Tile, 8)
DECODE_DOWN(bf16, Bf16Tile, 1)
DECODE_DOWN(bf16, Bf16Tile, 2)
DECODE_DOWN(bf16, Bf16Tile, 4)
DECODE_DOWN(bf16, Bf16Tile, 8)
