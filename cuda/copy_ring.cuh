// A ring of slots in shared memory that one warp fills from global memory, ahead of warps that read them.
//
// Fillings are numbered from 0 on, number n being in slot n % kSlots. Who waits for a filling has read the one before
// in that slot. Bulk copies from sm_90 on; before, every lane copies 16 bytes at a time.
#pragma once

#include <cstdint>

#include "barrier.cuh"
#include "bulk.cuh"
#include "copy_async.cuh"

template <int kSlots, int kSlotBytes>
struct CopyRing {
    alignas(128) uint8_t slots[kSlots][kSlotBytes];
    Barrier full[kSlots], empty[kSlots];

    // By one thread; then all who use it have to meet. Each filling is read by `readers` warps.
    __device__ __forceinline__ void init(uint32_t readers) {
#if __CUDA_ARCH__ >= 900
        constexpr uint32_t kArrivals = 1;
#else
        constexpr uint32_t kArrivals = 32;
#endif
        for (int i = 0; i < kSlots; ++i) {
            full[i].init(kArrivals);
            empty[i].init_warps(readers);
        }
#if __CUDA_ARCH__ >= 900
        barrier_init_fence();
#endif
    }

    // What the warp that fills does for filling `n`: `bytes`, a multiple of 16, from `from` to byte `at` of the slot.
    __device__ __forceinline__ void fill(uint32_t n, uint32_t at, const void* from, uint32_t bytes, int lane) {
        const uint32_t slot = n % kSlots, to = shared_address(slots[slot]) + at;
        // The first time round nobody has to leave: the phase before the first counts as over.
        empty[slot].wait(n / kSlots + 1);
#if __CUDA_ARCH__ >= 900
        if (lane == 0) {
            barrier_expect(full[slot].address(), bytes);
            bulk_copy(to, from, bytes, full[slot].address());
        }
#else
        for (uint32_t i = 16 * lane; i < bytes; i += 16 * 32) copy_async_16(to + i, static_cast<const char*>(from) + i);
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(full[slot].address()) : "memory");
#endif
    }

    // Where a reader finds filling `n`, once it is there.
    __device__ __forceinline__ const uint8_t* read(uint32_t n) const {
        const uint32_t slot = n % kSlots;
        full[slot].wait(n / kSlots);
        return slots[slot];
    }

    // By all lanes of a reader, when they have what they need of it.
    __device__ __forceinline__ void release(uint32_t n, int lane) {
#if __CUDA_ARCH__ >= 900
        async_fence();
#endif
        empty[n % kSlots].arrive(lane);
    }
};
