// Arguments of nvfp4_expand.cu; src/kernels/expand.rs mirrors them. As for every kernel, both sides assert size and
// offsets, and sizes are compared once more with what the driver reports when a kernel is loaded.
#pragma once

#include <cstddef>
#include <cstdint>

struct Nvfp4ExpandArgs {
    const uint8_t* blocks;  // [n_blocks, 36], 4-byte aligned
    void* out;              // [n_blocks, 64] bf16 or f32, 16-byte aligned
    uint64_t n_blocks;
    float scale;  // of the tensor
    uint32_t reserved;
};
static_assert(sizeof(Nvfp4ExpandArgs) == 32 && offsetof(Nvfp4ExpandArgs, out) == 8 &&
              offsetof(Nvfp4ExpandArgs, n_blocks) == 16 && offsetof(Nvfp4ExpandArgs, scale) == 24);
