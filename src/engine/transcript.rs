//! From tokens to the text of events, and to the end of it.

use std::sync::Arc;

use super::FinishReason;
use crate::{
    error::{Error, Result},
    sampling::SamplingParams,
    stop::{Finish, StopMatcher, StopRules},
    tokenizer::{Decoder, Tokenizer},
};

/// The output of one request so far.
pub(super) struct Transcript {
    /// `None` for a model without text.
    decoder: Option<Decoder<Arc<Tokenizer>>>,
    rules: StopRules,
    stop: StopMatcher,
    generated: usize,
}

impl Transcript {
    /// Of a validated `params`. `room_tokens` is what the context leaves.
    ///
    /// Errors: [`Error::Value`] for stop strings without a tokenizer.
    pub fn new(params: &SamplingParams, tokenizer: Option<&Arc<Tokenizer>>, room_tokens: usize) -> Result<Self> {
        if tokenizer.is_none() && !params.stop.is_empty() {
            return Err(Error::value("stop", format!("{:?}", params.stop), "none for a model without a tokenizer"));
        }
        let end_token_ids = tokenizer.map_or(&[][..], |tokenizer| tokenizer.end_token_ids());
        Ok(Self {
            decoder: tokenizer.map(|tokenizer| Decoder::new(Arc::clone(tokenizer), false)),
            rules: StopRules::new(params, end_token_ids, room_tokens),
            stop: StopMatcher::new(&params.stop, params.include_stop_str_in_output),
            generated: 0,
        })
    }

    /// Tokens that it may still take.
    pub fn room(&self) -> usize {
        self.rules.max_tokens() - self.generated
    }

    /// Takes the next token: the text that it makes certain, and whether it is the last.
    pub fn push(&mut self, token_id: u32) -> Result<(String, Option<FinishReason>)> {
        self.generated += 1;
        let finish = self.rules.after(token_id, self.generated);
        let armed = self.rules.armed(self.generated);
        let mut piece = String::new();
        if let Some(decoder) = &mut self.decoder {
            // A token that ends the text is no part of it.
            if !matches!(finish, Some(Finish::EndToken(_) | Finish::StopToken(_))) {
                piece = decoder.push(token_id)?;
            }
            if finish.is_some() {
                piece.push_str(&decoder.finish());
            }
        }
        let mut step = self.stop.push(&piece, armed);
        let finish_reason = match finish {
            _ if step.stop.is_some() => Some(FinishReason::Stop),
            Some(Finish::Length) => Some(FinishReason::Length),
            Some(_) => Some(FinishReason::Stop),
            None => None,
        };
        if finish_reason.is_some() && step.stop.is_none() {
            step.text.push_str(&self.stop.finish());
        }
        Ok((step.text, finish_reason))
    }
}
