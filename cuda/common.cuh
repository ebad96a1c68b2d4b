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

// Lets the next kernel start, up to its own wait. Comes right after the wait: a kernel that runs ahead then knows that
// all kernels but its direct predecessor have ended, so it may read whatever those wrote. Where it comes first, the
// next kernel knows this of one kernel less.
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
