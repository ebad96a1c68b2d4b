// decode_experts_up.cu: the first half of a MoE layer's experts.
//
//   act[n, slot]  = round(silu(gate_e x_n) * up_e x_n),  e = expert of slot `slot` of row n (ascending by index)
//   act_shared[n] = round(silu(gate x_n) * up x_n)       the shared expert, width 1024
//
// in   x [B, 2048] bf16 normed; scores [B, 256] f32; gate_up [256, 64, 4] tiles, shared_gate_up [128, 4] tiles;
//      scales [256] and shared_scales [128] x 2 f32 (gate, up)
// out  act [B, 6, 512] bf16; act_shared [B, 1024] bf16
//
// launch   grid 128, groups of 4 warps that split k: 4 groups at one row, else 3. The last group has a strip of the
//          shared expert first; then the groups take (listed expert, strip) pairs in turn. An expert that several rows
//          chose is read once
// bound    memory: distinct experts * 64 * 4 tiles; at one row the latency: ids are known only after the wait
// PDL      the shared expert's strip is requested before the wait, and multiplied while the others' weights come in. At
//          one row a group requests its expert as soon as that is chosen, not when all are. Triggers behind the choice
#include "gemv.cuh"
#include "routing.cuh"

namespace {

constexpr int kWidth = 512;
constexpr int kSharedWidth = 1024;
constexpr int kStrips = kWidth / 8;
constexpr int kBlocks = kSharedWidth / 8;
constexpr int kSplit = 4;
constexpr int kShared = -1;  // the unit of work that is a strip of the shared expert
// Named barriers; those from 1 on are the groups'.
constexpr int kAmongChoosers = 5, kChosenFor = 6;

// One row has 384 pairs, which are three groups' one pair each: the shared expert takes a fourth.
__host__ __device__ constexpr int groups_of(int rows) { return rows == 1 ? 4 : 3; }
__host__ __device__ constexpr int threads_of(int rows) { return groups_of(rows) * kSplit * 32; }

template <typename Tile, int NB>
__device__ __forceinline__ void decode_experts_up(const DecodeExpertsUpArgs& args) {
    constexpr int kGroups = groups_of(NB), kThreads = threads_of(NB), kWarps = kThreads / 32;
    constexpr int kGroupThreads = kSplit * 32, kStep = kBlocks * kGroups;
    extern __shared__ __align__(16) uint8_t shared[];
    float* sums = reinterpret_cast<float*>(shared + NB * x_stride(kHidden));  // [2, kWarps, 16, NB]
    Routing<NB>& routing = *reinterpret_cast<Routing<NB>*>(sums + 2 * kWarps * 16 * NB);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int group = warp / kSplit, split = warp % kSplit;
    const bool last = group == kGroups - 1;
    const int rows = args.rows, first = blockIdx.x + kBlocks * group;
    // Warps that choose for a row each, and those that stage x. At one row the choice is the last group's, which has
    // time: its weights are there.
    const int chooser = warp - (NB == 1 ? kWarps - kSplit : 0), stager = threadIdx.x - (NB == 1 ? 0 : 8 * 32);
    constexpr int kStagers = NB == 1 ? 8 * 32 : kThreads - 8 * 32;
    auto units = [&] { return (NB == 1 ? kChosen : routing.n_list) * kStrips; };

    Tile tile;
    float2 scales = {};
    auto tile_at = [&](int unit) {
        const uint8_t* strip = args.shared_gate_up + size_t(blockIdx.x) * kSplit * Tile::kBytes;
        if (unit != kShared) {
            strip = args.gate_up +
                    (size_t(routing.list[unit / kStrips]) * kStrips + unit % kStrips) * kSplit * Tile::kBytes;
        }
        return strip + split * Tile::kBytes;
    };
    auto request_scales = [&](int unit) {
        const float2* from = args.shared_scales + blockIdx.x;
        if (unit != kShared) from = args.scales + routing.list[unit / kStrips];
        scales = load_scales(from);
    };
    auto request = [&](int unit) {
        load_tile(tile, tile_at(unit), lane);
        request_scales(unit);
    };
    int unit = last ? kShared : first;
    if (last) request(kShared);
    routing.clear();
    __syncthreads();
    pdl_wait();

    if (chooser >= 0 && chooser < NB) {
        route<NB>(routing, args.scores, chooser, rows, kAmongChoosers, [&](int k) {
            if (NB > 1 || k % 2 != first / kStrips % 2) return;
            named_arrive(kChosenFor + k / 2, 32 + kGroupThreads);
        });
    } else {
        if (stager >= 0 && stager < kStagers) stage_x<NB, kHidden, kStagers>(shared, args.x, rows, stager);
        if (NB == 1 && !last) {
            named_sync(kChosenFor + group, 32 + kGroupThreads);
            request(unit);
        }
    }
    __syncthreads();
    if (NB > 1 && !last && unit < units()) request(unit);
    // Only now: the requests that decode_down makes before its wait would be in front of these.
    pdl_launch();

    for (int parity = 0; unit < units(); parity ^= 1) {
        const int following = unit == kShared ? first : unit + kStep;
        const bool more = NB > 1 && following < units();
        Accumulator sum;
        sum.clear();
        multiply_tile(tile, sum, lane_inputs<NB>(shared, kHidden, split, lane), tile_at(unit),
                      more ? tile_at(following) : nullptr, lane);
        // Two sets of sums in turn: a warp that is a strip ahead does not overwrite what the others still read.
        float* mine = sums + (parity * kWarps + group * kSplit) * 16 * NB;
        put_sums<NB>(mine + split * 16 * NB, sum, lane);
        named_sync(group + 1, kGroupThreads);
        for (int i = split * 32 + lane; i < 8 * NB; i += kGroupThreads) {
            const int row = i % 8, column = i / 8, entry = unit / kStrips;
            __nv_bfloat16* to;
            if (unit == kShared) {
                if (column >= rows) break;
                to = args.act_shared + column * kSharedWidth + blockIdx.x * 8;
            } else {
                const int slot = routing.slots[entry][column];
                if (slot < 0) continue;
                to = args.act + (column * kChosen + slot) * kWidth + unit % kStrips * 8;
            }
            to[row] = swiglu<Tile, NB, kSplit>(mine, row, column, scales);
        }
        if (!more) break;
        unit = following;
        request_scales(unit);
    }
}

}  // namespace

// Registers that leave room for a block of decode_down, which chooses and requests its weights meanwhile. BF16 tiles
// leave none.
#define DECODE_EXPERTS_UP(FORMAT, TILE, NB, REGISTERS)                                        \
    extern "C" __global__ void __maxnreg__(REGISTERS)                                         \
        decode_experts_up_##FORMAT##_##NB(const __grid_constant__ DecodeExpertsUpArgs args) { \
        decode_experts_up<TILE, NB>(args);                                                    \
    }

DECODE_EXPERTS_UP(nvfp4, Nvfp4Tile, 1, 72)
DECODE_EXPERTS_UP(nvfp4, Nvfp4Tile, 2, 96)
DECODE_EXPERTS_UP(nvfp4, Nvfp4Tile, 4, 88)
DECODE_EXPERTS_UP(nvfp4, Nvfp4Tile, 8, 88)
DECODE_EXPERTS_UP(bf16, Bf16Tile, 1, 128)
DECODE_EXPERTS_UP(bf16, Bf16Tile, 2, 168)
DECODE_EXPERTS_UP(bf16, Bf16Tile, 4, 168)
DECODE_EXPERTS_UP(bf16, Bf16Tile, 8, 168)
