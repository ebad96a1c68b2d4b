//! A Flint on the device, one step at a time.

use std::{collections::BTreeMap, mem};

use super::{
    IMAGES, Source,
    decode::Decoding,
    driver::{Buffer, Call, Device, Kernels, Pinned},
    load::Loader,
    prefill::Chunks,
    recordings::Recordings,
    tables::Tables,
};
use crate::{
    cancel::Cancel,
    config::{Attention, FlintConfig},
    cpu::Rope,
    error::{Error, Result},
    kernels::{Args, SAMPLE_RECORD_WORDS},
    kv::{KvBlocks, SequenceBlocks},
    plan::{Bases, Ending, Limits, Plan, Step, TOKEN_RING},
};

/// Host-fed steps that may be queued before the host waits for them.
const INPUT_RING: usize = 256;

/// How steps are launched. The results are the same bits whatever is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunOptions {
    /// Kernels may start before the ones ahead of them end, from compute capability 9.0 on.
    pub pdl: bool,
    /// A step is one graph.
    pub graphs: bool,
}

impl Default for RunOptions {
    fn default() -> Self {
        Self { pdl: true, graphs: true }
    }
}

/// A sequence of a [`GpuModel`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceId(u64);

/// A Flint on the device. It stays on the thread that loaded it.
pub struct GpuModel {
    // Graphs and calls hold addresses of the buffers below, and are dropped before them.
    recordings: Recordings,
    pub(super) plan: Plan,
    pub(super) options: RunOptions,
    kernels: Kernels,
    weights: Buffer,
    pub(super) buffers: Buffer,
    kv_full: Buffer,
    kv_window: Buffer,
    /// The sampler's, `[TOKEN_RING, sequences, 48]`.
    pub(super) records: Pinned<u32>,
    /// `[INPUT_RING, 2, sequences]`: tokens, positions.
    inputs: Pinned<u32>,
    /// The next free line of `inputs`.
    next_input: usize,
    pub(super) chunks: Chunks,
    pub(super) tables: Tables,
    pub(super) blocks: KvBlocks,
    pub(super) sequences: BTreeMap<SequenceId, SequenceBlocks>,
    next_id: u64,
    pub(super) decoding: Decoding,
    pub(super) device: Device,
}

impl GpuModel {
    /// Opens the GPU, plans, and brings the weights there. `progress` gets (bytes done, bytes in all) from this thread.
    ///
    /// Errors: [`Error::Unavailable`] without a usable GPU; [`Error::Device`] when memory does not suffice, with what is
    /// needed and free, before anything is read; [`Error::Value`] for limits out of range; [`Error::Cancelled`].
    pub fn load(
        source: Source<'_>,
        limits: Limits,
        options: RunOptions,
        progress: &mut dyn FnMut(u64, u64),
        cancel: &Cancel,
    ) -> Result<Self> {
        let device = Device::open()?;
        let mut plan = Plan::new(source.config(), &source.types()?, limits, device.card()?)?;
        let (memory, pools) = (plan.memory(), plan.pools());
        device.check_room("weights, KV cache and workspace", memory.total_bytes())?;
        let weights = device.alloc("the weights", memory.weights_bytes)?;
        let kernels = device.kernels(IMAGES);
        let mut loader = Loader::new(&device, &kernels, source, progress, cancel)?;
        loader.fill(plan.weights_mut(), &weights)?;
        loader.finish()?;
        // Behind the loader, whose scratch memory is as large as the LM head and is free again now.
        let kv_full = device.alloc("the KV cache", pools.full.block_bytes() * pools.full_blocks)?;
        let kv_window = device.alloc("the KV cache", pools.window.block_bytes() * pools.window_blocks)?;
        let buffers = device.alloc("the workspace", memory.workspace_bytes)?;
        // Counters start at zero; and no result, right or wrong, depends on what the memory held before.
        for buffer in [&kv_full, &kv_window, &buffers] {
            buffer.fill(0)?;
        }
        let frequencies: Vec<u8> =
            Rope::new(plan.config()).inv_freq().iter().flat_map(|value| value.to_le_bytes()).collect();
        buffers.write(plan.buffers().inv_freq as usize, &frequencies)?;
        Ok(Self {
            recordings: Recordings::default(),
            records: device.pinned(TOKEN_RING * limits.sequences * SAMPLE_RECORD_WORDS)?,
            inputs: device.pinned(INPUT_RING * 2 * limits.sequences)?,
            next_input: 0,
            chunks: Chunks::new(&device, plan.chunk())?,
            tables: Tables::new(&device, plan.buffers(), limits.sequences)?,
            blocks: KvBlocks::new(plan.config(), pools.full_blocks as u32, pools.window_blocks as u32),
            sequences: BTreeMap::new(),
            next_id: 0,
            decoding: Decoding::new(&device)?,
            plan,
            options,
            kernels,
            weights,
            buffers,
            kv_full,
            kv_window,
            device,
        })
    }

