//! Log-probabilities of texts, worked out on the host from logits of a device.

use std::sync::{Arc, OnceLock};

use rayon::{ThreadPool, prelude::*};

use super::{
    Sizes, Steps,
    job::{Begun, text_job},
};
use crate::{cancel::Cancel, error::Result, sampling::TokenLogprobs, threads};

/// Threads that score rows of logits: one row of a large vocabulary takes a millisecond or two.
#[derive(Debug)]
pub(in crate::engine) struct Scorer {
    sizes: Sizes,
    n_threads: Option<usize>,
    /// Started for the first text.
    threads: OnceLock<ThreadPool>,
}

impl Scorer {
    /// With so many threads, or one a core.
    pub fn new(sizes: Sizes, n_threads: Option<usize>) -> Self {
        Self { sizes, n_threads, threads: OnceLock::new() }
    }

    /// A job that scores `text`, of which each token but the first has a score.
    pub fn job<S: Steps>(self: Arc<Self>, text: &[u32], top_n: usize, cancel: &Cancel) -> Begun<S, Vec<TokenLogprobs>> {
        let (text, most) = (text.to_vec(), self.sizes.host_part_tokens());
        // Nothing follows the last.
        text_job(text.len() - 1, most, Vec::new(), cancel, move |device: &mut S, id, part, scores, cancel| {
            let mut sink = |logits: &[f32]| {
                self.add(scores, &text, logits, top_n)?;
                cancel.check()
            };
            device.prompt_logits(id, &text[part], &mut sink, cancel)
        })
    }

    /// Adds to the scores of `text` by the `logits` of its tokens that were not looked at yet, row by row.
    pub fn add(&self, scores: &mut Vec<TokenLogprobs>, text: &[u32], logits: &[f32], top_n: usize) -> Result<()> {
        let Sizes { vocab_tokens, logits: width, .. } = self.sizes;
        let threads = if let Some(threads) = self.threads.get() {
            threads
        } else {
            let threads = threads::pool(self.n_threads)?;
            self.threads.get_or_init(|| threads)
        };
        let next = &text[scores.len() + 1..];
        let rows = logits.par_chunks_exact(width).zip(next);
        let score = |(row, &token): (&[f32], &u32)| TokenLogprobs::new(&row[..vocab_tokens], token, top_n);
        for scored in threads.install(|| rows.map(score).collect::<Vec<_>>()) {
            scores.push(scored?);
        }
        Ok(())
    }
}
