//! The loop of the thread that owns a GPU: which sequences are in the next step. Requests come over a channel, replies go
//! back over one each. Nothing here knows a driver, so that all of it is tested on the CPU.
//!
//! One step is queued ahead of the one that is read, so the device never waits for the host. A row whose text ends has
//! one step too many on its way, which is read and dropped. Before rows change, all unread steps are read; the rows that go on
//! start again from their last token. Texts are read one after the other, long ones in parts with steps between them.

pub(super) mod job;
mod prompt;
pub(super) mod score;

use std::{
    collections::VecDeque,
    mem,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError},
    },
    time::{Duration, Instant},
};

use self::{job::Job, prompt::Prompt, score::Scorer};
use super::{Event, PromptProgress, generation::Reply, transcript::Transcript};
use crate::{
    cancel::Cancel,
    error::{Error, Result},
    kernels::{SampleRecord, SampleStart},
    sampling::{SamplingParams, TokenLogprobs},
};

/// How often rows that wait for their readers are looked at when there is nothing else to do.
const POLL: Duration = Duration::from_millis(5);

/// Steps of the rows between two parts of a text: few, since a part is read at many times their speed.
const STEPS_A_PART: usize = 4;

/// Most tokens of a part whose logits come to the host: there a token may cost 100 microseconds of 16 cores, ten times what
/// it costs the device.
const HOST_PART_TOKENS: usize = 512;

/// What the loop needs of a device; [`crate::gpu::GpuModel`] documents each.
pub(super) trait Steps {
    /// Names a sequence.
    type Id: Copy;

    fn add_sequence(&mut self) -> Result<Self::Id>;
    fn remove_sequence(&mut self, id: Self::Id);
    fn prefill(
        &mut self,
        id: Self::Id,
        tokens: &[u32],
        progress: &mut dyn FnMut(usize, usize),
        cancel: &Cancel,
    ) -> Result<()>;
    fn prompt_logits(
        &mut self,
        id: Self::Id,
        tokens: &[u32],
        sink: &mut dyn FnMut(&[f32]) -> Result<()>,
        cancel: &Cancel,
    ) -> Result<()>;
    fn begin_decode(&mut self, rows: &[(Self::Id, u32, &SampleStart)]) -> Result<()>;
    fn continue_decode(&mut self) -> Result<()>;
    fn read_step(&mut self) -> Result<Option<Vec<SampleRecord>>>;
    fn unread_steps(&self) -> usize;
    /// Waits for the device; an error says that nothing will work on it any more.
    fn check(&mut self) -> Result<()>;
}

/// Events that a reader has not read yet.
#[derive(Debug)]
pub(super) struct Backlog {
    unread: AtomicUsize,
    most: AtomicUsize,
}

impl Default for Backlog {
    fn default() -> Self {
        Self { unread: AtomicUsize::new(0), most: AtomicUsize::new(usize::MAX) }
    }
}

impl Backlog {
    /// From now on there are to be no more than about `events`.
    pub fn limit(&self, events: usize) {
        self.most.store(events.max(1), Ordering::Relaxed);
    }

    /// One was read.
    pub fn take(&self) {
        self.unread.fetch_sub(1, Ordering::Relaxed);
    }

    fn put(&self) {
        self.unread.fetch_add(1, Ordering::Relaxed);
    }

    fn is_full(&self) -> bool {
        self.unread.load(Ordering::Relaxed) >= self.most.load(Ordering::Relaxed)
    }

    /// Far enough below the limit for the row to go on a while: joining costs a step.
    fn has_room(&self) -> bool {
        self.unread.load(Ordering::Relaxed) <= self.most.load(Ordering::Relaxed) / 2
    }
}

/// A generation on its way to the loop.
pub(super) struct Request {
    pub prompt: Vec<u32>,
    /// Validated.
    pub params: SamplingParams,
    pub seed: u64,
    pub end_token_ids: Vec<u32>,
    pub transcript: Transcript,
    pub progress: PromptProgress,
    pub cancel: Cancel,
    pub replies: Sender<Result<Reply>>,
    pub backlog: Arc<Backlog>,
}

/// What comes over the channel.
pub(super) enum Work<S: Steps> {
    Generate(Box<Request>),
    Job(Box<dyn Job<S>>),
}