    /// The device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What it runs.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The dimensions.
    pub fn config(&self) -> &FlintConfig {
        self.plan.config()
    }

    /// How steps are launched from now on.
    pub fn set_options(&mut self, options: RunOptions) {
        if options != self.options {
            self.recordings.forget_graphs();
            self.options = options;
        }
    }

    /// A new, empty sequence. Errors: [`Error::Unavailable`] when the plan holds no more.
    pub fn add_sequence(&mut self) -> Result<SequenceId> {
        let most = self.plan.limits().sequences;
        if self.sequences.len() == most {
            let why = format!("all {most} sequences of the plan are in use");
            return Err(Error::Unavailable { what: "another sequence".into(), why });
        }
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        self.sequences.insert(id, SequenceBlocks::default());
        Ok(id)
    }

    /// Ends a sequence; its blocks are free once the steps that are queued have passed.
    pub fn remove_sequence(&mut self, id: SequenceId) {
        if let Some(blocks) = self.sequences.remove(&id) {
            self.blocks.free(blocks);
        }
        self.tables.forget(id);
    }

    /// Positions of a sequence, queued ones included; 0 for an unknown one.
    pub fn sequence_len(&self, id: SequenceId) -> usize {
        self.sequences.get(&id).map_or(0, SequenceBlocks::len)
    }

    /// One token for each of some sequences: `[B, V]` logits after them. Ends the decode loop.
    ///
    /// Errors: [`Error::Value`] naming what is wrong with `rows`, before anything is changed; [`Error::Device`].
    pub fn forward(&mut self, rows: &[(SequenceId, u32)]) -> Result<Vec<f32>> {
        self.check_tokens(rows)?;
        self.decoding.restart(Vec::new());
        self.queue_tokens(rows, Ending::Logits)?;
        self.read_logits(rows.len())
    }

    /// Makes room for `n` positions of a sequence without computing them: keys and values are what the memory holds. For
    /// benches.
    pub fn skip(&mut self, id: SequenceId, n: usize) -> Result<()> {
        let len = self.sequence_len(id);
        let most = self.plan.limits().context_tokens;
        let Some(sequence) = self.sequences.get_mut(&id).filter(|_| n <= most - len) else {
            return Err(Error::value("skip", format!("{n} after {len}"), format!("at most {most} positions")));
        };
        self.tables.forget(id);
        (0..n).try_for_each(|_| self.blocks.append(sequence, 1).map(drop))
    }

    /// The launches of a step, ready to be queued one by one or recorded; for benches.
    pub fn calls(&self, positions: &[u32], ending: Ending) -> Result<Vec<(Step, Call)>> {
        let steps = self.plan.steps(&self.bases(), positions, ending);
        steps.into_iter().map(|step| Ok((step, self.call(&step)?))).collect()
    }

    /// The two KV pools, full attention first; for tests and benches that fill them.
    pub fn kv_pools(&self) -> [(&Buffer, Attention); 2] {
        [(&self.kv_full, Attention::Full), (&self.kv_window, Attention::Sliding)]
    }

    /// The `[rows, V]` logits of the last step.
    pub(super) fn read_logits(&self, rows: usize) -> Result<Vec<f32>> {
        let bytes = rows * self.config().vocab_size * 4;
        let logits = self.buffers.read(self.plan.buffers().logits as usize, bytes)?;
        Ok(logits.as_chunks().0.iter().map(|&value| f32::from_le_bytes(value)).collect())
    }

    pub(super) fn bases(&self) -> Bases {
        Bases {
            weights: self.weights.address(),
            buffers: self.buffers.address(),
            kv_full: self.kv_full.address(),
            kv_window: self.kv_window.address(),
            records: self.records.address(),
        }
    }

    pub(super) fn queue_tokens(&mut self, rows: &[(SequenceId, u32)], ending: Ending) -> Result<()> {
        let ids: Vec<_> = rows.iter().map(|&(id, _)| id).collect();
        if self.next_input == INPUT_RING {
            self.device.synchronize("a step")?;
            self.next_input = 0;
        }
        let sequences = self.plan.limits().sequences;
        let first = self.next_input * 2 * sequences;
        self.next_input += 1;
        for (row, &(id, token)) in rows.iter().enumerate() {
            let position = self.sequence_len(id) as u32;
            self.inputs.set(first + row, token);
            self.inputs.set(first + sequences + row, position);
        }
        self.make_room(&ids)?;
        let tokens = self.plan.buffers().tokens as usize;
        // SAFETY: the line is written again only after the wait above; both ends live as long as `self`, whose drop waits.
        unsafe { self.buffers.queue_write(tokens, &self.inputs, first..first + 2 * sequences)? };
        self.run(ids.len(), ending)
    }

