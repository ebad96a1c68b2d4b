//! Rows on their way to experts and back: `cuda/prefill_route.cu` and its part of `cuda/args_prefill.h`.

use std::mem::offset_of;

use super::{
    Kernel, Launch,
    decode::{CHOSEN, EXPERTS, HIDDEN},
    kernel,
    prefill::ROWS_STEP,
};
use crate::tiles::PARTS;

/// Rows that share a mask of choices.
const MASK_ROWS: usize = 32;
/// Rows that a block of [`PREFILL_ROUTE`] routes.
const ROUTE_ROWS: usize = 8;
/// Most rows of [`PREFILL_GATHER_FEW`].
const FEW_ROWS: usize = 256;
/// Most rows that a block of [`PREFILL_GATHER`] copies, and how many rows that pays for.
const GATHER_ROWS: usize = 8;
const GATHER_SINGLY: usize = 1024;

/// The argument of [`PREFILL_ROUTE`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PrefillRouteArgs {
    /// `[T, 3, 256]` f32, parts that add up to the logits.
    pub logits: u64,
    /// `[T, 6]` u32 ascending, written.
    pub experts: u64,
    /// `[T, 6]` f32 of those, written.
    pub weights: u64,
    /// `[ceil(T / 32), 256]` u32, written: bit i of `[b, e]`: row 32 b + i chose expert e.
    pub masks: u64,
    /// T.
    pub rows: u32,
    /// Fills the struct.
    pub reserved: u32,
}

/// The argument of [`PREFILL_GROUP`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PrefillGroupArgs {
    /// `[ceil(T / 32), 256]` u32.
    pub masks: u64,
    /// `[ceil(T / 32), 256]` u32, written: sorted row of the first of rows 32 b .. that chose expert e.
    pub places: u64,
    /// `[expert_tiles(T, most_columns), 4]` u32, written: expert, first sorted row, rows, columns multiplied.
    pub tiles: u64,
    /// `[1]` u32, written.
    pub n_tiles: u64,
    /// T.
    pub rows: u32,
    /// [`super::prefill::Products::expert_columns`].
    pub most_columns: u32,
}

/// The argument of [`PREFILL_GATHER`] and [`PREFILL_GATHER_FEW`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PrefillGatherArgs {
    /// Panels `[32, panel_rows, 64]` bf16.
    pub x: u64,
    /// `[T, 6]` u32.
    pub experts: u64,
    /// `[ceil(T / 32), 256]` u32.
    pub masks: u64,
    /// `[ceil(T / 32), 256]` u32; not of [`PREFILL_GATHER_FEW`].
    pub places: u64,
    /// `[T, 6]` u32, written: the sorted row of each choice.
    pub sorted: u64,
    /// Panels `[32, sorted_rows, 64]` bf16; the rows of `sorted` are written.
    pub out: u64,
    /// T.
    pub rows: u32,
    /// Rows of a panel of `x`.
    pub panel_rows: u32,
    /// Rows of a panel of `out`, at least [`sorted_rows`].
    pub sorted_rows: u32,
    /// Fills the struct.
    pub reserved: u32,
}

/// The argument of [`PREFILL_COMBINE`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PrefillCombineArgs {
    /// `[sorted_rows, 2048]` bf16.
    pub y: u64,
    /// `[T, 6]` u32. Read before the kernel in front has ended, as `weights` is: another has to stand between.
    pub sorted: u64,
    /// `[T, 6]` f32.
    pub weights: u64,
    /// `[T, 2048]` bf16, output of the shared expert.
    pub shared: u64,
    /// `[T, 2048]` bf16, written.
    pub delta: u64,
    /// T.
    pub rows: u32,
    /// Fills the struct.
    pub reserved: u32,
}

/// The argument of [`PREFILL_COMBINE_NORM`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PrefillCombineNormArgs {
    /// `[sorted_rows, 2048]` bf16.
    pub y: u64,
    /// `[T, 6]` u32. Read before the kernel in front has ended, as `weights` and `residual` are: another has to stand
    /// between.
    pub sorted: u64,
    /// `[T, 6]` f32.
    pub weights: u64,
    /// `[T, 2048]` bf16, output of the shared expert.
    pub shared: u64,
    /// `[T, 2048]` bf16, replaced by the sum with the layer's output.
    pub residual: u64,
    /// `[2048]` f32.
    pub norm_weight: u64,
    /// Panels `[32, panel_rows, 64]` bf16, written.
    pub normed: u64,
    /// T.
    pub rows: u32,
    /// Rows of a panel of `normed`.
    pub panel_rows: u32,
    /// Epsilon of the norm.
    pub eps: f32,
    /// Fills the struct.
    pub reserved: u32,
}

