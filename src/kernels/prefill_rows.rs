//! `cuda/prefill_embed.cu` and `cuda/prefill_norm.cu`: what prefill does row by row, and `cuda/args_prefill_rows.h`.

use std::mem::offset_of;

use super::{Kernel, Launch, decode::HIDDEN, kernel};

/// Rows of a thread block, one a warp.
const ROWS: usize = 8;
/// Most rows of [`PREFILL_NORM_FEW`]: with a block each the multiprocessors of an H200 hold so many at once.
const FEW_ROWS: usize = 1024;

/// The embeddings of a chunk's tokens.
pub const PREFILL_EMBED: Kernel = kernel::<PrefillEmbedArgs>(c"prefill_embed");
/// Residual add and RMS norm, into panels.
pub const PREFILL_NORM: Kernel = kernel::<PrefillNormArgs>(c"prefill_norm");
/// The same with a block a row.
pub const PREFILL_NORM_FEW: Kernel = kernel::<PrefillNormArgs>(c"prefill_norm_few");

/// The argument of [`PREFILL_EMBED`]. Device addresses, multiples of 16; T rows of D = 2048.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PrefillEmbedArgs {
    /// `[V, D]` bf16.
    pub embedding: u64,
    /// `[T]` u32, below V.
    pub tokens: u64,
    /// Out: `[T, D]` bf16.
    pub delta: u64,
    /// Out: `[T, D]` bf16, zeros.
    pub residual: u64,
    /// T.
    pub rows: u32,
    /// Fills the struct.
    pub reserved: u32,
}

/// The argument of [`PREFILL_NORM`] and [`PREFILL_NORM_FEW`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PrefillNormArgs {
    /// `[T, D]` bf16, output of the block before, not yet added.
    pub delta: u64,
    /// `[T, D]` bf16, replaced by the sum.
    pub residual: u64,
    /// `[D]` f32.
    pub weight: u64,
    /// Out: panels of `cuda/panel.cuh`.
    pub normed: u64,
    /// T.
    pub rows: u32,
    /// Rows of a panel, a multiple of 8 and at least T.
    pub panel_rows: u32,
    /// Epsilon of the norm.
    pub eps: f32,
    /// Fills the struct.
    pub reserved: u32,
}

const _: () = assert!(
    size_of::<PrefillEmbedArgs>() == 40
        && offset_of!(PrefillEmbedArgs, rows) == 32
        && size_of::<PrefillNormArgs>() == 48
        && offset_of!(PrefillNormArgs, weight) == 16
        && offset_of!(PrefillNormArgs, rows) == 32
        && offset_of!(PrefillNormArgs, eps) == 40
);

fn launch(rows: usize, row_bytes: usize) -> Launch {
    let grid = [rows.div_ceil(ROWS) as u32, 1, 1];
    Launch { grid, block: 32 * ROWS as u32, shared_bytes: 0, bytes: (rows * row_bytes) as u64 }
}

/// The launch of [`PREFILL_EMBED`].
pub fn prefill_embed_launch(rows: usize) -> Launch {
    launch(rows, 3 * 2 * HIDDEN)
}

/// The kernel for so many rows, and its launch.
pub fn prefill_norm_launch(rows: usize) -> (Kernel, Launch) {
    let many = launch(rows, 4 * 2 * HIDDEN);
    if rows > FEW_ROWS {
        return (PREFILL_NORM, many);
    }
    (PREFILL_NORM_FEW, Launch { grid: [rows as u32, 1, 1], ..many })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_has_a_warp() {
        for (rows, blocks) in [(1, 1), (8, 1), (9, 2), (8192, 1024)] {
            assert_eq!(prefill_embed_launch(rows).grid, [blocks, 1, 1]);
        }
        let (kernel, launch) = prefill_norm_launch(8192);
        // Delta and residual in, residual and normed out.
        assert_eq!((kernel, launch.grid, launch.bytes), (PREFILL_NORM, [1024, 1, 1], 8192 * 16384));
    }

    #[test]
    fn few_rows_have_a_block_each() {
        let (kernel, launch) = prefill_norm_launch(64);
        assert_eq!((kernel, launch.grid, launch.block), (PREFILL_NORM_FEW, [64, 1, 1], 256));
    }
}
