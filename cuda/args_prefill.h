// Argument structs of products over many rows and of what groups rows by expert; src/kernels/prefill.rs and
// prefill_route.rs mirror them. T is the number of rows (tokens) of a launch, 1 or more. Panels are those of panel.cuh,
// weights the tiles of layout.cuh. A row of panels that no token owns may hold anything: what is computed from it is
// not written.
#pragma once

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

// prefill_linear (bf16 rows), prefill_logits (f32 rows), prefill_swiglu (panels).
struct PrefillLinearArgs {
    const __nv_bfloat16* x;  // panels [8 k_tiles, panel_rows, 64], 16-byte aligned
    const uint8_t* weights;  // [strips, k_tiles] tiles
    const float2* scales;    // [strips] of rows 0-7 and of rows 8-15; null: `scale` for all
    void* out;            // [T, out_stride] bf16 or f32; swiglu: panels [strips / 8, out_stride, 64]; 16-byte aligned
    uint32_t rows;        // T
    uint32_t panel_rows;  // a multiple of 8, at least T
    uint32_t strips;      // swiglu: a multiple of 8
    uint32_t k_tiles;     // k / 512
    uint32_t out_stride;  // bf16: a multiple of 8; swiglu: panel rows of out, a multiple of 8
    float scale;
};
static_assert(sizeof(PrefillLinearArgs) == 56 && offsetof(PrefillLinearArgs, rows) == 32 &&
              offsetof(PrefillLinearArgs, out_stride) == 48 && offsetof(PrefillLinearArgs, scale) == 52);

// Rows that one expert multiplies at once.
struct ExpertTile {
    uint32_t expert;
    uint32_t row;    // first, of the sorted panels; a multiple of 8
    uint32_t rows;   // 1 to most_columns
    uint32_t width;  // rows, rounded up to a width that the kernels are made for
};
static_assert(sizeof(ExpertTile) == 16);

// prefill_experts_up (x to act), prefill_experts_down (act to y).
struct PrefillExpertsArgs {
    const __nv_bfloat16* x;   // panels, sorted by expert: up [32, sorted_rows, 64], down [8, sorted_rows, 64]
    const uint8_t* weights;   // up [256, 64, 4] tiles of gate and up rows, down [256, 128, 1] tiles
    const float* scales;      // up [256, 2] gate, up; down [256]
    __nv_bfloat16* out;       // up: act panels [8, sorted_rows, 64]; down: y [sorted_rows, 2048]
    const ExpertTile* tiles;  // [n_tiles]
    const uint32_t* n_tiles;  // [1]
    uint32_t sorted_rows;     // of the buffers: a multiple of 8
    // The shared expert's half over all rows, up to shared_scale; of prefill_experts_*_16 alone.
    uint32_t shared_rows;           // T, or 0
    const __nv_bfloat16* shared_x;  // panels: up [32, panel_rows, 64], down [16, panel_rows, 64]
    const uint8_t* shared_weights;  // up [128, 4] tiles of gate and up rows, down [128, 2] tiles
    const float2* shared_scales;    // up [128] gate, up
    __nv_bfloat16* shared_out;      // up: panels [16, panel_rows, 64]; down: [T, 2048]
    uint32_t panel_rows;            // a multiple of 8, at least T
    float shared_scale;             // down
    uint32_t* counter;              // of *_64 and *_16: [1], zero between launches
};
static_assert(sizeof(PrefillExpertsArgs) == 104 && offsetof(PrefillExpertsArgs, sorted_rows) == 48 &&
              offsetof(PrefillExpertsArgs, shared_x) == 56 && offsetof(PrefillExpertsArgs, panel_rows) == 88);

// prefill_route: the choice of experts.
struct PrefillRouteArgs {
    const float* logits;  // [T, 3, 256] parts that add up to the logits
    uint32_t* experts;    // [T, 6] ascending
    float* weights;       // [T, 6] of those; they add up to 1
    uint32_t* masks;      // [ceil(T / 32), 256] bit i of [b, e]: row 32 b + i chose expert e
    uint32_t rows;        // T
    uint32_t reserved;
};
static_assert(sizeof(PrefillRouteArgs) == 40 && offsetof(PrefillRouteArgs, rows) == 32);

// prefill_group: where each expert's rows lie in the sorted panels, and the tiles over them.
struct PrefillGroupArgs {
    const uint32_t* masks;  // [ceil(T / 32), 256]
    uint32_t* places;       // [ceil(T / 32), 256] sorted row of the first of rows 32 b .. that chose e
    ExpertTile* tiles;      // [256 + 6 T / most_columns]
    uint32_t* n_tiles;      // [1]
    uint32_t rows;          // T
    uint32_t most_columns;  // of a tile: what the prefill_experts kernels of the step are made for
};
static_assert(sizeof(PrefillGroupArgs) == 40 && offsetof(PrefillGroupArgs, rows) == 32);

// prefill_gather: copies rows to their experts; prefill_gather_few needs no `places`, and takes up to 256 rows.
struct PrefillGatherArgs {
    const __nv_bfloat16* x;   // panels [32, panel_rows, 64]
    const uint32_t* experts;  // [T, 6]
    const uint32_t* masks;    // [ceil(T / 32), 256]
    const uint32_t* places;   // [ceil(T / 32), 256]
    uint32_t* sorted;         // [T, 6] sorted row of each choice
    __nv_bfloat16* out;       // panels [32, sorted_rows, 64]
    uint32_t rows;            // T
    uint32_t panel_rows;
    uint32_t sorted_rows;  // a multiple of 8, at least 6 T + 256 * 7
    uint32_t reserved;
};
static_assert(sizeof(PrefillGatherArgs) == 64 && offsetof(PrefillGatherArgs, rows) == 48);

// prefill_combine: the output of a MoE layer.
struct PrefillCombineArgs {
    const __nv_bfloat16* y;       // [sorted_rows, 2048]
    const uint32_t* sorted;       // [T, 6]
    const float* weights;         // [T, 6]
    const __nv_bfloat16* shared;  // [T, 2048] output of the shared expert
    __nv_bfloat16* delta;         // [T, 2048]
    uint32_t rows;                // T
    uint32_t reserved;
};
static_assert(sizeof(PrefillCombineArgs) == 48 && offsetof(PrefillCombineArgs, rows) == 40);

// prefill_combine_norm: the output of a MoE layer, added to the residual stream and normed.
struct PrefillCombineNormArgs {
    const __nv_bfloat16* y;       // [sorted_rows, 2048]
    const uint32_t* sorted;       // [T, 6]
    const float* weights;         // [T, 6]
    const __nv_bfloat16* shared;  // [T, 2048] output of the shared expert
    __nv_bfloat16* residual;      // [T, 2048] replaced by the sum
    const float* norm_weight;     // [2048]
    __nv_bfloat16* normed;        // panels [32, panel_rows, 64]
    uint32_t rows;                // T
    uint32_t panel_rows;
    float eps;
    uint32_t reserved;
};
static_assert(sizeof(PrefillCombineNormArgs) == 72 && offsetof(PrefillCombineNormArgs, rows) == 56 &&
              offsetof(PrefillCombineNormArgs, eps) == 64);
