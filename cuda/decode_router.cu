// decode_router.cu: what a MoE layer computes from its normed input alone.
//
//   n          = norm(delta + residual)
//   logits[e]  = router[e] . n                           fp32, e = 0..255
//   act_shared = round(silu(gate n) * up n)              the shared expert's first half, width 1024
//
// in   delta, residual [B, 2048] bf16; norm weight [2048] f32; router [256, 2048] f32; shared_gate_up [128, 4] tiles
// out  new_residual, normed [B, 2048] bf16; logits [B, 256] f32; act_shared [B, 1024] bf16
//
// launch   grid 128, 6 warps: 4 split the k of one strip of the shared expert, 2 take one row of the router each
// bound    latency; 2.1 MB of router and 2.4 MB (NVFP4) of the shared expert
// PDL      router rows and the strip are requested before the wait
#include "gemv.cuh"

namespace {

constexpr int kExperts = 256;
constexpr int kSharedWidth = 1024;
constexpr int kSplit = 4;
constexpr int kRouterRows = 2;  // a block
constexpr int kWarps = kSplit + kRouterRows;
constexpr int kVectors = kHidden / 4 / 32;  // float4 of a router row a lane holds

template <typename Tile, int NB>
__device__ __forceinline__ void decode_router(const DecodeRouterArgs& args) {
    extern __shared__ __align__(16) uint8_t shared[];
    float* sums = reinterpret_cast<float*>(shared + NB * x_stride(kHidden));  // [4, 16, NB]; the norm's before that
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int strip = blockIdx.x;
    const int expert = blockIdx.x * kRouterRows + warp - kSplit;

    Tile tile;
    float4 row[kVectors];
    if (warp < kSplit) {
        load_tile(tile, args.shared_gate_up + (size_t(strip) * kSplit + warp) * Tile::kBytes, lane);
    } else {
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            const uint4 bits = load_stream(args.router + size_t(expert) * kHidden + 4 * (32 * i + lane));
            row[i] = *reinterpret_cast<const float4*>(&bits);
        }
    }
    pdl_wait();
    pdl_launch();
    stage_normed<NB, kWarps>(shared, sums, args.norm);

    if (warp < kSplit) {
        Accumulator sum;
        sum.clear();
        multiply_tile(tile, sum, lane_inputs<NB>(shared, kHidden, warp, lane), nullptr, lane);
        put_sums<NB>(sums + warp * 16 * NB, sum, lane);
    } else {
        for (int column = 0; column < int(args.norm.rows); ++column) {
            const uint2* x = reinterpret_cast<const uint2*>(shared + column * x_stride(kHidden)) + lane;
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < kVectors; ++i) {
                const uint2 four = x[32 * i];
                sum = fmaf(row[i].x, bf16_low(four.x), sum);
                sum = fmaf(row[i].y, bf16_high(four.x), sum);
                sum = fmaf(row[i].z, bf16_low(four.y), sum);
                sum = fmaf(row[i].w, bf16_high(four.y), sum);
            }
            sum = warp_sum(sum);
            if (lane == 0) args.logits[column * kExperts + expert] = sum;
        }
    }
    __syncthreads();

    const float2 scales = args.shared_scales[strip];
    for (int i = threadIdx.x; i < 8 * NB; i += kWarps * 32) {
        const int row_of_strip = i % 8, column = i / 8;
        if (column >= int(args.norm.rows)) break;
        float gate = 0.0f, up = 0.0f;
#pragma unroll
        for (int s = 0; s < kSplit; ++s) {
            gate += sums[(s * 16 + row_of_strip) * NB + column];
            up += sums[(s * 16 + row_of_strip + 8) * NB + column];
        }
        gate = gate * Tile::kWeightScale * scales.x;
        up = up * Tile::kWeightScale * scales.y;
        args.act_shared[column * kSharedWidth + strip * 8 + row_of_strip] = __float2bfloat16_rn(silu(gate) * up);
    }
}

}  // namespace

#define DECODE_ROUTER(FORMAT, TILE, NB)                                                \
    extern "C" __global__ void __launch_bounds__(kWarps * 32)                          \
        decode_router_##FORMAT##_##NB(const __grid_constant__ DecodeRouterArgs args) { \
        decode_router<TILE, NB>(args);                                                 \
    }

DECODE_ROUTER(nvfp4, Nvfp4Tile, 1)
DECODE_ROUTER(nvfp4, Nvfp4Tile, 2)
DECODE_ROUTER(nvfp4, Nvfp4Tile, 4)
DECODE_ROUTER(nvfp4, Nvfp4Tile, 8)
DECODE_ROUTER(bf16, Bf16Tile, 1)
DECODE_ROUTER(bf16, Bf16Tile, 2)
DECODE_ROUTER(bf16, Bf16Tile, 4)
DECODE_ROUTER(bf16, Bf16Tile, 8)
