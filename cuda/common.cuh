// What every kernel needs: the launch dependency of PDL.
#pragma once

// Waits until the kernels before this one in the stream have ended and their writes are visible. Without the launch
// attribute, and before sm_90, that is already so when the kernel starts.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
