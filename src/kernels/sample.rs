//! `cuda/sample_greedy.cu`.

use std::mem::offset_of;

use super::{Kernel, Launch};

/// The most likely token of each row, as the input of the next step.
pub const SAMPLE_GREEDY: Kernel =
    Kernel { symbol: c"sample_greedy", args_bytes: size_of::<SampleGreedyArgs>(), pdl: true };

/// Rows of a line of [`SampleGreedyArgs::host_tokens`].
pub const HOST_ROWS: usize = 8;

/// The argument of [`SAMPLE_GREEDY`], as in `cuda/args_sample.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SampleGreedyArgs {
    /// `[B, logits_stride]` f32.
    pub logits: u64,
    /// `[B]` u32, written.
    pub tokens: u64,
    /// `[B]` u32; each goes up by 1.
    pub positions: u64,
    /// `[ring, 8]` u32 of host memory: the tokens again, in line position % ring.
    pub host_tokens: u64,
    /// `[B]` u64, zero before the first launch; every launch leaves zeros.
    pub best: u64,
    /// `[B]` u32, likewise.
    pub counters: u64,
    /// Tokens that may be chosen.
    pub vocab: u32,
    /// Values from one row of `logits` to the next.
    pub logits_stride: u32,
    /// Lines of `host_tokens`.
    pub ring: u32,
    /// Fills the struct.
    pub reserved: u32,
}

const _: () = assert!(
    size_of::<SampleGreedyArgs>() == 64
        && offset_of!(SampleGreedyArgs, host_tokens) == 24
        && offset_of!(SampleGreedyArgs, vocab) == 48
        && offset_of!(SampleGreedyArgs, ring) == 56
);

/// The launch of [`SAMPLE_GREEDY`] over `rows` rows of `vocab` logits.
pub fn sample_greedy_launch(rows: usize, vocab: usize) -> Launch {
    Launch { grid: [32, rows as u32, 1], block: 512, shared_bytes: 0, bytes: (rows * vocab * 4) as u64 }
}
