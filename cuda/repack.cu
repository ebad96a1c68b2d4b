// repack.cu: matrices as a file has them, to the tiles of layout.cuh, which has the drawing.
//
// in   low, high  rows of NVFP4 blocks in GGUF order, or of bf16: the rows 0-7 and the rows 8-15 of each strip
// out  tiles      [strips, k_tiles] of 4,608 (NVFP4) or 16,384 (bf16) bytes; every byte is written
//
// The values stay the same: codes are moved, and a scale byte e4m3 becomes e5m3, which holds its subnormals as normal
// numbers. Codes under a scale of zero are cleared, because no e5m3 is zero.
//
// launch   grid (strips, k_tiles), block 256: warp i makes chunk i; lane 4 g + t takes 16 inputs of rows g and g + 8
// bound    memory: twice the bytes of the matrix
// PDL      not used

#include "args_load.h"

namespace {

constexpr int kThreads = 256;
constexpr int kChunks = kThreads / 32;
constexpr int kLineBytes = 512;  // 16 bytes a lane
constexpr int kBlockBytes = 36;

// One NVFP4 group of a row.
struct Group {
    uint32_t scale;
    uint64_t codes;  // value v < 8 at bits 8 v, value v >= 8 at bits 8 (v - 8) + 4

    // Two neighbours, the second 16 bits higher, each as sign at bit `sign` and magnitude at bit `magnitude`.
    __device__ __forceinline__ uint32_t pair(int v, int sign, int magnitude) const {
        const uint32_t first = code(v), second = code(v + 1);
        const uint32_t both = first | second << 16;
        return (both >> 3 & 0x00010001) << sign | (both & 0x00070007) << magnitude;
    }

private:
    __device__ __forceinline__ uint32_t code(int v) const { return codes >> (8 * (v % 8) + 4 * (v / 8)) & 15; }
};

__device__ __forceinline__ Group load_group(const uint8_t* row, int block, int group) {
    const uint8_t* bytes = row + uint64_t(block) * kBlockBytes;
    const uint32_t* codes = reinterpret_cast<const uint32_t*>(bytes + 4 + 8 * group);
    const uint32_t scale = bytes[group] & 0x7F;
    if (scale == 0 || scale == 0x7F) return {0, 0};
    return {scale, codes[0] | uint64_t(codes[1]) << 32};
}

// The exponent's bias goes from 7 to 9: 2^-9, the smallest subnormal, becomes 0. A scale of zero has no meaning.
__device__ __forceinline__ uint32_t to_e5m3(uint32_t e4m3) {
    if (e4m3 >= 8) return e4m3 + (2 << 3);
    const int exponent = 31 - __clz(e4m3 | 1);
    return exponent << 3 | (e4m3 << (3 - exponent) & 7);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads) repack_nvfp4(const __grid_constant__ RepackArgs args) {
    const int lane = threadIdx.x % 32, chunk = threadIdx.x / 32;
    const uint64_t row = uint64_t(blockIdx.x) * args.row_step + lane / 4;
    const uint64_t row_bytes = uint64_t(args.k_tiles) * kChunks * kBlockBytes;
    const int block = blockIdx.y * kChunks + chunk;
    const Group low = load_group(args.low + row * row_bytes, block, lane % 4);
    const Group high = load_group(args.high + row * row_bytes, block, lane % 4);

    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
        words[j] =
            low.pair(4 * j, 15, 6) | high.pair(4 * j, 12, 3) | low.pair(4 * j + 2, 14, 0) | high.pair(4 * j + 2, 13, 9);

    uint8_t* tile = args.tiles + (uint64_t(blockIdx.x) * args.k_tiles + blockIdx.y) * (1 + kChunks) * kLineBytes;
    uint8_t* line = tile + 16 * lane;
    *reinterpret_cast<uint4*>(line + (1 + chunk) * kLineBytes) = make_uint4(words[0], words[1], words[2], words[3]);
    line[2 * chunk] = static_cast<uint8_t>(to_e5m3(low.scale));
    line[2 * chunk + 1] = static_cast<uint8_t>(to_e5m3(high.scale));
}

extern "C" __global__ void __launch_bounds__(kThreads) repack_bf16(const __grid_constant__ RepackArgs args) {
    constexpr int kMmas = 4;
    const int lane = threadIdx.x % 32, chunk = threadIdx.x / 32;
    const uint64_t row = uint64_t(blockIdx.x) * args.row_step + lane / 4;
    const uint64_t row_bytes = uint64_t(args.k_tiles) * kChunks * 4 * 32;
    const uint64_t first = row * row_bytes + ((uint64_t(blockIdx.y) * kChunks + chunk) * 4 + lane % 4) * 32;
    const uint4* low = reinterpret_cast<const uint4*>(args.low + first);
    const uint4* high = reinterpret_cast<const uint4*>(args.high + first);
    const uint4 l[2] = {low[0], low[1]}, h[2] = {high[0], high[1]};

    uint8_t* tile = args.tiles + (uint64_t(blockIdx.x) * args.k_tiles + blockIdx.y) * kMmas * kChunks * kLineBytes;
    uint4* line = reinterpret_cast<uint4*>(tile + chunk * kMmas * kLineBytes + 16 * lane);
    line[0] = make_uint4(l[0].x, h[0].x, l[0].y, h[0].y);
    line[32] = make_uint4(l[0].z, h[0].z, l[0].w, h[0].w);
    line[64] = make_uint4(l[1].x, h[1].x, l[1].y, h[1].y);
    line[96] = make_uint4(l[1].z, h[1].z, l[1].w, h[1].w);
}
