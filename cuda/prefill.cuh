// Products over many rows, D[weight rows, columns] = W x^T, apart from how the tensor cores are fed: weights on their
// way to A fragments, the units of work, and what becomes of the sums. A column is a row of x: a token.
//
// A unit of work is 8 strips of 16 weight rows, one a warp, and up to kMost columns. A lane's sums are those of
// mma.m16n8k16: d[4 c + q] belongs to weight row g (q < 2) or g + 8 and to column 8 c + 2 t + q % 2. Each sum runs over
// the inputs in order in one accumulator, so its bits depend on its column alone.
#pragma once

#include "args_prefill.h"
#include "fragment.cuh"
#include "layout.cuh"
#include "panel.cuh"

constexpr int kBlockStrips = 8;
constexpr int kPanelRowBytes = 128;

// A strip's NVFP4 tiles, kAhead chunks of codes ahead.
template <int kAhead>
struct Nvfp4Stream {
    static constexpr int kBytes = Nvfp4Tile::kBytes;
    static constexpr float kWeightScale = Nvfp4Tile::kWeightScale;
    uint4 codes[kAhead];
    uint4 scales, next_scales;

    __device__ __forceinline__ void prime(const uint8_t* at, int lane) {
        next_scales = load_stream(at + 16 * lane);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) load(i, at, lane);
    }
    __device__ __forceinline__ void begin(const uint8_t* next, int lane) {
        scales = next_scales;
        next_scales = load_stream(next + 16 * lane);
    }
    // The A fragments of the four k16 steps of chunk i.
    __device__ __forceinline__ void fragments(int i, uint32_t (&a)[4][4]) const {
        const ScalePairs pairs(scales, i);
        const uint4& words = codes[i % kAhead];
        expand_codes(a[0], words.x, pairs);
        expand_codes(a[1], words.y, pairs);
        expand_codes(a[2], words.z, pairs);
        expand_codes(a[3], words.w, pairs);
    }
    // Chunk i of the tile `at` is used up, and chunk i - 1 multiplied.
    __device__ __forceinline__ void refill(int i, const uint8_t* at, const uint8_t* next, int lane) {
        load((i + kAhead) % kChunks, i + kAhead < kChunks ? at : next, lane);
    }

private:
    __device__ __forceinline__ void load(int i, const uint8_t* at, int lane) {
        codes[i % kAhead] = load_stream(at + 512 + 512 * i + 16 * lane);
    }
};

// A strip's BF16 tiles, fewer chunks ahead since they are larger: the words are the fragments.
template <int kNvfp4Ahead>
struct Bf16Stream {
    static constexpr int kBytes = Bf16Tile::kBytes;
    static constexpr float kWeightScale = Bf16Tile::kWeightScale;
    static constexpr int kAhead = kNvfp4Ahead > 4 ? 3 : 1;
    static constexpr int kSlots = 4;
    uint4 words[kSlots][4];

    __device__ __forceinline__ void prime(const uint8_t* at, int lane) {
#pragma unroll
        for (int i = 0; i < kAhead; ++i) load(i, at, lane);
    }
    __device__ __forceinline__ void begin(const uint8_t*, int) {}
    __device__ __forceinline__ void fragments(int i, uint32_t (&a)[4][4]) const {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const uint4& word = words[i % kSlots][j];
            a[j][0] = word.x, a[j][1] = word.y, a[j][2] = word.z, a[j][3] = word.w;
        }
    }
    __device__ __forceinline__ void refill(int i, const uint8_t* at, const uint8_t* next, int lane) {
        load((i + kAhead) % kChunks, i + kAhead < kChunks ? at : next, lane);
    }

private:
    __device__ __forceinline__ void load(int i, const uint8_t* at, int lane) {
#pragma unroll
        for (int j = 0; j < 4; ++j) words[i % kSlots][j] = load_stream(at + 512 * (4 * i + j) + 16 * lane);
    }
};

// Which of a unit's 8 warps this is, and a lane in its warp.
struct Place {
    int thread;  // of the block
    int warp, lane, g, t;

    // `first` is the block's first warp. What follows from a place has to be computed where it is used: kept in
    // registers beside the sums for each width, it would not fit.
    __device__ __forceinline__ explicit Place(int first) : thread(threadIdx.x) {
        asm volatile("" : "+r"(thread));
        warp = first + thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
    }
};

