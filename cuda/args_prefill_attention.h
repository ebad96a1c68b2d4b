// Arguments of prefill_kv.cu, prefill_attention.cu and prefill_attention_hopper.cu; src/kernels/prefill_attention.rs
// mirrors them. T rows are the new tokens of all sequences, packed; a sequence's follow each other.
#pragma once

#include <cstddef>
#include <cstdint>

// Neighbouring tokens of one sequence: at most 16, at positions of one multiple of 16 to the next. A step has one table
// of them for all its layers, the highest positions first, so that the longest work starts first.
struct PrefillTile {
    uint32_t row;        // of the first token, among the T
    uint32_t rows;       // tokens, 1 to 16
    uint32_t position;   // of the first token; position / 16 == (position + rows - 1) / 16
    uint32_t table_row;  // of `blocks`
};
static_assert(sizeof(PrefillTile) == 16);

struct PrefillKvArgs {
    void* qkv;                 // [T, (8 + 2) G, 128] bf16: q, k, v as projected; q is replaced; 16-byte aligned
    void* kv;                  // of this layer in block 0, [2, G, 64 * 128] bf16; 16-byte aligned
    const uint32_t* blocks;    // [.., table_stride] block of positions 64 i to 64 i + 63
    const PrefillTile* tiles;  // [grid.x], 16-byte aligned
    const float* q_norm;       // [128], 16-byte aligned
    const float* k_norm;       // [128], 16-byte aligned
    const float* inv_freq;     // [64], or null: no rotation
    uint64_t block_stride;     // bf16 values from a block to the next, a multiple of 8
    uint32_t table_stride;
    float eps;
};
static_assert(sizeof(PrefillKvArgs) == 72 && offsetof(PrefillKvArgs, tiles) == 24 &&
              offsetof(PrefillKvArgs, inv_freq) == 48 && offsetof(PrefillKvArgs, table_stride) == 64);

struct PrefillAttentionArgs {
    const void* qkv;           // [T, (8 + 2) G, 128] bf16, q as prefill_kv leaves it; 16-byte aligned
    const void* kv;            // of this layer in block 0, [2, G, 64 * 128] bf16; 16-byte aligned
    const uint32_t* blocks;    // [.., table_stride] block of positions 64 i to 64 i + 63
    const PrefillTile* tiles;  // [n_tiles], 16-byte aligned
    const float* sinks;        // [8 G]
    void* attn;                // [16 G, panel_rows, 64] bf16, panels of panel.cuh; 16-byte aligned
    uint32_t* counter;         // [1], zero before and after
    uint64_t block_stride;     // bf16 values from a block to the next, a multiple of 8
    uint32_t table_stride;
    uint32_t panel_rows;  // at least T, a multiple of 8
    uint32_t window;      // positions seen, the token's own included; 0: all
    uint32_t n_tiles;
    uint32_t n_kv_heads;
    uint32_t reserved;
};
static_assert(sizeof(PrefillAttentionArgs) == 88 && offsetof(PrefillAttentionArgs, sinks) == 32 &&
              offsetof(PrefillAttentionArgs, counter) == 48 && offsetof(PrefillAttentionArgs, table_stride) == 64 &&
              offsetof(PrefillAttentionArgs, n_kv_heads) == 80);
