// What becomes of what warps, blocks and parts of a row have attended to: one result a head.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "args_attention.h"
#include "common.cuh"
#include "decode_cache.cuh"
#include "fragment.cuh"
#include "math.cuh"
#include "panel.cuh"

constexpr int kPartial = kHeadDim + 4;  // sums of p v, their maximum, the sum of p
// Below every score, and finite: what nothing was added to has weight zero beside anything.
constexpr float kLowest = -1e30f;

// Sums of p v over some positions for 4 dims of a head, with their maximum and their sum of p.
struct Merged {
    float4 out;
    float max;
    float sum;
};

__device__ __forceinline__ void add_scaled(float4& to, const float4& out, float weight) {
    to.x += out.x * weight;
    to.y += out.y * weight;
    to.z += out.z * weight;
    to.w += out.w * weight;
}

// Of kN results whose sums of p v and whose maxima with sums of p the functions give.
template <int kN, typename Out, typename Stats>
__device__ __forceinline__ Merged merge(Out out_of, Stats stats_of) {
    float4 x[kN];
    float2 stats[kN];
    Merged to{make_float4(0, 0, 0, 0), kLowest, 0};
#pragma unroll
    for (int i = 0; i < kN; ++i) {
        x[i] = out_of(i);
        stats[i] = stats_of(i);
        to.max = fmaxf(to.max, stats[i].x);
    }
#pragma unroll
    for (int i = 0; i < kN; ++i) {
        const float weight = exp2_fast(stats[i].x - to.max);
        to.sum += stats[i].y * weight;
        add_scaled(to.out, x[i], weight);
    }
    return to;
}

// Of the parts of a head, kPartial values each, the next kGroup * kPartial further on. A lane holds the maximum and the
// sum of p of every 32nd part.
__device__ __forceinline__ Merged merge_parts(const float* partial, int parts) {
    // Asked for anew, or addresses made of it would fill registers from before the first part.
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    constexpr int kInFlight = 16, kStep = kGroup * kPartial, kHeld = (kAttentionParts + 31) / 32;
    auto out_of = [&](int part) { return __ldcg(reinterpret_cast<const float4*>(partial + part * kStep) + lane); };
    float2 stats[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
        const int part = 32 * i + lane;
        stats[i] = make_float2(kLowest, 0);
        if (part < parts) stats[i] = __ldcg(reinterpret_cast<const float2*>(partial + part * kStep + kHeadDim));
    }
    float4 x[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) x[i] = i < parts ? out_of(i) : make_float4(0, 0, 0, 0);
    Merged to{make_float4(0, 0, 0, 0), kLowest, 0};
#pragma unroll
    for (int i = 0; i < kHeld; ++i) to.max = fmaxf(to.max, stats[i].x);
#pragma unroll
    for (int i = 16; i > 0; i /= 2) to.max = fmaxf(to.max, __shfl_xor_sync(~0u, to.max, i));
    float weight[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
        weight[i] = exp2_fast(stats[i].x - to.max);
        to.sum += stats[i].y * weight[i];
    }
    to.sum = warp_sum(to.sum);
#pragma unroll
    for (int held = 0; held < kHeld; ++held) {
#pragma unroll 1
        for (int first = 32 * held; first < 32 * held + 32; first += kInFlight) {
#pragma unroll
            for (int i = 0; i < kInFlight; ++i) {
                const int part = first + i;
                if (part >= parts) return to;
                add_scaled(to.out, x[i], __shfl_sync(~0u, weight[held], part % 32));
                if (part + kInFlight < parts) x[i] = out_of(part + kInFlight);
            }
        }
    }
    return to;
}

// What this thread wrote before, and what it knows of others', is seen by who sees what it writes after; and the
// reverse.
__device__ __forceinline__ void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Where the parts of a row and KV head leave what they have.
struct Parts {
    float* partial;
    uint32_t* counters;

    __device__ __forceinline__ Parts(const DecodeAttentionArgs& args, uint32_t row, uint32_t kv_head) {
        const uint64_t group = uint64_t(row) * args.kv_heads + kv_head;
        partial = args.partial + group * kAttentionParts * kGroup * kPartial;
        counters = args.counters + group * kGroup;
    }

    // Leaves what a warp has of a head for the warps of the other parts.
    __device__ __forceinline__ void leave(const Merged& x, int head, uint32_t part, int lane) const {
        float* to = partial + (part * kGroup + head) * kPartial;
        __stcg(reinterpret_cast<float4*>(to) + lane, x.out);
        if (lane == 0) __stcg(reinterpret_cast<float2*>(to + kHeadDim), make_float2(x.max, x.sum));
    }

    // The same, and the last to be there gets true, and the result of them all.
    __device__ __forceinline__ bool merge(Merged& x, int head, uint32_t part, uint32_t parts, int lane) const {
        leave(x, head, part, lane);
        __syncwarp();
        fence_gpu();
        uint32_t* counter = counters + head;
        const uint32_t before = lane == 0 ? atomicAdd(counter, 1u) : 0;
        if (__shfl_sync(~0u, before, 0) != parts - 1) return false;
        fence_gpu();
        __syncwarp();
        if (lane == 0) *counter = 0;
        x = merge_parts(partial + head * kPartial, parts);
        return true;
    }
};

// bf16(out / (sum + exp2(sink - max))), through the larger maximum, for dims 4 lane to 4 lane + 3 of a head.
__device__ __forceinline__ void store_attn(const DecodeAttentionArgs& args, const Merged& x, float sink, uint32_t row,
                                           uint32_t head, int lane) {
    const float top = fmaxf(x.max, sink);
    const float share = exp2_fast(x.max - top);
    const float scale = share / (x.sum * share + exp2_fast(sink - top));
    const uint32_t low = pack_bf16(x.out.x * scale, x.out.y * scale),
                   high = pack_bf16(x.out.z * scale, x.out.w * scale);
    const uint32_t column = head * kHeadDim + 4 * lane, cols = kGroup * args.kv_heads * kHeadDim;
    const bool panels = args.panel_rows != 0;
    const uint32_t at = panels ? uint32_t(panel_at(args.panel_rows, row, column)) : row * cols + column;
    __nv_bfloat16* to = static_cast<__nv_bfloat16*>(args.attn);
    *reinterpret_cast<uint32_t*>(to + at) = low;
    // Of a panel, the next pair lies in the next part, whose place the swizzle turns with that of this one.
    *reinterpret_cast<uint32_t*>(to + (at ^ (panels ? 8 : 2))) = high;
}