    /// Refuses rows that a step cannot have, and tokens that the model does not know.
    pub(super) fn check_tokens(&self, rows: &[(SequenceId, u32)]) -> Result<()> {
        self.check_rows(&rows.iter().map(|&(id, _)| id).collect::<Vec<_>>())?;
        let vocab = self.config().vocab_size;
        match rows.iter().find(|&&(_, token)| token as usize >= vocab) {
            Some((_, token)) => Err(Error::value("tokens", token.to_string(), format!("ids below {vocab}"))),
            None => Ok(()),
        }
    }

    /// Refuses rows that a step cannot have: none, too many, a sequence twice, unknown, or at its limit.
    pub(super) fn check_rows(&self, rows: &[SequenceId]) -> Result<()> {
        let limits = self.plan.limits();
        if !(1..=limits.sequences).contains(&rows.len()) {
            return Err(Error::value("rows", rows.len().to_string(), format!("1 to {}", limits.sequences)));
        }
        for (row, id) in rows.iter().enumerate() {
            let field = format!("rows[{row}]");
            let Some(sequence) = self.sequences.get(id) else {
                return Err(Error::value(field, "a sequence that has ended", "a sequence of this model"));
            };
            if rows[..row].contains(id) {
                return Err(Error::value(field, "a sequence for the second time", "each sequence once"));
            }
            if sequence.len() == limits.context_tokens {
                let found = format!("{} positions", sequence.len() + 1);
                return Err(Error::value(field, found, format!("at most {}", limits.context_tokens)));
            }
        }
        Ok(())
    }

    /// Gives every row's sequence its next position, and the device the blocks for it.
    pub(super) fn make_room(&mut self, rows: &[SequenceId]) -> Result<()> {
        for (row, id) in rows.iter().enumerate() {
            let sequence = self.sequences.get_mut(id).expect("rows were checked");
            let new = self.blocks.append(sequence, 1)?;
            self.tables.place(&self.device, &self.buffers, row, *id, sequence, new)?;
        }
        Ok(())
    }

    pub(super) fn run(&mut self, rows: usize, ending: Ending) -> Result<()> {
        let mut recordings = mem::take(&mut self.recordings);
        let result = self.run_recorded(&mut recordings, rows, ending);
        self.recordings = recordings;
        result
    }

    fn run_recorded(&self, recordings: &mut Recordings, rows: usize, ending: Ending) -> Result<()> {
        let make = || Ok(self.calls(&vec![0; rows], ending)?.into_iter().map(|(_, call)| call).collect());
        let step = recordings.get((rows, ending), make)?;
        if !self.options.graphs {
            return step.calls.iter().try_for_each(|call| call.queue(self.options.pdl));
        }
        let graph = match &step.graph {
            Some(graph) => graph,
            None => step.graph.insert(self.device.graph(&step.calls, self.options.pdl)?),
        };
        graph.launch()
    }

    pub(super) fn call(&self, step: &Step) -> Result<Call> {
        let function = self.kernels.get(step.kernel)?;
        macro_rules! call {
            ($($variant:ident),*) => {
                match &step.args {
                    // SAFETY: the struct is that of the kernel, which the plan pairs and whose size was compared; its
                    // addresses are those of the plan's buffers, which have the extents that the plan gave them and live as
                    // long as `self`. Calls and graphs are dropped before them, and freeing memory waits for the stream.
                    $(Args::$variant(args) => unsafe { function.call(step.launch, args) },)*
                }
            };
        }
        call!(
            DecodeAttention,
            DecodeDown,
            DecodeEmbed,
            DecodeExpertsUp,
            DecodeLinear,
            DecodeRouter,
            DecodeSample,
            GeneralAttention,
            GeneralEmbed,
            GeneralExpertsDown,
            GeneralNorm,
            GeneralProject,
            GeneralQkvFinish,
            GeneralRouter,
            GeneralSwiglu,
            PrefillAttention,
            PrefillCombine,
            PrefillCombineNorm,
            PrefillEmbed,
            PrefillExperts,
            PrefillGather,
            PrefillGroup,
            PrefillKv,
            PrefillLinear,
            PrefillNorm,
            PrefillRoute
        )
    }
}

impl Drop for GpuModel {
    fn drop(&mut self) {
        // So that nothing runs over memory that is about to be freed; an error is one of an earlier step.
        let _ = self.device.synchronize("the last step");
    }
}
