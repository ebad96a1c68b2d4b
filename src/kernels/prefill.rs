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

const fn symbol(bytes: &'static [u8]) -> &'static std::ffi::CStr {
    match std::ffi::CStr::from_bytes_with_nul(bytes) {
        Ok(symbol) => symbol,
        Err(_) => panic!(),
    }
}
macro_rules! pair {
    ($name:literal, $args:ty) => {
        [
            Kernel {
                symbol: symbol(concat!($name, "_nvfp4_256\0").as_bytes()),
                args_bytes: size_of::<$args>(),
                pdl: true,
            },
            Kernel {
                symbol: symbol(concat!($name, "_bf16_256\0").as_bytes()),
                args_bytes: size_of::<$args>(),
                pdl: true,
            },
        ]
    };
}
pub const LINEAR: [Kernel; 2] = pair!("prefill_linear", PrefillLinearArgs);
pub const LOGITS: [Kernel; 2] = pair!("prefill_logits", PrefillLinearArgs);
pub const SWIGLU: [Kernel; 2] = pair!("prefill_swiglu", PrefillLinearArgs);
pub const UP: [Kernel; 2] = pair!("prefill_experts_up", PrefillExpertsArgs);
pub const DOWN: [Kernel; 2] = pair!("prefill_experts_down", PrefillExpertsArgs);
const RING: u32 = 5 * 32768 + 5 * 16;
fn pick(kernels: [Kernel; 2], f: TileFormat) -> Kernel {
    kernels[usize::from(f == TileFormat::Bf16)]
}
fn linear(k: [Kernel; 2], f: TileFormat, a: &PrefillLinearArgs, ending: u32, out: u64) -> (Kernel, Launch) {
    let units = a.rows.div_ceil(256) * a.strips.div_ceil(16);
    let bytes = u64::from(a.strips) * u64::from(a.k_tiles) * f.tile_bytes() as u64
        + u64::from(a.rows) * (u64::from(a.x_panels) * 128 + u64::from(a.strips) * out);
    (pick(k, f), Launch { grid: [2 * units.min(66), 1, 1], block: 384, shared_bytes: RING + ending, bytes })
}
pub fn prefill_linear(f: TileFormat, a: &PrefillLinearArgs) -> (Kernel, Launch) {
    linear(LINEAR, f, a, 12288, 32)
}
pub fn prefill_swiglu(f: TileFormat, a: &PrefillLinearArgs) -> (Kernel, Launch) {
    linear(SWIGLU, f, a, 32768, 16)
}
pub fn prefill_logits(f: TileFormat, a: &PrefillLinearArgs) -> (Kernel, Launch) {
    linear(LOGITS, f, a, 0, 64)
}
pub fn prefill_experts_up(f: TileFormat, rows: usize) -> (Kernel, Launch) {
    let bytes = (256 * 64 * 4 * f.tile_bytes() + 6 * rows * (4096 + 1024)) as u64;
    (pick(UP, f), Launch { grid: [132, 1, 1], block: 384, shared_bytes: RING + 32768, bytes })
}
pub fn prefill_experts_down(f: TileFormat, rows: usize) -> (Kernel, Launch) {
    let bytes = (256 * 128 * f.tile_bytes() + 6 * rows * (4096 + 1024)) as u64;
    (pick(DOWN, f), Launch { grid: [132, 1, 1], block: 384, shared_bytes: RING + 12288, bytes })
}
pub const PREFILL_ROUTE: Kernel =
    Kernel { symbol: c"prefill_route", args_bytes: size_of::<PrefillRouteArgs>(), pdl: true };
pub fn prefill_route_launch(rows: usize) -> Launch {
    Launch { grid: [rows.div_ceil(32) as u32, 1, 1], block: 1024, shared_bytes: 0, bytes: (rows * 1072) as u64 }
}
pub const PREFILL_GROUP: Kernel =
    Kernel { symbol: c"prefill_group", args_bytes: size_of::<PrefillGroupArgs>(), pdl: true };
pub fn prefill_group_launch(rows: usize) -> Launch {
    Launch { grid: [1, 1, 1], block: 1024, shared_bytes: 0, bytes: (rows * 96) as u64 }
}
pub const PREFILL_GATHER: Kernel =
    Kernel { symbol: c"prefill_gather", args_bytes: size_of::<PrefillGatherArgs>(), pdl: true };
pub fn prefill_gather_launch(rows: usize) -> Launch {
    Launch { grid: [rows.div_ceil(8) as u32, 1, 1], block: 256, shared_bytes: 0, bytes: (rows * 7 * 4096) as u64 }
}
pub const PREFILL_COMBINE: Kernel =
    Kernel { symbol: c"prefill_combine", args_bytes: size_of::<PrefillCombineArgs>(), pdl: true };
pub fn prefill_combine_launch(rows: usize) -> Launch {
    Launch { grid: [rows as u32, 1, 1], block: 256, shared_bytes: 0, bytes: (rows * 8 * 4096) as u64 }
}
pub fn expert_columns(_: usize) -> u32 {
    256
}
