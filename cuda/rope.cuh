// Rotation of q and k.
#pragma once

#include <cstdint>

#include "math.cuh"

// cos and sin of the fp32 angle position * inv_freq. A double holds the angle's multiple of pi to 1e-11 and, less its
// whole quarters, in fp32 to 2^-27: sincosf on such angles would need local memory.
__device__ __forceinline__ void rope_angle(uint32_t position, float inv_freq, float& cos, float& sin) {
    const double half_turns = double(__fmul_rn(float(position), inv_freq)) * 0.318309886183790671538;
    const double quarters = rint(2.0 * half_turns);
    float s, c;
    sincospif(float(half_turns - 0.5 * quarters), &s, &c);
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
