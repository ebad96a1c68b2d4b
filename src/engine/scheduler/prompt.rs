//! Prompts on their way into the steps, and scores of what was read.

use std::{mem, ops::Range, time::Instant};

use super::{PromptProgress, Request, Row, Sizes, Steps};
use crate::{cancel::Cancel, error::Result, sampling::TokenLogprobs};

/// A prompt of which a part was read. All but its last token is, which the first step takes.
pub(super) struct Prompt<I> {
    pub id: I,
    pub request: Box<Request>,
    read: usize,
    scores: Option<Vec<TokenLogprobs>>,
    since: Instant,
}

impl<I: Copy> Prompt<I> {
    pub fn new(id: I, request: Box<Request>) -> Self {
        let scores = request.params.prompt_logprobs.map(|_| Vec::new());
        Self { id, request, read: 0, scores, since: Instant::now() }
    }

    pub fn is_whole(&self) -> bool {
        self.read + 1 == self.request.prompt.len()
    }

    /// Reads the next part; returns its tokens.
    pub fn advance<S: Steps<Id = I>>(&mut self, device: &mut S, sizes: Sizes) -> Result<usize> {
        let Request { prompt, params, progress, cancel, .. } = &*self.request;
        cancel.check()?;
        let part = self.read..(self.read + sizes.part_tokens).min(prompt.len() - 1);
        if !part.is_empty() {
            let mut shown = Shown { progress, tokens: 0 };
            let mut show = |done, _| shown.set(done);
            match &mut self.scores {
                Some(scores) => {
                    let top_n = params.prompt_logprobs.unwrap_or(0);
                    scores.extend(score(device, self.id, prompt, part.clone(), top_n, sizes, &mut show, cancel)?);
                }
                None => device.prefill(self.id, &prompt[part.clone()], &mut show, cancel)?,
            }
        }
        self.read = part.end;
        if self.is_whole() {
            progress.add(1);
        }
        Ok(part.len())
    }

    /// The row that it becomes.
    pub fn finish(self) -> Row<I> {
        let Self { id, request, scores, since, .. } = self;
        Row { id, request: *request, output: Vec::new(), prompt_logprobs: scores, since, ended: false }
    }
}

/// From tokens done so far to tokens added.
struct Shown<'a> {
    progress: &'a PromptProgress,
    tokens: usize,
}

impl Shown<'_> {
    fn set(&mut self, done: usize) {
        self.progress.add(done - mem::replace(&mut self.tokens, done));
    }
}

/// Reads `tokens[part]` and returns the log-probability of each token that follows one of them, given all before it.
#[allow(clippy::too_many_arguments, reason = "a text, what to say of it, and who is told")]
pub fn score<S: Steps>(
    device: &mut S,
    id: S::Id,
    tokens: &[u32],
    part: Range<usize>,
    top_n: usize,
    sizes: Sizes,
    progress: &mut dyn FnMut(usize, usize),
    cancel: &Cancel,
) -> Result<Vec<TokenLogprobs>> {
    let mut scores = Vec::with_capacity(part.len());
    if part.is_empty() {
        return Ok(scores);
    }
    let next = &tokens[part.start + 1..=part.end];
    let mut sink = |logits: &[f32]| {
        for row in logits.chunks_exact(sizes.logits) {
            scores.push(TokenLogprobs::new(&row[..sizes.vocab_tokens], next[scores.len()], top_n)?);
        }
        progress(scores.len(), part.len());
        cancel.check()
    };
    device.prompt_logits(id, &tokens[part.clone()], &mut sink, cancel)?;
    Ok(scores)
}
