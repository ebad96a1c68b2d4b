//! The CPU backend. `reference` is the specification, plain loops that every kernel is tested against; `fast` gives the
//! same results up to the order of additions, on all cores.

use std::sync::Arc;

use crate::{cancel::Cancel, config::FlintConfig, error::Result, weights::Weights};

/// How activations, residual stream and KV cache are kept between operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// Nothing is rounded: for parity tests and evaluation.
    Float32,
    /// Rounded to BF16 where Flint's own implementation rounds.
    Bfloat16,
}

/// Which code computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Path {
    /// The specification: one thread, plain loops; the result does not depend on how a prompt is cut into chunks, bit for bit.
    Reference,
    /// Threads and SIMD.
    Fast,
}

/// Which positions of a chunk get logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Positions {
    /// None: the chunk only fills the KV cache.
    None,
    /// The last one.
    Last,
    /// Every one.
    All,
}

/// How to run.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Rounding of activations.
    pub precision: Precision,
    /// Which code computes.
    pub path: Path,
    /// Threads of the fast path; `None` takes one a core.
    pub threads: Option<usize>,
}

/// The KV cache of one sequence.
pub struct Kv {
    len: usize,
}

impl Kv {
    /// Tokens whose keys and values are stored.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is stored.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes held now.
    pub fn bytes(&self) -> usize {
        unimplemented!()
    }
}

/// A Flint ready to run on the CPU. Shared by threads; each sequence brings its own [`Kv`].
pub struct CpuModel {
    weights: Arc<Weights>,
}

impl CpuModel {
    /// Prepares to run `weights`: rejects zero threads, starts the thread pool, computes rotary tables.
    pub fn new(weights: Arc<Weights>, options: Options) -> Result<Self> {
        let _ = options;
        Ok(Self { weights })
    }

    /// The dimensions.
    pub fn config(&self) -> &FlintConfig {
        &self.weights.config
    }

    /// The weights it runs.
    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// Bytes of a KV cache that holds `tokens` positions.
    pub fn kv_bytes_at(&self, tokens: usize) -> usize {
        let _ = tokens;
        unimplemented!()
    }

    /// An empty KV cache.
    pub fn new_kv(&self) -> Kv {
        unimplemented!()
    }

    /// Bytes of workspace that a `forward` holds beside mapped weights and KV, at most.
    pub fn workspace_bytes(&self) -> usize {
        unimplemented!()
    }

    /// Appends `tokens` to the sequence in `kv` and returns logits, `[rows, V]` in fp32, where `rows` is 0, 1 or
    /// `tokens.len()` by `positions`. Long input is processed in blocks. After an error, `kv` is as it was before the call.
    ///
    /// Errors: [`crate::Error::Value`] for no tokens, an id outside the vocabulary, or more than `context_length` positions;
    /// [`crate::Error::Cancelled`].
    pub fn forward(&self, kv: &mut Kv, tokens: &[u32], positions: Positions, cancel: &Cancel) -> Result<Vec<f32>> {
        let _ = (kv, tokens, positions, cancel);
        unimplemented!()
    }
}
