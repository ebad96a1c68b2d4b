// The experts' products where each has few rows: what counts is that weights stream from memory without a gap.
//
// Every warp multiplies strips of its own, whose pieces it brings itself, two ahead, past the caches into shared
// memory; no warp waits for another's weights. The 16 warps of a block share the columns: pages of 8 columns and 512
// inputs, which one thread brings. A block begins with its share of three quarters of all strips, in one run, so that
// columns are brought once for many strips. The rest is dealt out in short ranges to whoever is done: multiprocessors
// get unequal shares of the bandwidth. The shared expert's strips, over all rows, come first. A sum is
// one accumulator over the inputs in order, as everywhere, so it does not matter who makes it.
#pragma once

#include "bulk.cuh"
#include "prefill_narrow.cuh"

// The geometry, which src/kernels/prefill.rs repeats: one block on a multiprocessor.
template <typename Piece>
struct Few {
    static constexpr int kWarps = 16;  // that multiply
    static constexpr int kBringer = kWarps, kDealer = kWarps + 1;
    static constexpr int kThreads = 32 * (kWarps + 2);
    static constexpr int kBlocks = 1;
    static constexpr int kSlots = 2;  // pieces on their way to a warp
    static constexpr int kPages = 8;  // two tiles of 8 columns and 2,048 inputs, or one of 16
    static constexpr int kPanelBytes = 8 * kPanelRowBytes;
    static constexpr int kPageBytes = kChunks * kPanelBytes;
    static constexpr int kSlotsAt = kPages * kPageBytes;
    static constexpr int kBarriersAt = kSlotsAt + kWarps * kSlots * Piece::kBytes;
    // Ranges that are remembered: the fastest warp is at most as many ahead of the slowest as there are pages, and
    // requests weights of two more.
    static constexpr uint32_t kRanges = 16;
    static constexpr int kRangesAt = kBarriersAt + 8 * (2 * kPages + kWarps * kSlots + kRanges + 1);
};

// Strips begin to end - 1.
struct Range {
    uint32_t begin, end;
};

// Strips that have their columns in common: those of a tile of an expert.
struct Columns {
    uint32_t end;  // number of the strip behind the last
    uint32_t expert;
    uint32_t rows;    // columns that are written
    uint32_t groups;  // of 8 columns
    uint32_t k_tiles;
    size_t row;    // of x and of the output, the first column's
    size_t panel;  // rows of a panel of x, and of the output where that is panels
    const uint8_t* x;
    uint8_t* out;
    bool shared;  // of the shared expert
};

// Strips are numbered: those of the shared expert for its first rows, for the next ones, then those of each tile.
template <int kStrips, int kTiles, int kSharedStrips, int kSharedTiles, bool kPairs>
struct FewWork {
    static constexpr uint32_t kMost = 16;    // columns of a tile
    static constexpr bool kPanels = kPairs;  // of the output
    static constexpr uint32_t kDealt = 16;   // strips that are dealt out at once
    const PrefillExpertsArgs& args;
    uint32_t n_shared;  // strips of the shared expert, of all its tiles

