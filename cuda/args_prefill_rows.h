// Argument structs of prefill_embed.cu and prefill_norm.cu; src/kernels/prefill_rows.rs mirrors them. T rows of D =
// 2048.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

struct PrefillEmbedArgs {
    const __nv_bfloat16* embedding;  // [V, D]
    const uint32_t* tokens;          // [T]
    __nv_bfloat16* delta;            // [T, D]
    __nv_bfloat16* residual;         // [T, D] zeroed
    uint32_t rows;                   // T
    uint32_t reserved;
};
static_assert(sizeof(PrefillEmbedArgs) == 40 && offsetof(PrefillEmbedArgs, rows) == 32);

struct PrefillNormArgs {
    const __nv_bfloat16* delta;  // [T, D] output of the block before, not yet added
    __nv_bfloat16* residual;     // [T, D] replaced by round(delta + residual)
    const float* weight;         // [D]
    __nv_bfloat16* normed;       // panels of panel.cuh
    uint32_t rows;               // T
    uint32_t panel_rows;
    float eps;
    uint32_t reserved;
};
static_assert(sizeof(PrefillNormArgs) == 48 && offsetof(PrefillNormArgs, weight) == 16 &&
              offsetof(PrefillNormArgs, rows) == 32 && offsetof(PrefillNormArgs, eps) == 40);