/// A text of which a part was read into its sequence.
enum Reading<S: Steps> {
    Prompt(Prompt<S::Id>),
    Job(S::Id, Box<dyn Job<S>>),
}

/// Sizes that the loop keeps to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// Sequences at a time.
    pub sequences: usize,
    /// Tokens that may be chosen.
    pub vocab_tokens: usize,
    /// Logits of a row.
    pub logits: usize,
    /// Tokens of a text that are read without a step between them.
    pub part_tokens: usize,
}

impl Sizes {
    /// The same where their logits come to the host.
    pub fn host_part_tokens(&self) -> usize {
        self.part_tokens.min(HOST_PART_TOKENS)
    }
}

/// See the module.
pub(super) struct Scheduler<S: Steps> {
    device: S,
    inbox: Receiver<Work<S>>,
    sizes: Sizes,
    scorer: Arc<Scorer>,
    waiting: VecDeque<Work<S>>,
    /// The text that is being read.
    reading: Option<Reading<S>>,
    /// Steps that the rows are to have before more is read.
    owed_steps: usize,
    /// With a sequence, but not in the steps: new ones, and those whose reader is behind.
    aside: Vec<Row<S::Id>>,
    /// In the order of the steps' rows.
    rows: Vec<Row<S::Id>>,
    /// Why nothing works any more.
    broken: Option<Error>,
}

struct Row<I> {
    id: I,
    request: Request,
    output: Vec<u32>,
    /// Until they are sent with the first token.
    prompt_logprobs: Option<Vec<TokenLogprobs>>,
    /// When the last token was there, or when the prompt was begun.
    since: Instant,
    ended: bool,
}

impl<S: Steps> Scheduler<S> {
    pub fn new(device: S, inbox: Receiver<Work<S>>, sizes: Sizes, scorer: Arc<Scorer>) -> Self {
        Self {
            device,
            inbox,
            sizes,
            scorer,
            waiting: VecDeque::new(),
            reading: None,
            owed_steps: 0,
            aside: Vec::new(),
            rows: Vec::new(),
            broken: None,
        }
    }

    /// Works until everyone who could ask for something is gone.
    pub fn run(mut self) {
        while self.receive() {
            self.turn();
        }
        self.end_all(&Error::Closed);
    }

    /// Takes what has come; waits for it when there is nothing to do.
    fn receive(&mut self) -> bool {
        if self.rows.is_empty() && !self.is_due() {
            if self.aside.is_empty() {
                let Ok(work) = self.inbox.recv() else { return false };
                self.waiting.push_back(work);
            } else {
                match self.inbox.recv_timeout(POLL) {
                    Ok(work) => self.waiting.push_back(work),
                    Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => return false,
                }
            }
        }
        loop {
            match self.inbox.try_recv() {
                Ok(work) => self.waiting.push_back(work),
                Err(TryRecvError::Empty) => return true,
                Err(TryRecvError::Disconnected) => return false,
            }
        }
    }

    /// One step, or a change of what is in it.
    fn turn(&mut self) {
        let result = if self.is_due() { self.change() } else { self.step() };
        if let Err(error) = result {
            self.end_rows(&error);
            self.check_device();
        }
    }

    /// Whether a row has to leave, or something can come in.
    fn is_due(&self) -> bool {
        let crowded = self.is_crowded();
        self.rows.iter().any(|row| row.is_over() || row.is_ahead(crowded))
            || self.aside.iter().any(|row| row.is_over() || row.can_join(crowded))
            || match &self.reading {
                Some(reading) => self.can_read(reading),
                None => !self.waiting.is_empty() && self.can_admit(),
            }
    }

    /// Whether work waits for the place of a row. Then those whose readers are behind go on to their end too: their readers may
    /// be waiting for that work.
    fn is_crowded(&self) -> bool {
        !self.waiting.is_empty() && !self.has_place()
    }

    fn has_place(&self) -> bool {
        self.rows.len() + self.aside.len() < self.sizes.sequences
    }

    /// Whether rows have had the steps that they are owed.
    fn is_free(&self) -> bool {
        self.owed_steps == 0 || self.rows.is_empty()
    }

