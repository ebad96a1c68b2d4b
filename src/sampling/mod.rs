//! From logits to a token: the parameters of a request, their validation, and the reference sampler.
//!
//! The order is vLLM's: logit bias, allowed and banned tokens, end tokens hidden by `min_tokens`; repetition, frequency
//! and presence penalty; temperature, `min_p`, `top_k`, `top_p`; the draw.

mod errors;
mod logprobs;
mod params;
mod rng;
mod sampler;
mod select;

pub(crate) use self::{
    errors::{bad_logit, no_possible_logit, nothing_left, penalty_overflow},
    rng::fresh_seed,
    select::{least_weight, nucleus_share},
};
pub use self::{
    logprobs::{Logprob, TokenLogprobs},
    params::{MAX_LOGPROBS, SamplingParams},
    sampler::{Sampled, Sampler},
};
