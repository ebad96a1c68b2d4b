//! The products of the fast decode path: `cuda/decode_*.cu` but attention and the sampler, and `cuda/args_decode.h`.

use std::mem::offset_of;

use super::{Kernel, Launch, kernel, symbol};
use crate::tiles::{TILE_COLS, TILE_ROWS, TileFormat};

/// Rows of a step that the kernels are compiled for; a step of B rows uses the smallest that holds it.
pub const ROWS: [usize; 4] = [1, 2, 4, 8];
/// Most rows of a step of these kernels.
pub const MAX_ROWS: usize = ROWS[ROWS.len() - 1];
/// D, the width that these kernels are compiled for.
pub const HIDDEN: usize = 2048;
/// E.
pub const EXPERTS: usize = 256;
/// K.
pub const CHOSEN: usize = 6;
/// F.
pub const EXPERT_WIDTH: usize = 512;
/// Width of the shared expert.
pub const SHARED_WIDTH: usize = 1024;

/// The residual stream and its norm in front of a product. Addresses are the device's.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct NormArgs {
    /// `[B, D]` bf16, output of the block before, not yet added.
    pub delta: u64,
    /// `[B, D]` bf16.
    pub residual: u64,
    /// `[B, D]` bf16, written.
    pub new_residual: u64,
    /// `[B, D]` bf16, written, or 0.
    pub normed: u64,
    /// `[D]` f32.
    pub weight: u64,
    /// Epsilon of the norm.
    pub eps: f32,
    /// B.
    pub rows: u32,
}

/// Argument of the `decode_linear.cu` kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DecodeLinearArgs {
    /// For kernels that norm their input; else only `rows` counts.
    pub norm: NormArgs,
    /// `[B, k]` bf16 for kernels that do not.
    pub x: u64,
    /// `[strips, k / 512]` tiles.
    pub weights: u64,
    /// `[strips, 2]` f32, of rows 0-7 and of rows 8-15.
    pub scales: u64,
    /// `[B, out_stride]` bf16 or f32, written.
    pub out: u64,
    /// Strips of 16 rows.
    pub strips: u32,
    /// Values from one row of `out` to the next.
    pub out_stride: u32,
}

/// Argument of `decode_router`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DecodeRouterArgs {
    /// The norm in front; its `normed` is written for `decode_experts_up`.
    pub norm: NormArgs,
    /// `[256, D]` f32.
    pub router: u64,
    /// `[B, 256]` f32, written.
    pub scores: u64,
}

/// Argument of `decode_experts_up`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DecodeExpertsUpArgs {
    /// `[B, D]` bf16, normed.
    pub x: u64,
    /// `[B, 256]` f32, from 0 to 1.
    pub scores: u64,
    /// `[256, 64, 4]` tiles of gate and up rows.
    pub gate_up: u64,
    /// `[256, 2]` f32: gate, up.
    pub scales: u64,
    /// `[B, 6, 512]` bf16 by slot, written.
    pub act: u64,
    /// `[128, 4]` tiles of gate and up rows.
    pub shared_gate_up: u64,
    /// `[128, 2]` f32: gate, up.
    pub shared_scales: u64,
    /// `[B, 1024]` bf16, written.
    pub act_shared: u64,
    /// B.
    pub rows: u32,
    /// Fills the struct.
    pub reserved: u32,
}

/// Argument of `decode_down`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DecodeDownArgs {
    /// `[B, 256]` f32, from 0 to 1.
    pub scores: u64,
    /// `[256, 128]` tiles.
    pub down: u64,
    /// `[256]` f32.
    pub scales: u64,
    /// `[128, 2]` tiles.
    pub shared_down: u64,
    /// `[B, 6, 512]` bf16 by slot.
    pub act: u64,
    /// `[B, 1024]` bf16.
    pub act_shared: u64,
    /// `[B, D]` bf16, written.
    pub delta: u64,
    /// Scale of `shared_down`.
    pub shared_scale: f32,
    /// B.
    pub rows: u32,
}

