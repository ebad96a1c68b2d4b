// prefill_embed.cu: the embeddings of a chunk's tokens, as the first output that waits for its residual.
//
//   delta[t] = embedding[tokens[t]],  residual[t] = 0
//
// in   embedding [V, 2048] bf16; tokens [T] u32
// out  delta, residual [T, 2048] bf16
//
// launch   grid ceil(T / 8), 256 threads: a warp a row, 16 bytes a lane and turn
// bound    memory: 12 KiB a row
// PDL      waits before reading tokens and before writing what the kernels before may still read
#include "args_prefill_rows.h"
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) prefill_embed(const __grid_constant__ PrefillEmbedArgs args) {
    constexpr int kParts = 2048 / 8;  // of 16 bytes, in a row
    const uint32_t row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    pdl_wait();
    pdl_launch();
    if (row >= args.rows) return;
    const uint4* from = reinterpret_cast<const uint4*>(args.embedding) + size_t(args.tokens[row]) * kParts;
    uint4* delta = reinterpret_cast<uint4*>(args.delta) + size_t(row) * kParts;
    uint4* residual = reinterpret_cast<uint4*>(args.residual) + size_t(row) * kParts;
#pragma unroll
    for (uint32_t part = lane; part < kParts; part += 32) {
        delta[part] = from[part];
        residual[part] = make_uint4(0, 0, 0, 0);
    }
}
