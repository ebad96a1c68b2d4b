//! A loaded Flint and what it does for a caller: generate token by token, score text, return logits. The public Rust
//! API; Python and the command line convert to and from it.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(not(feature = "cuda"))]
#[path = "engine/no_cuda.rs"]
mod cuda;
mod generation;
mod options;
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "it drives a GPU"))]
mod scheduler;
mod transcript;

pub use self::{
    cuda::DeviceLogits,
    generation::{Generation, PromptProgress},
    options::{DeviceChoice, LoadOptions, Synthetic},
};

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use self::cuda::Cuda;
use crate::{
    cancel::Cancel,
    checkpoint::{Checkpoint, DType},
    config::FlintConfig,
    cpu::{CpuModel, Positions},
    error::{Error, Result},
    sampling::{SamplingParams, TokenLogprobs},
    tokenizer::Tokenizer,
};

/// Bytes of memory, by what holds them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Memory {
    /// Weights: mapped from the file, or held where the file's form had to be rearranged; on a GPU as packed there.
    pub weights_bytes: usize,
    /// KV cache of one sequence at the full context length; on a GPU of all sequences, set aside when it loads.
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

/// A Flint bound to a backend. Shared by threads: each generation owns its own state.
pub struct Engine {
    path: Option<PathBuf>,
    config: FlintConfig,
    tokenizer: Option<Arc<Tokenizer>>,
    backend: Backend,
    context_tokens: usize,
    device: String,
    load_time: Duration,
}

enum Backend {
    Cpu(CpuModel),
    Cuda(Cuda),
}

/// Where weights come from.
#[derive(Clone)]
enum Origin {
    File(Arc<Checkpoint>),
    Made { seed: u64, dtype: DType },
}

impl Engine {
    /// Opens `path` (a GGUF file or a safetensors folder), checks it whole and prepares the backend. `progress` gets
    /// (bytes done, bytes in all) now and then, from the calling thread.
    ///
    /// Errors: [`Error::Unavailable`] and [`Error::Device`] when [`DeviceChoice::Cuda`] was asked for and no GPU can do it.
    pub fn load(
        path: &Path,
        options: LoadOptions,
        progress: &mut dyn FnMut(u64, u64),
        cancel: &Cancel,
    ) -> Result<Arc<Self>> {
        let start = Instant::now();
        let checkpoint = Arc::new(Checkpoint::open(path)?);
        let config = FlintConfig::from_checkpoint(&checkpoint)?;
        let tokenizer = Tokenizer::from_checkpoint(&checkpoint)?;
        if tokenizer.vocab_size() > config.vocab_size {
            return Err(Error::format(
                path,
                "tokenizer",
                format!("at most {} tokens, the rows of the embedding", config.vocab_size),
                format!("{} tokens", tokenizer.vocab_size()),
            ));
        }
        let mut engine = Self::new(&Origin::File(checkpoint), config, Some(tokenizer), options, progress, cancel)?;
        engine.path = Some(path.to_path_buf());
        engine.load_time = start.elapsed();
        Ok(Arc::new(engine))
    }

    /// Random weights of any size, made where they are to be used: for benches and tests of speed. It has no tokenizer.
    ///
    /// Errors: as [`Self::load`]; [`Error::Unavailable`] when this machine's memory does not hold them.
    pub fn synthetic(
        model: Synthetic,
        options: LoadOptions,
        progress: &mut dyn FnMut(u64, u64),
        cancel: &Cancel,
    ) -> Result<Arc<Self>> {
        let start = Instant::now();
        let origin = Origin::Made { seed: model.seed, dtype: model.dtype };
        let mut engine = Self::new(&origin, model.config, None, options, progress, cancel)?;
        engine.load_time = start.elapsed();
        Ok(Arc::new(engine))
    }

