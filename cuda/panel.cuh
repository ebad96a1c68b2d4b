// The order in which activations wait for a tensor-core product over many rows: panels of 64 inputs.
//
//   panels [k / 64, panel_rows, 64] bf16, panel_rows a multiple of 8
//
// A panel's rows are 128 bytes each and follow each other, so the rows of a tile are one contiguous copy into shared
// memory, where they are a K-major operand with 128-byte swizzle as they lie. Two permutations stand behind that:
//
//   inputs   The 32 pairs of inputs of a row's panel are ordered so that 16-byte part p holds pairs p, p + 8, p + 16,
//            p + 24. mma j of a chunk of layout.cuh then finds its inputs in parts 2j and 2j + 1.
//   swizzle  part p of row r lies at p ^ (r % 8).
#pragma once

#include <cstddef>
#include <cstdint>

// Where input `column` of row `row` lies, in values; an even column's neighbour follows it.
__device__ __forceinline__ size_t panel_at(size_t panel_rows, uint32_t row, uint32_t column) {
    const uint32_t pair = column % 64 / 2, part = pair % 8, place = 2 * (pair / 8) + column % 2;
    return (size_t(column / 64) * panel_rows + row) * 64 + (part ^ row % 8) * 8 + place;
}
