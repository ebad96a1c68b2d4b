// Hopper's way to feed the products of prefill.cuh when columns are few and the weights' bytes count.
//
// Weights come through shared memory too: a ring of stages with a piece of each strip and the panels that it meets,
// all brought by one thread, so that far more is on its way than registers would hold. The first weights are requested
// before the kernels in front have ended.
#pragma once

#include "barrier.cuh"
#include "prefill_wgmma.cuh"

// The geometry of a kernel for up to kMost columns, which src/kernels/prefill.rs repeats. kSplit blocks share the 8
// strips of a unit: with few strips more multiprocessors have work, with many a stage of x serves more.
template <typename Piece, int kMost, int kSplit>
struct Narrow {
    static constexpr int kStrips = kBlockStrips / kSplit;
    static constexpr int kConsumers = 32 * kStrips;
    static constexpr int kThreads = kConsumers + 32;
    // On a multiprocessor. Of a kernel that leaves room for as much again the next one's first weights come during it;
    // BF16 needs the room to have as many on their way.
    static constexpr int kBlocks = kMost <= 16 && Piece::kTilePieces == 1 ? 2 : 1;
    static constexpr int kXBytes = Piece::kChunks * kMost * kPanelRowBytes;
    static constexpr int kStageBytes = kXBytes + kStrips * Piece::kBytes;
    static constexpr int kFit = 208 * 1024 / kBlocks / kStageBytes;
    static constexpr int kStages = kFit < 12 ? kFit : 12;
};

// A whole NVFP4 tile of a strip.
struct Nvfp4Piece {
    static constexpr int kChunks = 8;
    static constexpr int kTilePieces = 1;
    static constexpr int kBytes = Nvfp4Tile::kBytes;
    static constexpr float kWeightScale = Nvfp4Tile::kWeightScale;
    const uint4* lines;  // the lane's words of the piece
    uint4 scales;

    __device__ __forceinline__ Nvfp4Piece(const uint8_t* piece, int lane)
        : lines(reinterpret_cast<const uint4*>(piece) + lane), scales(lines[0]) {}
    struct Words {
        uint4 x;
    };
    __device__ __forceinline__ Words words(int i) const { return {lines[32 * (1 + i)]}; }
    __device__ __forceinline__ void fragments(int i, const Words& chunk, uint32_t (&a)[4][4]) const {
        const ScalePairs pairs(scales, i);
        const uint4& words = chunk.x;
        expand_codes(a[0], words.x, pairs);
        expand_codes(a[1], words.y, pairs);
        expand_codes(a[2], words.z, pairs);
        expand_codes(a[3], words.w, pairs);
    }
};

// A quarter of a BF16 tile.
struct Bf16Piece {
    static constexpr int kChunks = 2;
    static constexpr int kTilePieces = 4;
    static constexpr int kBytes = Bf16Tile::kBytes / kTilePieces;
    static constexpr float kWeightScale = Bf16Tile::kWeightScale;
    const uint4* lines;

    __device__ __forceinline__ Bf16Piece(const uint8_t* piece, int lane)
        : lines(reinterpret_cast<const uint4*>(piece) + lane) {}
    struct Words {
        uint4 x[4];
    };
    __device__ __forceinline__ Words words(int i) const {
        return {lines[128 * i], lines[128 * i + 32], lines[128 * i + 64], lines[128 * i + 96]};
    }
    __device__ __forceinline__ void fragments(int, const Words& chunk, uint32_t (&a)[4][4]) const {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint4& word = chunk.x[j];
            a[j][0] = word.x, a[j][1] = word.y, a[j][2] = word.z, a[j][3] = word.w;
        }
    }
};

#if __CUDA_ARCH_FEAT_SM90_ALL

// What the one thread that fills stages goes through: pieces of units, in the order in which they are multiplied.
template <typename Shape, typename Piece, typename Work>
struct Filler {
    const Ring<Shape>& ring;
    const Work& work;
    uint32_t i, step, units;
    Unit unit;
    int piece = 0, pieces;

    __device__ __forceinline__ Filler(const Ring<Shape>& ring, const Work& work, uint32_t first, uint32_t step)
        : ring(ring),
          work(work),
          i(first),
          step(step),
          units(work.units(1)),
          pieces(Piece::kTilePieces * work.k_tiles()) {
        if (i < units) unit = work.at(i, 1, 0);
    }
    __device__ __forceinline__ bool done() const { return i >= units; }
    __device__ __forceinline__ uint32_t rows() const { return (unit.rows + 7) / 8 * 8; }
    template <typename Strip>
    __device__ __forceinline__ void weights(uint32_t stage, Strip strip) const {
        barrier_expect(ring.full(stage), Piece::kChunks * rows() * kPanelRowBytes + Shape::kStrips * Piece::kBytes);
        for (int s = 0; s < Shape::kStrips; ++s)
            bulk_copy(ring.at(stage) + Shape::kXBytes + s * Piece::kBytes,
                      work.weights() + (work.tile(unit, strip(s)) * Piece::kTilePieces + piece) * Piece::kBytes,
                      Piece::kBytes, ring.full(stage));
    }
    __device__ __forceinline__ void x(uint32_t stage) const {
        for (int p = 0; p < Piece::kChunks; ++p)
            bulk_copy(ring.at(stage) + p * unit.width * kPanelRowBytes, work.x(piece * Piece::kChunks + p, unit.row),
                      rows() * kPanelRowBytes, ring.full(stage));
    }
    __device__ __forceinline__ void advance() {
        if (++piece < pieces) return;
        piece = 0;
        i += step;
        if (i < units) unit = work.at(i, 1, 0);
    }
};

