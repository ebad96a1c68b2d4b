//! The KV cache of the GPU as data: pools of blocks of [`BLOCK_POSITIONS`] positions, and which sequence owns which. One
//! pool serves the layers of full attention, one the sliding ones; a block holds its positions for all layers of the kind.
//!
//! A block goes back to its pool's queue when its sequence ends or its positions leave the window, and is taken again after
//! all that were free before it: its contents stay readable for as long as possible.

use std::{collections::VecDeque, mem, ops::Range};

use crate::{
    config::{Attention, FlintConfig},
    error::{Error, Result},
};

/// Positions of a block.
pub const BLOCK_POSITIONS: usize = 64;

/// Where keys and values lie in a pool: `[n_blocks, n_layers, 2, G, 64 * head_dim]` bf16. The K part of a layer and head is
/// `[64, head_dim]`, the V part `[head_dim, 64]`, so that both products of attention read along the contiguous dimension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolLayout {
    /// Layers of the pool's kind.
    pub n_layers: usize,
    /// G.
    pub n_kv_heads: usize,
    /// Values a head.
    pub head_dim: usize,
}

impl PoolLayout {
    /// Of the layers of `kind`.
    pub fn new(config: &FlintConfig, kind: Attention) -> Self {
        let n_layers = config.layers.iter().filter(|layer| layer.attention == kind).count();
        Self { n_layers, n_kv_heads: config.n_kv_heads, head_dim: config.head_dim }
    }

    /// bf16 values from the K or V part of a head to that of the next.
    pub fn head_values(self) -> usize {
        BLOCK_POSITIONS * self.head_dim
    }

    /// bf16 values from a layer of a block to the next: K parts of all heads, then V parts.
    pub fn layer_values(self) -> usize {
        2 * self.n_kv_heads * self.head_values()
    }

    /// bf16 values from a block to the next.
    pub fn block_values(self) -> usize {
        self.n_layers * self.layer_values()
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        2 * self.block_values()
    }
}

/// The free blocks of one kind of layer.
#[derive(Debug)]
struct Pool {
    /// Of its layers, for errors.
    name: &'static str,
    /// In the order in which they are taken.
    free: VecDeque<u32>,
}

impl Pool {
    fn new(name: &'static str, n_blocks: u32) -> Self {
        Self { name, free: (0..n_blocks).collect() }
    }

    fn check(&self, needed: usize, released: usize) -> Result<()> {
        let free = self.free.len() + released;
        if needed <= free {
            return Ok(());
        }
        let what = format!("room in the KV cache of the {} layers", self.name);
        Err(Error::Unavailable {
            what,
            why: format!("{needed} more blocks of 64 positions are needed, {free} are free"),
        })
    }
}

/// The blocks of one sequence. Give it back with [`KvBlocks::free`]: dropped, its blocks are lost.
#[derive(Debug, Default)]
#[must_use]
pub struct SequenceBlocks {
    len: usize,
    full: Vec<u32>,
    /// Index, in units of blocks, of the first entry of `window`.
    window_first: usize,
    window: VecDeque<u32>,
}

impl SequenceBlocks {
    /// Positions that have room; the next one to append.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no position has room.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The block of positions `64 index` to `64 index + 63` in the full-attention pool.
    pub fn full(&self, index: usize) -> Option<u32> {
        self.full.get(index).copied()
    }

    /// The same in the sliding layers' pool; `None` also once they have left the window.
    pub fn window(&self, index: usize) -> Option<u32> {
        self.window.get(index.checked_sub(self.window_first)?).copied()
    }

    /// Which `index` of [`Self::window`] hold a block.
    pub fn window_range(&self) -> Range<usize> {
        self.window_first..self.window_first + self.window.len()
    }
}

/// All blocks of the device, by owner.
#[derive(Debug)]
pub struct KvBlocks {
    full: Pool,
    window: Pool,
    sliding_window: usize,
    context_length: usize,
}

impl KvBlocks {
    /// Pools of `full_blocks` and `window_blocks` blocks, all free. A sequence that never runs out needs
    /// [`Self::full_blocks_for`] and [`Self::window_blocks_for`].
    pub fn new(config: &FlintConfig, full_blocks: u32, window_blocks: u32) -> Self {
        Self {
            full: Pool::new("full-attention", full_blocks),
            window: Pool::new("sliding", window_blocks),
            sliding_window: config.sliding_window,
            context_length: config.context_length,
        }
    }

    /// Full-attention blocks of a sequence of `positions`.
    pub fn full_blocks_for(positions: usize) -> usize {
        positions.div_ceil(BLOCK_POSITIONS)
    }

    /// Most sliding blocks that a sequence holds at a time when it grows by at most `step` positions: they hold the window
    /// of the first of them and the rest.
    pub fn window_blocks_for(sliding_window: usize, step: usize) -> usize {
        // A run of n positions touches most blocks when it starts at the end of one.
        (sliding_window + step - 1 + BLOCK_POSITIONS - 2) / BLOCK_POSITIONS + 1
    }