// What is done at a time: 8 strips and some columns.
struct Unit {
    uint32_t strip;   // first
    uint32_t row;     // of x, the first column's
    uint32_t rows;    // columns that are written, at least 1
    uint32_t width;   // columns that are multiplied
    uint32_t expert;  // else 0
};
static_assert(sizeof(Unit) == 20);  // UNIT_BYTES of src/kernels/prefill.rs

// Work of the kernels that take PrefillLinearArgs. Blocks beside each other in a cluster have the same columns.
template <int kMost>
struct LinearWork {
    static constexpr int kColumns = kMost;
    static constexpr bool kDealt = false;
    using Args = PrefillLinearArgs;
    const Args& args;

    __device__ __forceinline__ uint32_t stacks(uint32_t cluster) const {
        return (args.strips + kBlockStrips * cluster - 1) / (kBlockStrips * cluster);
    }
    // Units of a cluster.
    __device__ __forceinline__ uint32_t units(uint32_t cluster) const {
        return (args.rows + kMost - 1) / kMost * stacks(cluster);
    }
    __device__ __forceinline__ Unit at(uint32_t i, uint32_t cluster, uint32_t rank) const {
        const uint32_t stack = stacks(cluster), row = i / stack * kMost;
        return {(i % stack * cluster + rank) * kBlockStrips, row, min(args.rows - row, uint32_t(kMost)), kMost, 0};
    }
    __device__ __forceinline__ const uint8_t* x(const Unit&, uint32_t panel, uint32_t row) const {
        return reinterpret_cast<const uint8_t*>(args.x) + (size_t(panel) * args.panel_rows + row) * kPanelRowBytes;
    }
    __device__ __forceinline__ uint32_t k_tiles(const Unit&) const { return args.k_tiles; }
    // Where a strip's tiles begin. A strip behind the end reads the last one, and is not written.
    template <typename Tile>
    __device__ __forceinline__ const uint8_t* weights(const Unit& unit, uint32_t strip) const {
        return args.weights + size_t(min(unit.strip + strip, args.strips - 1)) * args.k_tiles * Tile::kBytes;
    }
    __device__ __forceinline__ bool has(const Unit& unit, uint32_t strip) const {
        return unit.strip + strip < args.strips;
    }
    __device__ __forceinline__ float2 scales(const Unit& unit, uint32_t strip) const {
        return args.scales ? args.scales[min(unit.strip + strip, args.strips - 1)]
                           : make_float2(args.scale, args.scale);
    }
    __device__ __forceinline__ void* out(const Unit&) const { return args.out; }
    __device__ __forceinline__ size_t out_stride(const Unit&) const { return args.out_stride; }
    // Units go round.
    __device__ __forceinline__ uint32_t* counter() const { return nullptr; }
};

// Work of the prefill_experts kernels: kStrips strips of kTiles tiles each expert. Those for up to 16 columns also do
// the shared expert, over all rows: its units come first.
template <int kMost, int kStrips, int kTiles, int kSharedStrips, int kSharedTiles, bool kPairs>
struct ExpertsWork {
    static constexpr int kColumns = kMost;
    static constexpr bool kDealt = true;
    static constexpr uint32_t kShared = ~0u;  // as a unit's expert
    using Args = PrefillExpertsArgs;
    const Args& args;

