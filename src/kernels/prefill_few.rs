//! The experts of a MoE layer where each has few rows: `prefill_experts_few` of `cuda/prefill_experts.cu`.

use std::{ffi::CStr, mem::offset_of};

use super::{
    Kernel, Launch,
    decode::{CHOSEN, EXPERT_WIDTH, EXPERTS, HIDDEN, SHARED_WIDTH, distinct_experts},
    prefill::{PrefillExpertsArgs, Products, ROWS_STEP, expert_tiles},
};
use crate::tiles::{TILE_COLS, TILE_ROWS, TileFormat};

/// Most rows of a tile.
pub const FEW_COLUMNS: usize = 16;
/// Most rows of a launch that is faster so.
pub const FEW_ROWS: usize = 512;

/// One half of [`PrefillFewArgs`]: what the kernels of many rows do, and the same of the shared expert for all rows. T is
/// the number of rows. Addresses are the device's.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PrefillFewHalf {
    /// With tiles of up to [`FEW_COLUMNS`] rows.
    pub routed: PrefillExpertsArgs,
    /// Panels: up `[32, panel_rows, 64]` bf16, down `[16, panel_rows, 64]`.
    pub shared_x: u64,
    /// Up `[128, 4]` tiles of gate and up rows, down `[128, 2]` tiles.
    pub shared_weights: u64,
    /// Up `[128, 2]` f32, gate and up of each strip.
    pub shared_scales: u64,
    /// Up: panels `[16, panel_rows, 64]` bf16, down `[T, 2048]` bf16; written.
    pub shared_out: u64,
    /// `[1]` u32, zero between launches.
    pub counter: u64,
    /// T.
    pub rows: u32,
    /// Rows of a panel of the shared expert: a multiple of 8, at least T.
    pub panel_rows: u32,
    /// Down.
    pub shared_scale: f32,
    /// Fills the struct.
    pub reserved: u32,
}

/// The argument of [`PREFILL_EXPERTS_FEW_NVFP4`] and [`PREFILL_EXPERTS_FEW_BF16`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PrefillFewArgs {
    /// Gate and up.
    pub up: PrefillFewHalf,
    /// Of what `up` makes.
    pub down: PrefillFewHalf,
    /// `[`[`few_counters`]`(T)]` u32, zero between launches.
    pub done: u64,
}

const _: () = assert!(
    size_of::<PrefillFewHalf>() == 112
        && offset_of!(PrefillFewHalf, shared_x) == 56
        && offset_of!(PrefillFewHalf, rows) == 96
        && size_of::<PrefillFewArgs>() == 232
        && offset_of!(PrefillFewArgs, down) == 112
);

/// Both halves, for NVFP4 tiles.
pub const PREFILL_EXPERTS_FEW_NVFP4: Kernel = kernel(c"prefill_experts_few_nvfp4");
/// The same for BF16 tiles.
pub const PREFILL_EXPERTS_FEW_BF16: Kernel = kernel(c"prefill_experts_few_bf16");

const fn kernel(symbol: &'static CStr) -> Kernel {
    Kernel { symbol, args_bytes: size_of::<PrefillFewArgs>(), pdl: true }
}

/// Words of [`PrefillFewArgs::done`] for T rows.
pub const fn few_counters(rows: usize) -> usize {
    1 + rows.div_ceil(FEW_COLUMNS) + expert_tiles(rows, FEW_COLUMNS as u32)
}

impl Products {
    /// Whether [`Self::experts_few`] is what T rows take.
    pub fn takes_few(self, rows: usize) -> bool {
        self.hopper && rows <= FEW_ROWS
    }

    /// The launch of [`PREFILL_EXPERTS_FEW_NVFP4`] or [`PREFILL_EXPERTS_FEW_BF16`] for T rows.
    pub fn experts_few(self, format: TileFormat, rows: usize) -> (Kernel, Launch) {
        let (warps, slots, pages, ranges) = (16, 2, 8, 16);
        let (kernel, piece) = match format {
            TileFormat::Nvfp4 => (PREFILL_EXPERTS_FEW_NVFP4, format.tile_bytes()),
            TileFormat::Bf16 => (PREFILL_EXPERTS_FEW_BF16, format.tile_bytes() / 4),
        };
        let page = ROWS_STEP * TILE_COLS * 2;
        let barriers = 2 * pages + warps * slots + 2 * (ranges + 1);
        let shared_bytes = pages * page + warps * slots * piece + 8 * barriers + 2 * (8 * ranges + 8);
        let tiles = |width: usize| 3 * width * HIDDEN / (TILE_ROWS * TILE_COLS);
        let row = |width: usize| 2 * 2 * (HIDDEN + width);
        let experts = distinct_experts(EXPERTS, CHOSEN, rows);
        let weights = (experts * tiles(EXPERT_WIDTH) + tiles(SHARED_WIDTH)) * format.tile_bytes();
        let bytes = weights + rows * (CHOSEN * row(EXPERT_WIDTH) + row(SHARED_WIDTH));
        let launch = Launch {
            grid: [self.processors as u32, 1, 1],
            block: 32 * (warps + 2) as u32,
            shared_bytes: shared_bytes as u32,
            bytes: bytes as u64,
        };
        (kernel, launch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_fits() {
        for format in [TileFormat::Nvfp4, TileFormat::Bf16] {
            let (_, launch) = Products::of(9, 132).experts_few(format, 64);
            assert_eq!(launch.grid, [132, 1, 1]);
            assert!(launch.shared_bytes <= 227 << 10, "{launch:?}");
        }
        assert!(!Products::of(10, 148).takes_few(64));
    }
}
