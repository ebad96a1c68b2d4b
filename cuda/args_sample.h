// Argument structs of the kernels that choose tokens; src/kernels/sample.rs mirrors them.
#pragma once

#include <cstddef>
#include <cstdint>

struct SampleGreedyArgs {
    const float* logits;    // [B, logits_stride]
    uint32_t* tokens;       // [B] the chosen token
    uint32_t* positions;    // [B] each goes up by 1
    uint32_t* host_tokens;  // host memory [ring, 8]: the chosen tokens, in line position % ring
    uint64_t* best;         // [B], zero before and after
    uint32_t* counters;     // [B], zero before and after
    uint32_t vocab;         // tokens that may be chosen
    uint32_t logits_stride;
    uint32_t ring;
    uint32_t reserved;
};
static_assert(sizeof(SampleGreedyArgs) == 64 && offsetof(SampleGreedyArgs, host_tokens) == 24 &&
              offsetof(SampleGreedyArgs, vocab) == 48 && offsetof(SampleGreedyArgs, ring) == 56);
