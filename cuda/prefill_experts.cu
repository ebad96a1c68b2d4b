// prefill_experts.cu: the routed experts over many rows, sorted by expert (prefill_route.cu).
//
//   prefill_experts_up    act[i] = round(silu(gate_e x_i) * up_e x_i)
//   prefill_experts_down  y[i]   = round(scale_e * down_e act_i)            e = expert of sorted row i
//
// *_16 do the same for the shared expert and all rows, as prefill_swiglu and prefill_linear would, unless shared_rows
// is 0.
//
// in   x panels [32, sorted_rows, 64] bf16; gate_up [256, 64, 4] tiles, scales [256] x 2 f32
//      down [256, 128, 1] tiles, scales [256] f32; tiles, n_tiles of prefill_group
// out  act panels [8, sorted_rows, 64] bf16; y [sorted_rows, 2048] bf16; rows that no token owns may be written
//
// launch   sm_90a: *_256, for tiles of up to so many rows, geometry as Hopper of prefill_wgmma.cuh; *_64 and *_16,
//          as Narrow of prefill_narrow.cuh. Every card: *_mma, up to 64, as AnyCard of prefill_mma.cuh. Blocks are
//          persistent: the number of tiles is known on the device alone. All give the same bits
// bound    tensor cores; with few rows an expert, the weights' bytes
// PDL      the number of tiles is read before the wait and, on sm_90a, the first weights are requested: tiles are older
//          than the kernel that this one waits for; triggers right after it
#include "prefill_mma.cuh"
#include "prefill_narrow.cuh"
#include "prefill_wgmma.cuh"

namespace {
template <int kMost>
using UpWork = ExpertsWork<kMost, 64, 4, 128, 4, true>;
template <int kMost>
using DownWork = ExpertsWork<kMost, 128, 1, 128, 2, false>;
}  // namespace

#define WIDE(NAME, FORMAT, STREAM, ENDING, WORK, N, ...)                                                    \
    extern "C" __global__ void HOPPER_CLUSTER(N) __launch_bounds__(Hopper<N>::kThreads, Hopper<N>::kBlocks) \
        NAME##_##FORMAT##_##N(const __grid_constant__ PrefillExpertsArgs args) {                            \
        prefill_wide<STREAM<Hopper<N>::kAhead>, ENDING, WORK<N>, N, __VA_ARGS__>(args);                     \
    }
#define NARROW(NAME, FORMAT, PIECE, ENDING, WORK, N, ...)                                                     \
    extern "C" __global__ void __launch_bounds__(Narrow<PIECE, N, 1>::kThreads, Narrow<PIECE, N, 1>::kBlocks) \
        NAME##_##FORMAT##_##N(const __grid_constant__ PrefillExpertsArgs args) {                              \
        prefill_narrow<PIECE, ENDING, WORK<N>, N, 1, __VA_ARGS__>(args);                                      \
    }
#define ANY_CARD(NAME, FORMAT, STREAM, ENDING, WORK)                                  \
    extern "C" __global__ void __launch_bounds__(AnyCard::kThreads, AnyCard::kBlocks) \
        NAME##_##FORMAT##_mma(const __grid_constant__ PrefillExpertsArgs args) {      \
        prefill_any_card<STREAM<8>, ENDING, WORK<AnyCard::kMost>>(args);              \
    }
#define PRODUCT(NAME, FORMAT, STREAM, PIECE, ENDING, WORK)                                       \
    WIDE(NAME, FORMAT, STREAM, ENDING, WORK, 256, 256, 224, 208, 192, 176, 160, 128, 96, 64, 32) \
    NARROW(NAME, FORMAT, PIECE, ENDING, WORK, 64, 64, 32, 16, 8)                                 \
    NARROW(NAME, FORMAT, PIECE, ENDING, WORK, 16, 16, 8)                                         \
    ANY_CARD(NAME, FORMAT, STREAM, ENDING, WORK)

PRODUCT(prefill_experts_up, nvfp4, Nvfp4Stream, Nvfp4Piece, SwigluPanels, UpWork)
PRODUCT(prefill_experts_up, bf16, Bf16Stream, Bf16Piece, SwigluPanels, UpWork)
PRODUCT(prefill_experts_down, nvfp4, Nvfp4Stream, Nvfp4Piece, Bf16Rows, DownWork)
PRODUCT(prefill_experts_down, bf16, Bf16Stream, Bf16Piece, Bf16Rows, DownWork)