    fn new(
        origin: &Origin,
        config: FlintConfig,
        tokenizer: Option<Tokenizer>,
        options: LoadOptions,
        progress: &mut dyn FnMut(u64, u64),
        cancel: &Cancel,
    ) -> Result<Self> {
        options.check(&config)?;
        let vocab_tokens = tokenizer.as_ref().map_or(config.vocab_size, Tokenizer::vocab_size);
        let (backend, device) = match options.device {
            DeviceChoice::Cpu | DeviceChoice::Reference => {
                let model = cpu::load(origin, &config, options, progress, cancel)?;
                (Backend::Cpu(model), format!("device {}", options.device))
            }
            DeviceChoice::Auto | DeviceChoice::Cuda => {
                match Cuda::start(origin, &config, vocab_tokens, options, progress, cancel) {
                    Ok(cuda) => {
                        let device = format!("device cuda: {}", cuda.facts().text);
                        (Backend::Cuda(cuda), device)
                    }
                    // Whatever keeps a GPU from being used, and nothing that is wrong with the request or the file.
                    Err(why @ (Error::Unavailable { .. } | Error::Device { .. }))
                        if options.device == DeviceChoice::Auto =>
                    {
                        let model = cpu::load(origin, &config, options, progress, cancel)?;
                        (Backend::Cpu(model), format!("device cpu: {why}"))
                    }
                    Err(error) => return Err(error),
                }
            }
        };
        let context_tokens = match &backend {
            Backend::Cuda(cuda) => cuda.facts().context_tokens,
            Backend::Cpu(_) => options.context_tokens.unwrap_or(config.context_length),
        };
        let tokenizer = tokenizer.map(Arc::new);
        Ok(Self { path: None, config, tokenizer, backend, context_tokens, device, load_time: Duration::ZERO })
    }

    /// Where the checkpoint was read from; none for [`Self::synthetic`].
    pub fn path(&self) -> Option<&Path> {
        self.path.as_deref()
    }

    /// The dimensions.
    pub fn config(&self) -> &FlintConfig {
        &self.config
    }

    /// Most tokens of a sequence: the model's context length, or less by the request or by the GPU's memory.
    pub fn context_tokens(&self) -> usize {
        self.context_tokens
    }

    /// What computes, and for a choice that was left to us, why: one line for a person.
    pub fn device(&self) -> &str {
        &self.device
    }

    /// Whether several generations of this engine run in one step, so that it pays to start them together.
    pub fn runs_together(&self) -> bool {
        matches!(self.backend, Backend::Cuda(_))
    }

    /// The checkpoint's tokenizer. Errors: [`Error::Unavailable`] for [`Self::synthetic`], which has none.
    pub fn tokenizer(&self) -> Result<&Tokenizer> {
        self.tokenizer.as_deref().ok_or_else(|| Error::Unavailable {
            what: "text".into(),
            why: "a synthetic model has no tokenizer; give and take token ids".into(),
        })
    }

    /// Tokens that a prompt may hold and an output will.
    pub fn vocab_tokens(&self) -> usize {
        self.tokenizer.as_ref().map_or(self.config.vocab_size, |tokenizer| tokenizer.vocab_size())
    }

    /// Ids that end a turn, ascending.
    pub fn end_token_ids(&self) -> &[u32] {
        self.tokenizer.as_ref().map_or(&[], |tokenizer| tokenizer.end_token_ids())
    }

    /// From opening the file to ready.
    pub fn load_time(&self) -> Duration {
        self.load_time
    }

    /// What is held, and what a full sequence would add.
    pub fn memory(&self) -> Memory {
        match &self.backend {
            Backend::Cpu(model) => Memory {
                weights_bytes: model.weights().bytes(),
                kv_max_bytes: model.kv_bytes_at(self.context_tokens),
                workspace_bytes: model.workspace_bytes(),
            },
            Backend::Cuda(cuda) => cuda.facts().memory,
        }
    }

