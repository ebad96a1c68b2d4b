//! Why no token was chosen, in the same words wherever it was tried.

use super::SamplingParams;
use crate::error::Error;

/// A logit that is NaN or plus infinity.
pub(crate) fn bad_logit(logit: f32, token_id: u32) -> Error {
    Error::value("logits", format!("{logit} for token {token_id}"), "numbers below infinity")
}

/// Every logit is minus infinity.
pub(crate) fn no_possible_logit() -> Error {
    Error::value("logits", "none above minus infinity", "at least one token that is possible")
}

/// A penalty made a logit plus infinity.
pub(crate) fn penalty_overflow(params: &SamplingParams) -> Error {
    let accepted = "one under which logits stay finite";
    Error::value("repetition_penalty", params.repetition_penalty.to_string(), accepted)
}

/// The request's own fields left no token for output token number `output_tokens`, where the logits had one.
pub(crate) fn nothing_left(params: &SamplingParams, output_tokens: usize) -> Error {
    let mut fields = Vec::new();
    if params.allowed_token_ids.is_some() {
        fields.push("allowed_token_ids");
    }
    if !params.banned_token_ids.is_empty() {
        fields.push("banned_token_ids");
    }
    if output_tokens < params.min_tokens {
        fields.push("min_tokens");
    }
    if fields.is_empty() {
        // A large factor on large negative logits.
        fields.push("repetition_penalty");
    }
    Error::value(fields.join(" with "), "no token left to choose", "at least one that the model gives a chance")
}
