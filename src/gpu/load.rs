//! Weights on their way to the device: from the mapped file through pinned memory, or made there.

use std::{borrow::Cow, collections::BTreeMap};

use rayon::{ThreadPool, prelude::*};

use super::{
    Pinned,
    driver::{Buffer, Device, Event, Kernels},
};
use crate::{
    cancel::Cancel,
    checkpoint::DType,
    config::FlintConfig,
    error::{Error, Result},
    kernels::{SyntheticArgs, synthetic_kernel, synthetic_launch},
    plan::Types,
    threads,
    weights::{self, Held, Matrix, MatrixRecipe, Recipe, Weights},
};

/// Bytes of each half of the staging memory: large enough to keep the bus busy, small enough to pin at once.
const HALF_BYTES: usize = 64 << 20;
/// Bytes that one thread copies into it at a time.
const COPY_BYTES: usize = 256 << 10;

/// Where weights come from.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// A checkpoint.
    Weights(&'a Weights),
    /// [`Weights::synthetic`], the same values made on the device.
    Synthetic {
        /// Dimensions.
        config: &'a FlintConfig,
        /// Of the random numbers.
        seed: u64,
        /// Of the projections.
        dtype: DType,
    },
}

impl Source<'_> {
    /// The dimensions.
    pub fn config(&self) -> &FlintConfig {
        match self {
            Self::Weights(weights) => &weights.config,
            Self::Synthetic { config, .. } => config,
        }
    }

    /// The types of its matrices.
    pub fn types(&self) -> Result<Types> {
        match self {
            Self::Weights(weights) => Ok(Types::of_weights(weights)),
            Self::Synthetic { config, dtype, .. } => Types::of_synthetic(config, *dtype),
        }
    }
}

/// One matrix that is not on the device yet.
#[derive(Clone, Copy)]
pub(super) enum Origin<'a> {
    Stored(&'a Matrix),
    Recipe(MatrixRecipe),
}

impl Origin<'_> {
    pub fn rows(&self) -> usize {
        match self {
            Self::Stored(matrix) => matrix.rows,
            Self::Recipe(recipe) => recipe.rows,
        }
    }

    pub fn cols(&self) -> usize {
        match self {
            Self::Stored(matrix) => matrix.cols,
            Self::Recipe(recipe) => recipe.cols,
        }
    }

    pub fn dtype(&self) -> DType {
        match self {
            Self::Stored(matrix) => matrix.data.dtype(),
            Self::Recipe(recipe) => recipe.dtype,
        }
    }

    /// The factor of its values; 1 except for NVFP4.
    pub fn scale(&self) -> f32 {
        match self {
            Self::Stored(matrix) => matrix.scale(),
            Self::Recipe(recipe) => recipe.scale(),
        }
    }

    /// Its values, row by row.
    pub fn values(&self) -> Vec<f32> {
        let made;
        let matrix = match self {
            Self::Stored(matrix) => matrix,
            Self::Recipe(recipe) => {
                made = recipe.make();
                &made
            }
        };
        let mut values = vec![0.0; matrix.rows * matrix.cols];
        values.chunks_exact_mut(matrix.cols).enumerate().for_each(|(row, out)| matrix.decode_row(row, out));
        values
    }

    /// Bytes as the file has it.
    pub fn bytes(&self) -> usize {
        let dtype = self.dtype();
        self.rows() * self.cols() / dtype.block_len() * dtype.block_bytes()
    }
}

enum Tensor<'a> {
    Vector(Cow<'a, [f32]>),
    Matrices(Vec<Origin<'a>>),
}

/// Writes the tensors of a source to the device, in stream order.
pub(super) struct Loader<'a> {
    pub device: &'a Device,
    pub kernels: &'a Kernels,
    tensors: BTreeMap<String, Tensor<'a>>,
    staging: Staging,
    progress: &'a mut dyn FnMut(u64, u64),
    cancel: &'a Cancel,
    done: u64,
    total: u64,
}

