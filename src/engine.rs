//! A loaded Flint and what it does for a caller: generate token by token, score text, return logits. The public Rust
//! API; Python and the command line convert to and from it.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    cancel::Cancel,
    checkpoint::Checkpoint,
    config::FlintConfig,
    cpu::{self, CpuModel, Kv, Positions, Precision},
    error::{Error, Result},
    sampling::{Sampler, SamplingParams, TokenLogprobs},
    stop::{Finish, StopMatcher, StopRules},
    tokenizer::{Decoder, Tokenizer},
    weights::Weights,
};

/// Positions whose logits are held at once when a whole text is scored: bounds the memory, `[SCORE_TOKENS, V]` fp32.
const SCORE_TOKENS: usize = 128;

/// How to load a checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct LoadOptions {
    /// Which code computes.
    pub path: cpu::Path,
    /// Rounding of activations.
    pub precision: Precision,
    /// Threads; `None` takes one a core.
    pub threads: Option<usize>,
}

/// Bytes of memory, by what holds them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Weights: mapped from the file, or held where the file's form had to be rearranged.
    pub weights_bytes: usize,
    /// KV cache of one sequence at the full context length.
    pub kv_max_bytes: usize,
    /// The most that one forward call holds beside weights and KV.
    pub workspace_bytes: usize,
}

/// Why a generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// An end token, a stop token or a stop string.
    Stop,
    /// `max_tokens` or the context length was reached.
    Length,
}

/// One generated token.
#[derive(Clone, Debug)]
pub struct Event {
    /// The token.
    pub token_id: u32,
    /// The text that became certain with it: whole characters, nothing that may still belong to a stop string. May be empty.
    pub text: String,
    /// If the request asked for log-probabilities.
    pub logprobs: Option<TokenLogprobs>,
    /// Set on the last event.
    pub finish_reason: Option<FinishReason>,
}

/// A checkpoint bound to a backend. Shared by threads: each generation owns its own state.
pub struct Engine {
    path: PathBuf,
    model: CpuModel,
    tokenizer: Arc<Tokenizer>,
    load_time: Duration,
}

impl Engine {
    /// Opens `path` (a GGUF file or a safetensors folder), checks it whole and prepares the backend. `progress` gets
    /// (bytes checked, bytes in all) now and then, from the calling thread.
    pub fn load(
        path: &Path,
        options: LoadOptions,
        progress: &mut dyn FnMut(u64, u64),
        cancel: &Cancel,
    ) -> Result<Arc<Self>> {
        let start = Instant::now();
        let checkpoint = Checkpoint::open(path)?;
        let config = FlintConfig::from_checkpoint(&checkpoint)?;
        let tokenizer = Arc::new(Tokenizer::from_checkpoint(&checkpoint)?);
        if tokenizer.vocab_size() > config.vocab_size {
            return Err(Error::format(
                path,
                "tokenizer",
                format!("at most {} tokens, the rows of the embedding", config.vocab_size),
                format!("{} tokens", tokenizer.vocab_size()),
            ));
        }
        let weights = Weights::bind(&checkpoint, config, progress, cancel)?;
        let model = CpuModel::new(
            Arc::new(weights),
            cpu::Options { precision: options.precision, path: options.path, threads: options.threads },
        )?;
        Ok(Arc::new(Self { path: path.to_path_buf(), model, tokenizer, load_time: start.elapsed() }))
    }

    /// Where the checkpoint was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The dimensions.
    pub fn config(&self) -> &FlintConfig {
        self.model.config()
    }

    /// The checkpoint's tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// From opening the file to ready.
    pub fn load_time(&self) -> Duration {
        self.load_time
    }

    /// What is held, and what a full sequence would add.
    pub fn memory(&self) -> Memory {
        Memory {
            weights_bytes: self.model.weights().bytes(),
            kv_max_bytes: self.model.kv_bytes_at(self.config().context_length),
            workspace_bytes: self.model.workspace_bytes(),
        }
    }

    /// Starts to generate after `prompt`. Nothing is computed before the first `next`.
    ///
    /// Errors: [`Error::Value`] naming the field of `params`, or the prompt when it is empty, holds an unknown id, or
    /// leaves no room for a token.
    pub fn generate(self: &Arc<Self>, prompt: Vec<u32>, params: &SamplingParams, cancel: Cancel) -> Result<Generation> {
        self.check_tokens("prompt", &prompt)?;
        let sampler = Sampler::new(params, &prompt, self.tokenizer.end_token_ids(), self.tokenizer.vocab_size())?;
        // The last token is never fed back, so a sequence may end one token past the last position.
        let room = self.config().context_length + 1 - prompt.len();
        Ok(Generation {
            rules: StopRules::new(params, self.tokenizer.end_token_ids(), room),
            kv: self.model.new_kv(),
            decoder: Decoder::new(Arc::clone(&self.tokenizer), false),
            stop: StopMatcher::new(&params.stop, params.include_stop_str_in_output),
            sampler,
            prompt_top_n: params.prompt_logprobs,
            pending: prompt,
            state: State::Prefill,
            generated: 0,
            prompt_logprobs: None,
            prefill_time: Duration::ZERO,
            decode_time: Duration::ZERO,
            cancel,
            engine: Arc::clone(self),
        })
    }

    /// Logits after each of `tokens`, `[T, V]` in fp32.
    pub fn logits(&self, tokens: &[u32], cancel: &Cancel) -> Result<Vec<f32>> {
        self.check_tokens("token_ids", tokens)?;
        self.model.forward(&mut self.model.new_kv(), tokens, Positions::All, cancel)
    }

