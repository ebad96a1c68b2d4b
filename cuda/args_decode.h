// Argument structs of the fast decode path's products; src/kernels/decode.rs mirrors them. Addresses of weights point
// at tiles (layout.cuh). B is the number of rows in use, at most the NB that a kernel was compiled for.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

// The residual stream and its norm, in front of a product.
struct NormArgs {
    const __nv_bfloat16* delta;     // [B, D] output of the block before, not yet added
    const __nv_bfloat16* residual;  // [B, D]
    __nv_bfloat16* new_residual;    // [B, D] round(delta + residual)
    __nv_bfloat16* normed;          // [B, D] or null
    const float* weight;            // [D]
    float eps;
    uint32_t rows;  // B
};
static_assert(sizeof(NormArgs) == 48);

struct DecodeLinearArgs {
    NormArgs norm;           // for kernels that norm their input; else only rows counts
    const __nv_bfloat16* x;  // [B, k] for kernels that do not
    const uint8_t* weights;  // [strips, k / 512] tiles
    const float2* scales;    // [strips] of rows 0-7 and of rows 8-15
    void* out;               // [B, out_stride]
    uint32_t strips;
    uint32_t out_stride;
};
static_assert(sizeof(DecodeLinearArgs) == 88 && offsetof(DecodeLinearArgs, x) == 48 &&
              offsetof(DecodeLinearArgs, strips) == 80);

struct DecodeRouterArgs {
    NormArgs norm;
    const float* router;  // [256, D]
    float* scores;        // [B, 256]
};
static_assert(sizeof(DecodeRouterArgs) == 64);

struct DecodeExpertsUpArgs {
    const __nv_bfloat16* x;         // [B, D] normed
    const float* scores;            // [B, 256]
    const uint8_t* gate_up;         // [256, 64, 4] tiles, gate rows and up rows
    const float2* scales;           // [256] gate, up
    __nv_bfloat16* act;             // [B, 6, 512] by slot
    const uint8_t* shared_gate_up;  // [128, 4] tiles, likewise
    const float2* shared_scales;    // [128] gate, up
    __nv_bfloat16* act_shared;      // [B, 1024]
    uint32_t rows;                  // B
    uint32_t reserved;
};
static_assert(sizeof(DecodeExpertsUpArgs) == 72);

struct DecodeDownArgs {
    const float* scores;              // [B, 256]
    const uint8_t* down;              // [256, 128] tiles
    const float* scales;              // [256]
    const uint8_t* shared_down;       // [128, 2] tiles
    const __nv_bfloat16* act;         // [B, 6, 512] by slot
    const __nv_bfloat16* act_shared;  // [B, 1024]
    __nv_bfloat16* delta;             // [B, D]
    float shared_scale;
    uint32_t rows;  // B
};
static_assert(sizeof(DecodeDownArgs) == 64);

struct DecodeEmbedArgs {
    const __nv_bfloat16* embedding;  // [V, D]
    const uint32_t* tokens;          // [B]
    const uint32_t* positions;       // [B]
    const float* inv_freq;           // [64]
    __nv_bfloat16* delta;            // [B, D]
    __nv_bfloat16* residual;         // [B, D] zeroed
    float* rope;                     // [B, 2, 64] cos, sin
};
static_assert(sizeof(DecodeEmbedArgs) == 56);
