// Barriers in shared memory at which some threads arrive and others wait: mbarrier, on any card.
#pragma once

#include <cstdint>

__device__ __forceinline__ uint32_t shared_address(const void* shared) {
    return uint32_t(__cvta_generic_to_shared(shared));
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.shared.b64 state, [%0];\n\t}" ::"r"(barrier) : "memory");
}

// Until the phase of this parity is over.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n\t.reg .pred done;\n\t"
        "again:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
        "@!done bra again;\n\t}" ::"r"(barrier),
        "r"(parity)
        : "memory");
#else
    asm volatile(
        "{\n\t.reg .pred done;\n\t"
        "again:\n\tmbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n\t"
        "@!done bra again;\n\t}" ::"r"(barrier),
        "r"(parity)
        : "memory");
#endif
}

// How many lanes of a warp arrive for it. racecheck follows every thread by itself, and does not see that __syncwarp()
// orders what the others did before where lanes have parted on their way there; built for it, all of them arrive.
#ifdef FLINT_RS_RACECHECK
constexpr uint32_t kWarpArrivals = 32;
#else
constexpr uint32_t kWarpArrivals = 1;
#endif

// What all lanes of a warp did before stands before what comes behind the wait.
__device__ __forceinline__ void warp_arrive(uint32_t barrier, int lane) {
    __syncwarp();
    if (lane < int(kWarpArrivals)) barrier_arrive(barrier);
}

struct Barrier {
    uint64_t word;

    __device__ __forceinline__ uint32_t address() const { return shared_address(&word); }

    // By one thread; then all who use it have to meet.
    __device__ __forceinline__ void init(uint32_t arrivals) { barrier_init(address(), arrivals); }
    __device__ __forceinline__ void init_warps(uint32_t warps) { init(warps * kWarpArrivals); }

    // By all lanes of a warp.
    __device__ __forceinline__ void arrive(int lane) { warp_arrive(address(), lane); }

    // Until phase number `phase` is over. It cannot be told from the next but one: that has to be impossible.
    __device__ __forceinline__ void wait(uint32_t phase) const { barrier_wait(address(), phase % 2); }
};
