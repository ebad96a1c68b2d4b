//! The engine on a GPU: one thread loads the model and owns it, everyone else sends it work.

use std::{
    process,
    sync::{
        Arc,
        mpsc::{self, Receiver, Sender},
    },
    thread::{self, JoinHandle},
};

use super::{
    LoadOptions, Memory, Origin,
    generation::wait,
    scheduler::{
        Request, Scheduler, Sizes, Steps, Work,
        job::{Begun, text_job},
        score::Scorer,
    },
};
use crate::{
    cancel::Cancel,
    config::FlintConfig,
    cpu::Precision,
    error::{Error, Result},
    gpu::{Device, DeviceMemory, GpuModel, RunOptions, SequenceId, Source},
    kernels::{SampleRecord, SampleStart},
    plan::{self, CHUNK_TOKENS, Limits, Types},
    sampling::TokenLogprobs,
    weights::Weights,
};

/// GPU memory that is left free beside weights, KV cache and workspace: for kernels, graphs and the driver's own.
const RESERVE_BYTES: u64 = 512 << 20;
/// A context cut to less than this is of no use: the GPU counts as too small.
const LEAST_CONTEXT: usize = 1024;

/// The thread that owns a GPU.
pub(super) struct Cuda {
    /// Dropped to end it.
    work: Option<Sender<Work<GpuModel>>>,
    thread: Option<JoinHandle<()>>,
    /// The process that has the thread: a fork of it does not.
    process: u32,
    facts: Facts,
}

/// What it loaded.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    /// For a person.
    pub text: String,
    pub context_tokens: usize,
    pub memory: Memory,
    sizes: Sizes,
    scorer: Arc<Scorer>,
}

/// Logits in the GPU's memory, complete: no stream has to wait for them.
#[derive(Debug)]
pub struct DeviceLogits {
    memory: DeviceMemory,
    shape: [usize; 2],
}

/// What the thread says while it loads.
enum News {
    Progress(u64, u64),
    Ready(Facts),
    Failed(Error),
}

/// What is to be loaded.
struct Order {
    origin: Origin,
    config: FlintConfig,
    vocab_tokens: usize,
    options: LoadOptions,
}

impl Cuda {
    /// Starts the thread and waits until the model is loaded. `progress` is called from this thread: where a file is
    /// checked first, that is the first half.
    pub fn start(
        origin: &Origin,
        config: &FlintConfig,
        vocab_tokens: usize,
        options: LoadOptions,
        progress: &mut dyn FnMut(u64, u64),
        cancel: &Cancel,
    ) -> Result<Self> {
        if options.precision == Precision::Float32 {
            let why = "its activations are bfloat16, and float32 was asked for".into();
            return Err(Error::Unavailable { what: "device cuda".into(), why });
        }
        let (work, inbox) = mpsc::channel();
        let (sender, news) = mpsc::channel();
        let order = Order { origin: origin.clone(), config: config.clone(), vocab_tokens, options };
        let cancel = cancel.clone();
        let thread = thread::Builder::new()
            .name("flint-gpu".into())
            .spawn(move || serve(order, inbox, &sender, &cancel))
            .map_err(|why| Error::Unavailable { what: "a thread for the GPU".into(), why: why.to_string() })?;
        for message in news {
            match message {
                News::Progress(done, total) => progress(done, total),
                News::Failed(error) => return Err(error),
                News::Ready(facts) => {
                    return Ok(Self { work: Some(work), thread: Some(thread), process: process::id(), facts });
                }
            }
        }
        Err(ended())
    }

    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Queues a generation.
    pub fn generate(&self, request: Request) -> Result<()> {
        self.send(Work::Generate(Box::new(request)))
    }

    /// As [`super::Engine::logits`].
    pub fn logits(&self, tokens: &[u32], cancel: &Cancel) -> Result<Vec<f32>> {
        let values = tokens.len() * self.facts.sizes.logits;
        let mut logits = Vec::new();
        logits.try_reserve_exact(values).map_err(|why| Error::Unavailable {
            what: format!("memory for {} bytes of logits", values * size_of::<f32>()),
            why: why.to_string(),
        })?;
        let (text, most) = (tokens.to_vec(), self.facts.sizes.host_part_tokens());
        let job =
            text_job(tokens.len(), most, logits, cancel, move |model: &mut GpuModel, id, part, logits, cancel| {
                let mut sink = |rows: &[f32]| {
                    logits.extend_from_slice(rows);
                    Ok(())
                };
                model.prompt_logits(id, &text[part], &mut sink, cancel)
            });
        self.run(job, cancel)
    }

