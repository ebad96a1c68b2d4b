// The packed weight layouts of the fast path, and what turns them into tensor-core operands.
//
// A matrix [rows, k] is cut into strips of 16 rows, and a strip into tiles of 512 inputs that follow each other along
// k:
//
//   tile (strip, kt) at  ((strip * k / 512) + kt) * kBytes
//
// Lane L = 4g + t of a warp (g = 0..7, t = 0..3) owns 16 bytes of each 512-byte line of a tile, so every load is a
// coalesced 16 bytes a lane. In chunk i (64 inputs) the lane holds the 16 inputs k = 64 i + 16 t + 0..15 of rows g and
// g + 8, which is exactly one NVFP4 group of each row. mma j of the chunk (j = 0..3) takes inputs 4j .. 4j+3 of those
// 16, so the A fragment is a0 = row g, inputs 4j, 4j+1; a1 = row g + 8, the same; a2 = row g, 4j+2, 4j+3; a3 = row g +
// 8, and the B fragment of token column g is 8 consecutive bytes of x: the permutation of k costs nothing.
//
//   NVFP4 tile, 4,608 bytes                        BF16 tile, 16,384 bytes
//        0  scales   lane: 16 bytes,                     0  chunk 0, mma 0   lane: a0 a1 a2 a3, 4 bytes each
//                    2i = row g, 2i+1 = row g+8        512  chunk 0, mma 1
//                    of chunk i                         ...
//      512  chunk 0  lane: 4 words, word j = mma j   15,872  chunk 7, mma 3
//      ...
//    4,096  chunk 7
//
// A word of codes holds 8 e2m1 codes so that few operations make four registers of two BF16 each. Code c of half h
// (0 low, 1 high) of register a_p has its sign at bit SIGN[p] + 16h and its magnitude at bits MAG[p]+2 .. MAG[p] + 16h:
//
//   p      0   1   2   3
//   SIGN  15  12  14  13
//   MAG    6   3   0   9
//
// The code then stands as sign | exponent | mantissa at bits 15, 8, 7, 6 of a BF16: its value times 2^-126, subnormals
// included. A scale byte is E5M3 = e4m3 with subnormals normalised and the exponent's bias moved from 7 to -2; as bits
// 11..4 of a BF16 under the constant 0x7600 it reads scale * 2^118. So one multiplication gives code * scale * 2^-8
// exactly; kWeightScale takes the 2^-8 back. A group of scale zero has all codes cleared: the value is the same.
//
// For SwiGLU a strip holds 8 gate rows (g) and the 8 up rows of the same outputs (g + 8): both are in one lane.
#pragma once

#include <cstdint>

#include "common.cuh"
#include "fragment.cuh"

constexpr int kTileRows = 16;
constexpr int kTileK = 512;
constexpr int kChunks = 8;

__device__ __forceinline__ uint4 load_stream(const void* address) {
    uint4 r;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "l"(address));
    return r;
}

__device__ __forceinline__ uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
    uint32_t r;
#if __CUDA_ARCH__ >= 900
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));
#endif
    return r;
}

// Constants of a strip or an expert, requested like the weights: behind a wait they would cost a miss of their own.
__device__ __forceinline__ float2 load_scales(const float2* address) {
    float2 r;
    asm volatile("ld.global.nc.v2.f32 {%0, %1}, [%2];" : "=f"(r.x), "=f"(r.y) : "l"(address));
    return r;
}

__device__ __forceinline__ float load_scale(const float* address) {
    float r;
    asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(r) : "l"(address));
    return r;
}

// Four independent chains of mma a warp: mma j adds to set j.
struct Accumulator {
    float sets[4][4];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int q = 0; q < 4; ++q) sets[j][q] = 0.0f;
    }
    // q: 0 = row g, column 2t; 1 = row g, 2t+1; 2 = row g+8, 2t; 3 = row g+8, 2t+1.
    __device__ __forceinline__ float sum(int q) const { return ((sets[0][q] + sets[1][q]) + sets[2][q]) + sets[3][q]; }
};

// The 16 inputs of one token column that a lane needs in one chunk.
struct Inputs {
    uint4 low, high;

    __device__ __forceinline__ void load(const uint4* x) {
        low = x[0];
        high = x[1];
    }
};

// The scales of rows g and g + 8 in chunk i, each twice as BF16.
struct ScalePairs {
    uint32_t g, g8;

    __device__ __forceinline__ ScalePairs(const uint4& scales, int i) {
        const uint32_t four = i < 2 ? scales.x : i < 4 ? scales.y : i < 6 ? scales.z : scales.w;
        g = pair(__byte_perm(four, 0, i % 2 ? 0x4442 : 0x4440));
        g8 = pair(__byte_perm(four, 0, i % 2 ? 0x4443 : 0x4441));
    }

private:
    static __device__ __forceinline__ uint32_t pair(uint32_t byte) { return byte * 0x00100010u + 0x76007600u; }
};

