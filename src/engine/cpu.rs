//! The engine on the CPU: every call computes on its own thread.

use std::{fs, sync::Arc, time::Instant};

use super::{DeviceChoice, Event, LoadOptions, Origin, PromptProgress, generation::Reply, transcript::Transcript};
use crate::{
    cancel::Cancel,
    config::FlintConfig,
    cpu::{self, BLOCK_TOKENS, CpuModel, Kv, Positions},
    error::{Error, Result},
    sampling::{Sampler, TokenLogprobs},
    weights::{self, Weights},
};

/// Positions whose logits are held at once when a whole text is scored: bounds the memory, `[SCORE_TOKENS, V]` fp32.
const SCORE_TOKENS: usize = 128;

/// The model on the CPU.
pub(super) fn load(
    origin: &Origin,
    config: &FlintConfig,
    options: LoadOptions,
    progress: &mut dyn FnMut(u64, u64),
    cancel: &Cancel,
) -> Result<CpuModel> {
    let weights = match origin {
        Origin::File(checkpoint) => Weights::bind(checkpoint, config.clone(), progress, cancel)?,
        Origin::Made { seed, dtype } => {
            let recipes = weights::recipes(config, *seed, *dtype)?;
            check_memory(recipes.iter().map(|(_, recipe)| recipe.bytes()).sum())?;
            Weights::make(config.clone(), recipes, progress, cancel)?
        }
    };
    let path = if options.device == DeviceChoice::Reference { cpu::Path::Reference } else { cpu::Path::Fast };
    let options = cpu::Options { precision: options.precision, path, threads: options.threads };
    CpuModel::new(Arc::new(weights), options)
}

/// Refuses weights that this machine's free memory does not hold, where the system tells.
fn check_memory(need: u64) -> Result<()> {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let free = line.and_then(|line| line.split_whitespace().next()?.parse::<u64>().ok()).map(|kib| kib << 10);
    match free.filter(|&free| need > free) {
        Some(free) => Err(Error::Unavailable {
            what: "memory for the weights".into(),
            why: format!("they need {:.1} GB, {:.1} GB are free", need as f64 / 1e9, free as f64 / 1e9),
        }),
        None => Ok(()),
    }
}

/// Feeds `tokens` to `kv`; returns the scores of all but the first among `vocab` tokens, and the logits after the last.
pub(super) fn score(
    model: &CpuModel,
    kv: &mut Kv,
    tokens: &[u32],
    vocab: usize,
    top_n: usize,
    progress: &PromptProgress,
    cancel: &Cancel,
) -> Result<(Vec<TokenLogprobs>, Vec<f32>)> {
    let width = model.config().vocab_size;
    let mut scores = Vec::with_capacity(tokens.len().saturating_sub(1));
    let mut last = Vec::new();
    for (chunk, start) in tokens.chunks(SCORE_TOKENS).zip((0..).step_by(SCORE_TOKENS)) {
        let logits = model.forward(kv, chunk, Positions::All, cancel)?;
        for (row, &next) in logits.chunks_exact(width).zip(&tokens[start + 1..]) {
            scores.push(TokenLogprobs::new(&row[..vocab], next, top_n)?);
        }
        last = logits[logits.len() - width..].to_vec();
        progress.add(chunk.len());
    }
    Ok((scores, last))
}

/// A generation whose steps are computed when they are asked for.
pub(super) struct CpuGeneration {
    kv: Kv,
    sampler: Sampler,
    transcript: Transcript,
    vocab: usize,
    /// Tokens that the model has not read yet: the prompt, then the token chosen last.
    pending: Vec<u32>,
    /// Most likely tokens to report for each position of the prompt, if it is to be scored; taken with the prompt.
    prompt_top_n: Option<usize>,
    /// Of the prompt; taken with it.
    progress: Option<PromptProgress>,
}

impl CpuGeneration {
    pub fn new(
        model: &CpuModel,
        sampler: Sampler,
        transcript: Transcript,
        vocab: usize,
        prompt: Vec<u32>,
        prompt_top_n: Option<usize>,
        progress: PromptProgress,
    ) -> Self {
        let kv = model.new_kv();
        Self { kv, sampler, transcript, vocab, pending: prompt, prompt_top_n, progress: Some(progress) }
    }

    /// Computes the next token.
    pub fn step(&mut self, model: &CpuModel, cancel: &Cancel) -> Result<Reply> {
        let start = Instant::now();
        let progress = self.progress.take().unwrap_or_default();
        let (prompt_logprobs, logits) = match self.prompt_top_n.take() {
            Some(top_n) => {
                let (scores, last) = score(model, &mut self.kv, &self.pending, self.vocab, top_n, &progress, cancel)?;
                (Some(scores), last)
            }
            None => (None, self.read(model, &progress, cancel)?),
        };
        let sampled = self.sampler.sample(&logits[..self.vocab])?;
        self.pending = vec![sampled.token_id];
        let (text, finish_reason) = self.transcript.push(sampled.token_id)?;
        let event = Event { token_id: sampled.token_id, text, logprobs: sampled.logprobs, finish_reason };
        let at = Instant::now();
        Ok(Reply { event, prompt_logprobs, time: at - start, at })
    }

    /// Feeds the pending tokens; returns the logits after the last.
    fn read(&mut self, model: &CpuModel, progress: &PromptProgress, cancel: &Cancel) -> Result<Vec<f32>> {
        let mut logits = Vec::new();
        let n_blocks = self.pending.len().div_ceil(BLOCK_TOKENS);
        for (block, tokens) in (1..).zip(self.pending.chunks(BLOCK_TOKENS)) {
            let positions = if block == n_blocks { Positions::Last } else { Positions::None };
            logits = model.forward(&mut self.kv, tokens, positions, cancel)?;
            progress.add(tokens.len());
        }
        Ok(logits)
    }

    /// Bytes of KV cache held now.
    pub fn kv_bytes(&self) -> usize {
        self.kv.bytes()
    }
}
