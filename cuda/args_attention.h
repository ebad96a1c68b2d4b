// Arguments of decode_attention.cu; src/kernels/attention.rs mirrors them.
#pragma once

#include <cstddef>
#include <cstdint>

struct DecodeAttentionArgs {
    const void* qkv;            // [B, (8 + 2) G, 128] bf16: q, k, v as projected; 16-byte aligned
    void* kv;                   // of this layer in block 0, [2, G, 64 * 128] bf16; 16-byte aligned
    const uint32_t* blocks;     // [B, table_stride] block of positions 64 i to 64 i + 63
    const uint32_t* positions;  // [B] of the new tokens
    const float* q_norm;        // [128], 16-byte aligned
    const float* k_norm;        // [128], 16-byte aligned
    const float* inv_freq;      // [64], or null: no rotation
    const float* sinks;         // [8 G]
    void* attn;                 // [B, 8 G, 128] bf16; 8-byte aligned
    float* partial;             // [B, G, max_splits, 1040], 16-byte aligned
    uint32_t* counters;         // [B, G], zero before and after
    uint64_t block_stride;      // bf16 values from a block to the next
    uint32_t table_stride;
    uint32_t window;           // positions seen, the new one included; 0: all
    uint32_t max_splits;       // 1 to 32
    uint32_t split_positions;  // fewest positions worth a split, at least 64
    float eps;
    uint32_t reserved;
};
static_assert(sizeof(DecodeAttentionArgs) == 120 && offsetof(DecodeAttentionArgs, q_norm) == 32 &&
              offsetof(DecodeAttentionArgs, attn) == 64 && offsetof(DecodeAttentionArgs, block_stride) == 88 &&
              offsetof(DecodeAttentionArgs, window) == 100 && offsetof(DecodeAttentionArgs, eps) == 112);
