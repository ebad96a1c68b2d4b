//! `cuda/prefill_kv.cu`, `cuda/prefill_attention.cu` and `cuda/prefill_attention_hopper.cu`.

use std::{collections::BTreeMap, mem::offset_of, ops::Range};

use super::{Kernel, Launch, kernel};

/// Norm and rotation of q and k of many new tokens, and the write of k and v.
pub const PREFILL_KV: Kernel = kernel::<PrefillKvArgs>(c"prefill_kv");
/// Attention of many new tokens, for any card.
pub const PREFILL_ATTENTION: Kernel = kernel::<PrefillAttentionArgs>(c"prefill_attention");
/// The same for compute capability 9.0. Its bits are its own.
pub const PREFILL_ATTENTION_HOPPER: Kernel = Kernel { symbol: c"prefill_attention_hopper", ..PREFILL_ATTENTION };

/// The head dimension of these kernels.
const HEAD_DIM: u64 = 128;
/// Their query heads a KV head.
const GROUP: u64 = 8;
/// Most tokens of a tile, which do not cross a multiple of as many positions.
const TILE_TOKENS: u32 = 16;
const SHARED_BYTES: u32 = 2 * (32 << 10);
/// Seven slots, what it takes to align them, barriers and work items.
const HOPPER_SHARED_BYTES: u32 = 7 * (32 << 10) + 1024 + 256;

/// Neighbouring new tokens of one sequence, as in `cuda/args_prefill_attention.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillTile {
    /// Of the first token, among the rows of the launch.
    pub row: u32,
    /// Tokens, 1 to 16.
    pub rows: u32,
    /// Of the first token.
    pub position: u32,
    /// Of the block tables.
    pub table_row: u32,
}

const _: () = assert!(
    size_of::<PrefillTile>() == 16
        && offset_of!(PrefillTile, rows) == 4
        && offset_of!(PrefillTile, position) == 8
        && offset_of!(PrefillTile, table_row) == 12
);

impl PrefillTile {
    /// The tiles of a launch whose rows are the new tokens at `positions` of one sequence after the other, each with its row
    /// of the block tables. The highest positions come first: they have the most to do, and what is begun last should be
    /// short. The order changes no result.
    pub fn cut(sequences: impl IntoIterator<Item = (u32, Range<u32>)>) -> Vec<Self> {
        let mut tiles = Vec::new();
        let mut row = 0;
        for (table_row, positions) in sequences {
            let mut position = positions.start;
            while position < positions.end {
                let end = positions.end.min((position / TILE_TOKENS + 1) * TILE_TOKENS);
                let rows = end - position;
                tiles.push(Self { row, rows, position, table_row });
                row += rows;
                position = end;
            }
        }
        tiles.sort_by_key(|tile| std::cmp::Reverse(tile.position / TILE_TOKENS));
        tiles
    }

    /// As the words that the device reads.
    pub fn words(self) -> [u32; 4] {
        [self.row, self.rows, self.position, self.table_row]
    }

    fn positions(self) -> Range<u32> {
        self.position..self.position + self.rows
    }
}

/// The argument of [`PREFILL_KV`]. T rows, G KV heads, 8 G query heads of 128 values.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PrefillKvArgs {
    /// In and out: `[T, (8 + 2) G, 128]` bf16: q, k and v as projected; q is replaced by what attention reads. A multiple of
    /// 16.
    pub qkv: u64,
    /// Out, the tiles' positions alone: the layer's part of block 0, `[2, G, 64 * 128]` bf16: see [`crate::kv::PoolLayout`];
    /// a multiple of 16.
    pub kv: u64,
    /// `[.., table_stride]` u32: the block of positions 64 i to 64 i + 63. Only entries of the tiles' positions are read.
    pub blocks: u64,
    /// [`PrefillTile`]s; a multiple of 16.
    pub tiles: u64,
    /// `[128]` f32; a multiple of 16.
    pub q_norm: u64,
    /// `[128]` f32; a multiple of 16.
    pub k_norm: u64,
    /// `[64]` f32, or 0 in a layer without rotation.
    pub inv_freq: u64,
    /// bf16 values from one block to the next, a multiple of 8.
    pub block_stride: u64,
    /// Entries of a row of `blocks`.
    pub table_stride: u32,
    /// Epsilon of the norms.
    pub eps: f32,
}