impl<'a> Loader<'a> {
    pub fn new(
        device: &'a Device,
        kernels: &'a Kernels,
        source: Source<'a>,
        progress: &'a mut dyn FnMut(u64, u64),
        cancel: &'a Cancel,
    ) -> Result<Self> {
        let tensors: BTreeMap<_, _> = match source {
            Source::Weights(weights) => weights
                .tensors()
                .into_iter()
                .map(|(spec, held)| match held {
                    Held::Vector(values) => (spec.gguf, Tensor::Vector(values.into())),
                    Held::Matrices(all) => (spec.gguf, Tensor::Matrices(all.into_iter().map(Origin::Stored).collect())),
                })
                .collect(),
            Source::Synthetic { config, seed, dtype } => weights::recipes(config, seed, dtype)?
                .into_iter()
                .map(|(spec, recipe)| match recipe {
                    Recipe::Vector(values) => (spec.gguf, Tensor::Vector(values.into())),
                    Recipe::Matrices(all) => {
                        (spec.gguf, Tensor::Matrices(all.into_iter().map(Origin::Recipe).collect()))
                    }
                })
                .collect(),
        };
        let bytes = |tensor: &Tensor<'_>| match tensor {
            Tensor::Vector(_) => 0,
            Tensor::Matrices(all) => all.iter().map(Origin::bytes).sum::<usize>() as u64,
        };
        let total = tensors.values().map(bytes).sum();
        let staging = Staging::new(device)?;
        progress(0, total);
        Ok(Self { device, kernels, tensors, staging, progress, cancel, done: 0, total })
    }

    /// The vector `name`, which every Flint has.
    pub fn vector(&self, name: &str) -> Vec<f32> {
        match self.tensors.get(name) {
            Some(Tensor::Vector(values)) => values.to_vec(),
            _ => unreachable!("{name} is no vector of a Flint"),
        }
    }

    /// The matrices of `name`, which every Flint has: one, or one an expert.
    pub fn matrices(&self, name: &str) -> Vec<Origin<'a>> {
        match self.tensors.get(name) {
            Some(Tensor::Matrices(all)) => all.clone(),
            _ => unreachable!("{name} is no matrix of a Flint"),
        }
    }

    /// The largest matrix among those whose name is `wanted`, in bytes as the file has it.
    pub fn largest(&self, wanted: impl Fn(&str) -> bool) -> usize {
        let bytes = |(name, tensor): (&String, &Tensor<'_>)| match tensor {
            Tensor::Matrices(all) if wanted(name) => all.iter().map(Origin::bytes).max().unwrap_or(0),
            _ => 0,
        };
        self.tensors.iter().map(bytes).max().unwrap_or(0)
    }

    /// Writes `values` to `offset`.
    pub fn put_f32(&mut self, values: &[f32], to: &Buffer, offset: u64) -> Result<()> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.put_bytes(&bytes, to, offset)
    }

    /// Writes `bytes` to `offset`.
    pub fn put_bytes(&mut self, bytes: &[u8], to: &Buffer, offset: u64) -> Result<()> {
        self.staging.copy(bytes, to, offset as usize)
    }

    /// Writes the matrix to `offset`, as the file has it.
    pub fn put(&mut self, matrix: Origin<'_>, to: &Buffer, offset: u64) -> Result<()> {
        self.cancel.check()?;
        match matrix {
            Origin::Stored(matrix) => self.staging.copy(matrix.data.bytes(), to, offset as usize)?,
            Origin::Recipe(recipe) => self.make(&recipe, to, offset)?,
        }
        self.count(matrix.bytes());
        Ok(())
    }

    /// Writes the matrix to `offset` as fp32, which every float type fits; only for types without a scale.
    pub fn put_as_f32(&mut self, matrix: Origin<'_>, to: &Buffer, offset: u64) -> Result<()> {
        if let Origin::Recipe(_) = matrix {
            return self.put(matrix, to, offset);
        }
        self.put_f32(&matrix.values(), to, offset)?;
        self.count(matrix.bytes());
        Ok(())
    }

    /// Waits for all of it.
    pub fn finish(self) -> Result<()> {
        self.device.synchronize("copying weights to the GPU")
    }

    fn make(&self, recipe: &MatrixRecipe, to: &Buffer, offset: u64) -> Result<()> {
        let n_elements = recipe.n_elements() as u64;
        let kernel = synthetic_kernel(recipe.dtype).zip(synthetic_launch(n_elements, recipe.dtype));
        let (kernel, launch) = kernel.ok_or_else(|| {
            Error::value("dtype", recipe.dtype.to_string(), "F32, BF16 or NVFP4, in matrices that a grid covers")
        })?;
        assert!(offset as usize + recipe_bytes(recipe) <= to.len(), "a matrix behind the end of its buffer");
        let args = SyntheticArgs {
            out: to.address() + offset,
            n_elements,
            chunk_len: recipe.chunk_len() as u64,
            seed: recipe.seed,
            spread: recipe.spread,
            reserved: 0,
        };
        // SAFETY: the argument is of this kernel; `out` has room for every element, checked above, at a 256-byte aligned
        // address, or for experts one that is a multiple of 4 bytes; `to` outlives the launch: freeing waits for it.
        unsafe { self.kernels.get(kernel)?.launch(launch, false, &args) }
    }

    fn count(&mut self, bytes: usize) {
        self.done += bytes as u64;
        (self.progress)(self.done, self.total);
    }
}

fn recipe_bytes(recipe: &MatrixRecipe) -> usize {
    Origin::Recipe(*recipe).bytes()
}

/// Two halves of pinned memory: one is filled while the other is copied to the device.
struct Staging {
    halves: [Pinned<u8>; 2],
    /// Recorded behind the copies of each half.
    copied: [Event; 2],
    current: usize,
    used: usize,
    /// Copies from the file.
    threads: ThreadPool,
}

impl Staging {
    fn new(device: &Device) -> Result<Self> {
        let halves = [device.pinned(HALF_BYTES)?, device.pinned(HALF_BYTES)?];
        let copied = [device.event(false)?, device.event(false)?];
        Ok(Self { halves, copied, current: 0, used: 0, threads: threads::pool(None)? })
    }

    fn copy(&mut self, mut bytes: &[u8], to: &Buffer, mut offset: usize) -> Result<()> {
        while !bytes.is_empty() {
            if self.used == HALF_BYTES {
                self.copied[self.current].record()?;
                self.current ^= 1;
                self.used = 0;
                // An event that was never recorded is over.
                self.copied[self.current].wait("copying weights to the GPU")?;
            }
            let (part, rest) = bytes.split_at(bytes.len().min(HALF_BYTES - self.used));
            let range = self.used..self.used + part.len();
            let half = &mut self.halves[self.current];
            let chunks = half.as_mut_slice()[range.clone()].par_chunks_mut(COPY_BYTES).zip(part.par_chunks(COPY_BYTES));
            self.threads.install(|| chunks.for_each(|(to, from)| to.copy_from_slice(from)));
            // SAFETY: this range is not written again before the event behind the copy has come; freeing either end waits.
            unsafe { to.queue_write(offset, &self.halves[self.current], range)? };
            self.used += part.len();
            offset += part.len();
            bytes = rest;
        }
        Ok(())
    }
}
