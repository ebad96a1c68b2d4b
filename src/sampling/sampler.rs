//! The sampler of one request.

use std::collections::HashMap;

use super::{
    SamplingParams, TokenLogprobs, errors,
    logprobs::check_logits,
    params::check_id,
    rng,
    select::{Draw, Shape, greedy},
};
use crate::error::{Error, Result};

/// What a sampler chose.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The token.
    pub token_id: u32,
    /// If the request asked for log-probabilities.
    pub logprobs: Option<TokenLogprobs>,
}

/// The sampler of one request: parameters, random state, and what was generated so far.
pub struct Sampler {
    params: SamplingParams,
    seed: u64,
    vocab_size: usize,
    /// What `min_tokens` hides: end tokens and the request's own stop tokens.
    ends: Vec<u32>,
    /// How often each token stands in the output; 0 for those that stand in the prompt only.
    seen: HashMap<u32, u32>,
    output_tokens: usize,
    /// The logits being worked on, kept for its memory.
    logits: Vec<f32>,
    draw: Draw,
}

impl Sampler {
    /// `end_token_ids` are those that `min_tokens` hides. Errors: [`Error::Value`] naming the field of `params`.
    pub fn new(params: &SamplingParams, prompt: &[u32], end_token_ids: &[u32], vocab_size: usize) -> Result<Self> {
        params.validate(vocab_size)?;
        for (field, ids) in [("prompt", prompt), ("end_token_ids", end_token_ids)] {
            for &id in ids {
                check_id(field, id, vocab_size)?;
            }
        }
        Ok(Self {
            seed: params.seed.unwrap_or_else(rng::fresh_seed),
            vocab_size,
            ends: [end_token_ids, &params.stop_token_ids].concat(),
            seen: prompt.iter().map(|&id| (id, 0)).collect(),
            output_tokens: 0,
            logits: Vec::new(),
            draw: Draw::default(),
            params: params.clone(),
        })
    }

    /// The seed in use: the request's own, or the one that was drawn.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Chooses a token from `logits` (`[V]`, fp32) and remembers it. Errors: [`Error::Value`] for logits that are no
    /// distribution (NaN, plus infinity, nothing above minus infinity) and when the request's own fields leave no
    /// token to choose; nothing is remembered then.
    pub fn sample(&mut self, logits: &[f32]) -> Result<Sampled> {
        if logits.len() != self.vocab_size {
            return Err(Error::value("logits", format!("{} of them", logits.len()), self.vocab_size.to_string()));
        }
        check_logits(logits)?;
        self.mask_and_bias(logits);
        self.penalise()?;
        let shape = Shape {
            temperature: self.params.temperature,
            min_p: self.params.min_p,
            top_k: usize::try_from(self.params.top_k).ok().filter(|k| *k > 0),
            top_p: self.params.top_p,
        };
        let chosen = if shape.temperature == 0.0 {
            greedy(&self.logits)
        } else {
            self.draw.draw(&self.logits, &shape, rng::random(self.seed, self.output_tokens as u64))
        };
        let token_id = chosen.ok_or_else(|| errors::nothing_left(&self.params, self.output_tokens))?;
        let logprobs = match self.params.logprobs {
            Some(top_n) => Some(TokenLogprobs::new(logits, token_id, top_n)?),
            None => None,
        };
        *self.seen.entry(token_id).or_default() += 1;
        self.output_tokens += 1;
        Ok(Sampled { token_id, logprobs })
    }

    /// Fills `self.logits` from the model's: bias added, and minus infinity for what may not be chosen now.
    fn mask_and_bias(&mut self, logits: &[f32]) {
        let work = &mut self.logits;
        work.clear();
        match &self.params.allowed_token_ids {
            None => work.extend_from_slice(logits),
            Some(allowed) => {
                work.resize(logits.len(), f32::NEG_INFINITY);
                for &id in allowed {
                    work[id as usize] = logits[id as usize];
                }
            }
        }
        for (&id, bias) in &self.params.logit_bias {
            work[id as usize] += bias;
        }
        for &id in &self.params.banned_token_ids {
            work[id as usize] = f32::NEG_INFINITY;
        }
        if self.output_tokens < self.params.min_tokens {
            for &id in &self.ends {
                work[id as usize] = f32::NEG_INFINITY;
            }
        }
    }

    /// Repetition, then frequency, then presence penalty; each operation rounds on its own.
    fn penalise(&mut self) -> Result<()> {
        let SamplingParams { repetition_penalty, frequency_penalty, presence_penalty, .. } = self.params;
        if (repetition_penalty, frequency_penalty, presence_penalty) == (1.0, 0.0, 0.0) {
            return Ok(());
        }
        for (&id, &count) in &self.seen {
            let logit = &mut self.logits[id as usize];
            if *logit > 0.0 {
                *logit /= repetition_penalty;
            } else {
                *logit *= repetition_penalty;
            }
            *logit -= frequency_penalty * count as f32;
            if count > 0 {
                *logit -= presence_penalty;
            }
            if *logit == f32::INFINITY {
                return Err(errors::penalty_overflow(&self.params));
            }
        }
        Ok(())
    }
}
