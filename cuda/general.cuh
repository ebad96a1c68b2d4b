// Values of a matrix in any of the file's types, half a warp a row.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "args_general.h"
#include "reference.cuh"

// e4m3 without sign, 0x7F being zero: shifted into place, the exponent's bias is made up by one product.
__device__ __forceinline__ float nvfp4_scale(uint32_t byte) {
    const uint32_t magnitude = byte & 0x7F;
    return magnitude == 0x7F ? 0.0f : __uint_as_float(magnitude << 20) * 0x1p120f;
}

// e2m1, likewise.
__device__ __forceinline__ float nvfp4_code(uint32_t nibble) {
    return __uint_as_float((nibble & 8) << 28 | (nibble & 7) << 22) * 0x1p126f;
}

// use(k, value) for every value of a row, without the scale of the tensor; exact. Lane i of half a warp has values i,
// i + 16, and so on, in ascending order.
template <typename Use>
__device__ __forceinline__ void for_each_value(uint32_t type, const uint8_t* row, uint32_t cols, int lane, Use use) {
    if (type == kF32) {
        const float* values = reinterpret_cast<const float*>(row);
#pragma unroll 8
        for (uint32_t k = lane; k < cols; k += kSums) use(k, values[k]);
    } else if (type == kF16) {
        const __half* values = reinterpret_cast<const __half*>(row);
#pragma unroll 8
        for (uint32_t k = lane; k < cols; k += kSums) use(k, __half2float(values[k]));
    } else if (type == kBf16) {
        const __nv_bfloat16* values = reinterpret_cast<const __nv_bfloat16*>(row);
#pragma unroll 8
        for (uint32_t k = lane; k < cols; k += kSums) use(k, __bfloat162float(values[k]));
    } else if (type == kQ8_0) {
        // 32 values: an fp16 scale, then signed bytes.
#pragma unroll 4
        for (uint32_t k = lane; k < cols; k += 32, row += 34) {
            const float scale = __half2float(*reinterpret_cast<const __half*>(row));
            use(k, scale * float(static_cast<int8_t>(row[2 + lane])));
            use(k + kSums, scale * float(static_cast<int8_t>(row[2 + kSums + lane])));
        }
    } else {
        // NVFP4, 64 values: 4 scales, then 4 times 8 bytes with values 0 to 7 in low and 8 to 15 in high nibbles.
        const uint32_t shift = lane / 8 * 4;
#pragma unroll 4
        for (uint32_t k = lane; k < cols; k += 64, row += 36) {
            const uint32_t scales = *reinterpret_cast<const uint32_t*>(row);
            const uint8_t* codes = row + 4 + lane % 8;
#pragma unroll
            for (uint32_t s = 0; s < 4; ++s) {
                use(k + kSums * s, nvfp4_code(codes[8 * s] >> shift) * nvfp4_scale(scales >> 8 * s));
            }
        }
    }
}

__device__ __forceinline__ const uint8_t* row_of(const GeneralMatrix& matrix, uint32_t index, uint32_t row) {
    return matrix.data + index * matrix.matrix_stride + uint64_t(row) * matrix.row_bytes;
}

__device__ __forceinline__ float scale_of(const GeneralMatrix& matrix, uint32_t index) {
    return matrix.scales == nullptr ? 1.0f : matrix.scales[index];
}

// Row `row` of matrix `index` times x [cols], with the scale of the tensor, unrounded. All lanes of the warp take part;
// `lane` is that within half of it.
__device__ __forceinline__ float dot_row(const GeneralMatrix& matrix, uint32_t index, uint32_t row, uint32_t cols,
                                         const __nv_bfloat16* x, int lane) {
    const float scale = scale_of(matrix, index);
    float sum = 0;
    for_each_value(matrix.type, row_of(matrix, index, row), cols, lane,
                   [&](uint32_t k, float w) { sum = add_product(sum, w, __bfloat162float(x[k])); });
    return half_warp_sum(sum) * scale;
}
