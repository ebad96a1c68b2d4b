// decode_router.cu: the router's scores of a MoE layer, which the choice of experts waits for.
//
//   n         = norm(delta + residual)
//   scores[e] = sigmoid(router[e] . n)          fp32, e = 0..255
//
// in   delta, residual [B, 2048] bf16; norm weight [2048] f32; router [256, 2048] f32
// out  new_residual, normed [B, 2048] bf16; scores [B, 256] f32
//
// launch   grid 128 or more, of which those from 128 on only wait; 8 warps: a block takes two rows of the router, each
//          split among 4 warps
// bound    latency; 2.1 MB
// PDL      the router's rows and the norm's weight are requested before the wait; triggers before it
#include "gemv.cuh"

namespace {

constexpr int kExperts = 256;
constexpr int kSplit = 4;
constexpr int kRows = 2;  // of the router, a block
constexpr int kWarps = kSplit * kRows;
constexpr int kBlocks = kExperts / kRows;
constexpr int kInputs = kHidden / kSplit;
constexpr int kVectors = kInputs / 4 / 32;  // float4 of a row a lane holds

// Sums over the lanes of each of N values, halving lanes and values together: lane L gets that of value L / (32 / N),
// with the additions of warp_sum.
template <int N>
__device__ __forceinline__ float warp_sums(float (&v)[N], int lane) {
    int half = 16;
#pragma unroll
    for (int n = N / 2; n > 0; n /= 2, half /= 2) {
        const bool upper = lane & half;
#pragma unroll
        for (int i = 0; i < n; ++i) {
            const float keep = upper ? v[n + i] : v[i], give = upper ? v[i] : v[n + i];
            v[i] = keep + __shfl_xor_sync(~0u, give, half);
        }
    }
#pragma unroll
    for (; half > 0; half /= 2) v[0] += __shfl_xor_sync(~0u, v[0], half);
    return v[0];
}

template <int NB>
__device__ __forceinline__ void decode_router(const DecodeRouterArgs& args) {
    extern __shared__ __align__(16) uint8_t shared[];
    float* sums = reinterpret_cast<float*>(shared + NB * x_stride(kHidden));  // [kWarps, NB]; the norm's before that
    if (blockIdx.x >= kBlocks) {
        pdl_launch();
        return pdl_wait();
    }
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int expert = blockIdx.x * kRows + warp / kSplit, first = warp % kSplit * kInputs;

    float4 row[kVectors];
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
        const uint4 bits = load_stream(args.router + size_t(expert) * kHidden + first + 4 * (32 * i + lane));
        row[i] = *reinterpret_cast<const float4*>(&bits);
    }
    Norm norm;
    norm.request(args.norm);
    // What the next kernel does before its wait, it may do beside the kernels in front of this one.
    pdl_launch();
    pdl_wait();
    norm.stage<NB>(shared, sums, args.norm);

    float v[NB];
#pragma unroll
    for (int column = 0; column < NB; ++column) {
        const uint2* x = reinterpret_cast<const uint2*>(shared + column * x_stride(kHidden) + 2 * first) + lane;
        v[column] = 0.0f;
#pragma unroll
        for (int i = 0; i < kVectors; ++i) {
            const uint2 four = x[32 * i];
            v[column] = fmaf(row[i].x, bf16_low(four.x), v[column]);
            v[column] = fmaf(row[i].y, bf16_high(four.x), v[column]);
            v[column] = fmaf(row[i].z, bf16_low(four.y), v[column]);
            v[column] = fmaf(row[i].w, bf16_high(four.y), v[column]);
        }
    }
    const float sum = warp_sums(v, lane);
    if (lane % (32 / NB) == 0) sums[warp * NB + lane / (32 / NB)] = sum;
    __syncthreads();

    const int column = threadIdx.x / kRows, row_of_block = threadIdx.x % kRows;
    if (column >= int(args.norm.rows)) return;
    float logit = 0.0f;
#pragma unroll
    for (int s = 0; s < kSplit; ++s) logit += sums[(row_of_block * kSplit + s) * NB + column];
    args.scores[column * kExperts + blockIdx.x * kRows + row_of_block] = sigmoid(logit);
}

}  // namespace

#define DECODE_ROUTER(NB)                                                            \
    extern "C" __global__ void __launch_bounds__(kWarps * 32 + (NB < 8 ? 384 : 256)) \
        decode_router_##NB(const __grid_constant__ DecodeRouterArgs args) {          \
        decode_router<NB>(args);                                                     \
    }

DECODE_ROUTER(1)
DECODE_ROUTER(2)
DECODE_ROUTER(4)
DECODE_ROUTER(8)