const _: () = assert!(
    size_of::<PrefillKvArgs>() == 72
        && offset_of!(PrefillKvArgs, tiles) == 24
        && offset_of!(PrefillKvArgs, inv_freq) == 48
        && offset_of!(PrefillKvArgs, table_stride) == 64
);

/// The argument of [`PREFILL_ATTENTION`] and [`PREFILL_ATTENTION_HOPPER`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PrefillAttentionArgs {
    /// `[T, (8 + 2) G, 128]` bf16, of which q is read, as [`PREFILL_KV`] leaves it; a multiple of 16.
    pub qkv: u64,
    /// The layer's part of block 0, `[2, G, 64 * 128]` bf16; a multiple of 16. From the first visible position's block to
    /// the tiles' positions all keys and values are there.
    pub kv: u64,
    /// `[.., table_stride]` u32: the block of positions 64 i to 64 i + 63. Only entries of visible positions are read.
    pub blocks: u64,
    /// [`PrefillTile`]s; a multiple of 16.
    pub tiles: u64,
    /// `[8 G]` f32.
    pub sinks: u64,
    /// Out: `[16 G, panel_rows, 64]` bf16 in the order of `cuda/panel.cuh`, the tiles' rows alone; a multiple of 16.
    pub attn: u64,
    /// One u32, zero before the first launch; every launch leaves zero.
    pub counter: u64,
    /// bf16 values from one block to the next, a multiple of 8.
    pub block_stride: u64,
    /// Entries of a row of `blocks`.
    pub table_stride: u32,
    /// Rows of a panel: at least T, a multiple of 8.
    pub panel_rows: u32,
    /// Positions that a token sees, itself included; 0 for all.
    pub window: u32,
    /// Tiles.
    pub n_tiles: u32,
    /// G.
    pub n_kv_heads: u32,
    /// Fills the struct.
    pub reserved: u32,
}

const _: () = assert!(
    size_of::<PrefillAttentionArgs>() == 88
        && offset_of!(PrefillAttentionArgs, sinks) == 32
        && offset_of!(PrefillAttentionArgs, counter) == 48
        && offset_of!(PrefillAttentionArgs, table_stride) == 64
        && offset_of!(PrefillAttentionArgs, n_kv_heads) == 80
);

/// How to launch [`PREFILL_KV`] for `tiles`. `None` without tiles or KV heads, or with more than a grid can hold.
pub fn prefill_kv_launch(n_kv_heads: u32, tiles: &[PrefillTile]) -> Option<Launch> {
    let (n_tiles, _) = items(n_kv_heads, tiles)?;
    if n_kv_heads > 65_535 {
        return None;
    }
    let rows: u64 = tiles.iter().map(|tile| u64::from(tile.rows)).sum();
    // q, k and v in and out.
    let bytes = rows * u64::from(n_kv_heads) * 2 * (GROUP + 2) * HEAD_DIM * 2;
    Some(Launch { grid: [n_tiles, n_kv_heads, 1], block: 256, shared_bytes: 0, bytes })
}

/// Which kernel a card runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefillAttention {
    /// [`PREFILL_ATTENTION`].
    Any,
    /// [`PREFILL_ATTENTION_HOPPER`], on a card with this many multiprocessors.
    Hopper(u32),
}

impl PrefillAttention {
    /// Of a card with this compute capability and number of multiprocessors.
    pub fn of(capability: (i32, i32), processors: u32) -> Self {
        if capability == (9, 0) { Self::Hopper(processors) } else { Self::Any }
    }

    /// The kernel.
    pub fn kernel(self) -> Kernel {
        match self {
            Self::Any => PREFILL_ATTENTION,
            Self::Hopper(_) => PREFILL_ATTENTION_HOPPER,
        }
    }

    /// How to launch it for `tiles`. `None` without tiles or KV heads, or with more than a grid can hold.
    pub fn launch(self, n_kv_heads: u32, window: Option<u32>, tiles: &[PrefillTile]) -> Option<Launch> {
        let (_, items) = items(n_kv_heads, tiles)?;
        let bytes = prefill_attention_bytes(n_kv_heads, window, tiles);
        Some(match self {
            Self::Any => Launch { grid: [items, 1, 1], block: 256, shared_bytes: SHARED_BYTES, bytes },
            Self::Hopper(processors) => {
                let grid = [items.min(processors.max(1)), 1, 1];
                Launch { grid, block: 384, shared_bytes: HOPPER_SHARED_BYTES, bytes }
            }
        })
    }
}

