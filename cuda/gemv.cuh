// Parts of the fast decode path's products: inputs to shared memory, with or without the norm in front; sums across
// warps.
#pragma once

#include "args_decode.h"
#include "copy_async.cuh"
#include "layout.cuh"

constexpr int kHidden = 2048;
constexpr int kNormWarps = 8;

// Bytes between the rows of x in shared memory: 16 more than a row, so that the 8 columns of a B fragment lie in
// different banks.
__host__ __device__ constexpr int x_stride(int k) { return 2 * k + 16; }

// Barrier `id` among `threads` threads; 0 is __syncthreads. Arriving does not wait for the others.
__device__ __forceinline__ void named_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// kParts pieces of 16 bytes from global to shared memory, piece `i` of them by a call to `where(i, from, to)`, which
// says where it lies and where it goes, or returns false where zeros go. A few go through registers, which is the
// shorter way; many go past them. The caller synchronises.
template <int kParts, typename Where>
__device__ __forceinline__ void copy_parts(Where where) {
    constexpr bool kRegisters = kParts <= 4;
    uint4 parts[kRegisters ? kParts : 1];
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
        const uint4* from;
        uint4* to;
        const bool used = where(i, from, to);
        if constexpr (kRegisters) {
            parts[i] = used ? __ldcg(from) : make_uint4(0, 0, 0, 0);
        } else if (used) {
            copy_async_16(to, from);
        } else {
            *to = make_uint4(0, 0, 0, 0);
        }
    }
    if constexpr (kRegisters) {
#pragma unroll
        for (int i = 0; i < kParts; ++i) {
            const uint4* from;
            uint4* to;
            where(i, from, to);
            *to = parts[i];
        }
    } else {
        copy_async_join();
    }
}

// Rows of x, kK wide, to shared memory by kThreads threads, of which this is number `thread`; rows that are not in use
// become zero. The caller synchronises.
template <int NB, int kK, int kThreads>
__device__ __forceinline__ void stage_x(uint8_t* shared, const __nv_bfloat16* x, int rows, int thread) {
    constexpr int kPerRow = kK / 8, kAll = NB * kPerRow;
    static_assert(kAll % kThreads == 0);
    copy_parts<kAll / kThreads>([&](int i, const uint4*& from, uint4*& to) {
        const int at = thread + i * kThreads, row = at / kPerRow, part = at % kPerRow;
        from = reinterpret_cast<const uint4*>(x + size_t(row) * kK) + part;
        to = reinterpret_cast<uint4*>(shared + row * x_stride(kK)) + part;
        return row < rows;
    });
}

// The same by one warp for the inputs of kTiles tiles from tile kt on, which it alone needs: no other warp is waited
// for. Ends synchronised.
template <int NB, int kK, int kTiles>
__device__ __forceinline__ void stage_tiles(uint8_t* shared, const __nv_bfloat16* x, int rows, int kt, int lane) {
    constexpr int kPerRow = kTiles * kTileK / 8;
    copy_parts<NB * kPerRow / 32>([&](int i, const uint4*& from, uint4*& to) {
        const int row = 32 * i / kPerRow, part = kt * kTileK / 8 + (32 * i) % kPerRow + lane;
        from = reinterpret_cast<const uint4*>(x + size_t(row) * kK) + part;
        to = reinterpret_cast<uint4*>(shared + row * x_stride(kK)) + part;
        return row < rows;
    });
    __syncwarp();
}

// s = delta + residual for the 8 values of a lane.
__device__ __forceinline__ void add_residual(float (&s)[8], const uint4& delta, const uint4& residual) {
    const uint32_t a[4] = {delta.x, delta.y, delta.z, delta.w};
    const uint32_t b[4] = {residual.x, residual.y, residual.z, residual.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        s[2 * i] = bf16_low(a[i]) + bf16_low(b[i]);
        s[2 * i + 1] = bf16_high(a[i]) + bf16_high(b[i]);
    }
}

__device__ __forceinline__ uint4 pack_8(const float (&s)[8]) {
    return make_uint4(pack_bf16(s[0], s[1]), pack_bf16(s[2], s[3]), pack_bf16(s[4], s[5]), pack_bf16(s[6], s[7]));
}

// The norm in front of a product: warp w of the first eight norms inputs 256 w .. of every row, 8 a lane.
struct Norm {
    float weight[8];

    // Before the wait.
    __device__ __forceinline__ void request(const NormArgs& args) {
        if (threadIdx.x >= kNormWarps * 32) return;
        const uint4* from = reinterpret_cast<const uint4*>(args.weight + 8 * threadIdx.x);
        const uint4 low = load_stream(from), high = load_stream(from + 1);
        const uint32_t bits[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) weight[i] = __uint_as_float(bits[i]);
    }

