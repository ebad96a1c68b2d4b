// Thread block clusters; cards before sm_90 have none, and one block does the work of all.
#pragma once

#include <cstdint>

#include "bulk.cuh"

#if __CUDA_ARCH__ >= 900
#define FLINT_CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)
#else
#define FLINT_CLUSTER(blocks)
#endif

// Blocks that share the work of a cluster launched as `blocks`.
constexpr uint32_t cluster_blocks(uint32_t blocks) {
#if __CUDA_ARCH__ >= 900
    return blocks;
#else
    return 1;
#endif
}

// cluster_sync in two halves, with work in between.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#else
    __syncthreads();
#endif
}

// All threads of the cluster meet; what they wrote before, to any block's shared memory, is seen by all.
__device__ __forceinline__ void cluster_sync() {
    cluster_arrive();
    cluster_wait();
}

// Where block `rank` of the cluster has what this block has at `shared`.
template <typename T>
__device__ __forceinline__ T* cluster_peer(T* shared, uint32_t rank) {
#if __CUDA_ARCH__ >= 900
    uint64_t address;
    asm("mapa.u64 %0, %1, %2;" : "=l"(address) : "l"(reinterpret_cast<uint64_t>(shared)), "r"(rank));
    return reinterpret_cast<T*>(address);
#else
    return shared;
#endif
}

#if __CUDA_ARCH__ >= 900
// A box in shared memory that blocks of the cluster fill. Who waits for it sees what was put into it; no barrier of the
// cluster, which would first wait for all else that its threads wrote, is needed.
struct ClusterBox {
    uint64_t barrier;

    __device__ __forceinline__ uint32_t address() const { return shared_address(&barrier); }

    // By one thread, which then arrives at the cluster's barrier; others put something in behind their wait there.
    __device__ __forceinline__ void init() {
        barrier_init(address(), 1);
        barrier_init_fence();
    }
    __device__ __forceinline__ void open(uint32_t bytes) {
        init();
        expect(bytes);
    }

    // By one thread, for each filling: how much is going to come. What comes earlier counts too.
    __device__ __forceinline__ void expect(uint32_t bytes) { barrier_expect(address(), bytes); }

    // Until filling number `parity` modulo 2 is complete.
    __device__ __forceinline__ void wait(uint32_t parity) const { barrier_wait(address(), parity); }

    // Into what block `rank` has at `to`, and into its box.
    __device__ __forceinline__ void put(float4* to, float4 x, uint32_t rank) const {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(
                         peer(shared_address(to), rank)),
                     "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w), "r"(peer(address(), rank))
                     : "memory");
    }
    __device__ __forceinline__ void put(float2* to, float2 x, uint32_t rank) const {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
                         peer(shared_address(to), rank)),
                     "f"(x.x), "f"(x.y), "r"(peer(address(), rank))
                     : "memory");
    }

    __device__ __forceinline__ void put(uint64_t* to, uint64_t x, uint64_t y, uint32_t rank) const {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b64 [%0], {%1, %2}, [%3];" ::"r"(
                         peer(shared_address(to), rank)),
                     "l"(x), "l"(y), "r"(peer(address(), rank))
                     : "memory");
    }
    __device__ __forceinline__ void put(uint64_t* to, uint64_t x, uint32_t rank) const {
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(
                         peer(shared_address(to), rank)),
                     "l"(x), "r"(peer(address(), rank))
                     : "memory");
    }

private:
    static __device__ __forceinline__ uint32_t peer(uint32_t address, uint32_t rank) {
        uint32_t there;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
        return there;
    }
};

// The first half of a meeting that says no more than that this thread has come.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
}
#else
// One block has nobody to exchange with: it takes the place of these and never calls them.
struct ClusterBox {
    __device__ __forceinline__ void init() {}
    __device__ __forceinline__ void open(uint32_t) {}
    __device__ __forceinline__ void expect(uint32_t) {}
    __device__ __forceinline__ void wait(uint32_t) const {}
    __device__ __forceinline__ void put(float4*, float4, uint32_t) const {}
    __device__ __forceinline__ void put(float2*, float2, uint32_t) const {}
    __device__ __forceinline__ void put(uint64_t*, uint64_t, uint64_t, uint32_t) const {}
    __device__ __forceinline__ void put(uint64_t*, uint64_t, uint32_t) const {}
};
__device__ __forceinline__ void cluster_arrive_relaxed() {}
#endif