    /// As [`super::Engine::logits_on_device`].
    pub fn logits_on_device(&self, tokens: &[u32], cancel: &Cancel) -> Result<DeviceLogits> {
        let shape = [tokens.len(), self.facts.sizes.logits];
        let (text, most) = (tokens.to_vec(), self.facts.sizes.part_tokens);
        let job = text_job(tokens.len(), most, None, cancel, move |model: &mut GpuModel, id, part, memory, cancel| {
            let memory = match memory {
                Some(memory) => memory,
                none => {
                    let bytes = shape[0] * shape[1] * size_of::<f32>();
                    none.insert(model.device().alloc("logits", bytes)?.into_shared()?)
                }
            };
            model.prompt_logits_into(id, &text[part.clone()], memory, part.start, cancel)
        });
        let memory = self.run(job, cancel)?;
        Ok(DeviceLogits { memory: memory.expect("the first part made it"), shape })
    }

    /// As [`super::Engine::score`].
    pub fn score(&self, tokens: &[u32], top_n: usize, cancel: &Cancel) -> Result<Vec<TokenLogprobs>> {
        self.run(Arc::clone(&self.facts.scorer).job(tokens, top_n, cancel), cancel)
    }

    /// Has the thread do a job, and waits for its result.
    fn run<T>(&self, (job, results): Begun<GpuModel, T>, cancel: &Cancel) -> Result<T> {
        self.send(Work::Job(job))?;
        wait(&results, cancel)?
    }

    fn send(&self, work: Work<GpuModel>) -> Result<()> {
        self.work.as_ref().ok_or_else(ended)?.send(work).map_err(|_| ended())
    }
}

impl Drop for Cuda {
    /// Waits until the memory is free.
    fn drop(&mut self) {
        self.work = None;
        if let Some(thread) = self.thread.take()
            && self.process == process::id()
        {
            // A panic in it was printed, and there is nobody to hand it to.
            let _ = thread.join();
        }
    }
}

fn ended() -> Error {
    Error::Device { what: "using the GPU".into(), why: "its thread has ended".into() }
}

impl DeviceLogits {
    /// Tokens, and logits of each.
    pub fn shape(&self) -> [usize; 2] {
        self.shape
    }

    /// Where they lie, row by row.
    pub fn address(&self) -> u64 {
        self.memory.address()
    }
}

/// The thread.
fn serve(order: Order, inbox: Receiver<Work<GpuModel>>, news: &Sender<News>, cancel: &Cancel) {
    // Nobody may be there to hear any of it.
    match load(order, news, cancel) {
        Ok((model, facts)) => {
            let (sizes, scorer) = (facts.sizes, Arc::clone(&facts.scorer));
            if news.send(News::Ready(facts)).is_ok() {
                Scheduler::new(model, inbox, sizes, scorer).run();
            }
        }
        Err(error) => _ = news.send(News::Failed(error)),
    }
}