    /// Starts to generate after `prompt`. On the CPU nothing is computed before the first `next`; on a GPU the request goes
    /// into its queue at once. `progress` counts the prompt's tokens as they are read; several generations may share one.
    ///
    /// Errors: [`Error::Value`] naming the field of `params`, or the prompt when it is empty, holds an unknown id, or
    /// leaves no room for a token.
    pub fn generate(
        self: &Arc<Self>,
        prompt: Vec<u32>,
        params: &SamplingParams,
        progress: &PromptProgress,
        cancel: &Cancel,
    ) -> Result<Generation> {
        Generation::start(self, prompt, params, progress, cancel)
    }

    /// Logits after each of `tokens`, `[T, V]` in fp32.
    pub fn logits(&self, tokens: &[u32], cancel: &Cancel) -> Result<Vec<f32>> {
        self.check_tokens("token_ids", tokens)?;
        match &self.backend {
            Backend::Cpu(model) => model.forward(&mut model.new_kv(), tokens, Positions::All, cancel),
            Backend::Cuda(cuda) => cuda.logits(tokens, cancel),
        }
    }

    /// The same in the GPU's memory. Errors: [`Error::Value`] without a GPU.
    pub fn logits_on_device(&self, tokens: &[u32], cancel: &Cancel) -> Result<DeviceLogits> {
        self.check_tokens("token_ids", tokens)?;
        match &self.backend {
            Backend::Cpu(_) => Err(Error::value("on_device", "True on the CPU", "False, or device cuda")),
            Backend::Cuda(cuda) => cuda.logits_on_device(tokens, cancel),
        }
    }

    /// Log-probabilities of each token after the first, given those before it: `T - 1` entries.
    pub fn score(&self, tokens: &[u32], top_n: usize, cancel: &Cancel) -> Result<Vec<TokenLogprobs>> {
        self.check_tokens("token_ids", tokens)?;
        match &self.backend {
            Backend::Cpu(model) => {
                let (kv, vocab) = (&mut model.new_kv(), self.vocab_tokens());
                cpu::score(model, kv, tokens, vocab, top_n, &PromptProgress::default(), cancel).map(|(all, _)| all)
            }
            Backend::Cuda(cuda) => cuda.score(tokens, top_n, cancel),
        }
    }

    /// [`Error::Value`] naming `field` unless a token can be generated after `tokens`: not empty, fewer than the context,
    /// all known.
    pub fn check_prompt(&self, field: &str, tokens: &[u32]) -> Result<()> {
        check_prompt(field, tokens, self.context_tokens, self.vocab_tokens())
    }

    /// [`Error::Value`] naming `field` unless `tokens` can be read: not empty, no more than the context, all known.
    fn check_tokens(&self, field: &str, tokens: &[u32]) -> Result<()> {
        let context = self.context_tokens;
        if tokens.len() > context {
            let accepted = format!("1 to {context} tokens, the context");
            return Err(Error::value(field, format!("{} tokens", tokens.len()), accepted));
        }
        check_known(field, tokens, self.vocab_tokens())
    }
}

/// [`Engine::check_prompt`] for so many tokens of context and vocabulary.
fn check_prompt(field: &str, tokens: &[u32], context: usize, vocab: usize) -> Result<()> {
    if tokens.len() >= context {
        let accepted = format!("at most {} tokens, to leave room for one in a context of {context}", context - 1);
        return Err(Error::value(field, format!("{} tokens", tokens.len()), accepted));
    }
    check_known(field, tokens, vocab)
}

/// [`Error::Value`] naming `field` for no tokens, or its entry that is none of `vocab`.
fn check_known(field: &str, tokens: &[u32], vocab: usize) -> Result<()> {
    if tokens.is_empty() {
        return Err(Error::value(field, "0 tokens", "1 or more tokens"));
    }
    match tokens.iter().position(|&id| id as usize >= vocab) {
        Some(at) => {
            Err(Error::value(format!("{field}[{at}]"), tokens[at].to_string(), format!("a token id below {vocab}")))
        }
        None => Ok(()),
    }
}
