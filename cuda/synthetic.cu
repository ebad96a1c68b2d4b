// synthetic.cu: random weights, the same bits as src/weights/synthetic.rs makes.
//
//   r(e, c)  = splitmix64 number n * (e % chunk_len) + c of the sequence that starts at seed ^ (e / chunk_len)
//   value e  = spread * unit(r(e, 0))                                      n = 1; unit: uniform, mean 0, variance 1
//   block e  = 4 scales 0x30 + (byte of r(e, 0) & 15), then the bytes of r(e, 1) .. r(e, 4)           n = 5
//
// out  out [n_elements] f32, bf16 (rounded once from fp32), or NVFP4 blocks in GGUF order; 4-byte aligned
//
// launch   grid ceil(n_elements / 256), block 256: one element a thread
// bound    memory: n_elements * element bytes
// PDL      not used

#include <cuda_bf16.h>

#include "args_load.h"

namespace {

constexpr int kThreads = 256;
constexpr int kBlockWords = 9;
constexpr uint32_t kFirstScales = 0x30303030u;

// https://prng.di.unimi.it/splitmix64.c
__device__ __forceinline__ uint64_t random_number(uint64_t seed, uint64_t index) {
    uint64_t z = seed + (index + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

// Two roundings, as on the host: no fused multiply-add.
__device__ __forceinline__ float unit(uint64_t number) {
    constexpr float kStep = 2.0f * 1.7320508f / (1 << 24);
    return __fsub_rn(__fmul_rn(static_cast<float>(number >> 40), kStep), 1.7320508f);
}

__device__ __forceinline__ uint64_t element_index() { return uint64_t(blockIdx.x) * kThreads + threadIdx.x; }

__device__ __forceinline__ float value(const SyntheticArgs& args, uint64_t element) {
    return __fmul_rn(args.spread, unit(random_number(args.seed ^ element / args.chunk_len, element % args.chunk_len)));
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) synthetic_f32(const __grid_constant__ SyntheticArgs args) {
    const uint64_t element = element_index();
    if (element < args.n_elements) static_cast<float*>(args.out)[element] = value(args, element);
}

extern "C" __global__ void __launch_bounds__(kThreads) synthetic_bf16(const __grid_constant__ SyntheticArgs args) {
    const uint64_t element = element_index();
    if (element < args.n_elements)
        static_cast<__nv_bfloat16*>(args.out)[element] = __float2bfloat16_rn(value(args, element));
}

extern "C" __global__ void __launch_bounds__(kThreads) synthetic_nvfp4(const __grid_constant__ SyntheticArgs args) {
    const uint64_t element = element_index();
    if (element >= args.n_elements) return;
    const uint64_t seed = args.seed ^ element / args.chunk_len;
    const uint64_t first = 5 * (element % args.chunk_len);
    uint32_t* block = static_cast<uint32_t*>(args.out) + element * kBlockWords;
    block[0] = kFirstScales + (static_cast<uint32_t>(random_number(seed, first)) & 0x0F0F0F0Fu);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const uint64_t codes = random_number(seed, first + 1 + i);
        block[1 + 2 * i] = static_cast<uint32_t>(codes);
        block[2 + 2 * i] = static_cast<uint32_t>(codes >> 32);
    }
}