    __device__ __forceinline__ uint32_t units(uint32_t cluster) const {
        return shared_units(cluster) + *args.n_tiles * (kStrips / kBlockStrips / cluster);
    }
    __device__ __forceinline__ Unit at(uint32_t i, uint32_t cluster, uint32_t rank) const {
        const uint32_t n_shared = shared_units(cluster);
        if (i < n_shared) {
            const uint32_t stack = kSharedStrips / kBlockStrips / cluster, row = i / stack * kMost;
            const uint32_t rows = min(args.shared_rows - row, uint32_t(kMost));
            return {(i % stack * cluster + rank) * kBlockStrips, row, rows, kMost, kShared};
        }
        const uint32_t stack = kStrips / kBlockStrips / cluster;
        const uint4 tile = reinterpret_cast<const uint4*>(args.tiles)[(i - n_shared) / stack];
        return {((i - n_shared) % stack * cluster + rank) * kBlockStrips, tile.y, tile.z, tile.w, tile.x};
    }
    __device__ __forceinline__ const uint8_t* x(const Unit& unit, uint32_t panel, uint32_t row) const {
        return reinterpret_cast<const uint8_t*>(shared(unit) ? args.shared_x : args.x) +
               (size_t(panel) * panel_rows(unit) + row) * kPanelRowBytes;
    }
    __device__ __forceinline__ uint32_t k_tiles(const Unit& unit) const { return shared(unit) ? kSharedTiles : kTiles; }
    template <typename Tile>
    __device__ __forceinline__ const uint8_t* weights(const Unit& unit, uint32_t strip) const {
        if (shared(unit)) return args.shared_weights + size_t(unit.strip + strip) * kSharedTiles * Tile::kBytes;
        return args.weights + size_t(unit.expert * kStrips + unit.strip + strip) * kTiles * Tile::kBytes;
    }
    __device__ __forceinline__ bool has(const Unit&, uint32_t) const { return true; }
    __device__ __forceinline__ float2 scales(const Unit& unit, uint32_t strip) const {
        if (kPairs)
            return shared(unit) ? args.shared_scales[unit.strip + strip]
                                : reinterpret_cast<const float2*>(args.scales)[unit.expert];
        const float scale = shared(unit) ? args.shared_scale : args.scales[unit.expert];
        return make_float2(scale, scale);
    }
    __device__ __forceinline__ void* out(const Unit& unit) const { return shared(unit) ? args.shared_out : args.out; }
    __device__ __forceinline__ size_t out_stride(const Unit& unit) const {
        return kPairs ? panel_rows(unit) : kStrips * kTileRows;
    }
    // Of those that are dealt out, or null.
    __device__ __forceinline__ uint32_t* counter() const { return args.counter; }

private:
    static __device__ __forceinline__ bool shared(const Unit& unit) { return kMost <= 16 && unit.expert == kShared; }
    __device__ __forceinline__ uint32_t shared_units(uint32_t cluster) const {
        if (kMost > 16) return 0;
        return (args.shared_rows + kMost - 1) / kMost * (kSharedStrips / kBlockStrips / cluster);
    }
    __device__ __forceinline__ uint32_t panel_rows(const Unit& unit) const {
        return shared(unit) ? args.panel_rows : args.sorted_rows;
    }
};

// Rows of bf16 in natural order.
struct Bf16Rows {
    // The strip that a warp takes.
    static __device__ __forceinline__ uint32_t strip(int warp) { return warp; }
    // Shared memory for a warp: at most 32 columns of 16 outputs, 48 bytes apart so that the banks differ.
    static constexpr int kColumnBytes = 48;
    static __host__ __device__ constexpr int columns(int most) { return most < 32 ? most : 32; }
    static __host__ __device__ constexpr int shared_bytes(int most) {
        return kBlockStrips * columns(most) * kColumnBytes;
    }

    template <int W, typename Work>
    static __device__ __forceinline__ void write(const float (&d)[W / 2], const Work& work, const Unit& unit,
                                                 float2 scales, const Place& at, uint8_t* shared) {
        constexpr int kColumns = columns(W);
        // The same place for all widths: other warps may be at a unit of another.
        uint8_t* mine = shared + at.thread / 32 * columns(Work::kColumns) * kColumnBytes;
        const int column = at.lane / 2, part = at.lane % 2;
        __nv_bfloat16* out = static_cast<__nv_bfloat16*>(work.out(unit)) + (unit.row + column) * work.out_stride(unit) +
                             (unit.strip + strip(at.warp)) * kTileRows + 8 * part;
        const bool has = work.has(unit, strip(at.warp));
#pragma unroll
        for (int c = 0; c < W; c += kColumns) {
            if (c >= unit.rows) break;
#pragma unroll
            for (int e = c; e < c + kColumns && e < W; e += 8) {
                const float* sums = d + e / 2;
                put(mine + (e - c) * kColumnBytes, at, pack_bf16(sums[0] * scales.x, sums[1] * scales.x),
                    pack_bf16(sums[2] * scales.y, sums[3] * scales.y));
            }
            __syncwarp();
#pragma unroll
            for (int e = 0; e < kColumns && c + e < W; e += 16)
                if (has && c + e + column < unit.rows && e + column < W)
                    *reinterpret_cast<uint4*>(out + (c + e) * work.out_stride(unit)) =
                        *reinterpret_cast<const uint4*>(mine + (e + column) * kColumnBytes + 16 * part);
            __syncwarp();
        }
    }

private:
    // Transposes 8 columns: `low` holds columns 2t, 2t+1 of row g, `high` of row g + 8.
    static __device__ __forceinline__ void put(uint8_t* to, const Place& at, uint32_t low, uint32_t high) {
#if __CUDA_ARCH__ >= 900
        const uint32_t address =
            uint32_t(__cvta_generic_to_shared(to + at.lane % 8 * kColumnBytes + at.lane / 8 % 2 * 16));
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address), "r"(low),
                     "r"(high)
                     : "memory");
