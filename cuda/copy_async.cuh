// Copies of 16 bytes from global to shared memory that pass the registers and the L1 cache by, on any card.
#pragma once

#include <cstdint>

__device__ __forceinline__ void copy_async_16(uint32_t shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
    copy_async_16(uint32_t(__cvta_generic_to_shared(shared)), global);
}

// Waits for all that the thread has on their way.
__device__ __forceinline__ void copy_async_join() {
    asm volatile("cp.async.commit_group;\n\tcp.async.wait_group 0;" ::: "memory");
}