// The A fragment of a word of codes.
__device__ __forceinline__ void expand_codes(uint32_t (&a)[4], uint32_t word, const ScalePairs& scales) {
    constexpr uint32_t kMask = 0x81C081C0u;
    a[0] = word & kMask;
    a[1] = (word << 3) & kMask;
    // 66 = 64 + 2: the magnitude goes up by 6 bits, the sign by 1, and the stray copies are masked.
    a[2] = ((word & 0x40074007u) * 66u) & kMask;
    a[3] = ((word >> 3) & 0x01C001C0u) | ((word << 2) & 0x80008000u);
    a[0] = mul_bf16x2(a[0], scales.g);
    a[1] = mul_bf16x2(a[1], scales.g8);
    a[2] = mul_bf16x2(a[2], scales.g);
    a[3] = mul_bf16x2(a[3], scales.g8);
}

struct Nvfp4Tile {
    static constexpr int kBytes = 4608;
    static constexpr int kAhead = kChunks;  // chunks that registers hold
    static constexpr float kWeightScale = 256.0f;
    uint4 codes[kAhead];
    uint4 scales;
    uint4 next_scales;

    __device__ __forceinline__ void load_scales(const uint8_t* tile, int lane) {
        next_scales = load_stream(tile + 16 * lane);
    }
    __device__ __forceinline__ void load_chunk(int i, const uint8_t* tile, int lane) {
        codes[i % kAhead] = load_stream(tile + 512 + 512 * i + 16 * lane);
    }
    __device__ __forceinline__ void begin() { scales = next_scales; }

    __device__ __forceinline__ void multiply(int i, Accumulator& sum, const Inputs& x) const {
        const ScalePairs pairs(scales, i);
        const uint4& chunk = codes[i % kAhead];
        multiply_word(chunk.x, pairs, sum.sets[0], x.low.x, x.low.y);
        multiply_word(chunk.y, pairs, sum.sets[1], x.low.z, x.low.w);
        multiply_word(chunk.z, pairs, sum.sets[2], x.high.x, x.high.y);
        multiply_word(chunk.w, pairs, sum.sets[3], x.high.z, x.high.w);
    }

private:
    static __device__ __forceinline__ void multiply_word(uint32_t word, const ScalePairs& pairs, float (&sum)[4],
                                                         uint32_t x0, uint32_t x1) {
        uint32_t a[4];
        expand_codes(a, word, pairs);
        mma(sum, a, x0, x1);
    }
};

struct Bf16Tile {
    static constexpr int kBytes = 16384;
    // Half a tile: 64 registers leave room for the next kernel's blocks beside this one's.
    static constexpr int kAhead = kChunks / 2;
    static constexpr float kWeightScale = 1.0f;
    uint4 words[kAhead][4];

    __device__ __forceinline__ void load_scales(const uint8_t*, int) {}
    __device__ __forceinline__ void load_chunk(int i, const uint8_t* tile, int lane) {
#pragma unroll
        for (int j = 0; j < 4; ++j) words[i % kAhead][j] = load_stream(tile + 512 * (4 * i + j) + 16 * lane);
    }
    __device__ __forceinline__ void begin() {}

    __device__ __forceinline__ void multiply(int i, Accumulator& sum, const Inputs& x) const {
        multiply_words(words[i % kAhead][0], sum.sets[0], x.low.x, x.low.y);
        multiply_words(words[i % kAhead][1], sum.sets[1], x.low.z, x.low.w);
        multiply_words(words[i % kAhead][2], sum.sets[2], x.high.x, x.high.y);
        multiply_words(words[i % kAhead][3], sum.sets[3], x.high.z, x.high.w);
    }

private:
    static __device__ __forceinline__ void multiply_words(const uint4& w, float (&sum)[4], uint32_t x0, uint32_t x1) {
        const uint32_t a[4] = {w.x, w.y, w.z, w.w};
        mma(sum, a, x0, x1);
    }
};

// Requests a tile, or as much of it as registers hold.
template <typename Tile>
__device__ __forceinline__ void load_tile(Tile& tile, const uint8_t* address, int lane) {
    tile.load_scales(address, lane);
#pragma unroll
    for (int i = 0; i < Tile::kAhead; ++i) tile.load_chunk(i, address, lane);
}

// Asks for what registers do not hold of a tile to come to the L2 cache: where it is not needed soon. Right behind this
// a load would read the same from memory once more.
template <typename Tile>
__device__ __forceinline__ void prefetch_rest(const uint8_t* address, int lane) {
#if __CUDA_ARCH__ >= 900
    constexpr int kHeld = Tile::kBytes / kChunks * Tile::kAhead;
    if (Tile::kAhead < kChunks && lane == 0) {
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address + kHeld), "n"(Tile::kBytes - kHeld)
                     : "memory");
    }
#endif
}

// Multiplies the tile that lies at `address` with x, and refills each chunk of registers as soon as it is used up, from
// the rest of the tile and then from `next`, so that as much as registers hold is always on its way. x points at the
// lane's 16 inputs of chunk 0: column g, byte 32 t of the tile's inputs.
template <typename Tile>
__device__ __forceinline__ void multiply_tile(Tile& tile, Accumulator& sum, const uint4* x, const uint8_t* address,
                                              const uint8_t* next, int lane) {
    tile.begin();
    if (next) tile.load_scales(next, lane);
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
        Inputs inputs;
        inputs.load(x + 8 * i);
        tile.multiply(i, sum, inputs);
        const int refill = i + Tile::kAhead;
        if (refill < kChunks) {
            tile.load_chunk(refill, address, lane);
        } else if (next) {
            tile.load_chunk(refill - kChunks, next, lane);
        }
    }
}
