// decode_experts_up.cu: the chosen experts' first half.
//
//   act[n, slot] = round(silu(gate_e x_n) * up_e x_n),  e = expert of slot `slot` of row n (ascending by index)
//
// in   x [B, 2048] bf16 normed; logits [B, 256] f32; gate_up [256, 64, 4] tiles; scales [256] x 2 f32 (gate, up)
// out  act [B, 6, 512] bf16
//
// launch   grid 128, 12 warps: 3 groups of 4 warps that split k; a group takes (listed expert, strip) pairs in turn. An
// expert
//          that several rows chose is read once
// bound    memory: distinct experts * 64 * 4 tiles; at one row the latency: ids are known only after the wait
// PDL      nothing can be requested before the wait: router logits come from the kernel before
#include "gemv.cuh"
#include "routing.cuh"

namespace {

constexpr int kWidth = 512;
constexpr int kStrips = kWidth / 8;
constexpr int kSplit = 4;
constexpr int kGroups = 3;
constexpr int kWarps = kSplit * kGroups;

template <typename Tile, int NB>
__device__ __forceinline__ void decode_experts_up(const DecodeExpertsUpArgs& args) {
    extern __shared__ __align__(16) uint8_t shared[];
    float* sums = reinterpret_cast<float*>(shared + NB * x_stride(kHidden));  // [2, kWarps, 16, NB]
    Routing<NB>& routing = *reinterpret_cast<Routing<NB>*>(sums + 2 * kWarps * 16 * NB);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int group = warp / kSplit, split = warp % kSplit;

    pdl_wait();
    pdl_launch();
    stage_x<NB, kWarps * 32>(shared, args.x, kHidden, args.rows);
    route<NB>(routing, args.logits, args.rows);

    const int units = routing.n_list * kStrips, step = gridDim.x * kGroups;
    int unit = blockIdx.x + gridDim.x * group;
    auto tile_at = [&](int unit) {
        const size_t strip = size_t(routing.list[unit / kStrips]) * kStrips + unit % kStrips;
        return args.gate_up + (strip * kSplit + split) * Tile::kBytes;
    };
    Tile tile;
    if (unit < units) load_tile(tile, tile_at(unit), lane);
    copy_async_join();
    __syncthreads();

    for (int parity = 0; unit < units; unit += step, parity ^= 1) {
        Accumulator sum;
        sum.clear();
        const uint8_t* next = unit + step < units ? tile_at(unit + step) : nullptr;
        multiply_tile(tile, sum, lane_inputs<NB>(shared, kHidden, split, lane), next, lane);
        float* mine = sums + (parity * kWarps + group * kSplit) * 16 * NB;
        put_sums<NB>(mine + split * 16 * NB, sum, lane);
        asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kSplit * 32) : "memory");

        const int entry = unit / kStrips, strip = unit % kStrips;
        const float2 scales = args.scales[routing.list[entry]];
        for (int i = split * 32 + lane; i < 8 * NB; i += kSplit * 32) {
            const int row = i % 8, column = i / 8;
            const int slot = routing.slots[entry][column];
            if (slot < 0) continue;
            float gate = 0.0f, up = 0.0f;
#pragma unroll
            for (int s = 0; s < kSplit; ++s) {
                gate += mine[(s * 16 + row) * NB + column];
                up += mine[(s * 16 + row + 8) * NB + column];
            }
            gate = gate * Tile::kWeightScale * scales.x;
            up = up * Tile::kWeightScale * scales.y;
            args.act[(column * kChosen + slot) * kWidth + strip * 8 + row] = __float2bfloat16_rn(silu(gate) * up);
        }
    }
}

}  // namespace

#define DECODE_EXPERTS_UP(FORMAT, TILE, NB)                                                   \
    extern "C" __global__ void __launch_bounds__(kWarps * 32)                                 \
        decode_experts_up_##FORMAT##_##NB(const __grid_constant__ DecodeExpertsUpArgs args) { \
        decode_experts_up<TILE, NB>(args);                                                    \
    }

DECODE_EXPERTS_UP(nvfp4, Nvfp4Tile, 1)
DECODE_EXPERTS_UP(nvfp4, Nvfp4Tile, 2)
DECODE_EXPERTS_UP(nvfp4, Nvfp4Tile, 4)
DECODE_EXPERTS_UP(nvfp4, Nvfp4Tile, 8)
DECODE_EXPERTS_UP(bf16, Bf16Tile, 1)
DECODE_EXPERTS_UP(bf16, Bf16Tile, 2)
DECODE_EXPERTS_UP(bf16, Bf16Tile, 4)
DECODE_EXPERTS_UP(bf16, Bf16Tile, 8)
