// Where the KV cache has what decode's attention reads: per block and layer K [G, 64 positions, 128] and V [G, 128, 64
// positions], bf16.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "args_attention.h"

constexpr int kHeadDim = 128;
constexpr int kGroup = 8;  // query heads of a KV head
constexpr int kBlock = 64;
constexpr int kPartHead = kBlock * kHeadDim;  // values of K or V of a block, layer and head

// Where a KV head of a row lies.
struct Cache {
    const DecodeAttentionArgs& args;
    uint32_t blocks, head;  // offsets in args.blocks and args.kv

    __device__ __forceinline__ Cache(const DecodeAttentionArgs& args, uint32_t row, uint32_t kv_head)
        : args(args), blocks(row * args.table_stride), head(kv_head * kPartHead) {}
    __device__ __forceinline__ __nv_bfloat16* at(uint32_t block, uint32_t offset) const {
        return static_cast<__nv_bfloat16*>(args.kv) + (block * args.block_stride + (head + offset));
    }
    __device__ __forceinline__ __nv_bfloat16* k(uint32_t block, uint32_t position) const {
        return at(block, position % kBlock * kHeadDim);
    }
    __device__ __forceinline__ __nv_bfloat16* v(uint32_t block, uint32_t position) const {
        return at(block, args.kv_heads * kPartHead + position % kBlock);
    }
    __device__ __forceinline__ uint32_t block_of(uint32_t position) const {
        return args.blocks[blocks + position / kBlock];
    }
};