    __device__ __forceinline__ explicit FewWork(const PrefillExpertsArgs& args)
        : args(args), n_shared((args.shared_rows + kMost - 1) / kMost * kSharedStrips) {}
    // The first of strips that cost `cost`: one of the shared expert costs as many as its inputs are longer.
    __device__ __forceinline__ uint32_t at_cost(uint32_t cost) const {
        constexpr uint32_t kCost = kSharedTiles / kTiles;
        return cost < kCost * n_shared ? (cost + kCost - 1) / kCost : cost - kCost * n_shared + n_shared;
    }
    __device__ __forceinline__ uint32_t cost() const {
        return kSharedTiles / kTiles * n_shared + *args.n_tiles * kStrips;
    }
    __device__ __forceinline__ Columns columns(uint32_t strip) const {
        if (strip < n_shared) {
            const uint32_t tile = strip / kSharedStrips, row = tile * kMost, rows = min(args.shared_rows - row, kMost);
            return {(tile + 1) * kSharedStrips,
                    0,
                    rows,
                    (rows + 7) / 8,
                    kSharedTiles,
                    row,
                    args.panel_rows,
                    reinterpret_cast<const uint8_t*>(args.shared_x),
                    reinterpret_cast<uint8_t*>(args.shared_out),
                    true};
        }
        const uint32_t index = (strip - n_shared) / kStrips;
        const uint4 tile = __ldg(reinterpret_cast<const uint4*>(args.tiles) + index);
        return {n_shared + (index + 1) * kStrips,
                tile.x,
                tile.z,
                (tile.z + 7) / 8,
                kTiles,
                tile.y,
                args.sorted_rows,
                reinterpret_cast<const uint8_t*>(args.x),
                reinterpret_cast<uint8_t*>(args.out),
                false};
    }
    // Which of its matrix's strips it is.
    static __device__ __forceinline__ uint32_t strip(uint32_t strip, uint32_t n_shared) {
        return strip < n_shared ? strip % kSharedStrips : (strip - n_shared) % kStrips;
    }
    // Where a strip's weights begin, and how many tiles they are.
    __device__ __forceinline__ const uint8_t* weights(uint32_t i, uint32_t tile_bytes, uint32_t& tiles) const {
        if (i < n_shared) {
            tiles = kSharedTiles;
            return args.shared_weights + size_t(i % kSharedStrips) * kSharedTiles * tile_bytes;
        }
        tiles = kTiles;
        const uint32_t at = i - n_shared;
        const uint32_t expert = __ldg(&args.tiles[at / kStrips].expert);
        return args.weights + (size_t(expert) * kStrips + at % kStrips) * kTiles * tile_bytes;
    }
    __device__ __forceinline__ float2 scales(const Columns& columns, uint32_t strip) const {
        if (columns.shared)
            return kPairs ? __ldg(args.shared_scales + strip) : make_float2(args.shared_scale, args.shared_scale);
        if (kPairs) return __ldg(reinterpret_cast<const float2*>(args.scales) + columns.expert);
        const float scale = __ldg(args.scales + columns.expert);
        return make_float2(scale, scale);
    }
    static constexpr int kOutStride = kStrips * kTileRows;  // where the output is rows
};

#if __CUDA_ARCH_FEAT_SM90_ALL

// The ranges of a block: number 0 is its share, the others are dealt out to it. An empty one is the last.
template <typename Shape, typename Work>
struct Ranges {
    const Work& work;
    Range first;
    uint32_t dealt, end;  // strips that are dealt out
    Range* ranges;        // [kRanges]
    uint32_t* wanted;     // number of the next to be asked for
    uint32_t barriers;    // shared address: one for each range, and that of whoever asks

    __device__ __forceinline__ Range get(uint32_t i) const {
        if (i == 0) return first;
        barrier_wait(barrier(i), (i - 1) / Shape::kRanges % 2);
        return ranges[i % Shape::kRanges];
    }
    // The strip of a range that is this warp's first.
    static __device__ __forceinline__ uint32_t strip(uint32_t i, const Range& range, uint32_t warp) {
        return range.begin + (i == 0 ? warp : (warp - (i - 1) * Work::kDealt) % Shape::kWarps);
    }
    // Asks for range i, once the one before is known; the first to do so is heard.
    __device__ __forceinline__ void ask(uint32_t i, bool leader) const {
        if (leader && atomicCAS(wanted, i, i + 1) == i) barrier_arrive(barriers + 8 * Shape::kRanges, 0);
    }
    // Answers, until nothing is left.
    __device__ __forceinline__ void deal() const {
        const uint32_t n = (end - dealt + Work::kDealt - 1) / Work::kDealt;
        for (uint32_t i = 1, begin = 0; begin < end; ++i) {
            barrier_wait(barriers + 8 * Shape::kRanges, (i - 1) % 2);
            const uint32_t taken = atomicAdd(work.args.counter, 1u);
            // Every block asks once in vain; the last to do so leaves the counter as it was.
            if (taken == n + gridDim.x - 1) *work.args.counter = 0;
            begin = min(dealt + taken * Work::kDealt, end);
            ranges[i % Shape::kRanges] = {begin, min(begin + Work::kDealt, end)};
            barrier_arrive(barrier(i), 0);
        }
    }

private:
    __device__ __forceinline__ uint32_t barrier(uint32_t i) const { return barriers + (i - 1) % Shape::kRanges * 8; }
};

