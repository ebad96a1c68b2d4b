//! Rows of packed matrices as f32, before the scale of the tensor.

use half::{bf16, f16};

use crate::weights::{Matrix, MatrixData};

/// The factor that [`decode_row`] leaves out. It multiplies fp32 accumulators, so that no weight is rounded by it.
pub fn scale(matrix: &Matrix) -> f32 {
    match matrix.data {
        MatrixData::Nvfp4 { scale, .. } => scale,
        _ => 1.0,
    }
}

/// Writes row `row` of `matrix` (`[cols]`) to `out`, without [`scale`]; every value is exact.
///
/// # Panics
/// When `row` or the length of `out` does not fit `matrix`.
pub fn decode_row(matrix: &Matrix, row: usize, out: &mut [f32]) {
    assert!(row < matrix.rows && out.len() == matrix.cols, "row {row} of {} x {}", matrix.rows, matrix.cols);
    let bytes_of = |block_len: usize, block_bytes: usize| {
        let row_bytes = matrix.cols / block_len * block_bytes;
        row * row_bytes..(row + 1) * row_bytes
    };
    match &matrix.data {
        MatrixData::F32(bytes) => {
            for (out, b) in out.iter_mut().zip(bytes[bytes_of(1, 4)].chunks_exact(4)) {
                *out = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
        MatrixData::F16(bytes) => {
            for (out, b) in out.iter_mut().zip(bytes[bytes_of(1, 2)].chunks_exact(2)) {
                *out = f16::from_le_bytes([b[0], b[1]]).to_f32();
            }
        }
        MatrixData::Bf16(bytes) => {
            for (out, b) in out.iter_mut().zip(bytes[bytes_of(1, 2)].chunks_exact(2)) {
                *out = bf16::from_le_bytes([b[0], b[1]]).to_f32();
            }
        }
        MatrixData::Q8_0(bytes) => {
            for (out, b) in out.chunks_exact_mut(32).zip(bytes[bytes_of(32, 34)].chunks_exact(34)) {
                let scale = f16::from_le_bytes([b[0], b[1]]).to_f32();
                for (out, &code) in out.iter_mut().zip(&b[2..]) {
                    *out = scale * f32::from(code.cast_signed());
                }
            }
        }
        MatrixData::Nvfp4 { blocks, .. } => {
            for (out, b) in out.chunks_exact_mut(64).zip(blocks[bytes_of(64, 36)].chunks_exact(36)) {
                for (s, out) in out.chunks_exact_mut(16).enumerate() {
                    let scale = e4m3(b[s]);
                    for (i, &code) in b[4 + 8 * s..12 + 8 * s].iter().enumerate() {
                        out[i] = E2M1[usize::from(code & 15)] * scale;
                        out[i + 8] = E2M1[usize::from(code >> 4)] * scale;
                    }
                }
            }
        }
    }
}

/// Values of the 4-bit codes: sign, two exponent bits with bias 1, one mantissa bit.
const E2M1: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// A block scale: four exponent bits with bias 7, three mantissa bits, the top bit ignored, 0x7F for zero.
fn e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    match byte & 0x7F {
        0x7F => 0.0,
        0..8 => mantissa * (-9f32).exp2(),
        _ => (8.0 + mantissa) * ((exponent - 10) as f32).exp2(),
    }
}