#else
        uint32_t* words = reinterpret_cast<uint32_t*>(to + at.g * kColumnBytes) + at.t;
        words[0] = transpose(low);
        words[4] = transpose(high);
#endif
    }
};

// Rows of f32 in natural order.
struct F32Rows {
    static __device__ __forceinline__ uint32_t strip(int warp) { return warp; }
    static __host__ __device__ constexpr int shared_bytes(int) { return 0; }

    template <int W, typename Work>
    static __device__ __forceinline__ void write(const float (&d)[W / 2], const Work& work, const Unit& unit,
                                                 float2 scales, const Place& at, uint8_t*) {
        float* out = static_cast<float*>(work.out(unit)) + (unit.row + 2 * at.t) * work.out_stride(unit) +
                     (unit.strip + strip(at.warp)) * kTileRows + at.g;
        if (!work.has(unit, strip(at.warp))) return;
#pragma unroll
        for (int c = 0; c < W / 8; ++c) {
            if (8 * c >= unit.rows) break;
#pragma unroll
            for (int q = 0; q < 2; ++q)
                if (8 * c + 2 * at.t + q < unit.rows) {
                    float* to = out + (8 * c + q) * work.out_stride(unit);
                    to[0] = d[4 * c + q] * scales.x;
                    to[8] = d[4 * c + 2 + q] * scales.y;
                }
        }
    }
};

__device__ __forceinline__ float silu_fast(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// round(silu(gate) * up), as panels: the 8 strips of a unit are the 64 outputs of a panel.
//
// The pair of outputs 2 t, 2 t + 1 of strip s lies in part 4 (s % 2) + t of a panel's row, word s / 2. So the four even
// strips make one half of each row, up to the swizzle, and the odd ones the other: a group of 4 warps takes either.
struct SwigluPanels {
    static constexpr int kColumnBytes = 64;
    static __device__ __forceinline__ uint32_t strip(int warp) { return 2 * (warp % 4) + warp / 4; }
    static __host__ __device__ constexpr int shared_bytes(int columns) { return 2 * columns * kColumnBytes; }

    template <int W, typename Work>
    static __device__ __forceinline__ void write(const float (&d)[W / 2], const Work& work, const Unit& unit,
                                                 float2 scales, const Place& at, uint8_t* shared) {
        const int group = at.warp / 4, word = at.warp % 4;
        // The same place for all widths: the other group may be at a unit of another.
        uint8_t* mine = shared + at.thread / 128 * Work::kColumns * kColumnBytes;
#pragma unroll
        for (int c = 0; c < W / 8; ++c) {
            if (8 * c >= unit.rows) break;
            const float first = silu_fast(d[4 * c] * scales.x) * (d[4 * c + 2] * scales.y);
            const float second = silu_fast(d[4 * c + 1] * scales.x) * (d[4 * c + 3] * scales.y);
            // Column 8 c + g. Words of a part are turned by the column, so that the banks differ.
            uint8_t* column = mine + (8 * c + at.g) * kColumnBytes;
            *reinterpret_cast<uint32_t*>(column + (at.t ^ at.g % 4) * 16 + (word + at.g / 2) % 4 * 4) =
                transpose(pack_bf16(first, second));
        }
        sync(group);
        uint8_t* out = static_cast<uint8_t*>(work.out(unit)) +
                       (unit.strip / kBlockStrips * work.out_stride(unit) + unit.row) * kPanelRowBytes;
        for (int i = at.thread % 128; i < W * 4; i += 128) {
            const int column = i / 4;
            if (column >= unit.rows) break;
            uint4 part = reinterpret_cast<const uint4*>(mine)[i];
            if (column & 2) part = make_uint4(part.y, part.z, part.w, part.x);
            if (column & 4) part = make_uint4(part.z, part.w, part.x, part.y);
            const int half = group ^ column / 4 % 2;
            *reinterpret_cast<uint4*>(out + column * kPanelRowBytes + half * 64 + i % 4 * 16) = part;
        }
        sync(group);
    }

private:
    static __device__ __forceinline__ void sync(int group) {
        if (group == 0)
            asm volatile("bar.sync 1, 128;" ::: "memory");
        else
            asm volatile("bar.sync 2, 128;" ::: "memory");
    }
};
