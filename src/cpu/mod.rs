//! The CPU backend. `reference` is the specification, plain loops that every kernel is tested against; `fast` gives the
//! same results up to the order of additions, on all cores.

pub mod reference;
mod fast;
mod kv;
mod rope;

pub use kv::Kv;
pub use rope::{Rope, RopeTable};

use std::sync::Arc;

use self::fast::Engine;
use crate::{
    cancel::Cancel,
    config::{Attention, FlintConfig},
    error::{Error, Result},
    weights::Weights,
};

/// Most tokens of a forward pass that are processed together: a prompt that is cut at multiples gives the same bits.
pub const BLOCK_TOKENS: usize = 512;

/// Most threads of the fast path.
pub const MAX_THREADS: usize = 1024;

/// How activations, residual stream and KV cache are kept between operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Precision {
    /// Nothing is rounded: for parity tests and evaluation.
    Float32,
    /// Rounded to BF16 where Flint's own implementation rounds.
    Bfloat16,
}

impl Precision {
    /// `x` as it is kept: to the nearest BF16, ties to even, or unchanged.
    pub fn round(self, x: f32) -> f32 {
        match self {
            Self::Float32 => x,
            Self::Bfloat16 => {
                // As half's conversion, without a branch, so that loops over it are vectorised.
                let bits = x.to_bits();
                let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) & 0xFFFF_0000;
                f32::from_bits(if x.is_nan() { bits & 0xFFFF_0000 | 0x40_0000 } else { rounded })
            }
        }
    }
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

/// A Flint ready to run on the CPU. Shared by threads; each sequence brings its own [`Kv`].
pub struct CpuModel {
    weights: Arc<Weights>,
    precision: Precision,
    rope: Rope,
    /// `None` on the reference path.
    engine: Option<Engine>,
}

impl CpuModel {
    /// Prepares to run `weights`: refuses no threads and more than [`MAX_THREADS`], starts the thread pool, computes rotary frequencies.
    pub fn new(weights: Arc<Weights>, options: Options) -> Result<Self> {
        if let Some(threads) = options.threads.filter(|threads| !(1..=MAX_THREADS).contains(threads)) {
            return Err(Error::value("threads", threads.to_string(), format!("1 to {MAX_THREADS}")));
        }
        let engine = match options.path {
            Path::Reference => None,
            Path::Fast => Some(Engine::new(options.threads)?),
        };
        let rope = Rope::new(&weights.config);
        Ok(Self { weights, precision: options.precision, rope, engine })
    }

    /// The dimensions.
    pub fn config(&self) -> &FlintConfig {
        &self.weights.config
    }

    /// The weights it runs.
    pub fn weights(&self) -> &Weights {
        &self.weights
    }

    /// Bytes that the KV cache of a sequence of `tokens` positions fills.
    pub fn kv_bytes_at(&self, tokens: usize) -> usize {
        kv::bytes_at(self.config(), self.precision, tokens)
    }

    /// An empty KV cache.
    pub fn new_kv(&self) -> Kv {
        Kv::new(self.config(), self.precision)
    }

    /// Bytes of workspace that a `forward` holds beside weights, KV and logits, at most.
    pub fn workspace_bytes(&self) -> usize {
        let c = self.config();
        let (query, kv) = (c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim);
        // Values a token. Activations stand once as they are and once packed for products.
        let attention = 3 * query + 4 * kv;
        let experts = c.n_experts_per_token + 1;
        let inner = c.n_experts_per_token * c.expert_intermediate_size + c.shared_intermediate_size;
        let moe = experts * (c.hidden_size + 16) + 2 * inner + 4 * c.n_experts;
        let dense = c.hidden_size + 2 * c.dense_intermediate_size;
        let token = 6 * c.hidden_size + attention.max(moe).max(dense) + c.head_dim;
        let sliding = c.layers.iter().filter(|kind| kind.attention == Attention::Sliding).count();
        let undo = sliding * 2 * kv * (c.sliding_window + BLOCK_TOKENS);
        let path = match &self.engine {
            // One layer's keys and values as f32.
            None => 2 * kv * c.context_length,
            Some(engine) => engine.workspace_values(c),
        };
        size_of::<f32>() * (BLOCK_TOKENS * token + undo + path)
    }

