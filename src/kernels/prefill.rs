//! Products over many rows: `cuda/prefill_linear.cu`, `cuda/prefill_experts.cu` and their part of `cuda/args_prefill.h`.

use std::mem::offset_of;

use super::{
    Kernel, Launch,
    decode::{CHOSEN, EXPERT_WIDTH, EXPERTS, HIDDEN, SHARED_WIDTH, distinct_experts},
    kernel, symbol,
};
use crate::tiles::{TILE_COLS, TILE_ROWS, TileFormat};

pub use super::prefill_route::*;

/// Inputs of a panel, see `cuda/panel.cuh`.
pub const PANEL: usize = 64;
/// The rows of panels are a multiple of this.
pub const ROWS_STEP: usize = 8;
/// Strips of a unit of work.
const UNIT_STRIPS: usize = 8;
/// Bytes of a `Unit` of `cuda/prefill.cuh`, of which a stage of [`Way::Narrow`] has one.
const UNIT_BYTES: usize = 20;
/// Chunks of a tile, one a panel.
const TILE_PANELS: usize = TILE_COLS / PANEL;
/// Bytes of a row of a panel.
const PANEL_ROW_BYTES: usize = 2 * PANEL;

/// The argument of [`PREFILL_LINEAR`], [`PREFILL_LOGITS`] and [`PREFILL_SWIGLU`]. T is the number of rows. Addresses are the
/// device's.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PrefillLinearArgs {
    /// Panels `[8 k_tiles, panel_rows, 64]` bf16; a multiple of 16.
    pub x: u64,
    /// `[strips, k_tiles]` tiles.
    pub weights: u64,
    /// `[strips, 2]` f32, of rows 0-7 and of rows 8-15, or 0: `scale` for all.
    pub scales: u64,
    /// `[T, out_stride]` bf16 or f32; of [`PREFILL_SWIGLU`] panels `[strips / 8, out_stride, 64]`. Written; a multiple of
    /// 16.
    pub out: u64,
    /// T.
    pub rows: u32,
    /// Rows of a panel of `x`: a multiple of 8, at least T. Those behind T may hold anything.
    pub panel_rows: u32,
    /// Strips of 16 rows; of [`PREFILL_SWIGLU`] a multiple of 8.
    pub strips: u32,
    /// Inputs / 512.
    pub k_tiles: u32,
    /// Values from one row of `out` to the next, of bf16 a multiple of 8; of [`PREFILL_SWIGLU`] rows of a panel of `out`.
    pub out_stride: u32,
    /// Without `scales`.
    pub scale: f32,
}

/// The argument of [`PREFILL_EXPERTS_UP`] and [`PREFILL_EXPERTS_DOWN`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct PrefillExpertsArgs {
    /// Panels sorted by expert: up `[32, sorted_rows, 64]` bf16, down `[8, sorted_rows, 64]`.
    pub x: u64,
    /// Up `[256, 64, 4]` tiles of gate and up rows, down `[256, 128, 1]` tiles.
    pub weights: u64,
    /// Up `[256, 2]` f32: gate, up; down `[256]`.
    pub scales: u64,
    /// Up: panels `[8, sorted_rows, 64]` bf16, down `[sorted_rows, 2048]` bf16; written.
    pub out: u64,
    /// `[n_tiles, 4]` u32 of [`PREFILL_GROUP`]. Read before the kernel in front has ended: another has to stand between.
    pub tiles: u64,
    /// `[1]` u32.
    pub n_tiles: u64,
    /// Rows of a panel, at least [`sorted_rows`].
    pub sorted_rows: u32,
    /// T, or 0. From here to `shared_scale`: the shared expert's half over all rows, of ways that do it, see [`Way::shares`].
    pub shared_rows: u32,
    /// Panels: up `[32, panel_rows, 64]` bf16, down `[16, panel_rows, 64]`.
    pub shared_x: u64,
    /// Up `[128, 4]` tiles of gate and up rows, down `[128, 2]` tiles.
    pub shared_weights: u64,
    /// Up `[128, 2]` f32, gate and up of each strip.
    pub shared_scales: u64,
    /// Up: panels `[16, panel_rows, 64]` bf16, down `[T, 2048]` bf16; written.
    pub shared_out: u64,
    /// Rows of a panel of the shared expert, at least T.
    pub panel_rows: u32,
    /// Down.
    pub shared_scale: f32,
    /// `[1]` u32 by which [`Way::Narrow`] deals out its units, zero between launches.
    pub counter: u64,
}

