// prefill_kv.cu: what attention over many new tokens needs: q, k and v of one layer as it reads them.
//
//   q, k = rope(norm(q)), rope(norm(k))          each rounded to bf16; no rope where inv_freq is null
//   cache[position] = k, v
//
// in       qkv [T, 10 G, 128] bf16, tiles, blocks, norms, inv_freq: see args_prefill_attention.h
// out      q in place, in the order of prefill_tile.cuh; of the tiles' positions alone, kv per block and layer: K [G,
//          64 positions, 128], V [G, 128, 64 positions], bf16
// Keys have the same bits as decode_attention.cu's.
//
// launch   grid (tiles, G), block 256; no dynamic shared memory
// bound    memory: 5 KB a token and KV head
// PDL      the angles come before the wait, so the tiles must be older than the kernel before; triggers right after it
//
// 16 lanes have a token: all its heads of the group, so that they compute its angles once. V is transposed through
// shared memory; a whole tile has 16 positions of a dim, which are one sector.

#include <cuda_bf16.h>

#include "args_prefill_attention.h"
#include "common.cuh"
#include "head_norm.cuh"
#include "prefill_tile.cuh"

namespace {

// Word b of lane a goes to word a of lane b, among neighbouring four lanes.
__device__ __forceinline__ uint4 transpose_4(uint4 x, int lane) {
    const bool odd = lane % 2, upper = lane % 4 / 2;
    uint32_t sent = __shfl_xor_sync(~0u, odd ? x.x : x.y, 1);
    (odd ? x.x : x.y) = sent;
    sent = __shfl_xor_sync(~0u, odd ? x.z : x.w, 1);
    (odd ? x.z : x.w) = sent;
    sent = __shfl_xor_sync(~0u, upper ? x.x : x.z, 2);
    (upper ? x.x : x.z) = sent;
    sent = __shfl_xor_sync(~0u, upper ? x.y : x.w, 2);
    (upper ? x.y : x.w) = sent;
    return x;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256) prefill_kv(const __grid_constant__ PrefillKvArgs args) {
    // Padded by 4 bytes, so that the 16 dims and two halves that a warp reads hit different banks.
    __shared__ __nv_bfloat16 values[kTileTokens][kHeadDim + 2];
    const PrefillTile tile = args.tiles[blockIdx.x];
    const int n_kv_heads = gridDim.y, kv_head = blockIdx.y;
    const int token = threadIdx.x / 16, lane16 = threadIdx.x % 16;
    const bool exists = token < tile.rows;
    // Lanes without a token repeat the last one's, so that shuffles have all lanes, and write nothing.
    const uint32_t place = min(uint32_t(token), tile.rows - 1);
    const uint32_t position = tile.position + place;

    const bool rope = args.inv_freq != nullptr;
    float cos[8], sin[8];
    if (rope) {
        // Lanes 8 apart have the same angles: each computes four.
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int first = 8 * (lane16 % 8) + (lane16 < 8 ? 0 : 4);
            float c, s;
            rope_angle(position, args.inv_freq[first + i], c, s);
            const float other_c = __shfl_xor_sync(~0u, c, 8), other_s = __shfl_xor_sync(~0u, s, 8);
            cos[i] = lane16 < 8 ? c : other_c;
            sin[i] = lane16 < 8 ? s : other_s;
            cos[4 + i] = lane16 < 8 ? other_c : c;
            sin[4 + i] = lane16 < 8 ? other_s : s;
        }
    }

    pdl_wait();
    pdl_launch();
    __nv_bfloat16* heads = static_cast<__nv_bfloat16*>(args.qkv) +
                           uint64_t(tile.row + place) * (kGroup + 2) * n_kv_heads * kHeadDim + 8 * lane16;
    __nv_bfloat16* q = heads + kGroup * kv_head * kHeadDim;
    const __nv_bfloat16* k = heads + (kGroup * n_kv_heads + kv_head) * kHeadDim;
    uint4 raw[kGroup + 1];
#pragma unroll
    for (int head = 0; head < kGroup; ++head) raw[head] = *reinterpret_cast<const uint4*>(q + head * kHeadDim);
    raw[kGroup] = *reinterpret_cast<const uint4*>(k);
    const uint4 v = *reinterpret_cast<const uint4*>(k + n_kv_heads * kHeadDim);

    const uint32_t block = args.blocks[uint64_t(tile.table_row) * args.table_stride + tile.position / kBlock];
    __nv_bfloat16* k_part = static_cast<__nv_bfloat16*>(args.kv) + block * args.block_stride + kv_head * kPartHead;
    __nv_bfloat16* v_part = k_part + n_kv_heads * kPartHead;
    uint32_t* to_shared = reinterpret_cast<uint32_t*>(&values[token][8 * lane16]);
    to_shared[0] = v.x, to_shared[1] = v.y, to_shared[2] = v.z, to_shared[3] = v.w;

    float weight[8];
    read_8(args.k_norm + 8 * lane16, weight);
    const uint4 x = norm_rope(raw[kGroup], weight, args.eps, rope, cos, sin, lane16);
    if (exists) *reinterpret_cast<uint4*>(k_part + position % kBlock * kHeadDim + 8 * lane16) = x;
    // This lane's four pairs are word lane16 % 4 of parts (lane16 / 4, 0 to 3).
    __nv_bfloat16* to = q + 32 * (lane16 / 4) + 8 * (lane16 % 4) - 8 * lane16;
    read_8(args.q_norm + 8 * lane16, weight);
#pragma unroll
    for (int head = 0; head < kGroup; ++head) {
        const uint4 x = norm_rope(raw[head], weight, args.eps, rope, cos, sin, lane16);
        const uint4 part = transpose_4(x, lane16);
        if (exists) *reinterpret_cast<uint4*>(to + head * kHeadDim) = part;
    }
    __syncthreads();

    // Two threads a dim, 8 positions each from a multiple of 8.
    const int dim = threadIdx.x / 2, half = threadIdx.x % 2;
    const int first = tile.position / kTileTokens * kTileTokens + 8 * half;
    __nv_bfloat16* v_row = v_part + dim * kBlock + first % kBlock;
    const int from = first - int(tile.position);
    if (from >= 0 && from + 8 <= int(tile.rows)) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const __nv_bfloat162 pair = {values[from + 2 * i][dim], values[from + 2 * i + 1][dim]};
            words[i] = *reinterpret_cast<const uint32_t*>(&pair);
        }
        *reinterpret_cast<uint4*>(v_row) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
        for (int i = max(0, -from); i < min(8, int(tile.rows) - from); ++i) v_row[i] = values[from + i][dim];
    }
}
