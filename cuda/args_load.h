// Argument structs of the kernels that fill weights; src/kernels/load.rs mirrors them.
#pragma once

#include <cstddef>
#include <cstdint>

struct SyntheticArgs {
    void* out;            // [n_elements] f32, bf16, or blocks of 36 bytes
    uint64_t n_elements;
    uint64_t chunk_len;   // elements that continue one sequence of random numbers
    uint64_t seed;
    float spread;         // standard deviation; not used for blocks
    uint32_t reserved;
};
static_assert(sizeof(SyntheticArgs) == 40 && offsetof(SyntheticArgs, n_elements) == 8 &&
              offsetof(SyntheticArgs, seed) == 24 && offsetof(SyntheticArgs, spread) == 32);
