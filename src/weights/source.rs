//! Matrices whose place, type and shape are known and whose bytes were not looked at yet.

use std::{path::PathBuf, sync::Arc};

use rayon::prelude::*;

use super::matrix::{Matrix, MatrixData};
use crate::{
    cancel::Cancel,
    checkpoint::{Bytes, DType, Tensor},
    error::{Error, Result},
    nvfp4::{self, BLOCK_BYTES, BLOCK_LEN, BLOCK_SCALES},
};

/// NVFP4 blocks that one thread works on between two looks at the cancel flag: 2.4 MB.
const CHUNK_BLOCKS: usize = 65_536;

/// A matrix in a checkpoint.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    /// The tensor that holds it, for error messages.
    pub tensor: String,
    /// The file of that tensor.
    pub file: Arc<PathBuf>,
    form: Form,
}

#[derive(Clone, Debug)]
enum Form {
    /// As a [`Matrix`] has it.
    Stored(Matrix),
    /// NVFP4 as `ModelOpt` exports it: consecutive pairs of codes (`[rows, cols / 2]`), scales apart (`[rows, cols / 16]`).
    Pairs { rows: usize, cols: usize, codes: Bytes, scales: Bytes, scale: f32 },
}

impl Source {
    /// The `rows` by `cols` values of `tensor` that start after `first` values: all of it, or a slice of a stack.
    /// `scale` is that of NVFP4. `None` when they do not lie inside, or for a type that stores no matrix.
    pub fn stored(tensor: &Tensor, first: usize, rows: usize, cols: usize, scale: f32) -> Option<Self> {
        let bytes_of = |values: usize| values / tensor.dtype.block_len() * tensor.dtype.block_bytes();
        let bytes = tensor.data.slice(bytes_of(first), bytes_of(rows * cols))?;
        let data = match tensor.dtype {
            DType::F32 => MatrixData::F32(bytes),
            DType::F16 => MatrixData::F16(bytes),
            DType::Bf16 => MatrixData::Bf16(bytes),
            DType::Q8_0 => MatrixData::Q8_0(bytes),
            DType::Nvfp4 => MatrixData::Nvfp4 { blocks: bytes, scale },
            _ => return None,
        };
        Some(Self {
            tensor: tensor.name.clone(),
            file: Arc::clone(&tensor.file),
            form: Form::Stored(Matrix { rows, cols, data }),
        })
    }

    /// A `ModelOpt` matrix; the tensors have the shapes of [`Form::Pairs`].
    pub fn pairs(codes: &Tensor, scales: &Tensor, rows: usize, cols: usize, scale: f32) -> Self {
        Self {
            // Only scales can be wrong from here on.
            tensor: scales.name.clone(),
            file: Arc::clone(&scales.file),
            form: Form::Pairs { rows, cols, codes: codes.data.clone(), scales: scales.data.clone(), scale },
        }
    }

    /// The type of the matrix that [`Self::load`] gives.
    pub fn dtype(&self) -> DType {
        match &self.form {
            Form::Stored(matrix) => matrix.data.dtype(),
            Form::Pairs { .. } => DType::Nvfp4,
        }
    }

    /// Bytes that [`Self::load`] reads.
    pub fn load_bytes(&self) -> usize {
        match &self.form {
            Form::Stored(Matrix { data: MatrixData::Nvfp4 { blocks, .. }, .. }) => blocks.len(),
            Form::Stored(_) => 0,
            Form::Pairs { codes, scales, .. } => codes.len() + scales.len(),
        }
    }

    /// The matrix, once every NVFP4 scale is known to be valid. GGUF forms stay where they are; pairs are repacked into
    /// memory of our own.
    pub fn load(&self, cancel: &Cancel) -> Result<Matrix> {
        match &self.form {
            Form::Stored(matrix) => {
                if let MatrixData::Nvfp4 { blocks, .. } = &matrix.data {
                    blocks.par_chunks(CHUNK_BLOCKS * BLOCK_BYTES).try_for_each(|blocks| {
                        cancel.check()?;
                        match nvfp4::find_invalid_scale(blocks) {
                            None => Ok(()),
                            Some(_) => Err(self.bad_scale("NVFP4 scale bytes other than 0xFF", nvfp4::INVALID_SCALE)),
                        }
                    })?;
                }
                Ok(matrix.clone())
            }
            Form::Pairs { rows, cols, codes, scales, scale } => {
                let mut blocks = vec![0; rows * cols / BLOCK_LEN * BLOCK_BYTES];
                blocks
                    .par_chunks_mut(CHUNK_BLOCKS * BLOCK_BYTES)
                    .zip(codes.par_chunks(CHUNK_BLOCKS * BLOCK_LEN / 2))
                    .zip(scales.par_chunks(CHUNK_BLOCKS * BLOCK_SCALES))
                    .try_for_each(|((blocks, codes), scales)| {
                        cancel.check()?;
                        // NVIDIA's scales are signed and 0x7F is NaN; ggml ignores the sign and reads 0x7F as zero.
                        if let Some(&byte) = scales.iter().find(|byte| **byte > nvfp4::MAX_SCALE) {
                            return Err(self.bad_scale("E4M3 scales from 0 to 448", byte));
                        }
                        nvfp4::from_pairs(codes, scales, blocks);
                        Ok(())
                    })?;
                let data = MatrixData::Nvfp4 { blocks: blocks.into(), scale: *scale };
                Ok(Matrix { rows: *rows, cols: *cols, data })
            }
        }
    }

    fn bad_scale(&self, expected: &str, byte: u8) -> Error {
        Error::format(&self.file, &self.tensor, expected, format!("{byte:#04X}"))
    }
}
