//! One running generation.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc::{Receiver, RecvTimeoutError, channel},
    },
    time::{Duration, Instant},
};

use super::{
    Backend, Engine, Event,
    cpu::CpuGeneration,
    scheduler::{Backlog, Request},
    transcript::Transcript,
};
use crate::{
    cancel::Cancel,
    error::{Error, Result},
    sampling::{Sampler, SamplingParams, TokenLogprobs, fresh_seed},
};

/// How often a generation that waits for the GPU looks whether it was cancelled.
const SLICE: Duration = Duration::from_millis(20);

/// One step of a generation, by whatever computed it.
pub(super) struct Reply {
    pub event: Event,
    /// With the first token, if they were asked for.
    pub prompt_logprobs: Option<Vec<TokenLogprobs>>,
    /// What the token took, without the time in a queue.
    pub time: Duration,
    /// When it was there.
    pub at: Instant,
}

/// How many tokens of prompts were read; every copy counts the same.
#[derive(Clone, Debug, Default)]
pub struct PromptProgress(Arc<AtomicUsize>);

impl PromptProgress {
    /// Tokens read so far.
    pub fn tokens(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn add(&self, tokens: usize) {
        self.0.fetch_add(tokens, Ordering::Relaxed);
    }
}

/// One running generation: an iterator of [`Event`]s. Dropping it ends the work. After an error it is over.
pub struct Generation {
    engine: Arc<Engine>,
    /// Its own, so that dropping it cancels nothing else.
    cancel: Cancel,
    source: Source,
    seed: u64,
    over: bool,
    prompt_logprobs: Option<Vec<TokenLogprobs>>,
    first_token_at: Option<Instant>,
    prefill_time: Duration,
    decode_time: Duration,
}

enum Source {
    Cpu(Box<CpuGeneration>),
    Cuda { replies: Receiver<Result<Reply>>, backlog: Arc<Backlog> },
}

impl Generation {
    pub(super) fn start(
        engine: &Arc<Engine>,
        prompt: Vec<u32>,
        params: &SamplingParams,
        progress: &PromptProgress,
        cancel: &Cancel,
    ) -> Result<Self> {
        engine.check_prompt("prompt", &prompt)?;
        let vocab = engine.vocab_tokens();
        params.validate(vocab)?;
        let room = engine.context_tokens() - prompt.len();
        let transcript = Transcript::new(params, engine.tokenizer.as_ref(), room)?;
        let cancel = cancel.child();
        let (source, seed) = match &engine.backend {
            Backend::Cpu(model) => {
                let sampler = Sampler::new(params, &prompt, engine.end_token_ids(), vocab)?;
                let seed = sampler.seed();
                let (top_n, progress) = (params.prompt_logprobs, progress.clone());
                let steps = CpuGeneration::new(model, sampler, transcript, vocab, prompt, top_n, progress);
                (Source::Cpu(Box::new(steps)), seed)
            }
            Backend::Cuda(cuda) => {
                let (sender, replies) = channel();
                let (backlog, seed) = (Arc::new(Backlog::default()), params.seed.unwrap_or_else(fresh_seed));
                cuda.generate(Request {
                    prompt,
                    params: params.clone(),
                    seed,
                    end_token_ids: engine.end_token_ids().to_vec(),
                    transcript,
                    progress: progress.clone(),
                    cancel: cancel.clone(),
                    replies: sender,
                    backlog: Arc::clone(&backlog),
                })?;
                (Source::Cuda { replies, backlog }, seed)
            }
        };
        Ok(Self {
            engine: Arc::clone(engine),
            cancel,
            source,
            seed,
            over: false,
            prompt_logprobs: None,
            first_token_at: None,
            prefill_time: Duration::ZERO,
            decode_time: Duration::ZERO,
        })
    }

    /// Lets it run ahead of its reader by about so many events and no more; without this, to its end. On the CPU it never
    /// runs ahead.
    pub fn limit_ahead(&self, events: usize) {
        if let Source::Cuda { backlog, .. } = &self.source {
            backlog.limit(events);
        }
    }

    /// The seed in use.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Scores of the prompt's tokens after the first, once the first event is out, if they were asked for.
    pub fn prompt_logprobs(&self) -> Option<&[TokenLogprobs]> {
        self.prompt_logprobs.as_deref()
    }

    /// When the first token was there, once its event is out.
    pub fn first_token_at(&self) -> Option<Instant> {
        self.first_token_at
    }

    /// Time from the start of the prompt to the first token; waiting for other generations is not part of it.
    pub fn prefill_time(&self) -> Duration {
        self.prefill_time
    }

    /// Time spent on all later tokens.
    pub fn decode_time(&self) -> Duration {
        self.decode_time
    }

    /// Bytes of KV cache held now by this generation alone; 0 on a GPU, where all share what was set aside.
    pub fn kv_bytes(&self) -> usize {
        match &self.source {
            Source::Cpu(steps) => steps.kv_bytes(),
            Source::Cuda { .. } => 0,
        }
    }

    fn step(&mut self) -> Result<Event> {
        self.cancel.check()?;
        let reply = match (&mut self.source, &self.engine.backend) {
            (Source::Cpu(steps), Backend::Cpu(model)) => steps.step(model, &self.cancel)?,
            (Source::Cuda { replies, backlog }, _) => {
                let reply = wait(replies, &self.cancel)??;
                backlog.take();
                reply
            }
            (Source::Cpu(_), Backend::Cuda(_)) => unreachable!("a generation is of its engine's backend"),
        };
        if self.first_token_at.is_some() {
            self.decode_time += reply.time;
        } else {
            self.first_token_at = Some(reply.at);
            (self.prefill_time, self.prompt_logprobs) = (reply.time, reply.prompt_logprobs);
        }
        self.over = reply.event.finish_reason.is_some();
        Ok(reply.event)
    }
}

/// What another thread sends next.
pub(super) fn wait<T>(receiver: &Receiver<T>, cancel: &Cancel) -> Result<T> {
    loop {
        match receiver.recv_timeout(SLICE) {
            Ok(value) => return Ok(value),
            Err(RecvTimeoutError::Timeout) => cancel.check()?,
            Err(RecvTimeoutError::Disconnected) => {
                cancel.check()?;
                let why = "its thread has ended".into();
                return Err(Error::Device { what: "waiting for the GPU".into(), why });
            }
        }
    }
}

impl Iterator for Generation {
    type Item = Result<Event>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.over {
            return None;
        }
        let event = self.step();
        self.over |= event.is_err();
        Some(event)
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.cancel.cancel();
    }
}