    /// Free blocks of the full-attention and the sliding pool.
    #[cfg(test)]
    fn n_free(&self) -> (usize, usize) {
        (self.full.free.len(), self.window.free.len())
    }

    /// Makes room for the next `n` positions of `sequence`, and takes back the sliding blocks that none of them can see.
    /// Returns which block indices of [`SequenceBlocks::full`] are new; those of the sliding layers' table are the same.
    ///
    /// Errors change nothing: [`Error::Unavailable`] with the blocks needed and free, [`Error::Value`] past the context.
    pub fn append(&mut self, sequence: &mut SequenceBlocks, n: usize) -> Result<Range<usize>> {
        let end = sequence.len.checked_add(n).filter(|&end| end <= self.context_length);
        let end = end.ok_or_else(|| {
            let found = format!("{n} after {}", sequence.len);
            Error::value("positions", found, format!("at most {} in the context", self.context_length))
        })?;
        let new = sequence.full.len()..end.div_ceil(BLOCK_POSITIONS);
        let released = self.out_of_sight(sequence);
        self.full.check(new.len(), 0)?;
        self.window.check(new.len(), released)?;

        self.trim(sequence);
        sequence.full.extend(self.full.free.drain(..new.len()));
        sequence.window.extend(self.window.free.drain(..new.len()));
        sequence.len = end;
        Ok(new)
    }

    /// Takes back the sliding blocks of `sequence` that its next position does not see, once the step that needed them is
    /// queued. [`Self::append`] does the same when the sequence goes on; this is for one whose last step was long.
    pub fn trim(&mut self, sequence: &mut SequenceBlocks) {
        let released = self.out_of_sight(sequence);
        self.window.free.extend(sequence.window.drain(..released));
        sequence.window_first += released;
    }

    /// Sliding blocks of `sequence` that its next position does not see.
    fn out_of_sight(&self, sequence: &SequenceBlocks) -> usize {
        // The next position sees itself and the window - 1 before it; later ones see nothing older.
        let visible = (sequence.len + 1).saturating_sub(self.sliding_window) / BLOCK_POSITIONS;
        (visible - sequence.window_first).min(sequence.window.len())
    }

