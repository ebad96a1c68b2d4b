// Exact arithmetic of sampling, the same as src/sampling/select.rs and rng.rs bit for bit: products and sums are
// rounded one by one, and everything that is added up is an integer.
#pragma once

#include <cstdint>

// A logit and its token in one integer whose order is that of choosing: larger logits first, then lower ids. No two
// tokens have the same key.
using Key = uint64_t;

// Above every token that is masked by a logit of minus infinity and below all others.
constexpr Key kFloor = 0x007FFFFFFFFFFFFFull;

__device__ __forceinline__ Key make_key(float logit, uint32_t token) {
    // Adding zero turns -0 into +0, with which it ties.
    const uint32_t bits = __float_as_uint(__fadd_rn(logit, 0.0f));
    const uint32_t ordered = bits >> 31 ? ~bits : bits | 0x80000000u;
    return uint64_t(ordered) << 32 | uint32_t(~token);
}

__device__ __forceinline__ uint32_t key_token(Key key) { return ~uint32_t(key); }

__device__ __forceinline__ float key_logit(Key key) {
    const uint32_t ordered = key >> 32;
    return __uint_as_float(ordered >> 31 ? ordered & 0x7FFFFFFFu : ~ordered);
}

// exp(x) * 2^40 for x <= 0; at most 2^40.
__device__ __forceinline__ uint64_t weight(float x) {
    if (x < -29.0f) return 0;
    constexpr float kRound = 12582912.0f;
    const float rounded = __fadd_rn(__fmul_rn(x, 0x1.715476p+0f), kRound);
    const float n = __fsub_rn(rounded, kRound);
    const float r = __fsub_rn(__fsub_rn(x, __fmul_rn(n, 355.0f / 512.0f)), __fmul_rn(n, -2.1219443e-4f));
    float p = 1.9875691e-4f;
    p = __fadd_rn(__fmul_rn(p, r), 1.3981999e-3f);
    p = __fadd_rn(__fmul_rn(p, r), 8.333452e-3f);
    p = __fadd_rn(__fmul_rn(p, r), 4.1665796e-2f);
    p = __fadd_rn(__fmul_rn(p, r), 1.6666665e-1f);
    p = __fadd_rn(__fmul_rn(p, r), 0.5f);
    p = __fadd_rn(__fadd_rn(__fmul_rn(p, __fmul_rn(r, r)), r), 1.0f);
    const uint32_t bits = __float_as_uint(p);
    const uint64_t mantissa = (bits & 0x007FFFFF) | 0x00800000;
    // The mantissa stands for p * 2^23, and `rounded` has n in its low bits. Half a unit is added at one bit below it,
    // which is nothing where the shift is to the left.
    const int shift = int(bits >> 23) - 127 - 23 + 40 + (int(__float_as_uint(rounded)) - 0x4B400000);
    return ((mantissa << 18 >> (17 - shift)) + 1) >> 1;
}

// The weight of a logit beside the first one, `max`; 0 if min_p drops it.
struct Weigh {
    float max;
    float temperature;
    uint64_t least;

    __device__ __forceinline__ float scale(float logit) const {
        const float x = __fsub_rn(logit, max);
        // The same without the cost of a division.
        return temperature == 1.0f ? x : __fdiv_rn(x, temperature);
    }
    __device__ __forceinline__ uint64_t scaled(float x) const {
        const uint64_t w = weight(x);
        return w < least ? 0 : w;
    }
    __device__ __forceinline__ uint64_t operator()(float logit) const { return scaled(scale(logit)); }
};

// total * share / 2^32, rounded up and at least 1: what the most likely tokens have to reach.
__device__ __forceinline__ uint64_t nucleus_need(uint64_t total, uint64_t share) {
    const uint64_t low = total * share;
    const uint64_t need = (__umul64hi(total, share) << 32 | low >> 32) + (uint32_t(low) != 0);
    return need == 0 ? 1 : need;
}

// 64 random bits for output token number `position` under `seed`: Philox4x32-10.
__device__ __forceinline__ uint64_t random_bits(uint64_t seed, uint64_t position) {
    uint32_t c0 = position, c1 = position >> 32, c2 = 0, c3 = 0, k0 = seed, k1 = seed >> 32;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t(0xD2511F53u) * c0, b = uint64_t(0xCD9E8D57u) * c2;
        c0 = uint32_t(b >> 32) ^ c1 ^ k0;
        c1 = uint32_t(b);
        c2 = uint32_t(a >> 32) ^ c3 ^ k1;
        c3 = uint32_t(a);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return uint64_t(c1) << 32 | c0;
}