/// Tiles, and tiles times KV heads.
fn items(n_kv_heads: u32, tiles: &[PrefillTile]) -> Option<(u32, u32)> {
    let n_tiles = u32::try_from(tiles.len()).ok()?;
    let items = n_tiles.checked_mul(n_kv_heads).filter(|items| (1..1 << 31).contains(items))?;
    Some((n_tiles, items))
}

/// The first position that the token at `position` sees.
fn first_visible(position: u32, window: Option<u32>) -> u32 {
    window.map_or(0, |window| (position + 1).saturating_sub(window))
}

/// q once, the result once, and K and V once for every sequence.
fn prefill_attention_bytes(n_kv_heads: u32, window: Option<u32>, tiles: &[PrefillTile]) -> u64 {
    let mut visible = BTreeMap::<u32, Range<u32>>::new();
    let mut rows = 0;
    for tile in tiles {
        rows += u64::from(tile.rows);
        let (start, end) = (first_visible(tile.position, window), tile.positions().end);
        let seen = visible.entry(tile.table_row).or_insert(start..end);
        *seen = seen.start.min(start)..seen.end.max(end);
    }
    let positions: u64 = visible.values().map(|seen| u64::from(seen.end - seen.start)).sum();
    u64::from(n_kv_heads) * HEAD_DIM * 2 * 2 * (GROUP * rows + positions)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_cover_every_token_once_and_cross_no_multiple_of_16() {
        let sequences = [(3, 0..1), (0, 5..70), (1, 100_000..102_048), (2, 16..32), (4, 9..9)];
        let tiles = PrefillTile::cut(sequences.clone());
        let mut row = 0;
        for (table_row, positions) in sequences {
            for position in positions {
                let has = |tile: &&PrefillTile| {
                    tile.table_row == table_row
                        && tile.positions().contains(&position)
                        && tile.row + (position - tile.position) == row
                };
                assert_eq!(tiles.iter().filter(has).count(), 1, "position {position} of {table_row}");
                row += 1;
            }
        }
        assert_eq!(tiles.iter().map(|tile| tile.rows).sum::<u32>(), row);
        assert!(tiles.iter().all(|tile| tile.position / 16 == (tile.position + tile.rows - 1) / 16));
        assert!(tiles.is_sorted_by_key(|tile| std::cmp::Reverse(tile.position / 16)));
    }

    #[test]
    fn launches() {
        let tiles = PrefillTile::cut([(0, 0..8192)]);
        let hopper = PrefillAttention::of((9, 0), 132);
        assert_eq!(hopper.kernel(), PREFILL_ATTENTION_HOPPER);
        let launch = hopper.launch(4, None, &tiles).unwrap();
        assert_eq!((launch.grid, launch.block), ([132, 1, 1], 384));
        assert!(launch.shared_bytes <= 232_448);
        assert_eq!(hopper.launch(4, None, &tiles[..3]).unwrap().grid, [12, 1, 1]);
        for capability in [(8, 0), (8, 9), (10, 0), (12, 0)] {
            let any = PrefillAttention::of(capability, 132);
            assert_eq!(any.kernel(), PREFILL_ATTENTION);
            let launch = any.launch(4, None, &tiles).unwrap();
            assert_eq!((launch.grid, launch.block), ([2048, 1, 1], 256));
            assert!(launch.shared_bytes <= 99 << 10);
        }
        assert_eq!(prefill_kv_launch(4, &tiles).unwrap().grid, [512, 4, 1]);
        assert_eq!(prefill_kv_launch(4, &[]), None);
        assert_eq!(hopper.launch(4, None, &[]), None);
        assert_eq!(hopper.launch(0, None, &tiles), None);
    }

    #[test]
    fn bytes_are_those_of_what_is_seen() {
        let one = PrefillTile::cut([(0, 99_999..100_000)]);
        assert_eq!(prefill_attention_bytes(4, None, &one), 4 * 512 * (8 + 100_000));
        let chunk = PrefillTile::cut([(0, 0..8192), (1, 600..602)]);
        assert_eq!(prefill_attention_bytes(1, Some(513), &chunk), 512 * (8 * 8194 + 8192 + 514));
    }
}