    fn can_read(&self, reading: &Reading<S>) -> bool {
        self.is_free() || reading.cancel().is_cancelled()
    }

    fn can_admit(&self) -> bool {
        self.has_place() && self.is_free() || self.broken.is_some()
    }

    fn step(&mut self) -> Result<()> {
        if self.rows.is_empty() {
            return Ok(());
        }
        // A row that ends by its length does so in a step that is known beforehand.
        let unread = self.device.unread_steps();
        if self.rows.iter().all(|row| row.request.transcript.room() > unread) {
            self.device.continue_decode()?;
        }
        self.owed_steps = self.owed_steps.saturating_sub(1);
        self.read()
    }

    fn read(&mut self) -> Result<()> {
        let records = self.device.read_step()?.unwrap_or_default();
        for (row, record) in self.rows.iter_mut().zip(&records) {
            row.take(record);
        }
        Ok(())
    }

    fn change(&mut self) -> Result<()> {
        while self.device.unread_steps() > 0 {
            self.read()?;
        }
        let crowded = self.is_crowded();
        // The last row takes the place of one that leaves, so that the others keep theirs, and their block tables.
        let mut place = 0;
        while let Some(row) = self.rows.get(place) {
            let is_over = row.is_over();
            if !is_over && !row.is_ahead(crowded) {
                place += 1;
                continue;
            }
            let row = self.rows.swap_remove(place);
            if is_over {
                self.remove(&row);
            } else {
                self.aside.push(row);
            }
        }
        // Those that ended first, so that their places are free.
        for row in mem::take(&mut self.aside) {
            if row.is_over() { self.remove(&row) } else { self.aside.push(row) }
        }
        match self.reading.take() {
            Some(reading) if self.can_read(&reading) => self.read_part(reading),
            None if self.can_admit() => self.admit(),
            reading => self.reading = reading,
        }
        let (joining, aside) = mem::take(&mut self.aside).into_iter().partition(|row| row.can_join(crowded));
        self.rows.extend::<Vec<_>>(joining);
        self.aside = aside;
        self.begin()
    }

    /// Queues the first step over all rows as they are now.
    fn begin(&mut self) -> Result<()> {
        let mut starts = Vec::with_capacity(self.rows.len());
        for row in &self.rows {
            starts.push(row.start(self.sizes.vocab_tokens)?);
        }
        let rows: Vec<_> =
            self.rows.iter().zip(&starts).map(|(row, start)| (row.id, row.last_token(), start)).collect();
        if rows.is_empty() { Ok(()) } else { self.device.begin_decode(&rows) }
    }

    /// Takes up the oldest work that waits.
    fn admit(&mut self) {
        let Some(work) = self.waiting.pop_front() else { return };
        if let Some(error) = &self.broken {
            return work.refuse(error.again());
        }
        if work.cancel().is_cancelled() {
            return work.refuse(Error::Cancelled);
        }
        match self.device.add_sequence() {
            Ok(id) => self.read_part(match work {
                Work::Generate(request) => Reading::Prompt(Prompt::new(id, request)),
                Work::Job(job) => Reading::Job(id, job),
            }),
            Err(error) => work.refuse(error),
        }
    }

    /// Reads the next part of a text.
    fn read_part(&mut self, mut reading: Reading<S>) {
        match reading.advance(&mut self.device, self.sizes, &self.scorer) {
            Ok(tokens) => {
                self.owed_steps = tokens * STEPS_A_PART / reading.part_tokens(self.sizes);
                match reading {
                    Reading::Prompt(prompt) if prompt.is_whole() => self.aside.push(prompt.finish()),
                    Reading::Job(id, job) if job.is_whole() => {
                        self.device.remove_sequence(id);
                        job.end(Ok(()));
                    }
                    reading => self.reading = Some(reading),
                }
            }
            Err(error) => {
                reading.refuse(&mut self.device, error);
                self.check_device();
            }
        }
    }

    /// Takes back the sequence of a row that is over.
    fn remove(&mut self, row: &Row<S::Id>) {
        self.device.remove_sequence(row.id);
        if !row.ended {
            row.request.refuse(Error::Cancelled);
        }
    }