const _: () = assert!(
    size_of::<PrefillLinearArgs>() == 56
        && offset_of!(PrefillLinearArgs, rows) == 32
        && offset_of!(PrefillLinearArgs, out_stride) == 48
        && offset_of!(PrefillLinearArgs, scale) == 52
        && size_of::<PrefillExpertsArgs>() == 104
        && offset_of!(PrefillExpertsArgs, sorted_rows) == 48
        && offset_of!(PrefillExpertsArgs, shared_x) == 56
        && offset_of!(PrefillExpertsArgs, panel_rows) == 88
);

/// How a kernel feeds the tensor cores, and with how many columns at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// `prefill_wgmma.cuh`, 256 or 128.
    Wide(usize),
    /// `prefill_narrow.cuh`, 64 or 16.
    Narrow(usize),
    /// `prefill_mma.cuh`.
    AnyCard,
}

/// Columns of [`Way::AnyCard`].
const ANY_CARD_COLUMNS: usize = 64;

/// One operation, compiled for each format and several ways to do it. All give the same bits.
#[derive(Debug)]
pub struct Product {
    ways: &'static [Way],
    /// By format (NVFP4, BF16), then as `ways`.
    kernels: [&'static [Kernel]; 2],
    ending: Ending,
    experts: bool,
}

/// What is kept in shared memory when a unit ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Bf16Rows,
    F32Rows,
    SwigluPanels,
}

impl Product {
    /// All its kernels, to load at start.
    pub fn all(&self) -> impl Iterator<Item = Kernel> {
        self.kernels.into_iter().flatten().copied()
    }

    /// The ways to do it.
    pub fn ways(&self) -> &'static [Way] {
        self.ways
    }

    /// Blocks of [`Way::Narrow`] that share a unit: few strips are to give many multiprocessors work. The LM head has
    /// more, and a stage of its x serves more of them.
    fn split(&self, format: TileFormat, way: Way) -> usize {
        let head = self.ending == Ending::F32Rows && format == TileFormat::Nvfp4;
        if self.experts || head && way == Way::Narrow(64) { 1 } else { 2 }
    }

    fn kernel(&self, format: TileFormat, way: Way) -> Kernel {
        let index = self.ways.iter().position(|&other| other == way).expect("a way of this product");
        self.kernels[usize::from(format == TileFormat::Bf16)][index]
    }
}

