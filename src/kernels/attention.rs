//! `cuda/decode_attention.cu` and, for steps of many rows, `cuda/decode_attention_many.cu`.

use std::mem::offset_of;

use super::{Kernel, Launch, decode::MAX_ROWS, kernel};

/// Attention of one new token a sequence to all before it, with its norms, rotation and KV write.
pub const DECODE_ATTENTION: Kernel = kernel::<DecodeAttentionArgs>(c"decode_attention");
/// The same to the last few positions.
pub const DECODE_ATTENTION_WINDOW: Kernel = kernel::<DecodeAttentionArgs>(c"decode_attention_window");
/// As [`DECODE_ATTENTION`], for many sequences.
pub const DECODE_ATTENTION_MANY: Kernel = kernel::<DecodeAttentionArgs>(c"decode_attention_many");
/// As [`DECODE_ATTENTION_WINDOW`], for many sequences.
pub const DECODE_ATTENTION_MANY_WINDOW: Kernel = kernel::<DecodeAttentionArgs>(c"decode_attention_many_window");

/// The only head dimension of these kernels.
pub const DECODE_ATTENTION_HEAD_DIM: u32 = 128;
/// Their query heads a KV head.
pub const DECODE_ATTENTION_GROUP: u32 = 8;
/// Most rows of a launch.
pub const DECODE_ATTENTION_ROWS: u32 = 256;
/// Most parts that the positions of a row are divided into.
const PARTS: u64 = 33;
/// fp32 values of a part's result for a head: 128 sums, their maximum, the sum of probabilities.
const PARTIAL_LEN: u64 = 128 + 4;

/// The argument of all of these kernels, as in `cuda/args_attention.h`. B rows, G KV heads, 8 G query heads of 128 values.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DecodeAttentionArgs {
    /// `[B, (8 + 2) G, 128]` bf16: q, k and v as projected; a multiple of 16.
    pub qkv: u64,
    /// The layer's part of block 0, `[2, G, 64 * 128]` bf16: see [`crate::kv::PoolLayout`]; a multiple of 16.
    pub kv: u64,
    /// `[B, table_stride]` u32: the block of positions 64 i to 64 i + 63. Only entries of visible positions are read.
    pub blocks: u64,
    /// `[B]` u32: positions of the new tokens.
    pub positions: u64,
    /// `[128]` f32; a multiple of 16.
    pub q_norm: u64,
    /// `[128]` f32; a multiple of 16.
    pub k_norm: u64,
    /// `[B, 2, 64]` f32, cosines and sines of the positions' angles, from `decode_embed`; a multiple of 16; or 0 in a layer
    /// without rotation.
    pub rope: u64,
    /// `[8 G]` f32.
    pub sinks: u64,
    /// Out: `[B, 8 G, 128]` bf16, or panels of `cuda/panel.cuh`; a multiple of 8.
    pub attn: u64,
    /// Workspace of [`decode_attention_partial_bytes`]; a multiple of 16. 0 with a window.
    pub partial: u64,
    /// `[B, 8 G]` u32, zero before the first launch; every launch leaves zeros. 0 with a window.
    pub counters: u64,
    /// bf16 values from one block to the next.
    pub block_stride: u64,
    /// Entries of a row of `blocks`.
    pub table_stride: u32,
    /// Positions that a token sees, itself included; 0 for all.
    pub window: u32,
    /// Epsilon of the norms.
    pub eps: f32,
    /// B.
    pub rows: u32,
    /// G.
    pub kv_heads: u32,
    /// Rows of a panel of `attn`, a multiple of 8 and at least B; 0 for rows as they are.
    pub panel_rows: u32,
}

