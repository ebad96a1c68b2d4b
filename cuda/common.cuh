// What every kernel needs: the launch dependency of PDL.
#pragma once

// Waits until the kernels before this one in the stream have ended and their writes are visible. Without the launch
// attribute, and before sm_90, that is already so when the kernel starts.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel in the stream start, up to its own wait. Called right after the wait, see pdl_wait: then, while
// a kernel runs ahead of its wait, only its direct predecessor can still be running.
__device__ __forceinline__ void pdl_launch() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
