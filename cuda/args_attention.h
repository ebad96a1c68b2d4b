// Arguments of decode_attention.cu and decode_attention_many.cu; src/kernels/attention.rs mirrors them.
#pragma once

#include <cstddef>
#include <cstdint>

// Most parts that the positions of a row are divided into: with 4 KV heads, one for each multiprocessor of an H200.
constexpr uint32_t kAttentionParts = 33;
// Dynamic shared memory of decode_attention_many.cu, where there is much and where there is little.
constexpr uint32_t kAttentionManyBytes = 206080;
constexpr uint32_t kAttentionManySmallBytes = 89088;

struct DecodeAttentionArgs {
    const void* qkv;            // [B, (8 + 2) G, 128] bf16: q, k, v as projected; 16-byte aligned
    void* kv;                   // of this layer in block 0, [2, G, 64 * 128] bf16; 16-byte aligned
    const uint32_t* blocks;     // [B, table_stride] block of positions 64 i to 64 i + 63
    const uint32_t* positions;  // [B] of the new tokens
    const float* q_norm;        // [128], 16-byte aligned
    const float* k_norm;        // [128], 16-byte aligned
    const float* rope;          // [B, 2, 64] cos, then sin, of decode_embed; 16-byte aligned; or null: no rotation
    const float* sinks;         // [8 G]
    void* attn;                 // [B, 8 G, 128] bf16, or panels of panel.cuh; 8-byte aligned
    float* partial;             // [B, G, kAttentionParts, 8, 132], 16-byte aligned; null with a window
    uint32_t* counters;         // [B, 8 G], zero before and after; null with a window
    uint64_t block_stride;      // bf16 values from a block to the next
    uint32_t table_stride;
    uint32_t window;  // positions seen, the new one included; 0: all
    float eps;
    uint32_t rows;        // B
    uint32_t kv_heads;    // G
    uint32_t panel_rows;  // of attn, a multiple of 8 and at least B; 0: rows as they are
};
static_assert(sizeof(DecodeAttentionArgs) == 120 && offsetof(DecodeAttentionArgs, q_norm) == 32 &&
              offsetof(DecodeAttentionArgs, attn) == 64 && offsetof(DecodeAttentionArgs, block_stride) == 88 &&
              offsetof(DecodeAttentionArgs, window) == 100 && offsetof(DecodeAttentionArgs, eps) == 104 &&
              offsetof(DecodeAttentionArgs, panel_rows) == 116);
