// Parts of the fast decode path's products: inputs to shared memory, with or without the norm in front; sums across
// warps.
#pragma once

#include "args_decode.h"
#include "layout.cuh"

constexpr int kHidden = 2048;
constexpr int kNormGroup = 256;  // values whose squares one warp adds, 8 a lane
constexpr int kNormGroups = kHidden / kNormGroup;

// Bytes between the rows of x in shared memory: 16 more than a row, so that the 8 columns of a B fragment lie in
// different banks.
__host__ __device__ constexpr int x_stride(int k) { return 2 * k + 16; }

__device__ __forceinline__ void copy_async_16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(uint32_t(__cvta_generic_to_shared(shared))),
                 "l"(global)
                 : "memory");
}

__device__ __forceinline__ void copy_async_join() {
    asm volatile("cp.async.commit_group;\n\tcp.async.wait_group 0;" ::: "memory");
}

// Rows of x to shared memory; rows that are not in use become zero. The caller joins and synchronises.
template <int NB, int kThreads>
__device__ __forceinline__ void stage_x(uint8_t* shared, const __nv_bfloat16* x, int k, int rows) {
    const int per_row = k / 8;
    for (int i = threadIdx.x; i < NB * per_row; i += kThreads) {
        const int row = i / per_row, part = i % per_row;
        uint8_t* to = shared + row * x_stride(k) + 16 * part;
        if (row < rows) {
            copy_async_16(to, x + size_t(row) * k + 8 * part);
        } else {
            *reinterpret_cast<uint4*>(to) = make_uint4(0, 0, 0, 0);
        }
    }
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

// normed = round(w * (s * rsqrt(mean(s^2) + eps))), s = delta + residual, to shared memory; block 0 also writes the new
// residual stream and, if wanted, the normed rows. `sums` is [NB, kNormGroups] of shared memory. Ends synchronised.
//
// A lane squares and adds its 8 values in order, a warp adds its 32 lanes by shuffles, and the 8 sums of a row are
// added in order: the same bits for every number of rows and warps.
template <int NB, int kWarps>
__device__ __forceinline__ void stage_normed(uint8_t* shared, float* sums, const NormArgs& args) {
    constexpr int kPairs = NB * kNormGroups;  // (row, group)
    constexpr int kEach = (kPairs + kWarps - 1) / kWarps;
    // With few pairs a warp keeps its values; with many it reads them again, which the L2 cache answers.
    constexpr bool kKeep = kEach <= 2;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool writes = blockIdx.x == 0;
    const uint4* delta = reinterpret_cast<const uint4*>(args.delta);
    const uint4* residual = reinterpret_cast<const uint4*>(args.residual);
    float kept[kKeep ? kEach : 1][8];
    auto index = [&](int pair) { return (pair * kNormGroup + 8 * lane) / 8; };  // rows follow each other

#pragma unroll
    for (int e = 0; e < kEach; ++e) {
        const int pair = warp + e * kWarps;
        if (pair >= kPairs || pair / kNormGroups >= int(args.rows)) continue;
        float (&s)[8] = kept[kKeep ? e : 0];
        add_residual(s, delta[index(pair)], residual[index(pair)]);
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) sum = fmaf(s[i], s[i], sum);
        sum = warp_sum(sum);
        if (lane == 0) sums[pair] = sum;
        if (writes) reinterpret_cast<uint4*>(args.new_residual)[index(pair)] = pack_8(s);
    }
    __syncthreads();

    const float4* weight = reinterpret_cast<const float4*>(args.weight);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
        const int pair = warp + e * kWarps;
        if (pair >= kPairs) continue;
        const int row = pair / kNormGroups, group = pair % kNormGroups;
        uint4* to = reinterpret_cast<uint4*>(shared + row * x_stride(kHidden) + 2 * (group * kNormGroup + 8 * lane));
        if (row >= int(args.rows)) {
            *to = make_uint4(0, 0, 0, 0);
            continue;
        }
        float (&s)[8] = kept[kKeep ? e : 0];
        if constexpr (!kKeep) add_residual(s, delta[index(pair)], residual[index(pair)]);
        float total = 0.0f;
#pragma unroll
        for (int i = 0; i < kNormGroups; ++i) total += sums[row * kNormGroups + i];
        const float scale = 1.0f / sqrtf(total / kHidden + args.eps);
        const float4 low = weight[(group * kNormGroup + 8 * lane) / 4],
                     high = weight[(group * kNormGroup + 8 * lane) / 4 + 1];
        const float w[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) s[i] = w[i] * (s[i] * scale);
        *to = pack_8(s);
        if (writes && args.normed) reinterpret_cast<uint4*>(args.normed)[index(pair)] = *to;
    }
    __syncthreads();
}

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