const _: () = assert!(
    size_of::<PrefillRouteArgs>() == 40
        && offset_of!(PrefillRouteArgs, rows) == 32
        && size_of::<PrefillGroupArgs>() == 40
        && offset_of!(PrefillGroupArgs, rows) == 32
        && size_of::<PrefillGatherArgs>() == 64
        && offset_of!(PrefillGatherArgs, rows) == 48
        && size_of::<PrefillCombineArgs>() == 48
        && offset_of!(PrefillCombineArgs, rows) == 40
        && size_of::<PrefillCombineNormArgs>() == 72
        && offset_of!(PrefillCombineNormArgs, rows) == 56
        && offset_of!(PrefillCombineNormArgs, eps) == 64
);

/// Sorted rows of T rows: each expert's begin at a multiple of eight.
pub const fn sorted_rows(rows: usize) -> usize {
    (CHOSEN * rows + EXPERTS * (ROWS_STEP - 1)).next_multiple_of(ROWS_STEP)
}

/// Most tiles of 16 bytes that [`PREFILL_GROUP`] makes of T rows.
pub const fn expert_tiles(rows: usize, most_columns: u32) -> usize {
    EXPERTS + CHOSEN * rows / most_columns as usize
}

/// The choice of experts.
pub const PREFILL_ROUTE: Kernel = kernel::<PrefillRouteArgs>(c"prefill_route");
/// Where each expert's rows lie, and the tiles over them.
pub const PREFILL_GROUP: Kernel = kernel::<PrefillGroupArgs>(c"prefill_group");
/// Copies rows to their experts.
pub const PREFILL_GATHER: Kernel = kernel::<PrefillGatherArgs>(c"prefill_gather");
/// The same, for up to 256 rows: it needs nothing of [`PREFILL_GROUP`], and runs beside it. What is older than that has to
/// have ended.
pub const PREFILL_GATHER_FEW: Kernel = kernel::<PrefillGatherArgs>(c"prefill_gather_few");
/// The output of a MoE layer.
pub const PREFILL_COMBINE: Kernel = kernel::<PrefillCombineArgs>(c"prefill_combine");
/// The same, and the residual add and norm behind it.
pub const PREFILL_COMBINE_NORM: Kernel = kernel::<PrefillCombineNormArgs>(c"prefill_combine_norm");

/// The launch of [`PREFILL_ROUTE`] for T rows.
pub fn prefill_route_launch(rows: usize) -> Launch {
    let masks = rows.div_ceil(MASK_ROWS);
    Launch {
        grid: [(masks * (MASK_ROWS / ROUTE_ROWS)) as u32, 1, 1],
        block: 32 * ROUTE_ROWS as u32,
        shared_bytes: 0,
        bytes: (4 * (rows * (PARTS * EXPERTS + 2 * CHOSEN) + masks * EXPERTS)) as u64,
    }
}

/// The launch of [`PREFILL_GROUP`] for T rows.
pub fn prefill_group_launch(rows: usize) -> Launch {
    let bytes = (8 * rows.div_ceil(MASK_ROWS) * EXPERTS) as u64;
    Launch { grid: [1, 1, 1], block: 1024, shared_bytes: 0, bytes }
}

/// The kernel that copies T rows to their experts, and its launch.
pub fn prefill_gather_launch(rows: usize) -> (Kernel, Launch) {
    let blocks = if rows <= GATHER_SINGLY { rows } else { rows.div_ceil(GATHER_ROWS) };
    let launch = Launch {
        grid: [blocks as u32, 1, 1],
        block: 256,
        shared_bytes: 0,
        bytes: (rows * (1 + CHOSEN) * 2 * HIDDEN) as u64,
    };
    (if rows <= FEW_ROWS { PREFILL_GATHER_FEW } else { PREFILL_GATHER }, launch)
}

fn combine_launch(rows: usize, row_parts: usize) -> Launch {
    Launch { grid: [rows as u32, 1, 1], block: 256, shared_bytes: 0, bytes: (rows * row_parts * 2 * HIDDEN) as u64 }
}

/// The launch of [`PREFILL_COMBINE`] for T rows.
pub fn prefill_combine_launch(rows: usize) -> Launch {
    combine_launch(rows, CHOSEN + 2)
}

/// The launch of [`PREFILL_COMBINE_NORM`] for T rows.
pub fn prefill_combine_norm_launch(rows: usize) -> Launch {
    combine_launch(rows, CHOSEN + 4)
}
