// prefill_attention.cu: attention of many new tokens over the KV cache, for one layer, on any card.
//
//   p[i] = exp(q . k[i] / sqrt(128) - m)         i from max(0, position - window + 1) to position, m the maximum of the
//   attn = sum p[i] v[i] / (sum p[i] + exp(sink - m))         scores so far and the sink
//
// in       q of qkv [T, 10 G, 128] bf16 as prefill_kv leaves it, kv per block and layer K [G, 64 positions, 128] and V
//          [G, 128, 64 positions] bf16, tiles, blocks, sinks: see args_prefill_attention.h
// out      attn [16 G, panel_rows, 64] bf16 in the order of panel.cuh
// p is rounded to bf16 for the product with v, relative to m as it stands then; all else is fp32.
//
// launch   grid n_tiles G, block 256, dynamic shared memory 64 KB
// order    keys come block by block, in ascending order, and a block that a token does not see leaves its maximum, sum
//          and output as they are to the bit. So a token's result depends on its own position alone: neither on the
//          tile that it is in, nor on its place there, nor on the launch.
// bound    tensor cores: 512 operations a token, query head and position seen
// PDL      waits before the first load, triggers right after it
//
// A thread block has 16 tokens x 8 query heads of one KV head: 128 rows, row 8 i + h being head h of token i, 16 of
// them a warp. A block of K and V lies in shared memory in rows of 128 bytes, 16-byte part p of row r at p ^ (r % 8);
// the next is on its way meanwhile.

#include <cuda_bf16.h>

#include "args_prefill_attention.h"
#include "common.cuh"
#include "fragment.cuh"
#include "prefill_tile.cuh"

namespace {

constexpr int kPartBytes = kPartHead * 2;  // K or V
constexpr int kStageBytes = 2 * kPartBytes;
static_assert(2 * kStageBytes == 65536, "shared memory of a launch");

// Two B fragments, of neighbouring groups of 8 columns.
__device__ __forceinline__ uint4 load_fragments(uint32_t from) {
    uint32_t b[4];
    load_matrices(b, from);
    return make_uint4(b[0], b[1], b[2], b[3]);
}

// The fragment c += A B.
__device__ __forceinline__ void mma(float* c, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    ::mma(*reinterpret_cast<float (*)[4]>(c), a, b0, b1);
}

// K as two halves of 64 dims, each [64 positions, 64], then V [128 dims, 64 positions]. Positions of V from `valid` on
// are zeros: p is zero there, but zero times what was never written may be NaN.
__device__ __forceinline__ void copy_block(uint32_t stage, const __nv_bfloat16* k, const __nv_bfloat16* v, int valid) {
    {
        const int position = threadIdx.x / 16, chunk = threadIdx.x % 16;
        const uint32_t to = stage + chunk / 8 * (kPartBytes / 2) + position * 128 + (chunk % 8 ^ position % 8) * 16;
#pragma unroll
        for (int i = 0; i < 4; ++i) copy_16(to + i * 16 * 128, k + 8 * threadIdx.x + i * 16 * kHeadDim, 16);
    }
    const int dim = threadIdx.x / 8, chunk = threadIdx.x % 8;
    const uint32_t to = stage + kPartBytes + dim * 128 + (chunk ^ dim % 8) * 16;
    const int bytes = 2 * max(0, min(8, valid - 8 * chunk));
#pragma unroll
    for (int i = 0; i < 4; ++i) copy_16(to + i * 32 * 128, v + 8 * threadIdx.x + i * 32 * kBlock, bytes);
    asm volatile("cp.async.commit_group;" ::: "memory");
}

}  // namespace

extern "C" __global__ void __launch_bounds__(256, 1)
    prefill_attention(const __grid_constant__ PrefillAttentionArgs args) {
    extern __shared__ __align__(128) uint8_t shared[];
    pdl_wait();
    pdl_launch();

    const uint32_t slots = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const PrefillTile tile = args.tiles[blockIdx.x / args.n_kv_heads];
    const int kv_head = blockIdx.x % args.n_kv_heads;
    const int end = tile.position + tile.rows;
    const int first_block = first_visible(tile, args.window) / kBlock, last_block = (end - 1) / kBlock;
    const uint32_t* table = args.blocks + uint64_t(tile.table_row) * args.table_stride;
    const __nv_bfloat16* kv = static_cast<const __nv_bfloat16*>(args.kv) + kv_head * kPartHead;
    const int v_offset = args.n_kv_heads * kPartHead;
    auto copy = [&](int block) {
        const __nv_bfloat16* k = kv + table[block] * args.block_stride;
        copy_block(slots + block % 2 * kStageBytes, k, k + v_offset, end - block * kBlock);
    };
    copy(first_block);

    const TileRows rows(tile, kv_head, 2 * warp, g);
    uint32_t q[8][4];
    rows.load_q(args, t, q);
    Softmax softmax(args.sinks[rows.head], t);
    float o[64] = {};

    // This lane's row of a pair of fragments: matrix lane / 8 is 8 columns and 8 inputs further each in turn.
    const int column = lane / 16 * 8 + lane % 8, input = lane / 8 % 2;
    for (int block = first_block; block <= last_block; ++block) {
        asm volatile("cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
        if (block < last_block) copy(block + 1);
        const uint32_t stage = slots + block % 2 * kStageBytes + column * 128;

        float s[32] = {};
#pragma unroll
        for (int i = 0; i < 8; ++i)
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
                const int chunk = 2 * i + input;
                const uint4 b =
                    load_fragments(stage + i / 4 * (kPartBytes / 2) + j * 8 * 128 + (chunk % 8 ^ column % 8) * 16);
                mma(s + 4 * j, q[i], b.x, b.y);
                mma(s + 4 * j + 4, q[i], b.z, b.w);
            }
        rows.mask(s, block * kBlock, args.window, t);
        softmax.step(s);
#pragma unroll
        for (int i = 0; i < 64; ++i) o[i] *= softmax.rescale[i / 2 % 2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t p[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) p[j] = pack_bf16(s[8 * i + 2 * j], s[8 * i + 2 * j + 1]);
#pragma unroll
            for (int j = 0; j < 16; j += 2) {
                const uint4 b = load_fragments(stage + kPartBytes + j * 8 * 128 + ((2 * i + input) ^ column % 8) * 16);
                mma(o + 4 * j, p, b.x, b.y);
                mma(o + 4 * j + 4, p, b.z, b.w);
            }
        }
    }
    store_attn(args, rows, softmax, o, t);
}
