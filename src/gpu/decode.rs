//! The decode loop: steps that feed each other, whose tokens the host reads behind them.

use super::{
    GpuModel, SequenceId,
    driver::{Device, Event},
};
use crate::{
    error::{Error, Result},
    kernels::{SAMPLE_RECORD_WORDS, SampleRecord, SampleStart},
    plan::{Ending, TOKEN_RING},
};

/// Steps of the decode loop that are on their way.
pub(super) struct Decoding {
    pub rows: Vec<SequenceId>,
    /// One for each line of the ring of records; step n has number n modulo that.
    events: [Event; TOKEN_RING],
    /// Steps that were queued since the loop began, and those of them that were read.
    queued: u32,
    read: u32,
}

impl Decoding {
    pub fn new(device: &Device) -> Result<Self> {
        let events = [device.event(false)?, device.event(false)?, device.event(false)?, device.event(false)?];
        Ok(Self { rows: Vec::new(), events, queued: 0, read: 0 })
    }

    pub fn restart(&mut self, rows: Vec<SequenceId>) {
        (self.rows, self.queued, self.read) = (rows, 0, 0);
    }

    /// Notes the step that was launched last.
    fn queue(&mut self) -> Result<()> {
        self.events[self.queued as usize % TOKEN_RING].record()?;
        self.queued += 1;
        Ok(())
    }
}

impl GpuModel {
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

    /// The sequences of the decode loop.
    pub(super) fn decode_rows(&self) -> &[SequenceId] {
        &self.decoding.rows
    }

    /// A new decode loop over `rows`, of which no step was queued.
    pub(super) fn restart_decode(&mut self, rows: Vec<SequenceId>) {
        self.decoding.restart(rows);
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
}
