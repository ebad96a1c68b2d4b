//! From logits to a token: the parameters of a request, their validation, and the reference sampler.

use std::collections::BTreeMap;

use crate::error::Result;

/// How the tokens of one request are chosen and when it ends. Names and order of operations follow vLLM's.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divides the logits; 0 is greedy (ties: lowest id). Default 1.0.
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
    /// If given, only these tokens can be chosen.
    pub allowed_token_ids: Option<Vec<u32>>,
    /// These tokens are never chosen.
    pub banned_token_ids: Vec<u32>,
    /// Makes the request reproducible; drawn and reported when `None`.
    pub seed: Option<u64>,
    /// Most tokens to generate; `None`: up to the context length.
    pub max_tokens: Option<usize>,
    /// End tokens and stops are held off until so many tokens stand.
    pub min_tokens: usize,
    /// Strings that end the text.
    pub stop: Vec<String>,
    /// Token ids that end the text, beside the model's own.
    pub stop_token_ids: Vec<u32>,
    /// Keeps the stop string in the text. Default false.
    pub include_stop_str_in_output: bool,
    /// Goes on after an end token. Default false.
    pub ignore_eos: bool,
    /// Reports the chosen token's log-probability and those of so many most likely tokens.
    pub logprobs: Option<usize>,
    /// The same for each prompt token after the first.
    pub prompt_logprobs: Option<usize>,
}

impl SamplingParams {
    /// Checks every field. Errors: [`crate::Error::Value`] naming field, value and range.
    pub fn validate(&self, vocab_size: usize) -> Result<()> {
        let _ = vocab_size;
        unimplemented!()
    }
}

/// A token's log-probability under the raw distribution of the model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Logprob {
    /// The token.
    pub token_id: u32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// 1 for the most likely token.
    pub rank: usize,
}

/// Log-probabilities at one position.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// The token that stands there.
    pub chosen: Logprob,
    /// The most likely tokens, best first.
    pub top: Vec<Logprob>,
}

impl TokenLogprobs {
    /// Of `token_id` and the `top_n` most likely tokens under `logits` (`[V]`, fp32).
    pub fn new(logits: &[f32], token_id: u32, top_n: usize) -> Self {
        let _ = (logits, token_id, top_n);
        unimplemented!()
    }
}

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
    seed: u64,
}

impl Sampler {
    /// `end_token_ids` are those that `min_tokens` hides. Errors: [`crate::Error::Value`] naming the field of `params`.
    pub fn new(params: &SamplingParams, prompt: &[u32], end_token_ids: &[u32], vocab_size: usize) -> Result<Self> {
        let _ = (params, prompt, end_token_ids, vocab_size);
        unimplemented!()
    }

    /// The seed in use: the request's own, or the one that was drawn.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Chooses a token from `logits` (`[V]`, fp32) and remembers it.
    pub fn sample(&mut self, logits: &[f32]) -> Result<Sampled> {
        let _ = logits;
        unimplemented!()
    }
}