fn load(order: Order, news: &Sender<News>, cancel: &Cancel) -> Result<(GpuModel, Facts)> {
    let Order { origin, config, vocab_tokens, options } = order;
    let device = Device::open()?;
    let (free, _) = device.memory()?;
    let types = match &origin {
        Origin::File(checkpoint) => Types::of_checkpoint(checkpoint, &config)?,
        Origin::Made { dtype, .. } => Types::of_synthetic(&config, *dtype)?,
    };
    let full = options.context_tokens.unwrap_or(config.context_length);
    let wanted =
        Limits { sequences: options.max_sequences, context_tokens: full, vocab_tokens, chunk_tokens: CHUNK_TOKENS };
    // What was asked for is not cut.
    let least = options.context_tokens.unwrap_or(LEAST_CONTEXT.min(full));
    let limits = plan::fit(&config, &types, wanted, least, device.card()?, free.saturating_sub(RESERVE_BYTES))?;

    let report = |offset: u64, parts: u64| {
        move |done: u64, total: u64| _ = news.send(News::Progress(offset * total + done, parts * total))
    };
    let run = RunOptions::default();
    let model = match &origin {
        Origin::File(checkpoint) => {
            let weights = Weights::bind(checkpoint, config.clone(), &mut report(0, 2), cancel)?;
            GpuModel::load(Source::Weights(&weights), limits, run, &mut report(1, 2), cancel)?
        }
        Origin::Made { seed, dtype } => {
            let source = Source::Synthetic { config: &config, seed: *seed, dtype: *dtype };
            GpuModel::load(source, limits, run, &mut report(0, 1), cancel)?
        }
    };
    let memory = model.plan().memory();
    let cut = if limits.context_tokens < full {
        format!(" (the model's {full} do not fit the {:.1} GB that are free)", free as f64 / 1e9)
    } else {
        String::new()
    };
    let sizes = Sizes {
        sequences: limits.sequences,
        vocab_tokens,
        logits: config.vocab_size,
        part_tokens: model.plan().chunk().tokens,
    };
    let facts = Facts {
        text: format!(
            "{}, driver {}; path {}; {} x {} tokens of context{cut}",
            device.name()?,
            device.driver()?,
            model.plan().path(),
            limits.sequences,
            limits.context_tokens,
        ),
        context_tokens: limits.context_tokens,
        memory: Memory {
            weights_bytes: memory.weights_bytes,
            kv_max_bytes: memory.kv_bytes,
            workspace_bytes: memory.workspace_bytes,
        },
        sizes,
        scorer: Arc::new(Scorer::new(sizes, options.threads)),
    };
    Ok((model, facts))
}

impl Steps for GpuModel {
    type Id = SequenceId;

    fn add_sequence(&mut self) -> Result<SequenceId> {
        self.add_sequence()
    }

    fn remove_sequence(&mut self, id: SequenceId) {
        self.remove_sequence(id);
    }

    fn prefill(
        &mut self,
        id: SequenceId,
        tokens: &[u32],
        progress: &mut dyn FnMut(usize, usize),
        cancel: &Cancel,
    ) -> Result<()> {
        self.prefill(id, tokens, progress, cancel)
    }

    fn prompt_logits(
        &mut self,
        id: SequenceId,
        tokens: &[u32],
        sink: &mut dyn FnMut(&[f32]) -> Result<()>,
        cancel: &Cancel,
    ) -> Result<()> {
        self.prompt_logits(id, tokens, sink, cancel)
    }

    fn begin_decode(&mut self, rows: &[(SequenceId, u32, &SampleStart)]) -> Result<()> {
        self.begin_decode(rows)
    }

    fn continue_decode(&mut self) -> Result<()> {
        self.continue_decode()
    }

    fn read_step(&mut self) -> Result<Option<Vec<SampleRecord>>> {
        self.read_step()
    }

    fn unread_steps(&self) -> usize {
        self.unread_steps()
    }

    fn check(&mut self) -> Result<()> {
        self.device().synchronize("using the GPU")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        checkpoint::DType,
        plan::{Card, Plan},
    };

    /// Before there are a KV cache and a workspace, loading holds the LM head as the file has it beside all weights.
    #[test]
    fn what_fit_leaves_beside_the_weights_holds_what_loading_needs() {
        let config = FlintConfig::flint(49, 150_144);
        for (dtype, file_bytes) in [(DType::Nvfp4, 150_144 * 2048 / 64 * 36), (DType::Bf16, 150_144 * 2048 * 2)] {
            let types = Types::of_synthetic(&config, dtype).unwrap();
            // The smallest plan that is ever made.
            let limits =
                Limits { sequences: 1, context_tokens: LEAST_CONTEXT, vocab_tokens: 150_000, chunk_tokens: 512 };
            let memory = Plan::new(&config, &types, limits, Card::H200).unwrap().memory();
            let beside = memory.kv_bytes + memory.workspace_bytes + RESERVE_BYTES as usize;
            assert!(file_bytes <= beside, "{dtype}: {file_bytes} bytes of {beside}");
        }
    }
}
