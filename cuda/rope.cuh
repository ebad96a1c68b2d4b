// Rotation of q and k.
#pragma once

#include <cstdint>

#include "math.cuh"

// cos and sin of the fp32 angle position * inv_freq, with the bits of src/cpu/rope.rs: a double holds the angle's
// multiple of pi and, less its whole quarters, in fp32 to 2^-27; then polynomials in x^2, of which no product is fused
// with an addition.
__device__ __forceinline__ void rope_angle(uint32_t position, float inv_freq, float& cos, float& sin) {
    const double half_turns = __dmul_rn(double(__fmul_rn(float(position), inv_freq)), 0.318309886183790671538);
    const double quarters = rint(2.0 * half_turns);
    const float x = float(__dsub_rn(half_turns, 0.5 * quarters)), square = __fmul_rn(x, x);
    auto add = [&](float sum, float c) { return __fadd_rn(__fmul_rn(sum, square), c); };
    const float c = add(add(add(add(0.23142955f, -1.3350585f), 4.0587077f), -4.934802f), 1.0f);
    const float s = __fmul_rn(x, add(add(add(-0.5894797f, 2.5498106f), -5.1677094f), 3.14159265f));
    const int quadrant = int(quarters) & 3;
    const float swapped_cos = quadrant & 1 ? s : c, swapped_sin = quadrant & 1 ? c : s;
    cos = quadrant == 1 || quadrant == 2 ? -swapped_cos : swapped_cos;
    sin = quadrant & 2 ? -swapped_sin : swapped_sin;
}

// One value of a rotated pair: x1 cos - x2 sin for the first (other = -x2), x2 cos + x1 sin for the second (other =
// x1).
__device__ __forceinline__ float rotate(float x, float other, float cos, float sin) {
    return round_bf16(__fadd_rn(__fmul_rn(x, cos), __fmul_rn(other, sin)));
}
