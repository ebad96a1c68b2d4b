// Thread block clusters of eight; cards before sm_90 have none, and one block does the work of eight.
#pragma once

#include <cstdint>

#if __CUDA_ARCH__ >= 900
#define FLINT_CLUSTER __cluster_dims__(8, 1, 1)
constexpr uint32_t kClusterBlocks = 8;
#else
#define FLINT_CLUSTER
constexpr uint32_t kClusterBlocks = 1;
#endif

// All threads of the cluster meet; what they wrote before, to any block's shared memory, is seen by all.
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
#else
    __syncthreads();
#endif
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
