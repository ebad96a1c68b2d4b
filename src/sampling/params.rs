//! What a request asks of sampling, and which values are accepted.

use std::{collections::BTreeMap, fmt::Display};

use crate::error::{Error, Result};

/// The most tokens per position that log-probabilities are reported for, as in vLLM and `OpenAI`'s interface: a whole
/// vocabulary for each token would take more memory than the model. `logits()` has everything.
pub const MAX_LOGPROBS: usize = 20;

/// How the tokens of one request are chosen and when it ends. Names and order of operations follow vLLM's.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 is greedy (ties: lowest id). Finite; default 1.0.
    pub temperature: f32,
    /// Keeps the k largest logits; 0 or -1 keeps all. Default 20.
    pub top_k: i64,
    /// Keeps the smallest set of most likely tokens whose mass reaches this. In (0, 1]; default 0.95.
    pub top_p: f32,
    /// Drops tokens less likely than this share of the most likely one. In [0, 1]; default 0.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens seen in prompt or output. Above 0; default 1.
    pub repetition_penalty: f32,
    /// Subtracted once for each time a token stands in the output. In [-2, 2]; default 0.
    pub frequency_penalty: f32,
    /// Subtracted from tokens that stand in the output. In [-2, 2]; default 0.
    pub presence_penalty: f32,
    /// Added to logits, by token id; in [-100, 100].
    pub logit_bias: BTreeMap<u32, f32>,
    /// If given, only these tokens can be chosen; at least one.
    pub allowed_token_ids: Option<Vec<u32>>,
    /// These tokens are never chosen.
    pub banned_token_ids: Vec<u32>,
    /// Makes the request reproducible; drawn and reported when `None`.
    pub seed: Option<u64>,
    /// Most tokens to generate, at least 1; `None`: up to the context length.
    pub max_tokens: Option<usize>,
    /// End tokens and stops are held off until so many tokens stand. At most `max_tokens`; default 0.
    pub min_tokens: usize,
    /// Strings that end the text; none of them empty.
    pub stop: Vec<String>,
    /// Token ids that end the text, beside the model's own.
    pub stop_token_ids: Vec<u32>,
    /// Keeps the stop string in the text. Default false.
    pub include_stop_str_in_output: bool,
    /// Goes on after an end token. Default false.
    pub ignore_eos: bool,
    /// Reports the chosen token's log-probability and those of so many most likely tokens, at most [`MAX_LOGPROBS`].
    pub logprobs: Option<usize>,
    /// The same for each prompt token after the first.
    pub prompt_logprobs: Option<usize>,
}

impl Default for SamplingParams {
    /// Flint's recommended sampling: temperature 1, `top_p` 0.95, `top_k` 20.
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_k: 20,
            top_p: 0.95,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            logit_bias: BTreeMap::new(),
            allowed_token_ids: None,
            banned_token_ids: Vec::new(),
            seed: None,
            max_tokens: None,
            min_tokens: 0,
            stop: Vec::new(),
            stop_token_ids: Vec::new(),
            include_stop_str_in_output: false,
            ignore_eos: false,
            logprobs: None,
            prompt_logprobs: None,
        }
    }
}

impl SamplingParams {
    /// Checks every field, for a model of `vocab_size` tokens. Errors: [`Error::Value`] naming the first field that is
    /// outside its range.
    pub fn validate(&self, vocab_size: usize) -> Result<()> {
        // NaN is in no range, so that each comparison refuses it.
        check(
            "temperature",
            self.temperature,
            (0.0..f32::INFINITY).contains(&self.temperature),
            "a finite number of at least 0",
        )?;
        check("top_k", self.top_k, self.top_k >= -1, "at least 1, or 0 or -1 for all tokens")?;
        check("top_p", self.top_p, self.top_p > 0.0 && self.top_p <= 1.0, "a number in (0, 1]")?;
        check("min_p", self.min_p, (0.0..=1.0).contains(&self.min_p), "a number in [0, 1]")?;
        let penalty = self.repetition_penalty;
        check("repetition_penalty", penalty, penalty > 0.0 && penalty.is_finite(), "a finite number above 0")?;
        for (field, penalty) in
            [("frequency_penalty", self.frequency_penalty), ("presence_penalty", self.presence_penalty)]
        {
            check(field, penalty, (-2.0..=2.0).contains(&penalty), "a number in [-2, 2]")?;
        }
        for (&id, bias) in &self.logit_bias {
            check_id("logit_bias", id, vocab_size)?;
            check(&format!("logit_bias[{id}]"), bias, (-100.0..=100.0).contains(bias), "a number in [-100, 100]")?;
        }
        let allowed = self.allowed_token_ids.as_deref();
        check("allowed_token_ids", "none", allowed.is_none_or(|ids| !ids.is_empty()), "at least one token id")?;
        for (field, ids) in [
            ("allowed_token_ids", allowed.unwrap_or_default()),
            ("banned_token_ids", &self.banned_token_ids),
            ("stop_token_ids", &self.stop_token_ids),
        ] {
            for &id in ids {
                check_id(field, id, vocab_size)?;
            }
        }
        check("max_tokens", 0, self.max_tokens != Some(0), "at least 1")?;
        let most = self.max_tokens.unwrap_or(usize::MAX);
        check("min_tokens", self.min_tokens, self.min_tokens <= most, format!("at most max_tokens, which is {most}"))?;
        check("stop", "an empty string", self.stop.iter().all(|stop| !stop.is_empty()), "strings with text")?;
        for (field, count) in [("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)] {
            let count = count.unwrap_or(0);
            check(field, count, count <= MAX_LOGPROBS, format!("at most {MAX_LOGPROBS}"))?;
        }
        Ok(())
    }
}

fn check(field: &str, found: impl Display, accepted: bool, range: impl Into<String>) -> Result<()> {
    if accepted { Ok(()) } else { Err(Error::value(field, found.to_string(), range)) }
}

/// Whether `id` is a token of the model.
pub(super) fn check_id(field: &str, id: u32, vocab_size: usize) -> Result<()> {
    check(field, id, (id as usize) < vocab_size, format!("token ids below {vocab_size}"))
}
