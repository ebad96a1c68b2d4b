// decode_linear.cu: y = W x for up to 8 rows, with what stands before and after it in the decode chain.
//
//   decode_qkv         out = round(W norm(delta + residual))                   rows q, k, v of one layer
//   decode_o           out = round(W x)                                        k = H * 128 = 4096
//   decode_dense_up    out = round(silu(gate n) * up n), n = norm(delta + residual)
//   decode_dense_down  out = round(W x)                                        k = 6144
//   decode_lm_head     out = W norm(delta + residual), fp32
//
// in   weights  [strips, k / 512] tiles of layout.cuh, NVFP4 or BF16; scales [strips] x 2 f32
//      x        [B, k] bf16, or delta, residual [B, 2048] bf16 and weight [2048] f32
// out  out      [B, out_stride] bf16 or f32; new_residual [B, 2048] bf16
//
// launch   kGroups groups of kSplit warps a block; a group takes a whole strip, block + group * blocks, for the LM head
//          every kGroups * blocks-th from there on, each warp k / 512 / kSplit tiles of it; dynamic shared memory NB *
//          x_stride(k) + sums. decode_o and decode_dense_down may have more blocks than strips, which only wait
// bound    memory: strips * k / 512 * tile bytes; at one row the latency of the chain
// PDL      weights and scales of the first strip, and the norm's weight, are requested before the wait; decode_qkv,
//          decode_o and decode_dense_down trigger before it, the others right after it
#include "gemv.cuh"

namespace {

enum class Before { kPlain, kNorm };
enum class After { kBf16, kSwiGlu, kF32 };

template <typename Tile, int NB, Before kBefore, After kAfter, int kK, int kSplit, int kGroups>
__device__ __forceinline__ void decode_linear(const DecodeLinearArgs& args) {
    constexpr int kWarps = kSplit * kGroups;
    constexpr int kTiles = kK / kTileK;
    constexpr int kEach = kTiles / kSplit;
    static_assert(kEach * kSplit == kTiles && kK % kTileK == 0);
    static_assert(kBefore == Before::kPlain || kK == kHidden);
    // Whether groups take strips in turn. Where they do not, no instruction is left that asks: behind the wait, each is
    // latency.
    constexpr bool kAgain = kAfter == After::kF32;

    extern __shared__ __align__(16) uint8_t shared[];
    float* sums = reinterpret_cast<float*>(shared + NB * x_stride(kK));  // [2, kWarps, 16, NB]; the norm's before that

    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int group = warp / kSplit, split = warp % kSplit;
    const int step = gridDim.x * kGroups;
    int strip = blockIdx.x + gridDim.x * group;
    auto tile_at = [&](int strip, int tile) {
        return args.weights + (size_t(strip) * kTiles + split * kEach + tile) * Tile::kBytes;
    };

    Tile tile;
    float2 scales = {};
    if (strip < int(args.strips)) {
        load_tile(tile, tile_at(strip, 0), lane);
        // Attention runs long enough before decode_o for the whole tile to come; elsewhere memory is busy anyway.
        if (kBefore == Before::kPlain) prefetch_rest<Tile>(tile_at(strip, 0), lane);
        scales = load_scales(args.scales + strip);
    }
    if constexpr (kBefore == Before::kNorm) {
        Norm norm;
        norm.request(args.norm);
        // Attention has two microseconds to spend in front of its own wait, on what no kernel of this step wrote since
        // decode_embed.
        constexpr bool kLaunchFirst = kAfter == After::kBf16;
        if (kLaunchFirst) pdl_launch();
        pdl_wait();
        if (!kLaunchFirst) pdl_launch();
        norm.stage<NB>(shared, sums, args.norm);
    } else {
        static_assert(kGroups == 1);
        pdl_launch();
        pdl_wait();
        // More blocks than strips: these only wait.
        if (strip >= int(args.strips)) return;
        stage_tiles<NB, kK, kEach>(shared, static_cast<const __nv_bfloat16*>(args.x), args.norm.rows, split * kEach,
                                   lane);
    }

    for (int parity = 0; strip < int(args.strips); strip += step, parity ^= 1) {
        Accumulator sum;
        sum.clear();
        const bool more = kAgain && strip + step < int(args.strips);
        float2 next_scales = {};
        if (more) next_scales = load_scales(args.scales + strip + step);
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            const uint8_t* next = i + 1 < kEach ? tile_at(strip, i + 1) : more ? tile_at(strip + step, 0) : nullptr;
            const uint4* x = lane_inputs<NB>(shared, kK, split * kEach + i, lane);
            multiply_tile(tile, sum, x, tile_at(strip, i), next, lane);
        }
        // Two sets of sums in turn: a warp that is a strip ahead does not overwrite what the others still read.
        float* mine = sums + (parity * kWarps + group * kSplit) * 16 * NB;
        put_sums<NB>(mine + split * 16 * NB, sum, lane);
        named_sync(group + 1, kSplit * 32);
        constexpr int kRows = kAfter == After::kSwiGlu ? 8 : 16;
        for (int i = split * 32 + lane; i < kRows * NB; i += kSplit * 32) {
            const int row = i % kRows, column = i / kRows;
            if (column >= int(args.norm.rows)) break;
            const size_t at = size_t(column) * args.out_stride + size_t(strip) * kRows + row;
            if constexpr (kAfter == After::kSwiGlu) {
                static_cast<__nv_bfloat16*>(args.out)[at] = swiglu<Tile, NB, kSplit>(mine, row, column, scales);
            } else {
                const float y = total<Tile, NB, kSplit>(mine, row, column) * (row < 8 ? scales.x : scales.y);
                if constexpr (kAfter == After::kF32) {
                    static_cast<float*>(args.out)[at] = y;
                } else {
                    static_cast<__nv_bfloat16*>(args.out)[at] = __float2bfloat16_rn(y);
                }
            }
        }
        if (!more) break;
        scales = next_scales;
    }
}

}  // namespace

