// Argument structs of the kernels that fill weights; src/kernels/load.rs mirrors them.
#pragma once

#include <cstddef>
#include <cstdint>

struct SyntheticArgs {
    void* out;  // [n_elements] f32, bf16, or blocks of 36 bytes
    uint64_t n_elements;
    uint64_t chunk_len;  // elements that continue one sequence of random numbers
    uint64_t seed;
    float spread;  // standard deviation; not used for blocks
    uint32_t reserved;
};
static_assert(sizeof(SyntheticArgs) == 40 && offsetof(SyntheticArgs, n_elements) == 8 &&
              offsetof(SyntheticArgs, seed) == 24 && offsetof(SyntheticArgs, spread) == 32);

struct RepackArgs {
    const uint8_t* low;   // row g of strip s at ((s * row_step) + g) * row bytes; 16-byte aligned
    const uint8_t* high;  // row g + 8, likewise
    uint8_t* tiles;       // [strips, k_tiles] tiles of layout.cuh, 16-byte aligned
    uint32_t strips;
    uint32_t k_tiles;   // inputs / 512
    uint32_t row_step;  // 16, or 8 where low and high are two matrices (gate and up)
    uint32_t reserved;
};
static_assert(sizeof(RepackArgs) == 40 && offsetof(RepackArgs, tiles) == 16 && offsetof(RepackArgs, strips) == 24 &&
              offsetof(RepackArgs, row_step) == 32);
