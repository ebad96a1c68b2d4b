//! One matrix, as the file stores it.

use half::{bf16, f16};

use crate::{
    checkpoint::{Bytes, DType},
    nvfp4,
};

/// A matrix of `rows` outputs by `cols` inputs, stored row after row.
#[derive(Clone, Debug)]
pub struct Matrix {
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// The elements.
    pub data: MatrixData,
}

/// The elements of a [`Matrix`], as the file stores them. Nothing is aligned beyond one byte.
#[derive(Clone, Debug)]
pub enum MatrixData {
    /// `rows * cols` little-endian singles.
    F32(Bytes),
    /// `rows * cols` halves.
    F16(Bytes),
    /// `rows * cols` bfloat16 values.
    Bf16(Bytes),
    /// `rows * cols / 32` blocks of 34 bytes.
    Q8_0(Bytes),
    /// `rows * cols / 64` blocks of 36 bytes in GGUF order; a value is code * block scale * `scale`.
    Nvfp4 {
        /// The blocks, see [`crate::nvfp4`].
        blocks: Bytes,
        /// The companion `.scale` of the tensor or expert; 1 when the file has none.
        scale: f32,
    },
}

impl MatrixData {
    /// How the elements are stored.
    pub fn dtype(&self) -> DType {
        match self {
            Self::F32(_) => DType::F32,
            Self::F16(_) => DType::F16,
            Self::Bf16(_) => DType::Bf16,
            Self::Q8_0(_) => DType::Q8_0,
            Self::Nvfp4 { .. } => DType::Nvfp4,
        }
    }

    /// The stored bytes.
    pub fn bytes(&self) -> &Bytes {
        match self {
            Self::F32(bytes) | Self::F16(bytes) | Self::Bf16(bytes) | Self::Q8_0(bytes) => bytes,
            Self::Nvfp4 { blocks, .. } => blocks,
        }
    }
}

impl Matrix {
    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        let dtype = self.data.dtype();
        self.cols / dtype.block_len() * dtype.block_bytes()
    }

    /// The factor that [`Self::decode_row`] leaves out; 1 except for NVFP4. It belongs on fp32 sums, so that it rounds
    /// no weight.
    pub fn scale(&self) -> f32 {
        match self.data {
            MatrixData::Nvfp4 { scale, .. } => scale,
            _ => 1.0,
        }
    }

    /// The stored bytes of row `row`.
    ///
    /// # Panics
    /// When `row` is not below `rows`.
    pub fn row(&self, row: usize) -> &[u8] {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        &self.data.bytes()[row * self.row_bytes()..][..self.row_bytes()]
    }

    /// Writes row `row` (`[cols]`) to `out`, without [`Self::scale`]. Exact for every type.
    ///
    /// # Panics
    /// When `row` is not below `rows` or `out` has not `cols` values.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols);
        decode(self.data.dtype(), self.row(row), out);
    }
}

/// Writes the values of `bytes`, whole blocks of a type that matrices have, to `out`.
///
/// # Panics
/// For any other type, or when the lengths of NVFP4 do not fit each other.
pub(crate) fn decode(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        DType::Nvfp4 => nvfp4::decode(bytes, out),
        DType::Q8_0 => {
            for (block, out) in bytes.as_chunks::<34>().0.iter().zip(out.chunks_exact_mut(32)) {
                let scale = f16::from_le_bytes([block[0], block[1]]).to_f32();
                for (code, out) in block[2..].iter().zip(out) {
                    *out = scale * f32::from(code.cast_signed());
                }
            }
        }
        _ => decode_floats(dtype, bytes, out),
    }
}

/// Writes the values of F32, F16 or BF16 `bytes` to `out`, as many as both have.
///
/// # Panics
/// For any other type.
pub(super) fn decode_floats(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    fn each<const N: usize>(bytes: &[u8], out: &mut [f32], value: impl Fn([u8; N]) -> f32) {
        for (bytes, out) in bytes.as_chunks().0.iter().zip(out) {
            *out = value(*bytes);
        }
    }
    match dtype {
        DType::F32 => each(bytes, out, f32::from_le_bytes),
        DType::F16 => each(bytes, out, |b| f16::from_le_bytes(b).to_f32()),
        DType::Bf16 => each(bytes, out, |b| bf16::from_le_bytes(b).to_f32()),
        _ => unreachable!("{dtype} is no float type"),
    }
}
