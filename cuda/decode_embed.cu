// decode_embed.cu: the embeddings of a step's tokens, as the first output that waits for its residual.
//
//   delta[n] = embedding[tokens[n]],  residual[n] = 0
//
// in   embedding [V, 2048] bf16; tokens [B] u32
// out  delta, residual [B, 2048] bf16
//
// launch   grid B, 256 threads of 16 bytes
// bound    latency
// PDL      waits before reading tokens, which the sampler wrote
#include "args_decode.h"
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) decode_embed(const __grid_constant__ DecodeEmbedArgs args) {
    pdl_wait();
    pdl_launch();
    const uint4* from = reinterpret_cast<const uint4*>(args.embedding) + size_t(args.tokens[blockIdx.x]) * 256;
    reinterpret_cast<uint4*>(args.delta)[blockIdx.x * 256 + threadIdx.x] = from[threadIdx.x];
    reinterpret_cast<uint4*>(args.residual)[blockIdx.x * 256 + threadIdx.x] = make_uint4(0, 0, 0, 0);
}