/// Argument of `decode_embed`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct DecodeEmbedArgs {
    /// `[V, D]` bf16.
    pub embedding: u64,
    /// `[B]` u32.
    pub tokens: u64,
    /// `[B]` u32.
    pub positions: u64,
    /// `[64]` f32.
    pub inv_freq: u64,
    /// `[B, D]` bf16, written.
    pub delta: u64,
    /// `[B, D]` bf16, zeroed.
    pub residual: u64,
    /// `[B, 2, 64]` f32, written: cosines, then sines, of the positions times `inv_freq`.
    pub rope: u64,
}

const _: () = assert!(
    size_of::<NormArgs>() == 48
        && size_of::<DecodeLinearArgs>() == 88
        && offset_of!(DecodeLinearArgs, x) == 48
        && offset_of!(DecodeLinearArgs, strips) == 80
        && size_of::<DecodeRouterArgs>() == 64
        && size_of::<DecodeExpertsUpArgs>() == 72
        && size_of::<DecodeDownArgs>() == 64
        && size_of::<DecodeEmbedArgs>() == 56
);

/// One operation, compiled for each number of rows and, where tiles matter, for each format.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// By format (NVFP4, BF16), or one for both; then as [`ROWS`].
    kernels: &'static [[Kernel; 4]],
}

impl Family {
    /// The kernel for a step of `rows` rows, 1 to 8.
    pub fn kernel(&self, format: TileFormat, rows: usize) -> Kernel {
        let format = usize::from(format == TileFormat::Bf16);
        self.kernels[format.min(self.kernels.len() - 1)][variant(rows)]
    }

    /// All of them, to load at start.
    pub fn all(&self) -> impl Iterator<Item = Kernel> {
        self.kernels.iter().flatten().copied()
    }
}

/// Index into [`ROWS`] of the kernel for `rows` rows.
fn variant(rows: usize) -> usize {
    ROWS.iter().position(|&most| rows <= most).expect("a step has 1 to 8 rows")
}

