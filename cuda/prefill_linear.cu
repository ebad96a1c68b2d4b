// prefill_linear.cu: products over many rows.
//
//   prefill_linear   out[n]   = round(scale * W x_n)                          bf16 rows
//   prefill_logits   out[n]   = scale * W x_n                                 f32 rows
//   prefill_swiglu   out[n,o] = round(silu(scale * gate_o x_n) * scale * up_o x_n)   panels
//
// in   x panels [k / 64, panel_rows, 64] bf16; weights [strips, k / 512] tiles; scales [strips] x 2 f32
// out  [T, out_stride]; swiglu: panels [strips / 8, out_stride, 64]
//
// launch   sm_90a: *_256 and *_128, up to so many columns a unit, geometry as Hopper<N> of prefill_wgmma.cuh; *_64 and
//          *_16, geometry as Narrow of prefill_narrow.cuh. Every card: *_mma, up to 64, as AnyCard of prefill_mma.cuh.
//          Blocks are persistent, a unit is 128 weight rows. All give the same bits
// bound    tensor cores; below some 200 rows the weights' bytes
// PDL      the first weights are requested before the wait (sm_90a); triggers right after it
#include "prefill_mma.cuh"
#include "prefill_narrow.cuh"
#include "prefill_wgmma.cuh"

#define WIDE(NAME, FORMAT, STREAM, ENDING, N)                                                               \
    extern "C" __global__ void HOPPER_CLUSTER(N) __launch_bounds__(Hopper<N>::kThreads, Hopper<N>::kBlocks) \
        NAME##_##FORMAT##_##N(const __grid_constant__ PrefillLinearArgs args) {                             \
        prefill_wide<STREAM<Hopper<N>::kAhead>, ENDING, LinearWork<N>, N, N>(args);                         \
    }
#define NARROW(NAME, FORMAT, PIECE, ENDING, N, SPLIT)                                                                 \
    extern "C" __global__ void __launch_bounds__(Narrow<PIECE, N, SPLIT>::kThreads, Narrow<PIECE, N, SPLIT>::kBlocks) \
        NAME##_##FORMAT##_##N(const __grid_constant__ PrefillLinearArgs args) {                                       \
        prefill_narrow<PIECE, ENDING, LinearWork<N>, N, SPLIT, N>(args);                                              \
    }
#define ANY_CARD(NAME, FORMAT, STREAM, ENDING)                                        \
    extern "C" __global__ void __launch_bounds__(AnyCard::kThreads, AnyCard::kBlocks) \
        NAME##_##FORMAT##_mma(const __grid_constant__ PrefillLinearArgs args) {       \
        prefill_any_card<STREAM<8>, ENDING, LinearWork<AnyCard::kMost>>(args);        \
    }
// SPLIT is that of 64 columns.
#define PRODUCT(NAME, FORMAT, STREAM, PIECE, ENDING, SPLIT) \
    WIDE(NAME, FORMAT, STREAM, ENDING, 256)                 \
    WIDE(NAME, FORMAT, STREAM, ENDING, 128)                 \
    NARROW(NAME, FORMAT, PIECE, ENDING, 64, SPLIT)          \
    NARROW(NAME, FORMAT, PIECE, ENDING, 16, 2)              \
    ANY_CARD(NAME, FORMAT, STREAM, ENDING)

PRODUCT(prefill_linear, nvfp4, Nvfp4Stream, Nvfp4Piece, Bf16Rows, 2)
PRODUCT(prefill_linear, bf16, Bf16Stream, Bf16Piece, Bf16Rows, 2)
PRODUCT(prefill_logits, nvfp4, Nvfp4Stream, Nvfp4Piece, F32Rows, 1)
PRODUCT(prefill_logits, bf16, Bf16Stream, Bf16Piece, F32Rows, 2)
PRODUCT(prefill_swiglu, nvfp4, Nvfp4Stream, Nvfp4Piece, SwigluPanels, 2)
PRODUCT(prefill_swiglu, bf16, Bf16Stream, Bf16Piece, SwigluPanels, 2)
