// What every kernel needs: the launch dependency of PDL, BF16 pairs, and math.cuh.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "math.cuh"

// Waits until the kernels before this one in the stream have ended and their writes are visible. Without the launch
// attribute, and before sm_90, that is already so when the kernel starts.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel start, up to its own wait. Right after the wait of this one, the next then knows that all
// kernels but this have ended, so it may read whatever those wrote. Before the wait, it may run beside what this one
// waits for, and along a row of kernels that do so, beside the last that did not: it may read what neither that one nor
// any of the row writes.
__device__ __forceinline__ void pdl_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

__device__ __forceinline__ float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
}