    // normed = round(w * (s * rsqrt(mean(s^2) + eps))), s = delta + residual, to shared memory; the first blocks also
    // write their part of the new residual stream and, if wanted, of the normed rows. `sums` is [NB, kNormWarps] of
    // shared memory. Every thread of the block calls it; ends synchronised.
    //
    // A lane squares and adds its 8 values in order, a warp adds its 32 lanes by shuffles, and the 8 sums of a row are
    // added in order: the same bits for every number of rows.
    template <int NB>
    __device__ __forceinline__ void stage(uint8_t* shared, float* sums, const NormArgs& args) const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        const bool norms = warp < kNormWarps, writes = blockIdx.x == warp;
        const int rows = args.rows;
        auto index = [&](int row) { return row * (kHidden / 8) + int(threadIdx.x); };
        uint4 delta[NB], residual[NB];
        float s[8];
        if (norms) {
#pragma unroll
            for (int row = 0; row < NB; ++row) {
                // Rows that are not in use repeat the last one, so that no load waits for a branch.
                const int from = index(NB == 1 ? 0 : min(row, rows - 1));
                delta[row] = __ldcg(reinterpret_cast<const uint4*>(args.delta) + from);
                residual[row] = __ldcg(reinterpret_cast<const uint4*>(args.residual) + from);
            }
#pragma unroll
            for (int row = 0; row < NB; ++row) {
                add_residual(s, delta[row], residual[row]);
                float sum = 0.0f;
#pragma unroll
                for (int i = 0; i < 8; ++i) sum = fmaf(s[i], s[i], sum);
                sum = warp_sum(sum);
                if (lane == 0) sums[row * kNormWarps + warp] = sum;
            }
        }
        __syncthreads();
        if (norms) {
            float total = 0.0f;
#pragma unroll
            for (int i = 0; i < kNormWarps; ++i) total += sums[lane % NB * kNormWarps + i];
            const float own = 1.0f / sqrtf(total / kHidden + args.eps);
#pragma unroll
            for (int row = 0; row < NB; ++row) {
                const float scale = NB == 1 ? own : __shfl_sync(~0u, own, row);
                uint4 normed = make_uint4(0, 0, 0, 0);
                if (row < rows) {
                    add_residual(s, delta[row], residual[row]);
                    if (writes) reinterpret_cast<uint4*>(args.new_residual)[index(row)] = pack_8(s);
#pragma unroll
                    for (int i = 0; i < 8; ++i) s[i] = weight[i] * (s[i] * scale);
                    normed = pack_8(s);
                    if (writes && args.normed) reinterpret_cast<uint4*>(args.normed)[index(row)] = normed;
                }
                reinterpret_cast<uint4*>(shared + row * x_stride(kHidden))[threadIdx.x] = normed;
            }
        }
        __syncthreads();
    }
};

// Where the lane's column of x starts: column g (any column beyond NB repeats one, and its sums are not used).
template <int NB>
__device__ __forceinline__ const uint4* lane_inputs(const uint8_t* shared, int k, int kt, int lane) {
    const int g = lane / 4, t = lane % 4;
    return reinterpret_cast<const uint4*>(shared + (g % NB) * x_stride(k) + 2 * kTileK * kt + 32 * t);
}

// A warp's sums of a strip to shared memory, [16 rows, NB].
template <int NB>
__device__ __forceinline__ void put_sums(float* to, const Accumulator& sum, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int q = 0; q < 2; ++q) {
        const int column = 2 * t + q;
        if (column < NB) {
            to[g * NB + column] = sum.sum(q);
            to[(g + 8) * NB + column] = sum.sum(2 + q);
        }
    }
}

// The product of a strip: what the kSplit warps that shared its inputs have put, added in order.
template <typename Tile, int NB, int kSplit>
__device__ __forceinline__ float total(const float* sums, int row, int column) {
    float v = 0.0f;
#pragma unroll
    for (int s = 0; s < kSplit; ++s) v += sums[(s * 16 + row) * NB + column];
    return v * Tile::kWeightScale;
}

// silu(gate) * up of a strip of 8 gate rows and the 8 up rows of the same outputs.
template <typename Tile, int NB, int kSplit>
__device__ __forceinline__ __nv_bfloat16 swiglu(const float* sums, int row, int column, const float2& scales) {
    const float gate = total<Tile, NB, kSplit>(sums, row, column) * scales.x;
    const float up = total<Tile, NB, kSplit>(sums, row + 8, column) * scales.y;
    return __float2bfloat16_rn(silu(gate) * up);
}
