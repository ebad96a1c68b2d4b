//! Random weights for benches and tests.

use rayon::prelude::*;

use super::{Matrix, MatrixData, Parts, Shape, Weights, list};
use crate::{
    checkpoint::{Bytes, DType},
    config::FlintConfig,
    error::{Error, Result},
    nvfp4::{BLOCK_BYTES, BLOCK_SCALES, CODES, SCALES},
};

/// Bytes that one thread makes at a time; a whole number of elements of every type.
const CHUNK_BYTES: usize = 65_536 * BLOCK_BYTES;
/// Block scales of synthetic NVFP4: 0.5 to 1.875.
const FIRST_SCALE: u8 = 0x30;

impl Weights {
    /// Random weights of any size, the same for the same `seed`. Projections keep the variance of their input, norms are
    /// near 1 and sinks near 0, so activations stay in the range of a trained model. `dtype` is that of the projections, F32,
    /// BF16 or NVFP4; beside NVFP4 the embedding is BF16 and routers are F32, as in the published file.
    ///
    /// Errors: [`Error::Value`] for another type, or for NVFP4 when a width is no multiple of 64.
    pub fn synthetic(config: FlintConfig, seed: u64, dtype: DType) -> Result<Self> {
        let mut parts = Parts::default();
        for (index, spec) in list::list(&config).into_iter().enumerate() {
            let seed = Random(seed ^ (index as u64) << 32).next();
            let embedding = spec.gguf == "token_embd.weight";
            let dtype = match spec.shape {
                Shape::Router(..) => DType::F32,
                _ if embedding && dtype == DType::Nvfp4 => DType::Bf16,
                _ => dtype,
            };
            let make = |seed, rows, cols| {
                // An embedding is a row by itself, not a sum over one.
                let spread = if embedding { 1.0 } else { (cols as f32).sqrt().recip() };
                matrix(seed, dtype, rows, cols, spread).ok_or_else(|| {
                    let accepted = format!("F32, BF16, or NVFP4 with {} in rows of whole blocks of 64", spec.gguf);
                    Error::value("dtype", format!("{dtype} with rows of {cols}"), accepted)
                })
            };
            let matrices = match spec.shape {
                Shape::Vector(len) => {
                    let mut random = Random(seed);
                    let mean = if spec.gguf.ends_with("attn_sinks.weight") { 0.0 } else { 1.0 };
                    parts.vectors.insert(spec.gguf, (0..len).map(|_| mean + 0.1 * random.unit()).collect());
                    continue;
                }
                Shape::Matrix(rows, cols) | Shape::Router(rows, cols) => vec![make(seed, rows, cols)?],
                Shape::Experts(n, rows, cols) => {
                    let seed_of = |expert: usize| seed.wrapping_add((expert as u64) << 40);
                    (0..n).into_par_iter().map(|e| make(seed_of(e), rows, cols)).collect::<Result<_>>()?
                }
            };
            parts.matrices.insert(spec.gguf, matrices);
        }
        Ok(parts.assemble(config))
    }
}

/// Values of mean 0 and standard deviation `spread`; `None` when the type cannot hold them.
fn matrix(seed: u64, dtype: DType, rows: usize, cols: usize, spread: f32) -> Option<Matrix> {
    if !cols.is_multiple_of(dtype.block_len()) {
        return None;
    }
    let fill = |element: fn(&mut Random, &mut [u8], f32)| -> Bytes {
        let mut bytes = vec![0; rows * cols / dtype.block_len() * dtype.block_bytes()];
        bytes.par_chunks_mut(CHUNK_BYTES).enumerate().for_each(|(chunk, bytes)| {
            let mut random = Random(seed ^ chunk as u64);
            bytes.chunks_exact_mut(dtype.block_bytes()).for_each(|bytes| element(&mut random, bytes, spread));
        });
        bytes.into()
    };
    let data = match dtype {
        DType::F32 => MatrixData::F32(fill(|random, bytes, spread| {
            bytes.copy_from_slice(&(spread * random.unit()).to_le_bytes());
        })),
        DType::Bf16 => MatrixData::Bf16(fill(|random, bytes, spread| {
            bytes.copy_from_slice(&half::bf16::from_f32(spread * random.unit()).to_le_bytes());
        })),
        DType::Nvfp4 => MatrixData::Nvfp4 {
            blocks: fill(|random, bytes, _| random.block(bytes)),
            scale: spread / block_deviation(),
        },
        _ => return None,
    };
    Some(Matrix { rows, cols, data })
}

/// The standard deviation of a value of [`Random::block`].
fn block_deviation() -> f32 {
    let mean_square = |values: &[f32]| values.iter().map(|v| v * v).sum::<f32>() / values.len() as f32;
    (mean_square(&CODES) * mean_square(&SCALES[usize::from(FIRST_SCALE)..][..16])).sqrt()
}

/// splitmix64: <https://prng.di.unimi.it/splitmix64.c>.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    /// Uniform, of mean 0 and variance 1.
    fn unit(&mut self) -> f32 {
        const STEP: f32 = 2.0 * 1.732_050_8 / (1 << 24) as f32;
        (self.next() >> 40) as f32 * STEP - 1.732_050_8
    }

    /// An NVFP4 block: any codes, scales from [`FIRST_SCALE`] and the 15 above it.
    fn block(&mut self, block: &mut [u8]) {
        let (scales, codes) = block.split_at_mut(BLOCK_SCALES);
        for (scale, byte) in scales.iter_mut().zip(self.next().to_le_bytes()) {
            *scale = FIRST_SCALE + (byte & 15);
        }
        codes.as_chunks_mut().0.iter_mut().for_each(|codes| *codes = self.next().to_le_bytes());
    }
}
