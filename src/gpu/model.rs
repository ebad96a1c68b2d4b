//! A Flint on the device, one step at a time.

use std::{collections::BTreeMap, mem};

use super::{
    IMAGES, Source,
    driver::{Buffer, Call, Device, Event, Kernels, Pinned},
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
    kernels::{Args, SAMPLE_RECORD_WORDS, SampleRecord, SampleStart},
    kv::{KvBlocks, SequenceBlocks},
    plan::{Bases, Card, Ending, Limits, Plan, Step, TOKEN_RING},
};

/// Host-fed steps that may be queued before the host waits for them.
const INPUT_RING: usize = 256;

/// How steps are launched. The results are the same bits whatever is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunOptions {
    /// Kernels may start before the ones ahead of them end.
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
    records: Pinned<u32>,
    /// `[INPUT_RING, 2, sequences]`: tokens, positions.
    inputs: Pinned<u32>,
    /// The next free line of `inputs`.
    next_input: usize,
    pub(super) chunks: Chunks,
    pub(super) tables: Tables,
    pub(super) blocks: KvBlocks,
    pub(super) sequences: BTreeMap<SequenceId, SequenceBlocks>,
    next_id: u64,
    decoding: Decoding,
    pub(super) device: Device,
}

/// Steps of the decode loop that are on their way.
struct Decoding {
    rows: Vec<SequenceId>,
    /// One for each line of the ring of records; step n has number n modulo that.
    events: [Event; TOKEN_RING],
    /// Steps that were queued since the loop began, and those of them that were read.
    queued: u32,
    read: u32,
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
        let card = Card { processors: device.processors()?, major: device.capability()?.0 };
        let mut plan = Plan::new(source.config(), &source.types()?, limits, card)?;
        let (memory, pools) = (plan.memory(), plan.pools());
        device.check_room("weights, KV cache and workspace", memory.total_bytes())?;
        let weights = device.alloc("the weights", memory.weights_bytes)?;
        let kv_full = device.alloc("the KV cache", pools.full.block_bytes() * pools.full_blocks)?;
        let kv_window = device.alloc("the KV cache", pools.window.block_bytes() * pools.window_blocks)?;
        let buffers = device.alloc("the workspace", memory.workspace_bytes)?;
        // Counters start at zero, and a masked product with what was never written must not meet a NaN.
        for buffer in [&kv_full, &kv_window, &buffers] {
            buffer.fill(0)?;
        }
        let frequencies: Vec<u8> =
            Rope::new(plan.config()).inv_freq().iter().flat_map(|value| value.to_le_bytes()).collect();
        buffers.write(plan.buffers().inv_freq as usize, &frequencies)?;
        let kernels = device.kernels(IMAGES);
        let mut loader = Loader::new(&device, &kernels, source, progress, cancel)?;
        loader.fill(plan.weights_mut(), &weights)?;
        loader.finish()?;
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

    /// Queues one token for each of some sequences, whose logits nobody needs. Ends the decode loop.
    ///
    /// Errors: as [`Self::forward`].
    pub fn feed(&mut self, rows: &[(SequenceId, u32)]) -> Result<()> {
        self.check_tokens(rows)?;
        self.decoding.restart(Vec::new());
        self.queue_tokens(rows, Ending::Nothing)
    }

    /// Starts the decode loop: queues a step over `rows`, which chooses the next token of each as its [`SampleStart`] says.
    /// That is one made for no records. Steps that were queued before and not read are forgotten.
    ///
    /// Errors: as [`Self::forward`].
    pub fn begin_decode(&mut self, rows: &[(SequenceId, u32, &SampleStart)]) -> Result<()> {
        let tokens: Vec<_> = rows.iter().map(|&(id, token, _)| (id, token)).collect();
        let ids: Vec<_> = rows.iter().map(|&(id, ..)| id).collect();
        self.check_tokens(&tokens)?;
        // All at once: each copy is waited for.
        let parameters: Vec<u8> = rows.iter().flat_map(|(.., start)| start.row.bytes()).collect();
        self.buffers.write(self.plan.buffers().sample_rows as usize, &parameters)?;
        for (row, (.., start)) in rows.iter().enumerate() {
            self.write_sampler(row, start)?;
        }
        self.decoding.restart(ids);
        self.queue_tokens(&tokens, Ending::Token)?;
        self.decoding.queue()
    }

