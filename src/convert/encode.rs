//! One matrix from any type to F32, BF16 or NVFP4, by blocks of rows on all cores.

use half::bf16;
use rayon::{ThreadPool, prelude::*};

use crate::{
    cancel::Cancel,
    checkpoint::DType,
    error::{Error, Result},
    nvfp4::{self, BadValue},
    weights::{Matrix, Source},
};

/// Values that are encoded between two writes.
const CHUNK_VALUES: usize = 4 << 20;

/// Gives the encoded bytes of `matrix`, which `source` names in errors, to `write` in order. Returns the tensor scale:
/// 1 unless `dtype` is NVFP4.
pub(super) fn encode(
    matrix: &Matrix,
    source: &Source,
    dtype: DType,
    pool: &ThreadPool,
    cancel: &Cancel,
    write: &mut dyn FnMut(&[u8]) -> Result<()>,
) -> Result<f32> {
    let refuse = |row: usize, bad: BadValue| {
        let expected = format!("finite values within the range of {dtype}");
        let found = format!("{} in row {row}, column {}", bad.value, bad.index);
        Error::format(&source.file, &source.tensor, expected, found)
    };
    let scale =
        if dtype == DType::Nvfp4 { nvfp4::tensor_scale(pool.install(|| amax(matrix, &refuse, cancel))?) } else { 1.0 };
    let row_bytes = matrix.cols / dtype.block_len() * dtype.block_bytes();
    let chunk_rows = (CHUNK_VALUES / matrix.cols).max(1);
    let mut bytes = Vec::new();
    for first in (0..matrix.rows).step_by(chunk_rows) {
        bytes.resize(chunk_rows.min(matrix.rows - first) * row_bytes, 0);
        let encode_one = |values: &mut Vec<f32>, (row, bytes): (usize, &mut [u8])| {
            cancel.check()?;
            read_row(matrix, first + row, values);
            encode_row(values, dtype, scale, bytes).map_err(|bad| refuse(first + row, bad))
        };
        let rows = bytes.par_chunks_exact_mut(row_bytes).enumerate();
        pool.install(|| rows.try_for_each_init(|| vec![0.0; matrix.cols], encode_one))?;
        write(&bytes)?;
    }
    Ok(scale)
}

/// The largest magnitude of a matrix.
fn amax(matrix: &Matrix, refuse: &(impl Fn(usize, BadValue) -> Error + Sync), cancel: &Cancel) -> Result<f32> {
    let rows = (0..matrix.rows).into_par_iter();
    let row_amax = |values: &mut Vec<f32>, row| {
        cancel.check()?;
        read_row(matrix, row, values);
        nvfp4::amax(values).map_err(|bad| refuse(row, bad))
    };
    rows.map_init(|| vec![0.0; matrix.cols], row_amax).try_reduce(|| 0.0, |a, b| Ok(a.max(b)))
}

/// Row `row` with the tensor scale.
fn read_row(matrix: &Matrix, row: usize, values: &mut [f32]) {
    matrix.decode_row(row, values);
    let scale = matrix.scale();
    for value in values {
        *value *= scale;
    }
}

fn encode_row(values: &[f32], dtype: DType, scale: f32, bytes: &mut [u8]) -> Result<(), BadValue> {
    let bad = |(index, value): (usize, &f32)| BadValue { index, value: *value };
    match dtype {
        DType::F32 => {
            for ((index, value), bytes) in values.iter().enumerate().zip(bytes.as_chunks_mut().0) {
                if !value.is_finite() {
                    return Err(bad((index, value)));
                }
                *bytes = value.to_le_bytes();
            }
        }
        DType::Bf16 => {
            for ((index, value), bytes) in values.iter().enumerate().zip(bytes.as_chunks_mut().0) {
                let rounded = bf16::from_f32(*value);
                if !rounded.is_finite() {
                    return Err(bad((index, value)));
                }
                *bytes = rounded.to_le_bytes();
            }
        }
        DType::Nvfp4 => nvfp4::quantize(values, scale, bytes),
        _ => unreachable!("nothing is converted to {dtype}"),
    }
    Ok(())
}