macro_rules! family {
    ($(#[$doc:meta])* $family:ident, $name:literal, [$($format:literal),*], $args:ty) => {
        $(#[$doc])*
        pub static $family: Family = Family {
            kernels: &[$([family!(@ $name, $format, "_1", $args), family!(@ $name, $format, "_2", $args),
                          family!(@ $name, $format, "_4", $args), family!(@ $name, $format, "_8", $args)]),*],
        };
    };
    ($(#[$doc:meta])* $family:ident, $name:literal, $args:ty) => {
        family!($(#[$doc])* $family, $name, ["_nvfp4", "_bf16"], $args);
    };
    (@ $name:literal, $format:literal, $rows:literal, $args:ty) => {
        kernel::<$args>(symbol(concat!($name, $format, $rows, "\0").as_bytes()))
    };
}

family!(
    /// q, k and v of a layer.
    DECODE_QKV, "decode_qkv", DecodeLinearArgs);
family!(
    /// Attention's output projection.
    DECODE_O, "decode_o", DecodeLinearArgs);
family!(
    /// First half of a dense MLP.
    DECODE_DENSE_UP, "decode_dense_up", DecodeLinearArgs);
family!(
    /// Second half of a dense MLP.
    DECODE_DENSE_DOWN, "decode_dense_down", DecodeLinearArgs);
family!(
    /// Final norm and logits.
    DECODE_LM_HEAD, "decode_lm_head", DecodeLinearArgs);
family!(
    /// The router's scores.
    DECODE_ROUTER, "decode_router", [""], DecodeRouterArgs);
family!(
    /// The experts' first half, shared and chosen ones.
    DECODE_EXPERTS_UP, "decode_experts_up", DecodeExpertsUpArgs);
family!(
    /// The second half of a MoE layer.
    DECODE_DOWN, "decode_down", DecodeDownArgs);

/// The embeddings of a step's tokens.
pub const DECODE_EMBED: Kernel = kernel::<DecodeEmbedArgs>(c"decode_embed");

/// Distinct experts that `rows` rows choose in the mean if all are equally likely, rounded.
pub fn distinct_experts(n_experts: usize, per_token: usize, rows: usize) -> usize {
    let missed = (1.0 - per_token as f64 / n_experts as f64).powi(rows as i32);
    (n_experts as f64 * (1.0 - missed)).round() as usize
}

/// Bytes between the rows of x in shared memory, as `x_stride` of `gemv.cuh`.
const fn x_stride(cols: usize) -> usize {
    2 * cols + 16
}

/// Bytes of `Routing` of `routing.cuh` for `rows` rows.
const fn routing_bytes(rows: usize) -> usize {
    let bytes = 4 * rows * CHOSEN + 4 * 8 + 4 * rows * CHOSEN + rows * CHOSEN * rows;
    bytes.next_multiple_of(4) + 4
}

/// How a `decode_linear.cu` kernel splits its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LinearShape {
    /// Inputs.
    cols: usize,
    /// Warps that split the inputs of a strip.
    split: usize,
    /// Strips that a block works on at once.
    groups: usize,
    /// Multiprocessors that get a block each, see `Launch::on_each`; 0 where blocks may lie as they come.
    each_of: usize,
    /// Most blocks, of the kernel whose groups take strips in turn; others have a group for each strip, whatever the card.
    most_blocks: usize,
}

/// Shape of [`DECODE_QKV`].
pub const QKV_SHAPE: LinearShape = LinearShape { cols: 2048, split: 4, groups: 3, each_of: 0, most_blocks: usize::MAX };
/// Shape of [`DECODE_DENSE_UP`].
pub const DENSE_UP_SHAPE: LinearShape =
    LinearShape { cols: 2048, split: 4, groups: 3, each_of: 0, most_blocks: usize::MAX };

impl LinearShape {
    /// Shape of [`DECODE_O`] on a card of `processors` multiprocessors.
    pub const fn o(processors: usize) -> Self {
        Self { cols: 4096, split: 8, groups: 1, each_of: processors, most_blocks: usize::MAX }
    }

    /// Shape of [`DECODE_DENSE_DOWN`].
    pub const fn dense_down(processors: usize) -> Self {
        Self { cols: 6144, split: 6, groups: 1, each_of: processors, most_blocks: usize::MAX }
    }

    /// Shape of [`DECODE_LM_HEAD`]: as many blocks as the card holds at once, which take all strips in turn.
    pub fn lm_head(processors: usize, format: TileFormat) -> Self {
        let each = if format == TileFormat::Nvfp4 { 2 } else { 1 };
        Self { cols: 2048, split: 2, groups: 4, each_of: 0, most_blocks: each * processors }
    }

    /// The launch for a matrix of `strips` strips and `rows` rows of input.
    pub fn launch(self, format: TileFormat, rows: usize, strips: usize, out_bytes: u64) -> Launch {
        let columns = ROWS[variant(rows)];
        let warps = self.split * self.groups;
        let sums = 4 * (2 * warps * TILE_ROWS * columns).max(columns * 8);
        let launch = Launch {
            grid: [strips.div_ceil(self.groups).min(self.most_blocks) as u32, 1, 1],
            block: (warps * 32) as u32,
            shared_bytes: (columns * x_stride(self.cols) + sums) as u32,
            bytes: (strips * self.cols / TILE_COLS * format.tile_bytes() + rows * self.cols * 2) as u64 + out_bytes,
        };
        if self.each_of > 0 { launch.on_each(self.each_of) } else { launch }
    }
}

/// The launch of [`DECODE_ROUTER`].
pub fn decode_router_launch(rows: usize, processors: usize) -> Launch {
    let columns = ROWS[variant(rows)];
    Launch {
        grid: [128, 1, 1],
        block: 8 * 32,
        shared_bytes: (columns * x_stride(HIDDEN) + 4 * 8 * columns) as u32,
        bytes: (EXPERTS * HIDDEN * 4 + rows * (HIDDEN * 8 + EXPERTS * 4)) as u64,
    }
    .on_each(processors)
}

/// The launch of [`DECODE_EXPERTS_UP`], for `distinct` experts in all.
pub fn decode_experts_up_launch(format: TileFormat, rows: usize, distinct: usize) -> Launch {
    let columns = ROWS[variant(rows)];
    let warps = if columns == 1 { 16 } else { 12 };
    let sums = 4 * 2 * warps * TILE_ROWS * columns;
    let activations = HIDDEN + CHOSEN * EXPERT_WIDTH + SHARED_WIDTH;
    Launch {
        grid: [128, 1, 1],
        block: (warps * 32) as u32,
        shared_bytes: (columns * x_stride(HIDDEN) + sums + routing_bytes(columns)) as u32,
        bytes: ((distinct * 64 + 128) * 4 * format.tile_bytes() + rows * activations * 2) as u64,
    }
}

/// The launch of [`DECODE_DOWN`], for `distinct` experts in all.
pub fn decode_down_launch(format: TileFormat, rows: usize, distinct: usize, processors: usize) -> Launch {
    let columns = ROWS[variant(rows)];
    let x = columns * CHOSEN * x_stride(EXPERT_WIDTH) + columns * x_stride(SHARED_WIDTH);
    let warps = if columns < 4 { 8 } else { 12 };
    Launch {
        grid: [128, 1, 1],
        block: warps * 32,
        shared_bytes: (x + 4 * columns * 8 * TILE_ROWS + routing_bytes(columns)) as u32,
        bytes: ((distinct + 2) * 128 * format.tile_bytes() + rows * (CHOSEN * EXPERT_WIDTH + SHARED_WIDTH + HIDDEN) * 2)
            as u64,
    }
    .on_each(processors)
}

/// The launch of [`DECODE_EMBED`].
pub fn decode_embed_launch(rows: usize) -> Launch {
    Launch { grid: [rows as u32, 1, 1], block: 256, shared_bytes: 0, bytes: (rows * HIDDEN * 6) as u64 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_strip_has_a_group() {
        for (shape, strips, blocks, threads) in [
            (QKV_SHAPE, 320, 107, 384),
            (LinearShape::o(132), 128, 132, 256),
            (LinearShape::o(108), 128, 128, 256),
            (DENSE_UP_SHAPE, 768, 256, 384),
            (LinearShape::dense_down(132), 128, 132, 192),
            (LinearShape::lm_head(132, TileFormat::Nvfp4), 9384, 264, 256),
            (LinearShape::lm_head(132, TileFormat::Bf16), 9384, 132, 256),
        ] {
            let launch = shape.launch(TileFormat::Nvfp4, 1, strips, 0);
            assert_eq!((launch.grid, launch.block), ([blocks, 1, 1], threads));
            assert!(launch.bytes > (strips * shape.cols / 512 * 4608) as u64);
        }
        // On any card, but for the LM head, whose groups take strips in turn.
        for processors in [1, 24, 46, 84, 108, 132, 170] {
            for format in [TileFormat::Nvfp4, TileFormat::Bf16] {
                for (shape, strips) in [
                    (QKV_SHAPE, 320),
                    (LinearShape::o(processors), 128),
                    (DENSE_UP_SHAPE, 768),
                    (LinearShape::dense_down(processors), 128),
                ] {
                    for rows in 1..=8 {
                        let launch = shape.launch(format, rows, strips, 0);
                        assert!(launch.grid[0] as usize * shape.groups >= strips, "{processors}, {shape:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn shared_memory_fits_every_card_at_eight_rows() {
        // sm_86, sm_89 and sm_120 give a block 99 KiB.
        let most = 99 * 1024;
        for format in [TileFormat::Nvfp4, TileFormat::Bf16] {
            for launch in [
                QKV_SHAPE.launch(format, 8, 320, 0),
                LinearShape::o(132).launch(format, 8, 128, 0),
                DENSE_UP_SHAPE.launch(format, 8, 768, 0),
                LinearShape::lm_head(132, format).launch(format, 8, 9384, 0),
                decode_router_launch(8, 132),
                decode_experts_up_launch(format, 8, 44),
                decode_down_launch(format, 8, 44, 132),
            ] {
                assert!(launch.shared_bytes <= most, "{launch:?}");
            }
        }
    }

    #[test]
    fn a_step_takes_the_smallest_kernel_that_holds_it() {
        for (rows, name) in [(1, "1"), (2, "2"), (3, "4"), (4, "4"), (5, "8"), (8, "8")] {
            let kernel = DECODE_QKV.kernel(TileFormat::Bf16, rows);
            assert_eq!(kernel.symbol.to_str().unwrap(), format!("decode_qkv_bf16_{name}"));
        }
        assert_eq!(DECODE_DOWN.all().count(), 8);
        // The router has no tiles.
        for format in [TileFormat::Nvfp4, TileFormat::Bf16] {
            assert_eq!(DECODE_ROUTER.kernel(format, 2).symbol, c"decode_router_2");
        }
    }
}
