//! Log-probabilities of texts, worked out on the host from logits of a device.

use rayon::{ThreadPool, prelude::*};

use super::Sizes;
use crate::{error::Result, sampling::TokenLogprobs, threads};

/// Threads that score rows of logits: one row of a large vocabulary takes a millisecond or two.
#[derive(Debug)]
pub(in crate::engine) struct Scorer {
    threads: ThreadPool,
    sizes: Sizes,
}

impl Scorer {
    /// With so many threads, or one a core.
    pub fn new(sizes: Sizes, threads: Option<usize>) -> Result<Self> {
        Ok(Self { threads: threads::pool(threads)?, sizes })
    }

    /// Adds to the scores of `text`, of which each token but the first has one, by the `logits` of the tokens that were not
    /// looked at yet, row by row.
    pub fn add(&self, scores: &mut Vec<TokenLogprobs>, text: &[u32], logits: &[f32], top_n: usize) -> Result<()> {
        let Sizes { vocab_tokens, logits: width, .. } = self.sizes;
        let next = &text[scores.len() + 1..];
        let rows = logits.par_chunks_exact(width).zip(next);
        let score = |(row, &token): (&[f32], &u32)| TokenLogprobs::new(&row[..vocab_tokens], token, top_n);
        for scored in self.threads.install(|| rows.map(score).collect::<Vec<_>>()) {
            scores.push(scored?);
        }
        Ok(())
    }
}
