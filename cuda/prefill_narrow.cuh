// Hopper's way to feed the products of prefill.cuh when columns are few and the weights' bytes count.
//
// Weights come through shared memory too: a ring of stages with a piece of each strip and the panels that it meets,
// all brought by one thread, so that far more is on its way than registers would hold. The first weights are requested
// before the kernels in front have ended. That thread also says which unit a stage belongs to: where the work has a
// counter, units are dealt out to whoever is done, since multiprocessors get unequal shares of the bandwidth.
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
    using Tile = Nvfp4Tile;
    static constexpr int kChunks = 8;
    static constexpr int kTilePieces = 1;
    static constexpr int kBytes = Tile::kBytes;
    static constexpr float kWeightScale = Tile::kWeightScale;
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
    using Tile = Bf16Tile;
    static constexpr int kChunks = 2;
    static constexpr int kTilePieces = 4;
    static constexpr int kBytes = Tile::kBytes / kTilePieces;
    static constexpr float kWeightScale = Tile::kWeightScale;
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
    Unit* units;  // [kStages], for the consumers
    uint32_t i, n;
    Unit unit;
    int piece = 0;

    __device__ __forceinline__ Filler(const Ring<Shape>& ring, const Work& work, Unit* units, uint32_t first)
        : ring(ring), work(work), units(units), i(first), n(work.units(1)) {
        find();
    }
    __device__ __forceinline__ bool done() const { return i >= n; }
    __device__ __forceinline__ uint32_t rows() const { return (unit.rows + 7) / 8 * 8; }
    template <typename Strip>
    __device__ __forceinline__ void weights(uint32_t stage, Strip strip) const {
        units[stage] = unit;
        barrier_expect(ring.full(stage), Piece::kChunks * rows() * kPanelRowBytes + Shape::kStrips * Piece::kBytes);
        for (int s = 0; s < Shape::kStrips; ++s)
            bulk_copy(ring.at(stage) + Shape::kXBytes + s * Piece::kBytes,
                      work.template weights<typename Piece::Tile>(unit, strip(s)) + piece * Piece::kBytes,
                      Piece::kBytes, ring.full(stage));
    }
    __device__ __forceinline__ void x(uint32_t stage) const {
        for (int p = 0; p < Piece::kChunks; ++p)
            bulk_copy(ring.at(stage) + p * unit.width * kPanelRowBytes,
                      work.x(unit, piece * Piece::kChunks + p, unit.row), rows() * kPanelRowBytes, ring.full(stage));
    }
    // To the next piece; `next` is the unit behind this.
    template <typename Next>
    __device__ __forceinline__ void advance(Next next) {
        if (++piece < Piece::kTilePieces * work.k_tiles(unit)) return;
        piece = 0;
        i = next(i);
        find();
    }

private:
    __device__ __forceinline__ void find() {
        if (!done()) unit = work.at(i, 1, 0);
    }
};

// Which unit of a block comes after unit i. The first two go by rounds, so that their weights can be requested before
// the wait, and so do all without a counter. The others are dealt out, each asked for during the one before.
struct Deal {
    uint32_t* counter;
    uint32_t step, n, asked = 0;

    __device__ __forceinline__ Deal(uint32_t* counter, uint32_t step, uint32_t n) : counter(counter), step(step), n(n) {
        ask();
    }
    __device__ __forceinline__ uint32_t behind(uint32_t i) {
        if (!counter || i < step) return i + step;
        const uint32_t dealt = 2 * step + asked;
        if (dealt < n) ask();
        return dealt;
    }
    // Every block asks once in vain; the last to do so leaves the counter as it was.
    __device__ __forceinline__ void end() const {
        if (counter && asked == max(n, 2 * step) - 2 * step + gridDim.x - 1) *counter = 0;
    }

private:
    __device__ __forceinline__ void ask() {
        if (counter) asked = atomicAdd(counter, 1u);
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
        // Of the reads of weights; the last products run under it.
        async_fence();
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
    float2 scales = work.scales(unit, Ending::strip(first_warp + threadIdx.x / 32));
    scales.x *= Piece::kWeightScale;
    scales.y *= Piece::kWeightScale;
    float d[W / 2];
#pragma unroll
    for (int i = 0; i < W / 2; ++i) d[i] = 0.0f;
    multiply_pieces<W, Shape, Piece>(d, ring, shared, Piece::kTilePieces * work.k_tiles(unit), threadIdx.x % 32);
    const Place at(first_warp);
    Ending::template write<W>(d, work, unit, scales, at, ending);
}

template <typename Piece, typename Ending, typename Work, int kMost, int kSplit, int... kWidths>
__device__ __forceinline__ void prefill_narrow(const typename Work::Args& args) {
    using Shape = Narrow<Piece, kMost, kSplit>;
    static_assert(kSplit == 1 || !Work::kDealt, "a unit that is dealt out is one block's");
    extern __shared__ __align__(1024) uint8_t shared[];
    uint8_t* ending = shared + Shape::kStages * Shape::kStageBytes;
    const Ring<Shape> ring{shared_address(shared), shared_address(ending + Ending::shared_bytes(kMost) / kSplit)};
    Unit* units =
        reinterpret_cast<Unit*>(ending + Ending::shared_bytes(kMost) / kSplit + 2 * sizeof(uint64_t) * Shape::kStages);
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
            Filler<Shape, Piece, Work> fill(ring, work, units, first), ahead = fill;
            // The first two units are known. Of others nothing is requested here, though without a counter it could be.
            auto known = [&](uint32_t i) { return i + step; };
            int early = 0;
            for (; early < Shape::kStages && ahead.i < 2 * step && !ahead.done(); ++early, ahead.advance(known))
                ahead.weights(early, strip);
            pdl_wait();
            pdl_launch();
            Deal deal(work.counter(), step, fill.n);
            auto dealt = [&](uint32_t i) { return deal.behind(i); };
            Ring<Shape> at = ring;
            for (; !fill.done(); fill.advance(dealt), at.advance()) {
                if (early > 0) {
                    --early;
                } else {
                    barrier_wait(ring.empty(at.stage), at.parity ^ 1);
                    fill.weights(at.stage, strip);
                }
                fill.x(at.stage);
            }
            barrier_wait(ring.empty(at.stage), at.parity ^ 1);
            units[at.stage].rows = 0;  // no more come
            barrier_arrive(ring.full(at.stage));
            deal.end();
        }
    } else {
        pdl_wait();
        pdl_launch();
        Ring<Shape> mine = ring;
        while (true) {
            barrier_wait(ring.full(mine.stage), mine.parity);
            const Unit unit = units[mine.stage];
            if (unit.rows == 0) break;
            do_narrow_unit<Ending, Shape, Piece, kWidths...>(mine, work, unit, shared, first_warp, ending);
        }
    }
}

#else

template <typename Piece, typename Ending, typename Work, int kMost, int kSplit, int... kWidths>
__device__ __forceinline__ void prefill_narrow(const typename Work::Args&) {
    __trap();
}

#endif
