//! Log-probabilities of the model's raw distribution.

use super::{
    errors,
    select::{Key, top_k},
};
use crate::error::{Error, Result};

/// A token's log-probability under the raw distribution of the model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Logprob {
    /// The token.
    pub token_id: u32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// 1 for the most likely token; of equally likely ones the lower id comes first.
    pub rank: usize,
}

/// Log-probabilities at one position.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// The token that stands there.
    pub chosen: Logprob,
    /// The most likely tokens, best first; fewer than asked for when fewer are possible at all.
    pub top: Vec<Logprob>,
}

impl TokenLogprobs {
    /// Of `token_id` and the `top_n` most likely tokens under `logits` (`[V]`, fp32): log-softmax in f64. Errors:
    /// [`Error::Value`] for logits that are no distribution ([`check_logits`]) and a token outside them.
    pub fn new(logits: &[f32], token_id: u32, top_n: usize) -> Result<Self> {
        check_logits(logits)?;
        let Some(&chosen) = logits.get(token_id as usize) else {
            return Err(Error::value("token_id", token_id.to_string(), format!("ids below {}", logits.len())));
        };
        let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
        let sum: f64 = logits.iter().map(|&l| (f64::from(l) - max).exp()).sum();
        let log_sum = sum.ln();
        let logprob = |key: Key, rank| Logprob {
            token_id: key.token_id(),
            logprob: (f64::from(key.logit()) - max - log_sum) as f32,
            rank,
        };
        let key = Key::new(chosen, token_id);
        let before = (0u32..).zip(logits).filter(|&(id, &l)| Key::new(l, id) > key).count();
        let mut top = Vec::new();
        if top_n > 0 {
            top_k(logits, top_n.min(logits.len()), &mut top);
        }
        top.sort_unstable_by(|a, b| b.cmp(a));
        Ok(Self {
            chosen: logprob(key, before + 1),
            top: (1..).zip(top).map(|(rank, key)| logprob(key, rank)).collect(),
        })
    }
}

/// Errors: [`Error::Value`] if one of `logits` is NaN or plus infinity, or if none is above minus infinity: no softmax
/// exists then, and any token taken from them would be made up.
pub(super) fn check_logits(logits: &[f32]) -> Result<()> {
    // Without branches, so that the compiler takes several at a time.
    let (mut sound, mut possible) = (true, false);
    for &logit in logits {
        sound &= logit < f32::INFINITY;
        possible |= logit > f32::NEG_INFINITY;
    }
    if !sound && let Some(id) = logits.iter().position(|&logit| logit.is_nan() || logit == f32::INFINITY) {
        return Err(errors::bad_logit(logits[id], id as u32));
    }
    if possible { Ok(()) } else { Err(errors::no_possible_logit()) }
}
