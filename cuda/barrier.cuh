// A barrier in shared memory at which some threads arrive and others wait: mbarrier, on any card.
#pragma once

#include <cstdint>

#include "bulk.cuh"

// The barrier that a thread alone waits for. All that racecheck still reports follows waits whose address is in a
// uniform register; built for it, this one is not.
__device__ __forceinline__ uint32_t followed(uint32_t barrier) {
#ifdef FLINT_RS_RACECHECK
    asm volatile(
        "{\n\t.reg .u32 zero;\n\t"
        "mov.u32 zero, %%tid.x;\n\t"
        "shr.u32 zero, zero, 31;\n\t"
        "add.u32 %0, %0, zero;\n\t}"
        : "+r"(barrier));
#endif
    return barrier;
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
    if (lane < int(kWarpArrivals)) {
        asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.shared.b64 state, [%0];\n\t}" ::"r"(barrier) : "memory");
    }
}

struct Barrier {
    uint64_t word;

    __device__ __forceinline__ uint32_t address() const { return shared_address(&word); }

    // By one thread; then all who use it have to meet.
    __device__ __forceinline__ void init(uint32_t arrivals) {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory");
    }
    __device__ __forceinline__ void init_warps(uint32_t warps) { init(warps * kWarpArrivals); }

    // By all lanes of a warp.
    __device__ __forceinline__ void arrive(int lane) { warp_arrive(address(), lane); }

    // Until phase number `phase` is over. It cannot be told from the next but one: that has to be impossible.
    __device__ __forceinline__ void wait(uint32_t phase) const {
#if __CUDA_ARCH__ >= 900
        barrier_wait(address(), phase % 2);
#else
        asm volatile(
            "{\n\t.reg .pred done;\n\t"
            "again:\n\tmbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n\t"
            "@!done bra again;\n\t}" ::"r"(address()),
            "r"(phase % 2)
            : "memory");
#endif
    }
};
