// Hopper's way to feed the products of prefill.cuh.
//
// Two warpgroups multiply 64 weight rows each: weights go from global memory through registers into A fragments, x
// comes as B from a ring of stages in shared memory that one more thread fills with bulk copies. While the tensor
// cores multiply a chunk, its warps expand the next. Blocks of a cluster have the same columns: each brings its share
// of a stage and multicasts it. Blocks are persistent; x and weights of the next unit are requested during this one.
//
// A stage holds as many panels of a unit as fit, so that narrow units keep as many bytes on their way.
#pragma once

#include "bulk.cuh"
#include "cluster.cuh"
#include "prefill.cuh"
#include "wgmma.cuh"

// The geometry of a kernel for up to kMost columns, which src/kernels/prefill.rs repeats.
template <int kMost>
struct Hopper {
    static constexpr uint32_t kCluster = 2;
    static constexpr int kConsumers = 256;
    static constexpr int kThreads = kConsumers + 128;  // registers are dealt to whole warpgroups
    static constexpr int kBlocks = 1;                  // on a multiprocessor
    static constexpr int kStageBytes = 32768;
    static constexpr int kStages = 5;
    static constexpr int kAhead = 4;  // chunks of weights on their way to a warp

    // Panels of a stage: 1, 2, 4 or 8.
    static __host__ __device__ constexpr int panels(int width) {
        const int fit = kStageBytes / (width * kPanelRowBytes);
        return fit >= 8 ? 8 : fit >= 4 ? 4 : fit >= 2 ? 2 : 1;
    }
};

// Its blocks of a cluster, as a kernel's attribute.
#if __CUDA_ARCH__ >= 900
#define HOPPER_CLUSTER(MOST) __cluster_dims__(Hopper<MOST>::kCluster, 1, 1)
#else
#define HOPPER_CLUSTER(MOST)
#endif

#if __CUDA_ARCH_FEAT_SM90_ALL

// A ring of stages as one side sees it.
template <typename Shape>
struct Ring {
    uint32_t stages;    // shared address
    uint32_t barriers;  // full, empty for each stage
    uint32_t stage = 0, parity = 0;

    __device__ __forceinline__ uint32_t at(uint32_t stage) const { return stages + stage * Shape::kStageBytes; }
    __device__ __forceinline__ uint32_t full(uint32_t stage) const { return barriers + 16 * stage; }
    __device__ __forceinline__ uint32_t empty(uint32_t stage) const { return barriers + 16 * stage + 8; }
    __device__ __forceinline__ void advance() {
        if (++stage == Shape::kStages) stage = 0, parity ^= 1;
    }
};

template <typename Shape, typename Work>
__device__ __forceinline__ void bring(Ring<Shape> ring, const Work& work, uint32_t i, uint32_t step) {
    constexpr uint32_t kCluster = Shape::kCluster;
    const uint32_t rank = cluster_rank(), units = work.units(kCluster);
    for (; i < units; i += step) {
        const Unit unit = work.at(i, kCluster, rank);
        const int n_panels = kChunks * work.k_tiles(unit);
        const uint32_t rows = (unit.rows + 7) / 8 * 8, share = (rows / 8 + kCluster - 1) / kCluster * 8;
        const uint32_t first = min(rank * share, rows), mine = min(share, rows - first) * kPanelRowBytes;
        const int panels = Shape::panels(unit.width);
        for (int panel = 0; panel < n_panels;) {
            barrier_wait(ring.empty(ring.stage), ring.parity ^ 1);
            barrier_expect(ring.full(ring.stage), panels * rows * kPanelRowBytes);
            uint32_t to = ring.at(ring.stage) + first * kPanelRowBytes;
            do {
                const uint8_t* from = work.x(unit, panel, unit.row + first);
                if (mine > 0) bulk_copy_all(to, from, mine, ring.full(ring.stage), (1 << kCluster) - 1);
                to += unit.width * kPanelRowBytes;
            } while (++panel % panels > 0);
            ring.advance();
        }
    }
}

// A consumer warp is done with a stage, in every block that copies to it.
template <typename Shape>
__device__ __forceinline__ void release(const Ring<Shape>& ring, uint32_t stage, int lane) {
    if (lane < int(Shape::kCluster)) barrier_arrive(ring.empty(stage), lane);
}