const _: () = assert!(
    size_of::<DecodeAttentionArgs>() == 120
        && offset_of!(DecodeAttentionArgs, q_norm) == 32
        && offset_of!(DecodeAttentionArgs, attn) == 64
        && offset_of!(DecodeAttentionArgs, block_stride) == 88
        && offset_of!(DecodeAttentionArgs, window) == 100
        && offset_of!(DecodeAttentionArgs, eps) == 104
        && offset_of!(DecodeAttentionArgs, panel_rows) == 116
);

/// Bytes of [`DecodeAttentionArgs::partial`] for `rows` rows; the same at every position.
pub fn decode_attention_partial_bytes(rows: usize, n_kv_heads: usize) -> usize {
    rows * n_kv_heads * (PARTS * u64::from(DECODE_ATTENTION_GROUP) * PARTIAL_LEN * 4) as usize
}

/// The kernel for a layer with this window, `None` for all positions, and its launch for new tokens at `positions`, one a
/// row, on a card of this major compute capability with so many multiprocessors: its shape depends on their number only, `bytes`
/// on their values. What a row adds up in which order depends on its own position and on which of both forms it is alone.
/// `None` without rows or KV heads, or with more than a launch can hold.
pub fn decode_attention_launch(
    card: (i32, u32),
    n_kv_heads: u32,
    window: Option<u32>,
    positions: &[u32],
) -> Option<(Kernel, Launch)> {
    // Each form has its own bits, so this is where the products change theirs.
    if positions.len() <= MAX_ROWS {
        decode_attention_few_launch(n_kv_heads, window, positions)
    } else {
        decode_attention_many_launch(card, n_kv_heads, window, positions)
    }
}

/// The form for few rows: every multiprocessor takes part in each.
pub fn decode_attention_few_launch(
    n_kv_heads: u32,
    window: Option<u32>,
    positions: &[u32],
) -> Option<(Kernel, Launch)> {
    // A block has a multiprocessor for itself and takes parts of all rows in turn; an H200 has this many. With several rows,
    // a second one for each is there when the first was short.
    const BLOCKS: u32 = 132;
    // A window's positions are shared by a cluster.
    const CLUSTER: u32 = 8;
    let (rows, bytes) = rows_and_bytes(n_kv_heads, window, positions)?;
    Some(if window.is_none() {
        let grid = [n_kv_heads, (BLOCKS / n_kv_heads).max(1) * rows.min(2), 1];
        (DECODE_ATTENTION, Launch { grid, block: 256, shared_bytes: 0, bytes })
    } else {
        // Three blocks fit on a multiprocessor, and where they may, three clusters wait until decode_qkv leaves them room on
        // top of each other. With these bytes two fit, clusters spread out, and start early; an H200 then holds 31.
        let shared_bytes = if n_kv_heads * rows <= 30 { 7 << 10 } else { 0 };
        let grid = [CLUSTER, n_kv_heads, rows];
        (DECODE_ATTENTION_WINDOW, Launch { grid, block: 160, shared_bytes, bytes })
    })
}

/// The form for many rows: each multiprocessor takes whole windows, or parts of what a row sees.
pub fn decode_attention_many_launch(
    (major, processors): (i32, u32),
    n_kv_heads: u32,
    window: Option<u32>,
    positions: &[u32],
) -> Option<(Kernel, Launch)> {
    let (_, bytes) = rows_and_bytes(n_kv_heads, window, positions)?;
    // As in `cuda/args_attention.h`: a block of compute capability 9 to 11 can have 227 KB, of others no more than 99 KB.
    let (block, shared_bytes) = if (9..12).contains(&major) { (512, 206_080) } else { (320, 89_088) };
    let kernel = if window.is_none() { DECODE_ATTENTION_MANY } else { DECODE_ATTENTION_MANY_WINDOW };
    Some((kernel, Launch { grid: [processors.max(1), 1, 1], block, shared_bytes, bytes }))
}

