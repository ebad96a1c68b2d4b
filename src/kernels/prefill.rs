//! Stand-in.
#![allow(missing_docs)]
use crate::kernels::{Kernel, Launch};
use crate::tiles::TileFormat;
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PrefillLinearArgs {
    pub x: u64,
    pub weights: u64,
    pub scales: u64,
    pub out: u64,
    pub rows: u32,
    pub panel_rows: u32,
    pub strips: u32,
    pub k_tiles: u32,
    pub x_panels: u32,
    pub out_stride: u32,
    pub scale: f32,
    pub reserved: u32,
}
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PrefillExpertsArgs {
    pub x: u64,
    pub weights: u64,
    pub scales: u64,
    pub out: u64,
    pub tiles: u64,
    pub n_tiles: u64,
    pub sorted_rows: u32,
    pub reserved: u32,
}
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PrefillRouteArgs {
    pub logits: u64,
    pub experts: u64,
    pub weights: u64,
    pub masks: u64,
    pub rows: u32,
    pub reserved: u32,
}
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PrefillGroupArgs {
    pub masks: u64,
    pub places: u64,
    pub tiles: u64,
    pub n_tiles: u64,
    pub rows: u32,
    pub most_columns: u32,
}
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PrefillGatherArgs {
    pub x: u64,
    pub experts: u64,
    pub masks: u64,
    pub places: u64,
    pub sorted: u64,
    pub out: u64,
    pub rows: u32,
    pub panel_rows: u32,
    pub sorted_rows: u32,
    pub reserved: u32,
}
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PrefillCombineArgs {
    pub y: u64,
    pub sorted: u64,
    pub weights: u64,
    pub shared: u64,
    pub delta: u64,
    pub rows: u32,
    pub reserved: u32,
}
pub fn prefill_linear(_: TileFormat, _: &PrefillLinearArgs) -> (Kernel, Launch) {
    (
        Kernel { symbol: c"prefill_linear", args_bytes: 64, pdl: true },
        Launch { grid: [1, 1, 1], block: 1, shared_bytes: 0, bytes: 0 },
    )
}
pub fn prefill_swiglu(_: TileFormat, _: &PrefillLinearArgs) -> (Kernel, Launch) {
    (
        Kernel { symbol: c"prefill_swiglu", args_bytes: 64, pdl: true },
        Launch { grid: [1, 1, 1], block: 1, shared_bytes: 0, bytes: 0 },
    )
}
pub fn prefill_logits(_: TileFormat, _: &PrefillLinearArgs) -> (Kernel, Launch) {
    (
        Kernel { symbol: c"prefill_logits", args_bytes: 64, pdl: true },
        Launch { grid: [1, 1, 1], block: 1, shared_bytes: 0, bytes: 0 },
    )
}
pub fn prefill_experts_up(_: TileFormat, _: usize) -> (Kernel, Launch) {
    (
        Kernel { symbol: c"prefill_experts_up", args_bytes: 64, pdl: true },
        Launch { grid: [1, 1, 1], block: 1, shared_bytes: 0, bytes: 0 },
    )
}
pub fn prefill_experts_down(_: TileFormat, _: usize) -> (Kernel, Launch) {
    (
        Kernel { symbol: c"prefill_experts_down", args_bytes: 64, pdl: true },
        Launch { grid: [1, 1, 1], block: 1, shared_bytes: 0, bytes: 0 },
    )
}
pub const PREFILL_ROUTE: Kernel = Kernel { symbol: c"prefill_route", args_bytes: 64, pdl: true };
pub fn prefill_route_launch(_: usize) -> Launch {
    Launch { grid: [1, 1, 1], block: 1, shared_bytes: 0, bytes: 0 }
}
pub const PREFILL_GROUP: Kernel = Kernel { symbol: c"prefill_group", args_bytes: 64, pdl: true };
pub fn prefill_group_launch(_: usize) -> Launch {
    Launch { grid: [1, 1, 1], block: 1, shared_bytes: 0, bytes: 0 }
}
pub const PREFILL_GATHER: Kernel = Kernel { symbol: c"prefill_gather", args_bytes: 64, pdl: true };
pub fn prefill_gather_launch(_: usize) -> Launch {
    Launch { grid: [1, 1, 1], block: 1, shared_bytes: 0, bytes: 0 }
}
pub const PREFILL_COMBINE: Kernel = Kernel { symbol: c"prefill_combine", args_bytes: 64, pdl: true };
pub fn prefill_combine_launch(_: usize) -> Launch {
    Launch { grid: [1, 1, 1], block: 1, shared_bytes: 0, bytes: 0 }
}
pub fn expert_columns(_: usize) -> u32 {
    32
}
