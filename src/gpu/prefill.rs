//! Prompts: chunks of tokens through the prefill kernels.

use super::{
    GpuModel, SequenceId,
    driver::{Buffer, Call, Device, DeviceMemory, Event, Pinned},
};
use crate::{
    cancel::Cancel,
    error::{Error, Result},
    plan::{Chunk, Ending, Part, Step},
};

/// Chunks that are queued and have not ended, at most: the device never waits for the host, and stops within two.
const AHEAD: usize = 2;
/// Tokens whose logits reach the host at a time.
const HOST_ROWS: usize = 64;

/// What chunks that are on their way hold.
pub(super) struct Chunks {
    /// [`crate::plan::ChunkInputs`] of each.
    inputs: [Pinned<u32>; AHEAD],
    /// Recorded behind each.
    ends: [Event; AHEAD],
    /// Chunks so far; number n has line n modulo [`AHEAD`].
    queued: usize,
    /// Made when they are asked for first.
    logits: Option<Pinned<f32>>,
}

impl Chunks {
    pub fn new(device: &Device, chunk: &Chunk) -> Result<Self> {
        let inputs = [device.pinned(chunk.inputs.words)?, device.pinned(chunk.inputs.words)?];
        Ok(Self { inputs, ends: [device.event(false)?, device.event(false)?], queued: 0, logits: None })
    }

    /// Waits for the chunk that was queued as the `age`th last, 1 or 2; for none if there were fewer.
    fn wait(&self, age: usize) -> Result<()> {
        // An event that was never recorded is over.
        self.ends[(self.queued + AHEAD - age) % AHEAD].wait("a chunk of a prompt")
    }

    /// Queues the copy of a chunk's inputs.
    fn upload(&mut self, words: &[u32], to: &Buffer, offset: u64) -> Result<()> {
        self.wait(AHEAD)?;
        let inputs = &mut self.inputs[self.queued % AHEAD];
        inputs.as_mut_slice()[..words.len()].copy_from_slice(words);
        // SAFETY: the line is written again only after the wait above for the chunk that read it; both ends live as long as
        // the model, whose drop waits.
        unsafe { to.queue_write(offset as usize, inputs, 0..words.len()) }
    }

    /// Notes the chunk whose kernels were queued last.
    fn end(&mut self) -> Result<()> {
        self.ends[self.queued % AHEAD].record()?;
        self.queued += 1;
        Ok(())
    }
}

impl GpuModel {
    /// Appends `tokens` to a sequence: their keys and values are in the cache when this returns. `progress` gets (tokens done,
    /// tokens in all) from this thread, at the start and after each chunk.
    ///
    /// Runs beside a decode loop of other sequences, which stays as it is; one that has this sequence ends.
    ///
    /// Errors: [`Error::Value`] naming what is wrong, before anything is changed; [`Error::Cancelled`] with the sequence at the
    /// border of a chunk, within two of the request; [`Error::Device`], and the sequence is gone.
    pub fn prefill(
        &mut self,
        id: SequenceId,
        tokens: &[u32],
        progress: &mut dyn FnMut(usize, usize),
        cancel: &Cancel,
    ) -> Result<()> {
        self.check_prompt(&[(id, tokens)])?;
        let (most, total) = (self.plan.chunk().tokens, tokens.len());
        progress(0, total);
        for (index, part) in tokens.chunks(most).enumerate() {
            cancel.check()?;
            self.queue_chunk(&[(id, part)], false)?;
            if index > 0 {
                // The one before it: the device has work until the next is queued.
                self.chunks.wait(2)?;
                progress(index * most, total);
            }
        }
        if total > 0 {
            self.chunks.wait(1)?;
            progress(total, total);
        }
        Ok(())
    }

    /// Queues a chunk of tokens of several sequences, and does not wait for it; see [`Self::prefill`].
    ///
    /// Errors: as there; more tokens than [`Chunk::tokens`] are refused.
    pub fn prefill_batch(&mut self, parts: &[(SequenceId, &[u32])]) -> Result<()> {
        self.check_chunk(parts)?;
        self.queue_chunk(parts, false)
    }