// d = the products of a unit. `tile` is the first of the strip, `next` that of the strip that comes then.
template <int W, typename Shape, typename Stream, int M>
__device__ __forceinline__ void multiply(float (&d)[M], Ring<Shape>& ring, Stream& weights, const uint8_t* tile,
                                         const uint8_t* next, int k_tiles, int lane) {
    constexpr int kPanels = Shape::panels(W);
    uint32_t a[2][4][4], last = 0;
#pragma unroll 1
    for (int kt = 0; kt < k_tiles; ++kt) {
        const uint8_t* following = kt + 1 < k_tiles ? tile + Stream::kBytes : next;
        weights.begin(following, lane);
#pragma unroll
        for (int i = 0; i < kChunks; ++i) {
            weights.fragments(i, a[i % 2]);
            if (i % kPanels == 0) barrier_wait(ring.full(ring.stage), ring.parity);
            const uint64_t b = describe(ring.at(ring.stage) + i % kPanels * W * kPanelRowBytes);
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < 4; ++j) wgmma<W>(d, a[i % 2][j], b + 2 * j);
            wgmma_commit();
            wgmma_wait<1>();
            weights.refill(i, tile, following, lane);
            if (i % kPanels == 0 && i > 0) release(ring, last, lane);
            if (i % kPanels == kPanels - 1) {
                last = ring.stage;
                ring.advance();
            }
        }
        tile = following;
        wgmma_wait<0>();
        release(ring, last, lane);
    }
}

// A unit with the least of the kernel's widths that holds it; they fall.
template <typename Ending, typename Shape, int W, int... kRest, typename Stream, typename Work>
__device__ __forceinline__ void do_unit(Ring<Shape>& ring, Stream& weights, const Work& work, const Unit& unit,
                                        const uint8_t* tile, const uint8_t* next, uint8_t* shared) {
    if constexpr (sizeof...(kRest) > 0) {
        if (unit.width < W) {
            return do_unit<Ending, Shape, kRest...>(ring, weights, work, unit, tile, next, shared);
        }
    }
    float2 scales = work.scales(unit, Ending::strip(threadIdx.x / 32));
    scales.x *= Stream::kWeightScale;
    scales.y *= Stream::kWeightScale;
    float d[W / 2];
#pragma unroll
    for (int i = 0; i < W / 2; ++i) d[i] = 0.0f;
    multiply<W>(d, ring, weights, tile, next, work.k_tiles(unit), threadIdx.x % 32);
    const Place at(0);
    Ending::template write<W>(d, work, unit, scales, at, shared);
}

template <typename Stream, typename Ending, typename Work, int kMost, int... kWidths>
__device__ __forceinline__ void prefill_wide(const typename Work::Args& args) {
    using Shape = Hopper<kMost>;
    constexpr uint32_t kCluster = Shape::kCluster;
    extern __shared__ __align__(1024) uint8_t shared[];
    uint8_t* ending = shared + Shape::kStages * Shape::kStageBytes;
    const Ring<Shape> ring{shared_address(shared), shared_address(ending + Ending::shared_bytes(kMost))};
    const Work work{args};
    const uint32_t rank = cluster_rank();
    const uint32_t first = blockIdx.x / kCluster, step = gridDim.x / kCluster;

    if (threadIdx.x == 0) {
        for (int i = 0; i < Shape::kStages; ++i) {
            barrier_init(ring.full(i), 1);
            barrier_init(ring.empty(i), kCluster * Shape::kConsumers / 32);
        }
        barrier_init_fence();
    }
    cluster_sync();

    if (threadIdx.x >= Shape::kConsumers) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        pdl_wait();
        pdl_launch();
        if (threadIdx.x / 32 == Shape::kConsumers / 32 && elect_one()) bring(ring, work, first, step);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int lane = threadIdx.x % 32, strip = Ending::strip(threadIdx.x / 32);
        const uint32_t units = work.units(kCluster);
        auto tile_of = [&](const Unit& unit) { return work.template weights<Stream>(unit, strip); };
        Stream weights;
        const uint8_t* tile = nullptr;
        if (first < units) {
            tile = tile_of(work.at(first, kCluster, rank));
            weights.prime(tile, lane);
        }
        pdl_wait();
        pdl_launch();
        Ring<Shape> mine = ring;
        for (uint32_t i = first; i < units; i += step) {
            const Unit unit = work.at(i, kCluster, rank);
            // At the end the strip is asked for once more, in vain.
            const uint8_t* next = i + step < units ? tile_of(work.at(i + step, kCluster, rank)) : tile;
            do_unit<Ending, Shape, kWidths...>(mine, weights, work, unit, tile, next, ending);
            tile = next;
        }
    }
    // Until then a block of the cluster may write to the others.
    cluster_sync();
}

#else

template <typename Stream, typename Ending, typename Work, int kMost, int... kWidths>
__device__ __forceinline__ void prefill_wide(const typename Work::Args&) {
    __trap();
}

#endif