template <int W, typename Shape, typename Piece>
__device__ __forceinline__ void multiply_pieces(float (&d)[W / 2], Ring<Shape>& ring, const uint8_t* shared, int pieces,
                                                int lane) {
    uint32_t a[2][4][4];
#pragma unroll 1
    for (int piece = 0; piece < pieces; ++piece) {
        // Known to be the same for all lanes, so that descriptors are made in uniform registers.
        const uint32_t stage = __shfl_sync(~0u, ring.stage, 0);
        barrier_wait(ring.full(stage), ring.parity);
        const Piece weights(shared + stage * Shape::kStageBytes + Shape::kXBytes + threadIdx.x / 32 * Piece::kBytes,
                            lane);
        const uint64_t x = describe(ring.at(stage));
        // A chunk ahead, so that its expansion fills the pauses between products.
        typename Piece::Words words[2] = {weights.words(0)};
#pragma unroll
        for (int i = 0; i < Piece::kChunks; ++i) {
            if (i + 1 < Piece::kChunks) words[(i + 1) % 2] = weights.words(i + 1);
            weights.fragments(i, words[i % 2], a[i % 2]);
            const uint64_t b = x + i * W * kPanelRowBytes / 16;
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < 4; ++j) wgmma<W>(d, a[i % 2][j], b + 2 * j);
            wgmma_commit();
            wgmma_wait<1>();
        }
        wgmma_wait<0>();
        warp_arrive(ring.empty(stage), lane);
        ring.advance();
    }
}

template <typename Ending, typename Shape, typename Piece, int W, int... kRest, typename Work>
__device__ __forceinline__ void do_narrow_unit(Ring<Shape>& ring, const Work& work, const Unit& unit,
                                               const uint8_t* shared, int first_warp, uint8_t* ending) {
    if constexpr (sizeof...(kRest) > 0) {
        if (unit.width < W)
            return do_narrow_unit<Ending, Shape, Piece, kRest...>(ring, work, unit, shared, first_warp, ending);
    }
    float d[W / 2];
#pragma unroll
    for (int i = 0; i < W / 2; ++i) d[i] = 0.0f;
    multiply_pieces<W, Shape, Piece>(d, ring, shared, Piece::kTilePieces * work.k_tiles(), threadIdx.x % 32);
    const Place at(first_warp);
    float2 scales = work.scales(unit, Ending::strip(at.warp));
    scales.x *= Piece::kWeightScale;
    scales.y *= Piece::kWeightScale;
    Ending::template write<W>(d, work, unit, scales, at, ending);
}

template <typename Piece, typename Ending, typename Work, int kMost, int kSplit, int... kWidths>
__device__ __forceinline__ void prefill_narrow(const typename Work::Args& args) {
    using Shape = Narrow<Piece, kMost, kSplit>;
    extern __shared__ __align__(1024) uint8_t shared[];
    uint8_t* ending = shared + Shape::kStages * Shape::kStageBytes;
    const Ring<Shape> ring{shared_address(shared), shared_address(ending + Ending::shared_bytes(kMost) / kSplit)};
    const Work work{args};
    const uint32_t first = blockIdx.x / kSplit, step = gridDim.x / kSplit;
    const int first_warp = blockIdx.x % kSplit * Shape::kStrips;

    if (threadIdx.x == 0) {
        for (int i = 0; i < Shape::kStages; ++i) {
            barrier_init(ring.full(i), 1);
            barrier_init(ring.empty(i), Shape::kStrips * kWarpArrivals);
        }
        barrier_init_fence();
    }
    __syncthreads();

    if (threadIdx.x >= Shape::kConsumers) {
        if (elect_one()) {
            auto strip = [&](int s) { return Ending::strip(first_warp + s); };
            using Fill = Filler<Shape, Piece, Work>;
            Fill fill(ring, work, first, step);
            int early = 0;
            for (Fill ahead = fill; early < Shape::kStages && !ahead.done(); ++early, ahead.advance())
                ahead.weights(early, strip);
            pdl_wait();
            pdl_launch();
            Ring<Shape> at = ring;
            for (; !fill.done(); fill.advance(), at.advance()) {
                if (early > 0) {
                    --early;
                } else {
                    barrier_wait(ring.empty(at.stage), at.parity ^ 1);
                    async_fence();
                    fill.weights(at.stage, strip);
                }
                fill.x(at.stage);
            }
        }
    } else {
        const uint32_t units = work.units(1);
        pdl_wait();
        pdl_launch();
        Ring<Shape> mine = ring;
        for (uint32_t i = first; i < units; i += step)
            do_narrow_unit<Ending, Shape, Piece, kWidths...>(mine, work, work.at(i, 1, 0), shared, first_warp, ending);
    }
}

#else

template <typename Piece, typename Ending, typename Work, int kMost, int kSplit, int... kWidths>
__device__ __forceinline__ void prefill_narrow(const typename Work::Args&) {
    __trap();
}

#endif
