// nvfp4_expand.cu: NVFP4 blocks in GGUF order to plain values.
//
//   out[b, 16 s + i] = code[b, s, i] * block_scale[b, s] * scale        s in 0..4, i in 0..16
//
// in   blocks  [n_blocks, 36]  u8    per block 4 scale bytes (e4m3, bit 7 ignored, 0x7F is zero), then 4 x 8 bytes of
//                                    e2m1 codes: the low nibbles of a sub-block are its values 0-7, the high ones 8-15
//      scale                   f32   of the tensor
// out  out     [n_blocks, 64]  bf16 or f32   code * block_scale is exact in f32; the product with scale rounds once,
//                                    and bf16 once more, to nearest even
//
// launch   grid ceil(n_blocks / 32), block 256: 8 threads a block, each reads 4 bytes of codes; no shared memory
// bound    memory: n_blocks * (36 + 64 * sizeof(out)) bytes
// PDL      waits before reading blocks; nothing runs ahead of the wait; no early trigger

#include <cuda_bf16.h>

#include "args_expand.h"
#include "common.cuh"

namespace {

constexpr int kBlockBytes = 36;
constexpr int kBlockValues = 64;
constexpr int kThreadsPerBlock = 8;
constexpr int kThreads = 256;

// Both formats hold the upper bits of an f32 but for the exponent's bias: shifted into place and multiplied by the
// difference of the biases, subnormals come out right too.
__device__ __forceinline__ float decode_e4m3(uint32_t byte) {
    const uint32_t magnitude = byte & 0x7F;
    return magnitude == 0x7F ? 0.0f : __uint_as_float(magnitude << 20) * 0x1p120f;
}

__device__ __forceinline__ float decode_e2m1(uint32_t nibble) {
    return __uint_as_float((nibble & 8) << 28 | (nibble & 7) << 22) * 0x1p126f;
}

__device__ __forceinline__ void store4(float* out, const float (&v)[4]) {
    *reinterpret_cast<float4*>(out) = make_float4(v[0], v[1], v[2], v[3]);
}

__device__ __forceinline__ void store4(__nv_bfloat16* out, const float (&v)[4]) {
    __nv_bfloat162 pairs[2] = {__floats2bfloat162_rn(v[0], v[1]), __floats2bfloat162_rn(v[2], v[3])};
    *reinterpret_cast<uint2*>(out) = *reinterpret_cast<uint2*>(pairs);
}

template <typename Out>
__device__ __forceinline__ void nvfp4_expand(const Nvfp4ExpandArgs& args) {
    static_assert(kThreads % kThreadsPerBlock == 0);
    const uint64_t thread = uint64_t(blockIdx.x) * kThreads + threadIdx.x;
    const uint64_t block = thread / kThreadsPerBlock;
    const uint32_t word = thread % kThreadsPerBlock;
    pdl_wait();
    if (block >= args.n_blocks) return;

    const uint8_t* in = args.blocks + block * kBlockBytes;
    const uint32_t sub_block = word / 2;
    const float block_scale = decode_e4m3(in[sub_block]);
    const uint32_t codes = *reinterpret_cast<const uint32_t*>(in + 4 + 4 * word);

    float low[4], high[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        low[i] = decode_e2m1(codes >> (8 * i)) * block_scale * args.scale;
        high[i] = decode_e2m1(codes >> (8 * i + 4)) * block_scale * args.scale;
    }

    Out* out = static_cast<Out*>(args.out) + block * kBlockValues + 16 * sub_block + 4 * (word % 2);
    store4(out, low);
    store4(out + 8, high);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) nvfp4_expand_bf16(const __grid_constant__ Nvfp4ExpandArgs args) {
    nvfp4_expand<__nv_bfloat16>(args);
}

extern "C" __global__ void __launch_bounds__(kThreads) nvfp4_expand_f32(const __grid_constant__ Nvfp4ExpandArgs args) {
    nvfp4_expand<float>(args);
}