    /// A mixed step: one token for each of `rows` through the decode kernels, then `parts` through those of prefill, so that
    /// what a token's results are does not depend on what shares the step. Returns `[B, V]` logits after the rows. Ends the
    /// decode loop; one that goes on is mixed by calling [`Self::prefill_batch`] between its steps.
    ///
    /// Errors: as [`Self::forward`] and [`Self::prefill_batch`].
    pub fn step(&mut self, rows: &[(SequenceId, u32)], parts: &[(SequenceId, &[u32])]) -> Result<Vec<f32>> {
        self.check_tokens(rows)?;
        self.check_chunk(parts)?;
        if let Some(index) = parts.iter().position(|part| rows.iter().any(|row| row.0 == part.0)) {
            return Err(Error::value(format!("parts[{index}]"), "a sequence of a row", "each sequence once"));
        }
        self.restart_decode(rows.iter().map(|row| row.0).collect());
        self.queue_tokens(rows, Ending::Logits)?;
        self.queue_chunk(parts, false)?;
        self.restart_decode(Vec::new());
        self.read_logits(rows.len())
    }

    /// Appends `tokens` as [`Self::prefill`] does; `sink` gets the logits after each of them in order, `[n, V]` at a time.
    ///
    /// Errors: as there, and what `sink` returns; then the sequence is at the border of a chunk.
    pub fn prompt_logits(
        &mut self,
        id: SequenceId,
        tokens: &[u32],
        sink: &mut dyn FnMut(&[f32]) -> Result<()>,
        cancel: &Cancel,
    ) -> Result<()> {
        self.each_logits(id, tokens, cancel, &mut |model, rows| model.hand_over_logits(rows, sink))
    }

    /// The same into rows of `to` from `first`, `[_, V]` f32; complete when this returns.
    pub fn prompt_logits_into(
        &mut self,
        id: SequenceId,
        tokens: &[u32],
        to: &DeviceMemory,
        first: usize,
        cancel: &Cancel,
    ) -> Result<()> {
        let row_bytes = 4 * self.config().vocab_size;
        let mut done = first;
        self.each_logits(id, tokens, cancel, &mut |model, rows| {
            let (from, at) = (model.plan.chunk_logits() as usize, done * row_bytes);
            done += rows;
            model.buffers.queue_copy(from, to, at, rows * row_bytes)
        })?;
        self.device.synchronize("the logits of a prompt")
    }

    /// Appends `tokens`, and calls `take` whenever logits of so many more of them were queued.
    fn each_logits(
        &mut self,
        id: SequenceId,
        tokens: &[u32],
        cancel: &Cancel,
        take: &mut dyn FnMut(&mut Self, usize) -> Result<()>,
    ) -> Result<()> {
        self.check_prompt(&[(id, tokens)])?;
        let Chunk { tokens: most, logits_rows, .. } = *self.plan.chunk();
        for part in tokens.chunks(most) {
            cancel.check()?;
            self.queue_chunk(&[(id, part)], true)?;
            for first in (0..part.len()).step_by(logits_rows) {
                cancel.check()?;
                let rows = logits_rows.min(part.len() - first);
                for step in self.plan.logits_steps(&self.bases(), first, rows) {
                    self.call(&step)?.queue(self.options.pdl)?;
                }
                take(self, rows)?;
            }
        }
        Ok(())
    }

    /// Gives `sink` what the last launches made.
    fn hand_over_logits(&mut self, rows: usize, sink: &mut dyn FnMut(&[f32]) -> Result<()>) -> Result<()> {
        let vocab = self.config().vocab_size;
        let host = match &mut self.chunks.logits {
            Some(host) => host,
            none => none.insert(self.device.pinned(HOST_ROWS.min(self.plan.chunk().logits_rows) * vocab)?),
        };
        for first in (0..rows).step_by(HOST_ROWS) {
            let len = HOST_ROWS.min(rows - first) * vocab;
            self.buffers.read_pinned(self.plan.chunk_logits() as usize + 4 * first * vocab, host, len)?;
            sink(&host.as_slice()[..len])?;
        }
        Ok(())
    }