    fn end_rows(&mut self, error: &Error) {
        for row in mem::take(&mut self.rows) {
            self.device.remove_sequence(row.id);
            if !row.ended {
                row.request.refuse(error.again());
            }
        }
    }

    /// After an error: when the device itself is broken, everything ends, now and later.
    fn check_device(&mut self) {
        if let Err(error) = self.device.check() {
            self.end_all(&error);
            self.broken = Some(error);
        }
    }

    fn end_all(&mut self, error: &Error) {
        self.rows.append(&mut self.aside);
        self.end_rows(error);
        if let Some(reading) = self.reading.take() {
            reading.refuse(&mut self.device, error.again());
        }
    }
}

impl<S: Steps> Work<S> {
    fn cancel(&self) -> &Cancel {
        match self {
            Self::Generate(request) => &request.cancel,
            Self::Job(job) => job.cancel(),
        }
    }

    fn refuse(self, error: Error) {
        match self {
            Self::Generate(request) => request.refuse(error),
            Self::Job(job) => job.end(Err(error)),
        }
    }
}

impl<S: Steps> Reading<S> {
    fn cancel(&self) -> &Cancel {
        match self {
            Self::Prompt(prompt) => &prompt.request.cancel,
            Self::Job(_, job) => job.cancel(),
        }
    }

    fn part_tokens(&self, sizes: Sizes) -> usize {
        match self {
            Self::Prompt(prompt) => prompt.part_tokens(sizes),
            Self::Job(_, job) => job.part_tokens(),
        }
    }

    /// Reads the next part; returns its tokens.
    fn advance(&mut self, device: &mut S, sizes: Sizes, scorer: &Scorer) -> Result<usize> {
        match self {
            Self::Prompt(prompt) => prompt.advance(device, sizes, scorer),
            Self::Job(id, job) => job.advance(device, *id),
        }
    }

    fn refuse(self, device: &mut S, error: Error) {
        let (id, work) = match self {
            Self::Prompt(prompt) => (prompt.id, Work::Generate(prompt.request)),
            Self::Job(id, job) => (id, Work::Job(job)),
        };
        device.remove_sequence(id);
        work.refuse(error);
    }
}

impl Request {
    fn refuse(&self, error: Error) {
        // Nobody may be there to hear it.
        let _ = self.replies.send(Err(error));
    }
}

impl<I> Row<I> {
    /// Whether it has to leave.
    fn is_over(&self) -> bool {
        self.ended || self.request.cancel.is_cancelled()
    }

    /// Whether it has to wait for its reader.
    fn is_ahead(&self, crowded: bool) -> bool {
        !crowded && self.request.backlog.is_full()
    }

    /// Whether it can come into the steps.
    fn can_join(&self, crowded: bool) -> bool {
        crowded || self.request.backlog.has_room()
    }

    fn last_token(&self) -> u32 {
        *self.output.last().or(self.request.prompt.last()).expect("a prompt is not empty")
    }

    fn start(&self, vocab_tokens: usize) -> Result<SampleStart> {
        let Request { params, seed, end_token_ids, prompt, .. } = &self.request;
        SampleStart::new(params, *seed, [prompt, &self.output], end_token_ids, vocab_tokens, 0)
    }

    /// Sends what a step chose for it.
    fn take(&mut self, record: &SampleRecord) {
        if self.is_over() {
            return;
        }
        let reply = self.reply(record);
        self.ended = reply.as_ref().map_or(true, |reply| reply.event.finish_reason.is_some());
        self.request.backlog.put();
        if self.request.replies.send(reply).is_err() {
            self.ended = true;
        }
    }

    fn reply(&mut self, record: &SampleRecord) -> Result<Reply> {
        let sampled = record.sampled(&self.request.params, self.output.len())?;
        self.output.push(sampled.token_id);
        let (text, finish_reason) = self.request.transcript.push(sampled.token_id)?;
        let now = Instant::now();
        let time = now - mem::replace(&mut self.since, now);
        let event = Event { token_id: sampled.token_id, text, logprobs: sampled.logprobs, finish_reason };
        Ok(Reply { event, prompt_logprobs: self.prompt_logprobs.take(), time, at: now })
    }
}

#[cfg(test)]
mod tests;