    /// Appends `tokens` to the sequence in `kv` and returns logits, `[rows, V]` in fp32, where `rows` is 0, 1 or
    /// `tokens.len()` by `positions`. Long input is processed in blocks. After an error, `kv` is as it was before the call.
    ///
    /// Errors: [`Error::Value`] for no tokens, an id outside the vocabulary, more than `context_length` positions, or a
    /// `kv` made by a model of other dimensions or precision; [`Error::Cancelled`].
    pub fn forward(&self, kv: &mut Kv, tokens: &[u32], positions: Positions, cancel: &Cancel) -> Result<Vec<f32>> {
        self.check(kv, tokens)?;
        let checkpoint = kv.checkpoint(tokens.len());
        let result = self.forward_blocks(kv, tokens, positions, cancel);
        if result.is_err() {
            kv.restore(checkpoint);
        }
        result
    }

    fn forward_blocks(&self, kv: &mut Kv, tokens: &[u32], positions: Positions, cancel: &Cancel) -> Result<Vec<f32>> {
        let rows = match positions {
            Positions::None => 0,
            Positions::Last => 1,
            Positions::All => tokens.len(),
        };
        let values = rows * self.config().vocab_size;
        let mut logits = Vec::new();
        // The one allocation whose size a caller chooses: 157 GB for a whole context of Flint.
        logits.try_reserve_exact(values).map_err(|why| Error::Unavailable {
            what: format!("memory for {} bytes of logits", values * size_of::<f32>()),
            why: why.to_string(),
        })?;
        let blocks = tokens.len().div_ceil(BLOCK_TOKENS);
        for (i, block) in tokens.chunks(BLOCK_TOKENS).enumerate() {
            let positions = match positions {
                Positions::Last if i + 1 < blocks => Positions::None,
                positions => positions,
            };
            let (weights, rope, precision) = (&self.weights, &self.rope, self.precision);
            logits.extend(match &self.engine {
                None => reference::forward_block(weights, rope, precision, kv, block, positions, cancel)?,
                Some(engine) => engine.forward_block(weights, rope, precision, kv, block, positions, cancel)?,
            });
            kv.len += block.len();
        }
        Ok(logits)
    }

    fn check(&self, kv: &Kv, tokens: &[u32]) -> Result<()> {
        let config = self.config();
        if !kv.fits(config, self.precision) {
            return Err(Error::value("kv", "a cache of another model", "a cache from this model's new_kv"));
        }
        if tokens.is_empty() {
            return Err(Error::value("tokens", "none", "one or more token ids"));
        }
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= config.vocab_size) {
            return Err(Error::value("tokens", token.to_string(), format!("ids below {}", config.vocab_size)));
        }
        let end = kv.len() + tokens.len();
        if end > config.context_length {
            let found = format!("{end} positions");
            return Err(Error::value("tokens", found, format!("at most {} in the context", config.context_length)));
        }
        Ok(())
    }
}

/// Words of 32 bits without an end, spread over all that there are.
#[cfg(test)]
fn spread_words() -> impl Iterator<Item = u32> {
    std::iter::successors(Some(1_u32), |word| Some(word.wrapping_mul(0x9E37_79B1).wrapping_add(0x1234_5677))).skip(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_equals_half() {
        for bits in spread_words().take(1_000_000) {
            for x in [bits, bits & 0xFFFF_8000, bits | 0x7F80_0000].map(f32::from_bits) {
                let expected = half::bf16::from_f32(x).to_f32();
                assert_eq!(Precision::Bfloat16.round(x).to_bits(), expected.to_bits(), "{x:?} {:#x}", x.to_bits());
                assert_eq!(Precision::Float32.round(x).to_bits(), x.to_bits());
            }
        }
    }
}