// A warp's weights on their way: pieces of the strips that it takes, kSlots of them requested.
template <typename Shape, typename Piece, typename Work>
struct Pieces {
    const Ranges<Shape, Work>& ranges;
    uint32_t slots, barriers;  // shared addresses, this warp's
    uint32_t range = 0;        // of what is requested next
    uint32_t strip, end;
    uint32_t left = 0;  // pieces of that strip
    bool more = true;   // ranges
    const uint8_t* from = nullptr;
    uint32_t slot = 0, parity = 0;  // of what is multiplied next

    __device__ __forceinline__ Pieces(const Ranges<Shape, Work>& ranges, uint32_t slots, uint32_t barriers)
        : ranges(ranges), slots(slots), barriers(barriers) {
        begin(ranges.first);
    }
    // The next piece, into the slot that was used up last, or one that never was.
    __device__ __forceinline__ bool request(uint32_t slot, bool leader) {
        if (left == 0) return false;
        if (leader) {
            barrier_expect(barriers + 8 * slot, Piece::kBytes);
            bulk_copy(slots + slot * Piece::kBytes, from, Piece::kBytes, barriers + 8 * slot);
        }
        from += Piece::kBytes;
        if (--left == 0) {
            strip += Shape::kWarps;
            find();
        }
        return true;
    }
    // After the wait: goes to ranges that were dealt out, and asks for the next when one piece is left of this.
    __device__ __forceinline__ void look_ahead(bool leader) {
        while (more) {
            if (left + (strip + Shape::kWarps < end) <= 1) ranges.ask(range + 1, leader);
            if (left > 0) return;
            const Range next = ranges.get(++range);
            more = next.begin < next.end;
            begin(next);
        }
    }
    __device__ __forceinline__ void wait() const { barrier_wait(barriers + 8 * slot, parity); }
    __device__ __forceinline__ void advance(bool leader) {
        look_ahead(leader);
        request(slot, leader);
        if (++slot == Shape::kSlots) slot = 0, parity ^= 1;
    }

private:
    __device__ __forceinline__ void begin(const Range& next) {
        strip = ranges.strip(range, next, threadIdx.x / 32), end = next.end;
        find();
    }
    __device__ __forceinline__ void find() {
        if (strip >= end) return;
        uint32_t tiles;
        from = ranges.work.weights(strip, Piece::kTilePieces * Piece::kBytes, tiles);
        left = Piece::kTilePieces * tiles;
    }
};

// The pages as one side sees them: which of all that were ever filled, counted over the kernel.
template <typename Shape>
struct Pages {
    uint32_t pages, barriers;

    __device__ __forceinline__ uint32_t at(uint32_t page) const {
        return pages + page % Shape::kPages * Shape::kPageBytes;
    }
    __device__ __forceinline__ uint32_t full(uint32_t page) const { return barriers + page % Shape::kPages * 16; }
    __device__ __forceinline__ uint32_t empty(uint32_t page) const { return full(page) + 8; }
    static __device__ __forceinline__ uint32_t parity(uint32_t page) { return page / Shape::kPages % 2; }
    __device__ __forceinline__ void wait(uint32_t page) const { barrier_wait(full(page), parity(page)); }
};