    /// Log-probabilities of each token after the first, given those before it: `T - 1` entries.
    pub fn score(&self, tokens: &[u32], top_n: usize, cancel: &Cancel) -> Result<Vec<TokenLogprobs>> {
        self.check_tokens("token_ids", tokens)?;
        let mut kv = self.model.new_kv();
        self.score_into(&mut kv, tokens, top_n, cancel).map(|(scores, _)| scores)
    }

    /// Feeds `tokens` to `kv`; returns the scores of all but the first, and the logits after the last.
    fn score_into(
        &self,
        kv: &mut Kv,
        tokens: &[u32],
        top_n: usize,
        cancel: &Cancel,
    ) -> Result<(Vec<TokenLogprobs>, Vec<f32>)> {
        let vocab = self.config().vocab_size;
        let mut scores = Vec::with_capacity(tokens.len().saturating_sub(1));
        let mut last = Vec::new();
        for (chunk, start) in tokens.chunks(SCORE_TOKENS).zip((0..).step_by(SCORE_TOKENS)) {
            let logits = self.model.forward(kv, chunk, Positions::All, cancel)?;
            for (row, &next) in logits.chunks_exact(vocab).zip(&tokens[start + 1..]) {
                scores.push(TokenLogprobs::new(&row[..self.tokenizer.vocab_size()], next, top_n)?);
            }
            last = logits[logits.len() - vocab..].to_vec();
        }
        Ok((scores, last))
    }

    /// [`Error::Value`] naming `field` unless `tokens` can be read: not empty, no more than the context, all known.
    pub fn check_tokens(&self, field: &str, tokens: &[u32]) -> Result<()> {
        let context = self.config().context_length;
        if tokens.is_empty() || tokens.len() > context {
            let accepted = format!("1 to {context} tokens");
            return Err(Error::value(field, format!("{} tokens", tokens.len()), accepted));
        }
        let vocab = self.tokenizer.vocab_size();
        match tokens.iter().position(|&id| id as usize >= vocab) {
            Some(at) => {
                Err(Error::value(format!("{field}[{at}]"), tokens[at].to_string(), format!("a token id below {vocab}")))
            }
            None => Ok(()),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Prefill,
    Decode,
    Done,
}

/// One running generation: an iterator of [`Event`]s. Dropping it ends the work. After an error it is over.
pub struct Generation {
    engine: Arc<Engine>,
    cancel: Cancel,
    kv: Kv,
    sampler: Sampler,
    decoder: Decoder<Arc<Tokenizer>>,
    rules: StopRules,
    stop: StopMatcher,
    /// Most likely tokens to report for each position of the prompt, if it is to be scored.
    prompt_top_n: Option<usize>,
    /// Tokens that the model has not read yet: the prompt, then the token chosen last.
    pending: Vec<u32>,
    state: State,
    generated: usize,
    prompt_logprobs: Option<Vec<TokenLogprobs>>,
    prefill_time: Duration,
    decode_time: Duration,
}

impl Generation {
    /// The seed in use.
    pub fn seed(&self) -> u64 {
        self.sampler.seed()
    }

    /// Scores of the prompt's tokens after the first, once the first event is out, if they were asked for.
    pub fn prompt_logprobs(&self) -> Option<&[TokenLogprobs]> {
        self.prompt_logprobs.as_deref()
    }

    /// Time from the first `next` to the first token.
    pub fn prefill_time(&self) -> Duration {
        self.prefill_time
    }

    /// Time spent on all later tokens.
    pub fn decode_time(&self) -> Duration {
        self.decode_time
    }

    /// Bytes of KV cache held now.
    pub fn kv_bytes(&self) -> usize {
        self.kv.bytes()
    }

    fn step(&mut self) -> Result<Event> {
        let start = Instant::now();
        let logits = self.read_pending()?;
        let sampled = self.sampler.sample(&logits[..self.engine.tokenizer.vocab_size()])?;
        self.pending = vec![sampled.token_id];
        self.generated += 1;
        let (text, finish_reason) = self.advance_text(sampled.token_id)?;
        match self.state {
            State::Prefill => self.prefill_time = start.elapsed(),
            _ => self.decode_time += start.elapsed(),
        }
        self.state = if finish_reason.is_some() { State::Done } else { State::Decode };
        Ok(Event { token_id: sampled.token_id, text, logprobs: sampled.logprobs, finish_reason })
    }

    /// Runs the model over the pending tokens; returns the logits after the last.
    fn read_pending(&mut self) -> Result<Vec<f32>> {
        let engine = &self.engine;
        match self.prompt_top_n {
            Some(top_n) if self.state == State::Prefill => {
                let (scores, last) = engine.score_into(&mut self.kv, &self.pending, top_n, &self.cancel)?;
                self.prompt_logprobs = Some(scores);
                Ok(last)
            }
            _ => engine.model.forward(&mut self.kv, &self.pending, Positions::Last, &self.cancel),
        }
    }

    /// The text that `token_id` makes certain, and whether it is the last.
    fn advance_text(&mut self, token_id: u32) -> Result<(String, Option<FinishReason>)> {
        let finish = self.rules.after(token_id, self.generated);
        let armed = self.rules.armed(self.generated);
        // A token that ends the text is no part of it.
        let mut piece = match finish {
            Some(Finish::EndToken(_) | Finish::StopToken(_)) => String::new(),
            _ => self.decoder.push(token_id)?,
        };
        if finish.is_some() {
            piece.push_str(&self.decoder.finish());
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

impl Iterator for Generation {
    type Item = Result<Event>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.state == State::Done {
            return None;
        }
        let event = self.cancel.check().and_then(|()| self.step());
        if event.is_err() {
            self.state = State::Done;
        }
        Some(event)
    }
}
