//! Block tables: which KV block holds which positions of the sequence in a row.

use std::ops::Range;

use super::{
    SequenceId,
    driver::{Buffer, Device, Pinned},
};
use crate::{error::Result, kv::SequenceBlocks, plan::Buffers};

/// The device's block tables, and pinned copies that they are written from.
pub(super) struct Tables {
    full: Table,
    window: Table,
    /// The sequence whose blocks each row has.
    rows: Vec<Option<SequenceId>>,
}

struct Table {
    /// `[rows, stride]`. An entry is written once while a sequence keeps its row, so a copy in flight is not disturbed.
    host: Pinned<u32>,
    /// Of the device's table, in the workspace.
    offset: usize,
    stride: usize,
}

impl Tables {
    /// Of `rows` rows.
    pub fn new(device: &Device, buffers: &Buffers, rows: usize) -> Result<Self> {
        let stride = buffers.table_stride;
        let table = |offset: u64| Ok(Table { host: device.pinned(rows * stride)?, offset: offset as usize, stride });
        let (full, window) = (table(buffers.blocks_full)?, table(buffers.blocks_window)?);
        Ok(Self { full, window, rows: vec![None; rows] })
    }

    /// A row for each of `ids`: its own if it has one, else one that neither another of them nor any of `busy` has.
    ///
    /// # Panics
    /// With more sequences in all than there are rows.
    pub fn rows_for(&self, ids: &[SequenceId], busy: &[SequenceId]) -> Vec<usize> {
        let own = |id: &SequenceId| self.rows.iter().position(|row| *row == Some(*id));
        let mut taken: Vec<usize> = busy.iter().chain(ids).filter_map(own).collect();
        let mut choose = |id: &SequenceId| {
            own(id).unwrap_or_else(|| {
                // One that has no blocks of anybody, if there is one.
                let free = (0..self.rows.len()).filter(|row| !taken.contains(row));
                let row = free.min_by_key(|&row| self.rows[row].is_some()).expect("a row for each sequence");
                taken.push(row);
                row
            })
        };
        ids.iter().map(&mut choose).collect()
    }

    /// Queues what the device does not know yet of `sequence`, which is to be row `row` and whose blocks `new` were just
    /// taken.
    pub fn place(
        &mut self,
        device: &Device,
        workspace: &Buffer,
        row: usize,
        id: SequenceId,
        sequence: &SequenceBlocks,
        new: Range<usize>,
    ) -> Result<()> {
        let end = new.end;
        let (full, window) = if self.rows[row] == Some(id) {
            (new.clone(), new)
        } else {
            // Copies of the row's last sequence may be under way.
            device.synchronize("a step")?;
            // A sequence that moved leaves a row whose table no longer follows it.
            self.forget(id);
            self.rows[row] = Some(id);
            (0..end, sequence.window_range())
        };
        self.full.write(workspace, row, full, |index| sequence.full(index))?;
        self.window.write(workspace, row, window, |index| sequence.window(index))
    }

    /// The blocks of `id` have changed otherwise, or are gone.
    pub fn forget(&mut self, id: SequenceId) {
        for row in &mut self.rows {
            if *row == Some(id) {
                *row = None;
            }
        }
    }
}

impl Table {
    fn write(
        &mut self,
        workspace: &Buffer,
        row: usize,
        entries: Range<usize>,
        block: impl Fn(usize) -> Option<u32>,
    ) -> Result<()> {
        if entries.is_empty() {
            return Ok(());
        }
        let first = row * self.stride;
        for index in entries.clone() {
            self.host.set(first + index, block(index).expect("the sequence has these blocks"));
        }
        let range = first + entries.start..first + entries.end;
        // SAFETY: the entries are not written again before the stream has passed, see `Table::host` and `place`; both ends
        // live as long as the model, whose drop waits.
        unsafe { workspace.queue_write(self.offset + 4 * range.start, &self.host, range) }
    }
}
