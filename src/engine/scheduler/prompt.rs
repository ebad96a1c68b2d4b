//! Prompts on their way into the steps.

use std::{mem, time::Instant};

use super::{PromptProgress, Request, Row, Sizes, Steps, score::Scorer};
use crate::{error::Result, sampling::TokenLogprobs};

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

    /// Most tokens of a part.
    pub fn part_tokens(&self, sizes: Sizes) -> usize {
        if self.scores.is_some() { sizes.host_part_tokens() } else { sizes.part_tokens }
    }

    /// Reads the next part; returns its tokens.
    pub fn advance<S: Steps<Id = I>>(&mut self, device: &mut S, sizes: Sizes, scorer: &Scorer) -> Result<usize> {
        let most = self.part_tokens(sizes);
        let Request { prompt, params, progress, cancel, .. } = &*self.request;
        cancel.check()?;
        let part = &prompt[self.read..(self.read + most).min(prompt.len() - 1)];
        if !part.is_empty() {
            let mut shown = Shown { progress, tokens: 0 };
            match &mut self.scores {
                Some(scores) => {
                    let top_n = params.prompt_logprobs.unwrap_or(0);
                    let mut sink = |logits: &[f32]| {
                        scorer.add(scores, prompt, logits, top_n)?;
                        shown.set(scores.len() - self.read);
                        cancel.check()
                    };
                    device.prompt_logits(self.id, part, &mut sink, cancel)?;
                }
                None => device.prefill(self.id, part, &mut |done, _| shown.set(done), cancel)?,
            }
        }
        self.read += part.len();
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