// The sums of a strip over G groups of 8 columns; `page` is the first of its columns, `last` says that no other strip
// of this warp needs them.
template <int G, typename Shape, typename Piece, typename Work>
__device__ __forceinline__ void multiply_strip(float (&d)[G][4], Pieces<Shape, Piece, Work>& pieces,
                                               const Pages<Shape>& pages, const uint8_t* slots, uint32_t page,
                                               uint32_t k_tiles, bool last, int lane) {
    const uint32_t row = lane % 8 * kPanelRowBytes + (lane / 8 ^ lane % 8) * 16;
#pragma unroll 1
    for (uint32_t kt = 0; kt < k_tiles; ++kt, page += G) {
#pragma unroll
        for (int g = 0; g < G; ++g) pages.wait(page + g);
        uint32_t x[G];
#pragma unroll
        for (int g = 0; g < G; ++g) x[g] = pages.at(page + g) + row;
#pragma unroll 1
        for (int part = 0; part < Piece::kTilePieces; ++part) {
            pieces.wait();
            const Piece weights(slots + pieces.slot * Piece::kBytes, lane);
#pragma unroll
            for (int i = 0; i < Piece::kChunks; ++i) {
                uint32_t a[4][4];
                weights.fragments(i, weights.words(i), a);
#pragma unroll
                for (int g = 0; g < G; ++g) {
                    // Parts 4 h to 4 h + 3 of each row of a panel are the B fragments of mma 2 h and 2 h + 1.
                    uint32_t b[2][4];
                    load_matrices(b[0], x[g] + i * Shape::kPanelBytes);
                    load_matrices(b[1], (x[g] ^ 64) + i * Shape::kPanelBytes);
#pragma unroll
                    for (int j = 0; j < 4; ++j) mma(d[g], a[j], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
                }
            }
            __syncwarp();
            pieces.advance(lane == 0);
#pragma unroll
            for (int g = 0; g < G; ++g) x[g] += Piece::kChunks * Shape::kPanelBytes;
        }
        if (last && lane < G) barrier_arrive(pages.empty(page + lane), 0);
    }
}

// A strip's outputs: 8 activations as they lie in panels, or 16 values of rows.
template <int G, typename Work>
__device__ __forceinline__ void write_strip(const float (&d)[G][4], const Columns& columns, uint32_t strip,
                                            float2 scales, int lane) {
    const uint32_t t = lane % 4;
#pragma unroll
    for (int g = 0; g < G; ++g) {
        const uint32_t column = 8 * g + lane / 4;
        const bool written = column < columns.rows;
        if (Work::kPanels) {
            const float first = silu_fast(d[g][0] * scales.x) * (d[g][2] * scales.y);
            const float second = silu_fast(d[g][1] * scales.x) * (d[g][3] * scales.y);
            // Outputs 2 t and 2 t + 1 of the strip are word strip / 2 of a part, see SwigluPanels.
            const uint32_t pair = transpose(pack_bf16(first, second));
            const uint32_t part = (4 * (strip % 2) + t) ^ column % 8;
            uint8_t* to = columns.out + (strip / kBlockStrips * columns.panel + columns.row + column) * kPanelRowBytes +
                          16 * part + strip % kBlockStrips / 2 * 4;
            if (written) *reinterpret_cast<uint32_t*>(to) = pair;
        } else {
            const uint32_t low = transpose(pack_bf16(d[g][0] * scales.x, d[g][1] * scales.x));
            const uint32_t high = transpose(pack_bf16(d[g][2] * scales.y, d[g][3] * scales.y));
            uint32_t* to = reinterpret_cast<uint32_t*>(columns.out) +
                           ((columns.row + column) * Work::kOutStride + strip * kTileRows) / 2 + t;
            if (written) to[0] = low, to[4] = high;
        }
    }
}

template <int G, typename Shape, typename Piece, typename Work>
__device__ __forceinline__ void do_strip(Pieces<Shape, Piece, Work>& pieces, const Pages<Shape>& pages,
                                         const uint8_t* slots, uint32_t page, const Columns& columns, uint32_t strip,
                                         float2 scales, bool last, int lane) {
    float d[G][4] = {};
    multiply_strip<G>(d, pieces, pages, slots, page, columns.k_tiles, last, lane);
    write_strip<G, Work>(d, columns, strip, scales, lane);
}

template <typename Piece, typename Work>
__device__ __forceinline__ void prefill_few(const PrefillExpertsArgs& args) {
    using Shape = Few<Piece>;
    extern __shared__ __align__(1024) uint8_t shared[];
    const uint32_t base = shared_address(shared), barriers = base + Shape::kBarriersAt;
    const Pages<Shape> pages{base, barriers};
    const uint32_t warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const uint32_t slot_barriers = barriers + 16 * Shape::kPages;
    const uint32_t range_barriers = slot_barriers + 8 * Shape::kWarps * Shape::kSlots;
    uint32_t* wanted = reinterpret_cast<uint32_t*>(shared + Shape::kRangesAt + Shape::kRanges * sizeof(Range));

    if (threadIdx.x < Shape::kPages) {
        barrier_init(pages.full(threadIdx.x), 1);
        barrier_init(pages.empty(threadIdx.x), Shape::kWarps);
    } else if (threadIdx.x < Shape::kPages + Shape::kWarps * Shape::kSlots + Shape::kRanges + 1) {
        barrier_init(slot_barriers + 8 * (threadIdx.x - Shape::kPages), 1);
    }
    if (threadIdx.x == 0) *wanted = 1;
    barrier_init_fence();
    __syncthreads();

    const Work work{args};
    const uint32_t cost = work.cost(), own = cost / 4 * 3;
    const Ranges<Shape, Work> ranges{
        work,
        {work.at_cost(own * blockIdx.x / gridDim.x), work.at_cost(own * (blockIdx.x + 1) / gridDim.x)},
        work.at_cost(own),
        work.at_cost(cost),
        reinterpret_cast<Range*>(shared + Shape::kRangesAt),
        wanted,
        range_barriers};
    if (warp >= Shape::kWarps) {
        pdl_wait();
        pdl_launch();
        if (lane > 0) return;
        if (warp == Shape::kDealer) return ranges.deal();
        uint32_t page = 0;
        for (uint32_t r = 0;; ++r) {
            const Range range = ranges.get(r);
            if (r > 0 && range.begin >= range.end) break;
            for (uint32_t i = range.begin; i < range.end;) {
                const Columns columns = work.columns(i);
                for (uint32_t kt = 0; kt < columns.k_tiles; ++kt)
                    for (uint32_t g = 0; g < columns.groups; ++g, ++page) {
                        barrier_wait(pages.empty(page), Pages<Shape>::parity(page) ^ 1);
                        barrier_expect(pages.full(page), Shape::kPageBytes);
                        const uint8_t* from =
                            columns.x + (kt * kChunks * columns.panel + columns.row + 8 * g) * kPanelRowBytes;
                        for (int p = 0; p < kChunks; ++p)
                            bulk_copy(pages.at(page) + p * Shape::kPanelBytes,
                                      from + p * columns.panel * kPanelRowBytes, Shape::kPanelBytes, pages.full(page));
                    }
                i = columns.end;
            }
        }
        return;
    }
    const uint8_t* slots = shared + Shape::kSlotsAt + warp * Shape::kSlots * Piece::kBytes;
    Pieces<Shape, Piece, Work> pieces(ranges, shared_address(slots), slot_barriers + 8 * Shape::kSlots * warp);
    int early = 0;
    while (early < Shape::kSlots && pieces.request(early, lane == 0)) ++early;
    pdl_wait();
    pdl_launch();
    for (; early < Shape::kSlots; ++early) {
        pieces.look_ahead(lane == 0);
        pieces.request(early, lane == 0);
    }
    uint32_t page = 0;
    for (uint32_t r = 0;; ++r) {
        const Range range = ranges.get(r);
        if (r > 0 && range.begin >= range.end) break;
        uint32_t i = ranges.strip(r, range, warp);
        for (uint32_t at = range.begin; at < range.end;) {
            const Columns columns = work.columns(at);
            at = min(columns.end, range.end);
            const uint32_t n_pages = columns.groups * columns.k_tiles;
            // Not before they came: else the next columns' turn could be counted with this one.
            if (i >= at)
                for (uint32_t p = 0; p < n_pages; ++p) {
                    pages.wait(page + p);
                    if (lane == 0) barrier_arrive(pages.empty(page + p), 0);
                }
            for (; i < at; i += Shape::kWarps) {
                const uint32_t strip = Work::strip(i, work.n_shared);
                const bool last = i + Shape::kWarps >= at;
                float2 scales = work.scales(columns, strip);
                scales.x *= Piece::kWeightScale;
                scales.y *= Piece::kWeightScale;
                if (columns.groups == 1)
                    do_strip<1>(pieces, pages, slots, page, columns, strip, scales, last, lane);
                else
                    do_strip<2>(pieces, pages, slots, page, columns, strip, scales, last, lane);
            }
            page += n_pages;
        }
    }
}

#else

template <typename Piece, typename Work>
__device__ __forceinline__ void prefill_few(const PrefillExpertsArgs&) {
    __trap();
}

#endif
