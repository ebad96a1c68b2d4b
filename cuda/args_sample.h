// Argument and memory structs of the sampler; src/kernels/sample.rs mirrors them.
#pragma once

#include <cstddef>
#include <cstdint>

// Bits of SampleRow::flags.
constexpr uint32_t kSampleMasked = 1;     // masks has tokens that may not be chosen
constexpr uint32_t kSampleBiased = 2;     // bias has values
constexpr uint32_t kSamplePenalised = 4;  // seen is read and kept up to date
constexpr uint32_t kSampleLogprobs = 8;

// Values of SampleRecord::status. But for kSampled, the row stays as it was.
constexpr uint32_t kSampled = 0;
constexpr uint32_t kSampleBadLogit = 1;     // NaN or plus infinity: the first one's token and value
constexpr uint32_t kSampleImpossible = 2;   // no logit above minus infinity
constexpr uint32_t kSampleOverflow = 3;     // a penalty made plus infinity
constexpr uint32_t kSampleNothingLeft = 4;  // masks and penalties left no token

constexpr uint32_t kSampleTopMost = 20;

// What a request asks for, and how far it is.
struct SampleRow {
    uint64_t seed;
    uint64_t least;     // weights below are dropped: min_p, at least 1
    uint64_t share;     // top_p * 2^32, rounded; 2^32 keeps all
    float temperature;  // 0 is greedy
    float repetition;
    float frequency;
    float presence;
    uint32_t top_k;  // 0 keeps all
    uint32_t min_tokens;
    uint32_t flags;
    uint32_t top_n;    // most likely tokens to report, at most 20
    uint32_t output;   // tokens chosen so far
    uint32_t records;  // records written so far, modulo 2^32
};
static_assert(sizeof(SampleRow) == 64 && offsetof(SampleRow, temperature) == 24 && offsetof(SampleRow, top_k) == 40 &&
              offsetof(SampleRow, output) == 56);

struct SampleTop {
    uint32_t token;
    float logprob;
};

// One choice.
struct SampleRecord {
    uint32_t sequence;  // records of the row before it, plus 1
    uint32_t status;
    uint32_t token;
    float value;    // the token's log-probability if asked for; of a bad logit, the logit
    uint32_t rank;  // of the token under the raw distribution, from 1, if asked for
    uint32_t n_top;
    SampleTop top[kSampleTopMost];  // [n_top], best first
    uint32_t reserved[2];
};
static_assert(sizeof(SampleRecord) == 192 && offsetof(SampleRecord, top) == 24);

struct DecodeSampleArgs {
    const float* logits;    // [B, logits_stride]
    SampleRow* rows;        // [B]
    const uint32_t* masks;  // [B, 2, ceil(V / 32)] bit v % 32 of word v / 32 is set for tokens that may be chosen; the
                            // second half counts while fewer than min_tokens stand. Read if kSampleMasked
    const float* bias;      // [B, V] read if kSampleBiased
    uint32_t* seen;    // [B, V] 0, or 1 + times in the output for tokens of prompt and output. Used if kSamplePenalised
    float* workspace;  // [B, V] for logits that masks, biases or penalties change
    uint32_t* tokens;  // [B]
    uint32_t* positions;  // [B]
    SampleRecord* ring;   // [ring_lines, ring_rows] in memory that the host reads
    uint32_t vocab;       // V
    uint32_t logits_stride;
    uint32_t ring_lines;
    uint32_t ring_rows;  // at least B
};
static_assert(sizeof(DecodeSampleArgs) == 88 && offsetof(DecodeSampleArgs, workspace) == 40 &&
              offsetof(DecodeSampleArgs, ring) == 64 && offsetof(DecodeSampleArgs, vocab) == 72);