fn rows_and_bytes(n_kv_heads: u32, window: Option<u32>, positions: &[u32]) -> Option<(u32, u64)> {
    const GRID_LIMIT: u32 = 65_535;
    let rows = u32::try_from(positions.len()).ok().filter(|rows| (1..=DECODE_ATTENTION_ROWS).contains(rows))?;
    if !(1..=GRID_LIMIT).contains(&n_kv_heads) {
        return None;
    }
    let seen = |&position: &u32| u64::from(position) + 1;
    let seen: u64 = positions.iter().map(|p| window.map_or(seen(p), |window| seen(p).min(window.into()))).sum();
    // K and V of every position; q in and attention out.
    Some((rows, u64::from(n_kv_heads) * 2 * 128 * (2 * seen + 2 * 8 * u64::from(rows))))
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: (i32, u32) = (9, 132);

    #[test]
    fn launches_of_few_rows_depend_on_the_kind_of_layer_and_the_number_of_rows() {
        let (kernel, launch) = decode_attention_launch(H200, 4, None, &[0]).unwrap();
        assert_eq!((kernel, launch.grid, launch.block), (DECODE_ATTENTION, [4, 33, 1], 256));
        assert_eq!(decode_attention_launch(H200, 4, None, &[99_999]).unwrap().1.grid, launch.grid);
        assert_eq!(decode_attention_launch(H200, 4, None, &[99_999, 0, 5]).unwrap().1.grid, [4, 66, 1]);
        assert_eq!(decode_attention_launch(H200, 200, None, &[7]).unwrap().1.grid, [200, 1, 1]);
        let (kernel, launch) = decode_attention_launch(H200, 4, Some(513), &[0, 7, 100_000]).unwrap();
        assert_eq!((kernel, launch.grid, launch.block), (DECODE_ATTENTION_WINDOW, [8, 4, 3], 160));
        assert_eq!(decode_attention_launch(H200, 4, None, &[]), None);
        assert_eq!(decode_attention_launch(H200, 0, None, &[1]), None);
    }

    #[test]
    fn launches_of_many_rows_fill_the_card() {
        for rows in [9, 256] {
            for (window, kernel) in [(None, DECODE_ATTENTION_MANY), (Some(513), DECODE_ATTENTION_MANY_WINDOW)] {
                let (found, launch) = decode_attention_launch(H200, 4, window, &vec![7; rows]).unwrap();
                assert_eq!((found, launch.grid, launch.block), (kernel, [132, 1, 1], 512));
                // Beside them a KB that every block takes, and what the kernel itself has.
                assert!(launch.shared_bytes + 2048 + 1024 <= 228 << 10);
            }
        }
        for card in [(8, 108), (12, 188)] {
            let launch = decode_attention_launch(card, 4, None, &[7; 64]).unwrap().1;
            assert_eq!((launch.grid, launch.block), ([card.1, 1, 1], 320));
            assert!(launch.shared_bytes + 2048 <= 99 << 10);
        }
        assert_eq!(decode_attention_launch(H200, 4, Some(513), &[1; 257]), None);
        assert_eq!(decode_attention_launch(H200, 0, None, &[1; 9]), None);
    }

    #[test]
    fn bytes_are_those_of_the_visible_positions() {
        let bytes = |window, positions: &[u32]| decode_attention_launch(H200, 4, window, positions).unwrap().1.bytes;
        // A new position adds its K and V, 512 bytes a head; a full window adds nothing.
        assert_eq!(bytes(None, &[100_000]) - bytes(None, &[99_999]), 2048);
        assert_eq!(bytes(Some(513), &[100_000]), bytes(Some(513), &[512]));
        assert_eq!(bytes(Some(513), &[511, 3]) + bytes(Some(513), &[0]), bytes(Some(513), &[511, 0, 3]));
        assert_eq!(bytes(None, &[50; 9]), 9 * bytes(None, &[50]));
    }

    #[test]
    fn partial_results_of_every_part_fit() {
        assert_eq!(decode_attention_partial_bytes(8, 4), 8 * 4 * 33 * 8 * 132 * 4);
    }
}
