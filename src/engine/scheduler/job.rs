//! Texts that are read for what their logits say; nothing is generated after them.

use std::{
    ops::Range,
    sync::mpsc::{self, Receiver, Sender},
};

use super::Steps;
use crate::{cancel::Cancel, error::Result};

/// Work with a sequence of its own, done one part of its text after the other.
pub(in crate::engine) trait Job<S: Steps>: Send {
    /// Asks for its early end.
    fn cancel(&self) -> &Cancel;

    /// Most tokens of a part.
    fn part_tokens(&self) -> usize;

    /// Reads the next part; returns its tokens.
    fn advance(&mut self, device: &mut S, id: S::Id) -> Result<usize>;

    /// Whether all parts were read.
    fn is_whole(&self) -> bool;

    /// Sends the result, or the error that it ended with.
    fn end(self: Box<Self>, outcome: Result<()>);
}

/// A job for the loop, and where its result will come.
pub(in crate::engine) type Begun<S, T> = (Box<dyn Job<S>>, Receiver<Result<T>>);

/// A job over `tokens` tokens, in parts of `part_tokens` at most. `read` reads a part of them into the sequence and adds to the
/// result; the thread that owns the device calls it.
pub(in crate::engine) fn text_job<S, T, R>(
    tokens: usize,
    part_tokens: usize,
    result: T,
    cancel: &Cancel,
    read: R,
) -> Begun<S, T>
where
    S: Steps,
    T: Send + 'static,
    R: FnMut(&mut S, S::Id, Range<usize>, &mut T, &Cancel) -> Result<()> + Send + 'static,
{
    let (results, receiver) = mpsc::channel();
    let text = Text { tokens, part_tokens, done: 0, result, read, results, cancel: cancel.clone() };
    (Box::new(text), receiver)
}

struct Text<T, R> {
    tokens: usize,
    part_tokens: usize,
    done: usize,
    result: T,
    read: R,
    results: Sender<Result<T>>,
    cancel: Cancel,
}

impl<S, T, R> Job<S> for Text<T, R>
where
    S: Steps,
    T: Send,
    R: FnMut(&mut S, S::Id, Range<usize>, &mut T, &Cancel) -> Result<()> + Send,
{
    fn cancel(&self) -> &Cancel {
        &self.cancel
    }

    fn part_tokens(&self) -> usize {
        self.part_tokens
    }

    fn advance(&mut self, device: &mut S, id: S::Id) -> Result<usize> {
        self.cancel.check()?;
        let part = self.done..(self.done + self.part_tokens).min(self.tokens);
        (self.read)(device, id, part.clone(), &mut self.result, &self.cancel)?;
        self.done = part.end;
        Ok(part.len())
    }

    fn is_whole(&self) -> bool {
        self.done == self.tokens
    }

    fn end(self: Box<Self>, outcome: Result<()>) {
        let Self { result, results, .. } = *self;
        // Nobody may be there to hear it.
        let _ = results.send(outcome.map(|()| result));
    }
}
