//! Random weights for benches and tests.

use rayon::prelude::*;

use super::{Matrix, MatrixData, Parts, Shape, Spec, Weights, list};
use crate::{
    cancel::Cancel,
    checkpoint::{Bytes, DType},
    config::FlintConfig,
    error::{Error, Result},
    nvfp4::{BLOCK_BYTES, BLOCK_SCALES, CODES, SCALES},
    threads,
};

/// Bytes that one thread makes at a time; a whole number of elements of every type.
const CHUNK_BYTES: usize = 65_536 * BLOCK_BYTES;
/// Block scales of synthetic NVFP4: 0.5 to 1.875.
const FIRST_SCALE: u8 = 0x30;

/// What a synthetic tensor is made from.
#[derive(Clone, Debug)]
pub(crate) enum Recipe {
    /// Its values.
    Vector(Vec<f32>),
    /// One, or one an expert.
    Matrices(Vec<MatrixRecipe>),
}

impl Recipe {
    /// Bytes of its matrices; vectors are next to nothing.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Vector(_) => 0,
            Self::Matrices(all) => all.iter().map(MatrixRecipe::bytes).sum::<usize>() as u64,
        }
    }
}

/// A matrix of random values with mean 0 and standard deviation `spread`. Element i (a value, or an NVFP4 block) takes
/// the numbers `n * (i % chunk_len)` and following of the splitmix64 sequence that starts at `seed ^ (i / chunk_len)`, n
/// being 5 for a block and else 1; so anyone can make any element, and `cuda/synthetic.cu` makes the same.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct MatrixRecipe {
    pub seed: u64,
    /// F32, BF16 or NVFP4.
    pub dtype: DType,
    pub rows: usize,
    pub cols: usize,
    pub spread: f32,
}

/// The recipes of a whole model, see [`Weights::synthetic`].
pub(crate) fn recipes(config: &FlintConfig, seed: u64, dtype: DType) -> Result<Vec<(Spec, Recipe)>> {
    match dtype {
        DType::F32 | DType::Bf16 => {}
        DType::Nvfp4 => config.check_nvfp4()?,
        other => return Err(Error::value("dtype", other.to_string(), "F32, BF16 or NVFP4")),
    }
    let recipe = |(index, spec): (usize, Spec)| {
        let seed = Random(seed ^ (index as u64) << 32).next();
        let embedding = spec.gguf == "token_embd.weight";
        let (n, rows, cols) = match spec.shape {
            Shape::Vector(len) => {
                let mut random = Random(seed);
                let mean = if spec.gguf.ends_with("attn_sinks.weight") { 0.0 } else { 1.0 };
                let values = (0..len).map(|_| mean + 0.1 * random.unit()).collect();
                return (spec, Recipe::Vector(values));
            }
            Shape::Matrix(rows, cols) | Shape::Router(rows, cols) => (1, rows, cols),
            Shape::Experts(n, rows, cols) => (n, rows, cols),
        };
        let dtype = match spec.shape {
            Shape::Router(..) => DType::F32,
            _ if embedding && dtype == DType::Nvfp4 => DType::Bf16,
            _ => dtype,
        };
        // An embedding is a row by itself, not a sum over one.
        let spread = if embedding { 1.0 } else { (cols as f32).sqrt().recip() };
        let seed_of = |expert: usize| seed.wrapping_add((expert as u64) << 40);
        let matrices = (0..n).map(|e| MatrixRecipe { seed: seed_of(e), dtype, rows, cols, spread }).collect();
        (spec, Recipe::Matrices(matrices))
    };
    Ok(list::list(config).into_iter().enumerate().map(recipe).collect())
}

impl Weights {
    /// Random weights of any size, the same for the same `seed`. Projections keep the variance of their input, norms are
    /// near 1 and sinks near 0, so activations stay in the range of a trained model. `dtype` is that of the projections, F32,
    /// BF16 or NVFP4; beside NVFP4 the embedding is BF16 and routers are F32, as in the published file.
    ///
    /// Errors: [`Error::Value`] for another type, or naming the dimension that is no multiple of 64 for NVFP4.
    pub fn synthetic(config: FlintConfig, seed: u64, dtype: DType) -> Result<Self> {
        let all = recipes(&config, seed, dtype)?;
        Self::make(config, all, &mut |_, _| {}, &Cancel::default())
    }

    /// What `recipes` says. `progress` gets (bytes made, bytes in all), before the first and after each tensor.
    pub(crate) fn make(
        config: FlintConfig,
        recipes: Vec<(Spec, Recipe)>,
        progress: &mut dyn FnMut(u64, u64),
        cancel: &Cancel,
    ) -> Result<Self> {
        let (mut done, total) = (0, recipes.iter().map(|(_, recipe)| recipe.bytes()).sum());
        progress(done, total);
        let pool = threads::pool(None)?;
        let mut parts = Parts::default();
        for (spec, recipe) in recipes {
            cancel.check()?;
            done += recipe.bytes();
            match recipe {
                Recipe::Vector(values) => _ = parts.vectors.insert(spec.gguf, values),
                Recipe::Matrices(recipes) => {
                    let matrices = pool.install(|| recipes.par_iter().map(MatrixRecipe::make).collect());
                    parts.matrices.insert(spec.gguf, matrices);
                }
            }
            progress(done, total);
        }
        Ok(parts.assemble(config))
    }
}

impl MatrixRecipe {
    /// The factor of NVFP4 that gives the values their `spread`; 1 for other types.
    pub fn scale(&self) -> f32 {
        if self.dtype == DType::Nvfp4 { self.spread / block_deviation() } else { 1.0 }
    }

    /// Bytes of the matrix.
    pub fn bytes(&self) -> usize {
        self.n_elements() * self.dtype.block_bytes()
    }

    /// Elements that continue one sequence of random numbers.
    pub fn chunk_len(&self) -> usize {
        CHUNK_BYTES / self.dtype.block_bytes()
    }

    /// Values, or blocks of NVFP4.
    pub fn n_elements(&self) -> usize {
        self.rows * self.cols / self.dtype.block_len()
    }

    /// The matrix.
    pub fn make(&self) -> Matrix {
        let data = match self.dtype {
            DType::Nvfp4 => MatrixData::Nvfp4 { blocks: self.fill(Random::block), scale: self.scale() },
            DType::Bf16 => MatrixData::Bf16(self.fill(|random, bytes| {
                bytes.copy_from_slice(&half::bf16::from_f32(self.spread * random.unit()).to_le_bytes());
            })),
            DType::F32 => MatrixData::F32(self.fill(|random, bytes| {
                bytes.copy_from_slice(&(self.spread * random.unit()).to_le_bytes());
            })),
            other => unreachable!("no recipe is of type {other}"),
        };
        Matrix { rows: self.rows, cols: self.cols, data }
    }

    fn fill(&self, element: impl Fn(&mut Random, &mut [u8]) + Sync) -> Bytes {
        let element_bytes = self.dtype.block_bytes();
        let mut bytes = vec![0; self.bytes()];
        bytes.par_chunks_mut(self.chunk_len() * element_bytes).enumerate().for_each(|(chunk, bytes)| {
            let mut random = Random(self.seed ^ chunk as u64);
            bytes.chunks_exact_mut(element_bytes).for_each(|bytes| element(&mut random, bytes));
        });
        bytes.into()
    }
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