    /// Takes back every block of `sequence`, which came from these pools.
    pub fn free(&mut self, mut sequence: SequenceBlocks) {
        self.full.free.extend(mem::take(&mut sequence.full));
        self.window.free.extend(mem::take(&mut sequence.window));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::config::{LayerKind, Mlp};

    fn config(sliding_window: usize) -> FlintConfig {
        let layer = |attention| LayerKind { attention, rope: false, mlp: Mlp::Moe };
        FlintConfig {
            hidden_size: 320,
            vocab_size: 8192,
            context_length: 4096,
            n_heads: 8,
            n_kv_heads: 2,
            head_dim: 96,
            dense_intermediate_size: 1024,
            n_experts: 16,
            n_experts_per_token: 6,
            expert_intermediate_size: 128,
            shared_intermediate_size: 256,
            sliding_window,
            rms_norm_eps: 1e-6,
            rope_theta: 10_000.0,
            layers: vec![layer(Attention::Full), layer(Attention::Sliding), layer(Attention::Sliding)],
        }
    }

    #[test]
    fn layout_counts_every_value_once() {
        let layout = PoolLayout::new(&config(65), Attention::Sliding);
        assert_eq!((layout.n_layers, layout.n_kv_heads, layout.head_dim), (2, 2, 96));
        assert_eq!(layout.head_values(), 64 * 96);
        assert_eq!(layout.layer_values(), 2 * 2 * 64 * 96);
        assert_eq!(layout.block_bytes(), 64 * 2 * 2 * 2 * 96 * 2);
        assert_eq!(PoolLayout::new(&config(65), Attention::Full).n_layers, 1);
    }

    #[test]
    fn a_block_is_taken_at_its_first_position_and_released_after_its_last_left_the_window() {
        for window in [1, 2, 63, 64, 65, 66, 128, 513] {
            let mut blocks = KvBlocks::new(&config(window), 64, 64);
            let mut sequence = SequenceBlocks::default();
            for position in 0..1500_usize {
                let new = blocks.append(&mut sequence, 1).unwrap();
                assert_eq!(new.len(), usize::from(position % 64 == 0), "position {position}");
                // What `position` sees, one by one.
                let oldest = (0..=position).find(|seen| position - seen < window).unwrap();
                assert_eq!(sequence.window_range(), oldest / 64..position / 64 + 1, "window {window}, {position}");
                for index in 0..30 {
                    assert_eq!(sequence.full(index).is_some(), index <= position / 64);
                    assert_eq!(sequence.window(index).is_some(), sequence.window_range().contains(&index));
                }
                assert!(sequence.window_range().len() <= KvBlocks::window_blocks_for(window, 1));
            }
            blocks.free(sequence);
            assert_eq!(blocks.n_free(), (64, 64));
        }
    }

    #[test]
    fn released_blocks_are_the_last_to_be_taken_again() {
        let mut blocks = KvBlocks::new(&config(1), 8, 3);
        let mut sequence = SequenceBlocks::default();
        let mut taken = Vec::new();
        for _ in 0..6 {
            let new = blocks.append(&mut sequence, 64).unwrap();
            taken.push(sequence.window(new.start).unwrap());
        }
        assert_eq!(taken, [0, 1, 2, 0, 1, 2]);
        blocks.free(sequence);
    }

    #[test]
    fn a_long_step_gives_back_all_but_the_window() {
        let mut blocks = KvBlocks::new(&config(65), 64, 20);
        let mut sequence = SequenceBlocks::default();
        blocks.append(&mut sequence, 1000).unwrap();
        assert_eq!(sequence.window_range(), 0..16);
        blocks.trim(&mut sequence);
        // Position 1000 sees 936 to 1000.
        assert_eq!((sequence.window_range(), blocks.n_free()), (14..16, (48, 18)));
        blocks.trim(&mut sequence);
        assert_eq!(blocks.append(&mut sequence, 24).unwrap(), 16..16);
        assert_eq!(sequence.window_range(), 14..16);
        blocks.free(sequence);
        assert_eq!(blocks.n_free(), (64, 20));
    }

    #[test]
    fn errors_name_what_is_missing_and_change_nothing() {
        let mut blocks = KvBlocks::new(&config(65), 3, 9);
        let mut sequence = SequenceBlocks::default();
        blocks.append(&mut sequence, 130).unwrap();
        let error = blocks.append(&mut sequence, 200).unwrap_err().to_string();
        assert_eq!(
            error,
            "room in the KV cache of the full-attention layers is not available: 3 more blocks of 64 positions are needed, 0 are free"
        );
        assert_eq!((sequence.len(), sequence.window_range(), blocks.n_free()), (130, 0..3, (0, 6)));
        let error = blocks.append(&mut sequence, 4096).unwrap_err().to_string();
        assert_eq!(error, "positions: expected at most 4096 in the context, found 4096 after 130");
        assert!(blocks.append(&mut sequence, usize::MAX).is_err());
        assert_eq!(blocks.append(&mut sequence, 62).unwrap(), 3..3);
        blocks.free(sequence);

        let mut blocks = KvBlocks::new(&config(65), 9, 2);
        let mut sequence = SequenceBlocks::default();
        let error = blocks.append(&mut sequence, 129).unwrap_err().to_string();
        assert!(
            error.contains("sliding layers") && error.contains("3 more") && error.contains("2 are free"),
            "{error}"
        );
        assert!(sequence.is_empty());
        // The third block fits once the first is out of sight, in the same call.
        blocks.append(&mut sequence, 128).unwrap();
        assert_eq!(blocks.append(&mut sequence, 1).unwrap(), 2..3);
        assert_eq!(sequence.window_range(), 1..3);
        blocks.free(sequence);
    }

    proptest! {
        /// Any order of growing and ending sequences: no block has two owners, none is lost, and each sequence has the
        /// blocks of what its next position sees.
        #[test]
        fn every_block_has_one_owner(
            window in 1..300_usize,
            steps in proptest::collection::vec((0..4_usize, 0..3_usize, 1..200_usize), 1..200),
        ) {
            const POOL: (usize, usize) = (40, 14);
            let mut blocks = KvBlocks::new(&config(window), POOL.0 as u32, POOL.1 as u32);
            let mut sequences: [SequenceBlocks; 4] = Default::default();
            for (which, action, n) in steps {
                if action == 0 {
                    blocks.free(mem::take(&mut sequences[which]));
                } else {
                    let sequence = &mut sequences[which];
                    let (len, range, free) = (sequence.len(), sequence.window_range(), blocks.n_free());
                    if blocks.append(sequence, n).is_ok() {
                        let oldest = (len + 1).saturating_sub(window);
                        prop_assert_eq!(sequence.len(), len + n);
                        prop_assert_eq!(sequence.window_range(), oldest / 64..(len + n).div_ceil(64));
                        prop_assert_eq!(sequence.full.len(), KvBlocks::full_blocks_for(len + n));
                        prop_assert!(sequence.window.len() <= KvBlocks::window_blocks_for(window, n));
                    } else {
                        prop_assert_eq!((sequence.len(), sequence.window_range(), blocks.n_free()), (len, range, free));
                    }
                }
                for (pool, size, owned) in [
                    (&blocks.full, POOL.0, sequences.iter().flat_map(|s| &s.full).collect::<Vec<_>>()),
                    (&blocks.window, POOL.1, sequences.iter().flat_map(|s| &s.window).collect()),
                ] {
                    prop_assert_eq!(owned.len() + pool.free.len(), size);
                    prop_assert_eq!(owned.into_iter().chain(&pool.free).collect::<BTreeSet<_>>().len(), size);
                }
            }
        }
    }
}
