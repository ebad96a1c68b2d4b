// Hopper's bulk copies into shared memory, what barriers do for them, and clusters that share a copy.
#pragma once

#include <cstdint>

#include "barrier.cuh"

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// True for one thread of a warp that is all here. That it is alone is known to the compiler, which then needs no loop
// around instructions with uniform operands, as copies are: a tenth of the instructions of a branch on a thread's
// number.
__device__ __forceinline__ bool elect_one() {
    uint32_t elected;
    asm volatile(
        "{\n\t.reg .pred alone;\n\t"
        "elect.sync _|alone, 0xFFFFFFFF;\n\t"
        "selp.u32 %0, 1, 0, alone;\n\t}"
        : "=r"(elected));
    return elected != 0;
}

// Shows initialised barriers to the other blocks of the cluster and to copies; then the cluster has to meet.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives, and has the phase wait for `bytes` of copies.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives at what block `rank` of the cluster has at `barrier`.
__device__ __forceinline__ void barrier_arrive(uint32_t barrier, uint32_t rank) {
    asm volatile(
        "{\n\t.reg .b32 there;\n\t"
        "mapa.shared::cluster.u32 there, %0, %1;\n\t"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n\t}" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// By the threads that read or wrote shared memory, before they arrive at the barrier behind which bulk copies write
// there, or products read it.
__device__ __forceinline__ void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Copies to this block and completes on `barrier`; addresses and length are multiples of 16.
__device__ __forceinline__ void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// The same to each block of the cluster in `mask`, to the same place, and completes on its barrier there.
__device__ __forceinline__ void bulk_copy_all(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier,
                                              uint16_t mask) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], "
        "%4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "h"(mask)
        : "memory");
}

#endif