    /// Queues the next step of the decode loop, over the tokens that the device chose: the host need not know them.
    ///
    /// Errors: [`Error::Value`] when a sequence is at its limit, or when as many steps are unread as the ring has lines.
    pub fn continue_decode(&mut self) -> Result<()> {
        if self.unread_steps() == TOKEN_RING {
            let found = format!("{TOKEN_RING} unread steps");
            return Err(Error::value("continue_decode", found, format!("at most {}", TOKEN_RING - 1)));
        }
        let rows = self.decoding.rows.clone();
        self.check_rows(&rows)?;
        self.make_room(&rows)?;
        self.run(rows.len(), Ending::Token)?;
        self.decoding.queue()
    }

    /// Waits for the oldest unread step of the decode loop: what it chose for each row. `None` when all were read. A row
    /// whose record is an error did not move on: it must leave the loop.
    pub fn read_step(&mut self) -> Result<Option<Vec<SampleRecord>>> {
        const WHAT: &str = "a decode step";
        if self.unread_steps() == 0 {
            return Ok(None);
        }
        let line = self.decoding.read as usize % TOKEN_RING;
        self.decoding.events[line].wait(WHAT)?;
        self.decoding.read += 1;
        let sequences = self.plan.limits().sequences;
        let record = |row: usize| {
            let first = (line * sequences + row) * SAMPLE_RECORD_WORDS;
            let record = SampleRecord::new(&std::array::from_fn(|word| self.records.get(first + word)));
            if record.sequence == self.decoding.read {
                return Ok(record);
            }
            let why = format!("row {row} has record {}, {} was due", record.sequence, self.decoding.read);
            Err(Error::Device { what: WHAT.into(), why })
        };
        (0..self.decoding.rows.len()).map(record).collect::<Result<_>>().map(Some)
    }

    /// Steps of the decode loop that were queued and not read.
    pub fn unread_steps(&self) -> usize {
        (self.decoding.queued - self.decoding.read) as usize
    }

    /// Whether every row of the decode loop has room for one more step.
    pub fn can_continue(&self) -> bool {
        self.check_rows(&self.decoding.rows).is_ok()
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

    /// The sequences of the decode loop.
    pub(super) fn decode_rows(&self) -> &[SequenceId] {
        &self.decoding.rows
    }

    /// A new decode loop over `rows`, of which no step was queued.
    pub(super) fn restart_decode(&mut self, rows: Vec<SequenceId>) {
        self.decoding.restart(rows);
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

    /// What a request has beside its parameters.
    fn write_sampler(&self, row: usize, start: &SampleStart) -> Result<()> {
        let (b, vocab) = (self.plan.buffers(), self.plan.limits().vocab_tokens);
        let write = |base: u64, values: &[u8], len: usize| {
            if values.len() != len {
                let what = "writing the sampler's memory".into();
                return Err(Error::Device { what, why: format!("{} bytes for {len}", values.len()) });
            }
            self.buffers.write(base as usize + row * len, values)
        };
        let bytes = |words: &[u32]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>();
        if let Some(masks) = &start.masks {
            write(b.sample_masks, &bytes(masks), 2 * vocab.div_ceil(32) * 4)?;
        }
        if let Some(bias) = &start.bias {
            let bits: Vec<u32> = bias.iter().map(|value| value.to_bits()).collect();
            write(b.sample_bias, &bytes(&bits), vocab * 4)?;
        }
        if let Some(seen) = &start.seen {
            write(b.sample_seen, &bytes(seen), vocab * 4)?;
        }
        Ok(())
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
    fn check_rows(&self, rows: &[SequenceId]) -> Result<()> {
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
    fn make_room(&mut self, rows: &[SequenceId]) -> Result<()> {
        for (row, id) in rows.iter().enumerate() {
            let sequence = self.sequences.get_mut(id).expect("rows were checked");
            let new = self.blocks.append(sequence, 1)?;
            self.tables.place(&self.device, &self.buffers, row, *id, sequence, new)?;
        }
        Ok(())
    }

    fn run(&mut self, rows: usize, ending: Ending) -> Result<()> {
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
            PrefillEmbed,
            PrefillExperts,
            PrefillFew,
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

impl Decoding {
    fn new(device: &Device) -> Result<Self> {
        let events = [device.event(false)?, device.event(false)?, device.event(false)?, device.event(false)?];
        Ok(Self { rows: Vec::new(), events, queued: 0, read: 0 })
    }

    fn restart(&mut self, rows: Vec<SequenceId>) {
        (self.rows, self.queued, self.read) = (rows, 0, 0);
    }

    /// Notes the step that was launched last.
    fn queue(&mut self) -> Result<()> {
        self.events[self.queued as usize % TOKEN_RING].record()?;
        self.queued += 1;
        Ok(())
    }
}