    /// The launches of a chunk, ready to be queued one by one or recorded; for benches, behind a chunk of the same parts.
    pub fn chunk_calls(&self, parts: &[Part], logits: bool) -> Result<Vec<(Step, Call)>> {
        let steps = self.plan.chunk_steps(&self.bases(), parts, logits);
        steps.into_iter().map(|step| Ok((step, self.call(&step)?))).collect()
    }

    /// Gives the tokens their positions, and queues their chunk; `logits` as in [`crate::plan::Plan::chunk_steps`].
    fn queue_chunk(&mut self, tokens: &[(SequenceId, &[u32])], logits: bool) -> Result<()> {
        let queued = self.try_queue_chunk(tokens, logits);
        if queued.is_err() {
            // Positions were given whose keys may never come.
            for &(id, _) in tokens {
                self.remove_sequence(id);
            }
        }
        queued
    }

    fn try_queue_chunk(&mut self, tokens: &[(SequenceId, &[u32])], logits: bool) -> Result<()> {
        let ids: Vec<_> = tokens.iter().map(|&(id, _)| id).collect();
        if self.decode_rows().iter().any(|id| ids.contains(id)) {
            self.restart_decode(Vec::new());
        }
        let slots = self.tables.rows_for(&ids, self.decode_rows());
        let mut parts = Vec::with_capacity(tokens.len());
        for (&(id, tokens), slot) in tokens.iter().zip(slots) {
            let sequence = self.sequences.get_mut(&id).expect("prompts were checked");
            parts.push((Part { slot, first: sequence.len(), tokens: tokens.len() }, tokens));
            let new = self.blocks.append(sequence, tokens.len())?;
            self.tables.place(&self.device, &self.buffers, slot, id, sequence, new)?;
        }
        let words = self.plan.chunk_inputs(&parts);
        self.chunks.upload(&words, &self.buffers, self.plan.chunk().inputs.tokens)?;
        let parts: Vec<_> = parts.into_iter().map(|(part, _)| part).collect();
        for (_, call) in self.chunk_calls(&parts, logits)? {
            call.queue(self.options.pdl)?;
        }
        self.chunks.end()?;
        // What is queued from now on runs behind the chunk, so it may have the blocks.
        for id in &ids {
            self.blocks.trim(self.sequences.get_mut(id).expect("prompts were checked"));
        }
        Ok(())
    }

    /// Refuses what a chunk cannot have, besides what [`Self::check_prompt`] does.
    fn check_chunk(&self, parts: &[(SequenceId, &[u32])]) -> Result<()> {
        self.check_prompt(parts)?;
        let (tokens, most) = (parts.iter().map(|part| part.1.len()).sum::<usize>(), self.plan.chunk().tokens);
        if !(1..=most).contains(&tokens) || parts.iter().any(|part| part.1.is_empty()) {
            return Err(Error::value(
                "parts",
                format!("{tokens} tokens"),
                format!("1 to {most}, and some of each part"),
            ));
        }
        Ok(())
    }

    /// Refuses a sequence twice or unknown, tokens that the model does not know, and more than a sequence's limit.
    fn check_prompt(&self, parts: &[(SequenceId, &[u32])]) -> Result<()> {
        let (limits, vocab) = (self.plan.limits(), self.config().vocab_size);
        for (index, (id, tokens)) in parts.iter().enumerate() {
            let field = format!("parts[{index}]");
            let Some(sequence) = self.sequences.get(id) else {
                return Err(Error::value(field, "a sequence that has ended", "a sequence of this model"));
            };
            if parts[..index].iter().any(|other| other.0 == *id) {
                return Err(Error::value(field, "a sequence for the second time", "each sequence once"));
            }
            if let Some(token) = tokens.iter().find(|&&token| token as usize >= vocab) {
                return Err(Error::value("tokens", token.to_string(), format!("ids below {vocab}")));
            }
            if tokens.len() > limits.context_tokens - sequence.len() {
                let found = format!("{} positions", sequence.len() + tokens.len());
                return Err(Error::value(field, found, format!("at most {}", limits.context_tokens)));
            }
        }
        Ok(())
    }
}
