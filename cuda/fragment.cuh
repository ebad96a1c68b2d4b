// Fragments of tensor-core products in BF16.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "common.cuh"

// 16 bytes that no other thread of the SM will read.
__device__ __forceinline__ uint4 load_once(const __nv_bfloat16* from) {
    uint4 x;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from));
    return x;
}

__device__ __forceinline__ void load_once(uint32_t (&x)[4], const __nv_bfloat16* from) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "l"(from));
}

// Half as much.
__device__ __forceinline__ void load_once(uint32_t (&x)[2], const __nv_bfloat16* from) {
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "l"(from));
}

// c += A B, m16n8k16: fp32 sums.
__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    mma(c, a[0], a[1], a[2], a[3], b0, b1);
}

// Four 8x8 matrices from shared memory, of which lane 8 m + r gives the address of row r of matrix m.
__device__ __forceinline__ void load_matrices(uint32_t (&b)[4], uint32_t from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                 : "r"(from)
                 : "memory");
}

// The transpose of the 8x8 matrix of which lane (g, t) holds columns 2 t and 2 t + 1 of row g.
__device__ __forceinline__ uint32_t transpose(uint32_t a) {
    uint32_t d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}

// Within 2 ulp.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ void unpack(const uint4& from, float (&to)[8]) {
    const uint32_t words[4] = {from.x, from.y, from.z, from.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        to[2 * i] = bf16_low(words[i]);
        to[2 * i + 1] = bf16_high(words[i]);
    }
}
