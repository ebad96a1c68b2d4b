//! Rows of packed matrices: their bytes, and their values as f32 before the scale of the tensor.

use half::{bf16, f16};

use crate::{
    checkpoint::{Bytes, DType},
    weights::{Matrix, MatrixData},
};

/// The factor that [`decode`] leaves out. It multiplies fp32 accumulators, so that no weight is rounded by it.
pub fn scale(matrix: &Matrix) -> f32 {
    match matrix.data {
        MatrixData::Nvfp4 { scale, .. } => scale,
        _ => 1.0,
    }
}

/// The packed bytes of row `row`, and how to read them.
pub fn row(matrix: &Matrix, row: usize) -> (DType, &[u8]) {
    let (dtype, bytes) = packed(matrix);
    let row_bytes = row_bytes(matrix);
    (dtype, &bytes[row * row_bytes..(row + 1) * row_bytes])
}

/// Packed bytes of a row.
pub fn row_bytes(matrix: &Matrix) -> usize {
    packed_len(packed(matrix).0, matrix.cols)
}

/// How `matrix` is stored, and all its bytes.
pub fn packed(matrix: &Matrix) -> (DType, &Bytes) {
    match &matrix.data {
        MatrixData::F32(bytes) => (DType::F32, bytes),
        MatrixData::F16(bytes) => (DType::F16, bytes),
        MatrixData::Bf16(bytes) => (DType::Bf16, bytes),
        MatrixData::Q8_0(bytes) => (DType::Q8_0, bytes),
        MatrixData::Nvfp4 { blocks, .. } => (DType::Nvfp4, blocks),
    }
}

/// Bytes of `n` values; `n` is a whole number of blocks.
pub fn packed_len(dtype: DType, n: usize) -> usize {
    n / dtype.block_len() * dtype.block_bytes()
}

/// Writes the values of `bytes` to `out`, without [`scale`]; every value is exact.
pub fn decode(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len(), packed_len(dtype, out.len()));
    match dtype {
        DType::F32 => {
            for (out, b) in out.iter_mut().zip(bytes.chunks_exact(4)) {
                *out = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
        DType::F16 => {
            for (out, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *out = f16::from_le_bytes([b[0], b[1]]).to_f32();
            }
        }
        DType::Bf16 => {
            for (out, b) in out.iter_mut().zip(bytes.chunks_exact(2)) {
                *out = bf16::from_le_bytes([b[0], b[1]]).to_f32();
            }
        }
        DType::Q8_0 => {
            for (out, b) in out.chunks_exact_mut(32).zip(bytes.chunks_exact(34)) {
                let scale = f16::from_le_bytes([b[0], b[1]]).to_f32();
                for (out, &code) in out.iter_mut().zip(&b[2..]) {
                    *out = scale * f32::from(code.cast_signed());
                }
            }
        }
        DType::Nvfp4 => {
            for (out, b) in out.chunks_exact_mut(64).zip(bytes.chunks_exact(36)) {
                for (s, out) in out.chunks_exact_mut(16).enumerate() {
                    let scale = E4M3[usize::from(b[s] & 0x7F)];
                    for (i, &code) in b[4 + 8 * s..12 + 8 * s].iter().enumerate() {
                        out[i] = E2M1[usize::from(code & 15)] * scale;
                        out[i + 8] = E2M1[usize::from(code >> 4)] * scale;
                    }
                }
            }
        }
        DType::U8 | DType::F8E4m3 => unreachable!("no matrix is stored as {dtype}"),
    }
}

/// Values of the 4-bit codes: sign, two exponent bits with bias 1, one mantissa bit.
const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Values of block scales: four exponent bits with bias 7, three mantissa bits, 0x7F for zero.
pub const E4M3: [f32; 128] = {
    let mut table = [0.0; 128];
    let mut byte = 0;
    while byte < 127 {
        table[byte] = match byte {
            0..8 => byte as f32 / 512.0,
            _ => f32::from_bits(((byte as u32) << 20) + (120 << 23)),
        };
        byte += 1;
    }
    table
};
