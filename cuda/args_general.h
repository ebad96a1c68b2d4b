// Arguments of the general kernels; src/kernels/general.rs mirrors them.
#pragma once

#include <cstddef>
#include <cstdint>

// How a matrix is stored, as src/weights/matrix.rs describes it.
enum MatrixType : uint32_t { kF32 = 0, kF16 = 1, kBf16 = 2, kQ8_0 = 3, kNvfp4 = 4 };

// One matrix [rows, cols] in the file's layout, or a stack of them.
struct GeneralMatrix {
    const uint8_t* data;     // row after row, matrix after matrix; 4-byte aligned
    const float* scales;     // [n], one a matrix, or null: all 1
    uint64_t matrix_stride;  // bytes from a matrix of the stack to the next
    uint32_t row_bytes;
    uint32_t type;  // MatrixType
};
static_assert(sizeof(GeneralMatrix) == 32 && offsetof(GeneralMatrix, matrix_stride) == 16 &&
              offsetof(GeneralMatrix, type) == 28);

struct GeneralEmbedArgs {
    GeneralMatrix table;     // [V, cols]
    const uint32_t* tokens;  // [B]
    void* delta;             // [B, cols] bf16
    void* residual;          // [B, cols] bf16
    uint32_t cols;
    uint32_t reserved;
};
static_assert(sizeof(GeneralEmbedArgs) == 64 && offsetof(GeneralEmbedArgs, tokens) == 32 &&
              offsetof(GeneralEmbedArgs, cols) == 56);

struct GeneralNormArgs {
    const void* delta;        // [B, cols] bf16
    const void* residual_in;  // [B, cols] bf16
    const float* weight;      // [cols]
    void* residual_out;       // [B, cols] bf16, not residual_in
    void* normed;             // [B, cols] bf16
    uint32_t cols;
    float eps;
};
static_assert(sizeof(GeneralNormArgs) == 48 && offsetof(GeneralNormArgs, weight) == 16 &&
              offsetof(GeneralNormArgs, cols) == 40);

struct GeneralProjectArgs {
    GeneralMatrix matrix;  // [rows, cols]
    const void* x;         // [B, cols] bf16
    void* out;             // [B, out_stride] bf16 or f32; rows values from `offset` on are written
    uint32_t rows;
    uint32_t cols;
    uint32_t out_stride;
    uint32_t offset;
    uint32_t n;    // B
    uint32_t f32;  // 1: out is f32, unrounded
};
static_assert(sizeof(GeneralProjectArgs) == 72 && offsetof(GeneralProjectArgs, x) == 32 &&
              offsetof(GeneralProjectArgs, rows) == 48 && offsetof(GeneralProjectArgs, n) == 64);

struct GeneralQkvFinishArgs {
    void* qkv;                  // [B, (H + 2 G) head_dim] bf16; its q is replaced
    void* kv;                   // of this layer in block 0, [2, G, 64 * head_dim] bf16
    const uint32_t* blocks;     // [slots, table_stride]
    const uint32_t* positions;  // [B]
    const float* q_norm;        // [head_dim]
    const float* k_norm;        // [head_dim]
    const float* inv_freq;      // [head_dim / 2], or null: no rotation
    const uint32_t* slots;      // [B] row of blocks of a token's sequence, or null: its own
    uint64_t block_stride;      // bf16 values from a block to the next
    uint32_t table_stride;
    uint32_t n_heads;
    uint32_t n_kv_heads;
    uint32_t head_dim;  // even
    float eps;
    uint32_t reserved;
};
static_assert(sizeof(GeneralQkvFinishArgs) == 96 && offsetof(GeneralQkvFinishArgs, q_norm) == 32 &&
              offsetof(GeneralQkvFinishArgs, block_stride) == 64 && offsetof(GeneralQkvFinishArgs, head_dim) == 84);

struct GeneralAttentionArgs {
    const void* qkv;            // [B, (H + 2 G) head_dim] bf16; q is read
    const void* kv;             // of this layer in block 0, [2, G, 64 * head_dim] bf16
    const uint32_t* blocks;     // [slots, table_stride]
    const uint32_t* positions;  // [B]
    const float* sinks;         // [H]
    void* attn;                 // [B, H, head_dim] bf16
    const uint32_t* slots;      // [B] row of blocks of a token's sequence, or null: its own
    uint64_t block_stride;      // bf16 values from a block to the next
    uint32_t table_stride;
    uint32_t window;  // positions seen, the new one included; 0: all
    uint32_t n_heads;
    uint32_t n_kv_heads;
    uint32_t head_dim;  // even, at most 256
    float scale;        // of scores
};
static_assert(sizeof(GeneralAttentionArgs) == 88 && offsetof(GeneralAttentionArgs, sinks) == 32 &&
              offsetof(GeneralAttentionArgs, block_stride) == 56 && offsetof(GeneralAttentionArgs, scale) == 84);

struct GeneralRouterArgs {
    const float* logits;  // [B, E]
    uint32_t* experts;    // [B, K], ascending by index
    float* weights;       // [B, K]
    uint32_t n_experts;   // E, at most 1024
    uint32_t chosen;      // K, at most 32 and E
};
static_assert(sizeof(GeneralRouterArgs) == 32 && offsetof(GeneralRouterArgs, n_experts) == 24);

struct GeneralSwigluArgs {
    GeneralMatrix gate;       // [rows, cols], or a stack of E
    GeneralMatrix up;         // likewise
    const void* x;            // [B, cols] bf16
    const uint32_t* experts;  // [B, K]; null: one matrix each and K = 1
    void* act;                // [B, K, rows] bf16
    uint32_t rows;
    uint32_t cols;
};
static_assert(sizeof(GeneralSwigluArgs) == 96 && offsetof(GeneralSwigluArgs, x) == 64 &&
              offsetof(GeneralSwigluArgs, rows) == 88);

struct GeneralExpertsDownArgs {
    GeneralMatrix experts;   // E x [rows, cols]
    GeneralMatrix shared;    // [rows, shared_cols]
    const uint32_t* chosen;  // [B, K]
    const float* weights;    // [B, K]
    const void* act;         // [B, K, cols] bf16
    const void* act_shared;  // [B, shared_cols] bf16
    void* delta;             // [B, rows] bf16
    uint32_t rows;
    uint32_t cols;
    uint32_t shared_cols;
    uint32_t n_chosen;  // K
};
static_assert(sizeof(GeneralExpertsDownArgs) == 120 && offsetof(GeneralExpertsDownArgs, chosen) == 64 &&
              offsetof(GeneralExpertsDownArgs, rows) == 104);
