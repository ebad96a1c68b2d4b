// decode_embed.cu: the embeddings of a step's tokens, as the first output that waits for its residual, and the angles
// that every rotating layer of the step needs.
//
//   delta[n] = embedding[tokens[n]],  residual[n] = 0,  rope[n] = cos, sin of positions[n] * inv_freq
//
// in   embedding [V, 2048] bf16; tokens, positions [B] u32; inv_freq [64] f32
// out  delta, residual [B, 2048] bf16; rope [B, 2, 64] f32
//
// launch   grid B, 256 threads of 16 bytes
// bound    latency
// PDL      waits before reading tokens and positions, which the sampler wrote; triggers at its end, since attention of
//          the first layer reads rope before its wait and decode_qkv lets it start early
#include "args_decode.h"
#include "common.cuh"
#include "rope.cuh"

extern "C" __global__ void __launch_bounds__(256) decode_embed(const __grid_constant__ DecodeEmbedArgs args) {
    constexpr int kPairs = 64;
    pdl_wait();
    const int row = blockIdx.x, i = threadIdx.x;
    const uint4* from = reinterpret_cast<const uint4*>(args.embedding) + size_t(args.tokens[row]) * 256;
    reinterpret_cast<uint4*>(args.delta)[row * 256 + i] = from[i];
    reinterpret_cast<uint4*>(args.residual)[row * 256 + i] = make_uint4(0, 0, 0, 0);
    if (i < kPairs) {
        float* to = args.rope + row * 2 * kPairs + i;
        rope_angle(args.positions[row], args.inv_freq[i], to[0], to[kPairs]);
    }
    // For attention of the first layer, which reads rope once all blocks of this kernel have ended, and perhaps before
    // what they wrote would be seen.
    __threadfence();
}
