// Hopper's asynchronous products (sm_90a): 64 rows of A from the registers of a warpgroup, B from shared memory.
#pragma once

#include <cstdint>

// Describes B to the tensor core: rows of 128 bytes, K-major, 128-byte swizzle, 8 rows every 1,024 bytes, which is what
// a stage of panels is. k16 step j starts 32 j bytes further, 2 j in units of the descriptor.
__device__ __forceinline__ uint64_t describe(uint32_t shared_address) {
    return uint64_t(shared_address >> 4 & 0x3FFF) | uint64_t(1) << 16 | uint64_t(64) << 32 | uint64_t(1) << 62;
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most `kLeft` of the committed groups run.
template <int kLeft>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}

// d += a b, or without `add` d = a b, N columns, 16 inputs. The fragments are those of mma.m16n8k16: warp w of the
// warpgroup has rows 16 w + g and 16 w + g + 8, and d[4 i ..] columns 8 i + 2 t and 8 i + 2 t + 1 of both.
template <int N>
struct Wgmma;

template <int N, int M>
__device__ __forceinline__ void wgmma(float (&d)[M], const uint32_t (&a)[4], uint64_t b, bool add = true) {
    static_assert(N / 2 <= M, "a sum for each column");
    Wgmma<N>::multiply(d, a, b, add);
}

#define D0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define D1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define D2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define D3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define D4 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define D5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define D6 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define D7 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define OUT4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define OUT8(i) OUT4(i), OUT4(i + 4)
#define OUT16(i) OUT8(i), OUT8(i + 8)
#define OUT32(i) OUT16(i), OUT16(i + 16)
#define OUT64(i) OUT32(i), OUT32(i + 32)
#define WGMMA(N, D, A, ADD, ...)                                                                                       \
    template <>                                                                                                        \
    struct Wgmma<N> {                                                                                                  \
        template <int M>                                                                                               \
        static __device__ __forceinline__ void multiply(float (&d)[M], const uint32_t (&a)[4], uint64_t b, bool add) { \
            asm volatile("{\n\t.reg .pred add;\n\tsetp.ne.b32 add, " ADD                                               \
                         ", 0;\n\t"                                                                                    \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" D "}, " A ", add, 1, 1, 0;\n\t}" \
                         : __VA_ARGS__                                                                                 \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(add)));                         \
        }                                                                                                              \
    };

WGMMA(8, "%0, %1, %2, %3", "{%4, %5, %6, %7}, %8", "%9", OUT4(0))
WGMMA(16, "%0, %1, %2, %3, %4, %5, %6, %7", "{%8, %9, %10, %11}, %12", "%13", OUT8(0))
WGMMA(32, D0, "{%16, %17, %18, %19}, %20", "%21", OUT16(0))
WGMMA(64, D0 ", " D1, "{%32, %33, %34, %35}, %36", "%37", OUT32(0))
WGMMA(96, D0 ", " D1 ", " D2, "{%48, %49, %50, %51}, %52", "%53", OUT32(0), OUT16(32))
WGMMA(128, D0 ", " D1 ", " D2 ", " D3, "{%64, %65, %66, %67}, %68", "%69", OUT64(0))
WGMMA(160, D0 ", " D1 ", " D2 ", " D3 ", " D4, "{%80, %81, %82, %83}, %84", "%85", OUT64(0), OUT16(64))
WGMMA(176, D0 ", " D1 ", " D2 ", " D3 ", " D4 ", %80, %81, %82, %83, %84, %85, %86, %87", "{%88, %89, %90, %91}, %92",
      "%93", OUT64(0), OUT16(64), OUT8(80))
WGMMA(192, D0 ", " D1 ", " D2 ", " D3 ", " D4 ", " D5, "{%96, %97, %98, %99}, %100", "%101", OUT64(0), OUT32(64))
WGMMA(208, D0 ", " D1 ", " D2 ", " D3 ", " D4 ", " D5 ", %96, %97, %98, %99, %100, %101, %102, %103",
      "{%104, %105, %106, %107}, %108", "%109", OUT64(0), OUT32(64), OUT8(96))
WGMMA(224, D0 ", " D1 ", " D2 ", " D3 ", " D4 ", " D5 ", " D6, "{%112, %113, %114, %115}, %116", "%117", OUT64(0),
      OUT32(64), OUT16(96))
WGMMA(256, D0 ", " D1 ", " D2 ", " D3 ", " D4 ", " D5 ", " D6 ", " D7, "{%128, %129, %130, %131}, %132", "%133",
      OUT64(0), OUT64(64))

#undef WGMMA
#undef OUT64
#undef OUT32
#undef OUT16
#undef OUT8
#undef OUT4
#undef D0
#undef D1
#undef D2
#undef D3
#undef D4
#undef D5
#undef D6
#undef D7