// One kernel a number of rows and format. Registers are bounded so that the next kernel's blocks fit beside this one's
// and request their weights meanwhile, which for BF16 and where the norm holds 4 rows and more is within reach of
// blocks of 256 threads only. The bounds are for Hopper, whose registers were counted.
template <typename Tile, int NB, Before kBefore>
__host__ __device__ constexpr int bound(int threads) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
    return threads;
#else
    if (Tile::kBytes == Bf16Tile::kBytes) return kBefore == Before::kPlain && threads == 256 ? 512 : threads;
    return threads > 256 && NB <= 2 ? 768 : kBefore == Before::kPlain ? 640 : 512;
#endif
}

#define DECODE_LINEAR(NAME, FORMAT, TILE, NB, BEFORE, AFTER, K, SPLIT, GROUPS)                            \
    extern "C" __global__ void __launch_bounds__(bound<TILE, NB, Before::BEFORE>(SPLIT * GROUPS * 32), 1) \
        NAME##_##FORMAT##_##NB(const __grid_constant__ DecodeLinearArgs args) {                           \
        decode_linear<TILE, NB, Before::BEFORE, After::AFTER, K, SPLIT, GROUPS>(args);                    \
    }

#define DECODE_LINEARS(FORMAT, TILE, NB)                                          \
    DECODE_LINEAR(decode_qkv, FORMAT, TILE, NB, kNorm, kBf16, 2048, 4, 3)         \
    DECODE_LINEAR(decode_o, FORMAT, TILE, NB, kPlain, kBf16, 4096, 8, 1)          \
    DECODE_LINEAR(decode_dense_up, FORMAT, TILE, NB, kNorm, kSwiGlu, 2048, 4, 3)  \
    DECODE_LINEAR(decode_dense_down, FORMAT, TILE, NB, kPlain, kBf16, 6144, 6, 1) \
    DECODE_LINEAR(decode_lm_head, FORMAT, TILE, NB, kNorm, kF32, 2048, 2, 4)

DECODE_LINEARS(nvfp4, Nvfp4Tile, 1)
DECODE_LINEARS(nvfp4, Nvfp4Tile, 2)
DECODE_LINEARS(nvfp4, Nvfp4Tile, 4)
DECODE_LINEARS(nvfp4, Nvfp4Tile, 8)
DECODE_LINEARS(bf16, Bf16Tile, 1)
DECODE_LINEARS(bf16, Bf16Tile, 2)
DECODE_LINEARS(bf16, Bf16Tile, 4)
DECODE_LINEARS(bf16, Bf16Tile, 8)
