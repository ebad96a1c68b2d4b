//! How a model is loaded.

use std::{fmt, str::FromStr, thread::available_parallelism};

use super::{check_prompt, transcript::Transcript};
use crate::{
    checkpoint::DType,
    config::FlintConfig,
    cpu::{MAX_THREADS, Precision},
    error::{Error, Result},
    plan::MAX_ROWS,
    sampling::SamplingParams,
};

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The GPU when one is usable, else the CPU.
    Auto,
    /// The first GPU.
    Cuda,
    /// Threads and SIMD.
    Cpu,
    /// The specification, on one thread.
    Reference,
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Cuda => "cuda",
            Self::Cpu => "cpu",
            Self::Reference => "reference",
        })
    }
}

impl FromStr for DeviceChoice {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        let all = [Self::Auto, Self::Cuda, Self::Cpu, Self::Reference];
        all.into_iter()
            .find(|choice| choice.to_string() == name)
            .ok_or_else(|| Error::value("device", format!("{name:?}"), "auto, cuda, cpu or reference"))
    }
}

/// How to load a model.
#[derive(Clone, Copy, Debug)]
pub struct LoadOptions {
    /// What computes.
    pub device: DeviceChoice,
    /// Rounding of activations. A GPU rounds as Flint's own implementation does.
    pub precision: Precision,
    /// Threads of the CPU, at most one a core, which `None` takes: threads without a core of their own keep the others waiting.
    pub threads: Option<usize>,
    /// Sequences that a GPU runs at a time and sets KV memory aside for, 1 to 256; more wait. While at most 8 run, each gives
    /// the bits that it gives alone; while more do, those of one of 9 to 256, which add in another order. The CPU runs each
    /// call by itself.
    pub max_sequences: usize,
    /// Most tokens of a sequence; `None` takes the model's context length, on a GPU cut to what fits its memory.
    pub context_tokens: Option<usize>,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self {
            device: DeviceChoice::Auto,
            precision: Precision::Bfloat16,
            threads: None,
            max_sequences: 8,
            context_tokens: None,
        }
    }
}

impl LoadOptions {
    pub(super) fn check(&self, config: &FlintConfig) -> Result<()> {
        if !(1..=MAX_ROWS).contains(&self.max_sequences) {
            return Err(Error::value("max_sequences", self.max_sequences.to_string(), format!("1 to {MAX_ROWS}")));
        }
        if let Some(context) = self.context_tokens.filter(|n| !(1..=config.context_length).contains(n)) {
            let accepted = format!("1 to the model's {}", config.context_length);
            return Err(Error::value("context_tokens", context.to_string(), accepted));
        }
        if let Some(threads) = self.threads {
            let why = match self.device {
                DeviceChoice::Reference => "None with device reference, which has one thread",
                DeviceChoice::Cuda => "None with device cuda",
                DeviceChoice::Auto | DeviceChoice::Cpu => {
                    let cores = available_parallelism().map_or(MAX_THREADS, usize::from);
                    if (1..=cores).contains(&threads) {
                        return Ok(());
                    }
                    &format!("None or 1 to {cores}, the cores that this process may use")
                }
            };
            return Err(Error::value("threads", threads.to_string(), why));
        }
        Ok(())
    }
}

/// A model of random weights.
#[derive(Clone, Debug)]
pub struct Synthetic {
    /// Dimensions.
    pub config: FlintConfig,
    /// Of the random numbers.
    pub seed: u64,
    /// Of the projections: F32, BF16 or NVFP4.
    pub dtype: DType,
}

impl Synthetic {
    /// What [`super::Engine::generate`] would refuse of a request, before the weights are made.
    pub fn check_request(&self, options: LoadOptions, prompt: &[u32], params: &SamplingParams) -> Result<()> {
        options.check(&self.config)?;
        let context = options.context_tokens.unwrap_or(self.config.context_length);
        check_prompt("prompt", prompt, context, self.config.vocab_size)?;
        params.validate(self.config.vocab_size)?;
        // Which refuses what needs a tokenizer.
        Transcript::new(params, None, context - prompt.len()).map(drop)
    }
}