macro_rules! product {
    ($(#[$doc:meta])* $product:ident, $name:literal, $args:ty, $ending:ident, $experts:literal,
     [$($way:expr => $suffix:literal),*]) => {
        $(#[$doc])*
        pub static $product: Product = Product {
            ways: &[$($way),*],
            kernels: [
                &[$(product!(@ $name, "_nvfp4_", $suffix, $args, $way, $ending, $experts)),*],
                &[$(product!(@ $name, "_bf16_", $suffix, $args, $way, $ending, $experts)),*],
            ],
            ending: Ending::$ending,
            experts: $experts,
        };
    };
    (@ $name:literal, $format:literal, $suffix:literal, $args:ty, $way:expr, $ending:ident, $experts:literal) => {
        Kernel {
            // The others are too short to wait for an empty multiprocessor.
            all_shared: ($experts || matches!(Ending::$ending, Ending::F32Rows)) && matches!($way, Way::Narrow(16)),
            ..kernel::<$args>(symbol(concat!($name, $format, $suffix, "\0").as_bytes()))
        }
    };
    ($(#[$doc:meta])* linear $product:ident, $name:literal, $ending:ident) => {
        product!($(#[$doc])* $product, $name, PrefillLinearArgs, $ending, false, [
            Way::Wide(256) => "256", Way::Wide(128) => "128", Way::Narrow(64) => "64", Way::Narrow(16) => "16",
            Way::AnyCard => "mma"
        ]);
    };
    ($(#[$doc:meta])* experts $product:ident, $name:literal, $ending:ident) => {
        product!($(#[$doc])* $product, $name, PrefillExpertsArgs, $ending, true, [
            Way::Wide(256) => "256", Way::Narrow(64) => "64", Way::Narrow(16) => "16", Way::AnyCard => "mma"
        ]);
    };
}

product!(
    /// To rows of bf16.
    linear PREFILL_LINEAR, "prefill_linear", Bf16Rows);
product!(
    /// To rows of f32.
    linear PREFILL_LOGITS, "prefill_logits", F32Rows);
product!(
    /// Gate and up, to panels of activations.
    linear PREFILL_SWIGLU, "prefill_swiglu", SwigluPanels);
product!(
    /// The routed experts' first half.
    experts PREFILL_EXPERTS_UP, "prefill_experts_up", SwigluPanels);
product!(
    /// The routed experts' second half.
    experts PREFILL_EXPERTS_DOWN, "prefill_experts_down", Bf16Rows);

/// Picks kernels for a card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Products {
    hopper: bool,
    processors: usize,
}

impl Products {
    /// For a card of compute capability `major`.x with `processors` multiprocessors.
    pub fn of(major: i32, processors: usize) -> Self {
        Self { hopper: major == 9, processors }
    }

    /// The launch of [`PREFILL_LINEAR`].
    pub fn linear(self, format: TileFormat, args: &PrefillLinearArgs) -> (Kernel, Launch) {
        self.fastest(&PREFILL_LINEAR, format, args)
    }

    /// The launch of [`PREFILL_LOGITS`].
    pub fn logits(self, format: TileFormat, args: &PrefillLinearArgs) -> (Kernel, Launch) {
        self.fastest(&PREFILL_LOGITS, format, args)
    }

    /// The launch of [`PREFILL_SWIGLU`].
    pub fn swiglu(self, format: TileFormat, args: &PrefillLinearArgs) -> (Kernel, Launch) {
        self.fastest(&PREFILL_SWIGLU, format, args)
    }

    /// The launch of [`PREFILL_EXPERTS_UP`] for T rows.
    pub fn experts_up(self, format: TileFormat, rows: usize) -> (Kernel, Launch) {
        self.experts(&PREFILL_EXPERTS_UP, format, self.experts_way(rows), rows)
    }

    /// The launch of [`PREFILL_EXPERTS_DOWN`] for T rows.
    pub fn experts_down(self, format: TileFormat, rows: usize) -> (Kernel, Launch) {
        self.experts(&PREFILL_EXPERTS_DOWN, format, self.experts_way(rows), rows)
    }

    /// Most rows of a tile of the experts' kernels for T rows, which [`PREFILL_GROUP`] has to know.
    pub fn expert_columns(self, rows: usize) -> u32 {
        self.experts_way(rows).columns() as u32
    }

    /// Whether [`Self::experts_up`] and [`Self::experts_down`] for T rows do the shared expert too.
    pub fn experts_share(self, rows: usize) -> bool {
        self.experts_way(rows).shares()
    }

    /// By what was measured on an H200 with random routing, see benches/notes.md.
    fn experts_way(self, rows: usize) -> Way {
        match rows {
            _ if !self.hopper => Way::AnyCard,
            0..=512 => Way::Narrow(16),
            513..=3072 => Way::Narrow(64),
            _ => Way::Wide(256),
        }
    }

    fn fastest(self, product: &Product, format: TileFormat, args: &PrefillLinearArgs) -> (Kernel, Launch) {
        let ways = product.ways.iter().copied().filter(|&way| (way == Way::AnyCard) != self.hopper);
        let way = ways.min_by_key(|&way| self.nanoseconds(product, format, way, args)).expect("one for each card");
        self.linear_launch(product, format, way, args)
    }

    /// What a launch takes on an H200, to 10 %: benches/notes.md has the measurements.
    fn nanoseconds(self, product: &Product, format: TileFormat, way: Way, args: &PrefillLinearArgs) -> usize {
        let bf16 = format == TileFormat::Bf16;
        // A chunk of 64 inputs of a unit, and its beginning and end.
        let (chunk, ends) = match (way, product.split(format, way)) {
            (Way::Wide(256), _) => (if bf16 { 760 } else { 630 }, 2500),
            (Way::Wide(_), _) => (if bf16 { 600 } else { 440 }, 2000),
            (Way::Narrow(64), 1) => (270, 1500),
            (Way::Narrow(64), _) => (if bf16 { 200 } else { 148 }, 1500),
            (Way::Narrow(_), _) => (if bf16 { 130 } else { 95 }, 1500),
            (Way::AnyCard, _) => (500, 2500),
        };
        let shape = Shape::of(product, format, way);
        // Two blocks of a multiprocessor take twice as long.
        let waves = shape.units(args).div_ceil((self.processors / shape.together).max(1));
        waves * TILE_PANELS * args.k_tiles as usize * chunk + waves.div_ceil(shape.blocks) * ends
    }

    /// The launch of [`PREFILL_LINEAR`], [`PREFILL_LOGITS`] or [`PREFILL_SWIGLU`] in one of its ways.
    pub fn linear_launch(
        self,
        product: &Product,
        format: TileFormat,
        way: Way,
        args: &PrefillLinearArgs,
    ) -> (Kernel, Launch) {
        let (rows, strips) = (args.rows as usize, args.strips as usize);
        let out = match product.ending {
            Ending::Bf16Rows => 2 * TILE_ROWS,
            Ending::F32Rows => 4 * TILE_ROWS,
            Ending::SwigluPanels => TILE_ROWS,
        };
        let weights = strips * args.k_tiles as usize * format.tile_bytes();
        let shape = Shape::of(product, format, way);
        let x = TILE_PANELS * args.k_tiles as usize * PANEL_ROW_BYTES;
        let bytes = weights + rows * (x + strips * out);
        (product.kernel(format, way), self.launch(shape, shape.units(args), bytes))
    }

    /// The launch of [`PREFILL_EXPERTS_UP`] or [`PREFILL_EXPERTS_DOWN`] in one of its ways, for T rows.
    pub fn experts(self, product: &Product, format: TileFormat, way: Way, rows: usize) -> (Kernel, Launch) {
        let up = product.ending == Ending::SwigluPanels;
        let (tiles, x, out) = if up { (256, HIDDEN, EXPERT_WIDTH) } else { (128, EXPERT_WIDTH, HIDDEN) };
        let stacks = if up { 64 } else { 128 } / UNIT_STRIPS;
        let shape = Shape::of(product, format, way);
        // Routed ones, which fill every card as they are.
        let most_units = expert_tiles(rows, way.columns() as u32) * stacks.div_ceil(shape.cluster);
        let experts = distinct_experts(EXPERTS, CHOSEN, rows);
        let mut bytes = experts * tiles * format.tile_bytes() + CHOSEN * rows * 2 * (x + out);
        if way.shares() {
            // Twice as wide.
            let (x, out) = if up { (HIDDEN, SHARED_WIDTH) } else { (SHARED_WIDTH, HIDDEN) };
            bytes += 2 * tiles * format.tile_bytes() + rows * 2 * (x + out);
        }
        (product.kernel(format, way), self.launch(shape, most_units, bytes))
    }

    /// Units that run beside each other.
    fn at_once(self, shape: Shape) -> usize {
        (self.processors * shape.blocks / shape.together).max(1)
    }

    fn launch(self, shape: Shape, units: usize, bytes: usize) -> Launch {
        Launch {
            grid: [(units.min(self.at_once(shape)) * shape.together) as u32, 1, 1],
            block: shape.threads as u32,
            shared_bytes: shape.shared_bytes as u32,
            bytes: bytes as u64,
        }
    }
}

impl Way {
    /// Whether the experts' kernels do the shared expert too.
    pub fn shares(self) -> bool {
        self == Self::Narrow(16)
    }

    /// Most columns at once.
    pub fn columns(self) -> usize {
        match self {
            Self::Wide(columns) | Self::Narrow(columns) => columns,
            Self::AnyCard => ANY_CARD_COLUMNS,
        }
    }
}

/// The geometry of a kernel: `Hopper`, `Narrow` and `AnyCard` of `cuda/prefill_*.cuh`.
#[derive(Clone, Copy, Debug)]
struct Shape {
    columns: usize,
    threads: usize,
    /// On a multiprocessor.
    blocks: usize,
    /// Blocks of a cluster: as many units beside each other.
    cluster: usize,
    /// Blocks that take the same step: a cluster, or those that share a unit.
    together: usize,
    shared_bytes: usize,
}

impl Shape {
    fn of(product: &Product, format: TileFormat, way: Way) -> Self {
        let columns = way.columns();
        let ending = match product.ending {
            Ending::Bf16Rows => UNIT_STRIPS * columns.min(32) * 48,
            Ending::F32Rows => 0,
            Ending::SwigluPanels => 2 * columns * 64,
        };
        match way {
            Way::Wide(_) => {
                let (stages, stage) = (5, 32 << 10);
                let shared_bytes = stages * (stage + 16) + ending;
                Self { columns, threads: 256 + 128, blocks: 1, cluster: 2, together: 2, shared_bytes }
            }
            Way::Narrow(_) => {
                let split = product.split(format, way);
                let (chunks, piece) = match format {
                    TileFormat::Nvfp4 => (TILE_PANELS, format.tile_bytes()),
                    TileFormat::Bf16 => (TILE_PANELS / 4, format.tile_bytes() / 4),
                };
                let strips = UNIT_STRIPS / split;
                let blocks = if columns <= 16 && format == TileFormat::Nvfp4 { 2 } else { 1 };
                let stage = chunks * columns * PANEL_ROW_BYTES + strips * piece;
                let stages = ((208 << 10) / blocks / stage).min(12);
                let shared_bytes = stages * (stage + 16 + UNIT_BYTES) + ending / split;
                Self { columns, threads: 32 * strips + 32, blocks, cluster: 1, together: split, shared_bytes }
            }
            Way::AnyCard => {
                let shared_bytes = 4 * columns * PANEL_ROW_BYTES + ending;
                // Registers: up to 128 a thread with NVFP4, 144 with BF16.
                let blocks = if format == TileFormat::Nvfp4 { 2 } else { 1 };
                Self { columns, threads: 32 * UNIT_STRIPS, blocks, cluster: 1, together: 1, shared_bytes }
            }
        }
    }

    fn units(self, args: &PrefillLinearArgs) -> usize {
        let stacks = (args.strips as usize).div_ceil(UNIT_STRIPS * self.cluster);
        (args.rows as usize).div_ceil(self.columns) * stacks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMATS: [TileFormat; 2] = [TileFormat::Nvfp4, TileFormat::Bf16];

    fn args(strips: u32, k_tiles: u32, rows: u32) -> PrefillLinearArgs {
        PrefillLinearArgs { rows, strips, k_tiles, ..PrefillLinearArgs::default() }
    }

    #[test]
    fn shared_memory_fits() {
        let products = Products::of(9, 132);
        for format in FORMATS {
            for product in
                [&PREFILL_LINEAR, &PREFILL_LOGITS, &PREFILL_SWIGLU, &PREFILL_EXPERTS_UP, &PREFILL_EXPERTS_DOWN]
            {
                for &way in product.ways {
                    let shape = Shape::of(product, format, way);
                    // sm_86, sm_89 and sm_120 give a block 99 KiB; Hopper 227, and 228 to all blocks, each with 1 of its own.
                    let most = if way == Way::AnyCard { 99 << 10 } else { 227 << 10 };
                    assert!(shape.shared_bytes <= most, "{way:?} {shape:?}");
                    assert!(
                        way == Way::AnyCard || shape.blocks * (shape.shared_bytes + 1024) <= 228 << 10,
                        "{shape:?}"
                    );
                }
            }
            for product in [&PREFILL_EXPERTS_UP, &PREFILL_EXPERTS_DOWN] {
                let (_, launch) = products.experts(product, format, Way::Wide(256), 8192);
                assert_eq!(launch.grid, [132, 1, 1]);
            }
        }
    }

    #[test]
    fn the_choice_is_what_was_measured_to_be_fastest() {
        let products = Products::of(9, 132);
        for (strips, k_tiles, rows, columns) in [
            (320, 4, 16, "16"),
            (320, 4, 64, "64"),
            (320, 4, 128, "64"),
            (320, 4, 256, "128"),
            (320, 4, 8192, "256"),
            (128, 8, 16, "16"),
            (128, 8, 256, "64"),
            (128, 8, 1024, "128"),
            (128, 8, 8192, "256"),
        ] {
            let (kernel, launch) = products.linear(TileFormat::Nvfp4, &args(strips, k_tiles, rows));
            let name = format!("prefill_linear_nvfp4_{columns}");
            assert_eq!(kernel.symbol.to_str().unwrap(), name, "{strips} strips, {rows} rows");
            assert!(launch.grid[0] <= 264 && launch.bytes > 0);
        }
        let (kernel, _) = Products::of(10, 148).logits(TileFormat::Bf16, &args(16, 12, 9));
        assert_eq!(kernel.symbol, c"prefill_logits_bf16_mma");
    }

    #[test]
    fn blocks_that_work_together_all_exist() {
        for processors in [1, 2, 3, 108, 131, 132] {
            for rows in [1, 8, 9, 300, 16_384] {
                for &way in PREFILL_LINEAR.ways {
                    let shape = Shape::of(&PREFILL_LINEAR, TileFormat::Nvfp4, way);
                    let products = Products::of(9, processors);
                    let (_, launch) =
                        products.linear_launch(&PREFILL_LINEAR, TileFormat::Nvfp4, way, &args(21, 1, rows));
                    assert!(launch.grid[0] > 0 && launch.grid[0].is_multiple_of(shape.together as u32), "{launch:?}");
                }
            }
        }
    }
}
