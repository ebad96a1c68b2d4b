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

    /// Reads the next part, at most `part_tokens`; returns its tokens.
    fn advance(&mut self, device: &mut S, id: S::Id, part_tokens: usize) -> Result<usize>;

    /// Whether all parts were read.
    fn is_whole(&self) -> bool;

    /// Sends the result, or the error that it ended with.
    fn end(self: Box<Self>, outcome: Result<()>);
}

/// A [`Job`] that results in a `T`.
pub(in crate::engine) struct Text<T, M, R> {
    tokens: usize,
    done: usize,
    /// Makes what `read` adds to; taken by the first part.
    make: Option<M>,
    read: R,
    result: Option<T>,
    results: Sender<Result<T>>,
    cancel: Cancel,
}

impl<T, M, R> Text<T, M, R> {
    /// A job over `tokens` tokens, and where its result will come: `make` makes an empty one, and `read` reads a part of the
    /// tokens into the sequence and adds to it. Both are called by the thread that owns the device.
    pub fn new<S: Steps>(tokens: usize, make: M, read: R, cancel: &Cancel) -> (Self, Receiver<Result<T>>)
    where
        M: FnOnce(&mut S) -> Result<T>,
        R: FnMut(&mut S, S::Id, Range<usize>, &mut T) -> Result<()>,
    {
        let (results, receiver) = mpsc::channel();
        (Self { tokens, done: 0, make: Some(make), read, result: None, results, cancel: cancel.clone() }, receiver)
    }
}

impl<S, T, M, R> Job<S> for Text<T, M, R>
where
    S: Steps,
    T: Send,
    M: FnOnce(&mut S) -> Result<T> + Send,
    R: FnMut(&mut S, S::Id, Range<usize>, &mut T) -> Result<()> + Send,
{
    fn cancel(&self) -> &Cancel {
        &self.cancel
    }

    fn advance(&mut self, device: &mut S, id: S::Id, part_tokens: usize) -> Result<usize> {
        self.cancel.check()?;
        if let Some(make) = self.make.take() {
            self.result = Some(make(device)?);
        }
        let part = self.done..(self.done + part_tokens).min(self.tokens);
        if let Some(result) = self.result.as_mut().filter(|_| !part.is_empty()) {
            (self.read)(device, id, part.clone(), result)?;
        }
        self.done = part.end;
        Ok(part.len())
    }

    fn is_whole(&self) -> bool {
        self.done == self.tokens
    }

    fn end(self: Box<Self>, outcome: Result<()>) {
        let Self { result, results, .. } = *self;
        let result = outcome.map(|()| result.expect("the first part made it"));
        // Nobody may be there to hear it.
        let _ = results.send(result);
    }
}
