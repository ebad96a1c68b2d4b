//! `cuda/decode_attention.cu`.

use std::mem::offset_of;

use super::{Kernel, Launch};

/// Attention of one new token a sequence to all before it, with its norms, rotation and KV write.
pub const DECODE_ATTENTION: Kernel =
    Kernel { symbol: c"decode_attention", args_bytes: size_of::<DecodeAttentionArgs>(), pdl: true };
/// The same to the last few positions.
pub const DECODE_ATTENTION_WINDOW: Kernel =
    Kernel { symbol: c"decode_attention_window", args_bytes: size_of::<DecodeAttentionArgs>(), pdl: true };

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

/// The argument of both kernels, as in `cuda/args_attention.h`. B rows, G KV heads, 8 G query heads of 128 values.
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
/// row: its shape depends on their number only, `bytes` on their values. What a row adds up in which order depends on its
/// own position alone. `None` without rows or KV heads, or with more than a launch can hold.
pub fn decode_attention_launch(n_kv_heads: u32, window: Option<u32>, positions: &[u32]) -> Option<(Kernel, Launch)> {
    const GRID_LIMIT: u32 = 65_535;
    // A block has a multiprocessor for itself and takes parts of all rows in turn; an H200 has this many. With several rows,
    // a second one for each is there when the first was short.
    const BLOCKS: u32 = 132;
    // A window's positions are shared by a cluster.
    const CLUSTER: u32 = 8;
    let rows = u32::try_from(positions.len()).ok().filter(|rows| (1..=DECODE_ATTENTION_ROWS).contains(rows))?;
    if !(1..=GRID_LIMIT).contains(&n_kv_heads) {
        return None;
    }
    let seen = |&position: &u32| u64::from(position) + 1;
    let seen: u64 = positions.iter().map(|p| window.map_or(seen(p), |window| seen(p).min(window.into()))).sum();
    // K and V of every position; q in and attention out.
    let bytes = u64::from(n_kv_heads) * 2 * 128 * (2 * seen + 2 * 8 * u64::from(rows));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_depend_on_the_kind_of_layer_and_the_number_of_rows() {
        let (kernel, launch) = decode_attention_launch(4, None, &[0]).unwrap();
        assert_eq!((kernel, launch.grid, launch.block), (DECODE_ATTENTION, [4, 33, 1], 256));
        assert_eq!(decode_attention_launch(4, None, &[99_999]).unwrap().1.grid, launch.grid);
        assert_eq!(decode_attention_launch(4, None, &[99_999, 0, 5]).unwrap().1.grid, [4, 66, 1]);
        assert_eq!(decode_attention_launch(200, None, &[7]).unwrap().1.grid, [200, 1, 1]);
        let (kernel, launch) = decode_attention_launch(4, Some(513), &[0, 7, 100_000]).unwrap();
        assert_eq!((kernel, launch.grid, launch.block), (DECODE_ATTENTION_WINDOW, [8, 4, 3], 160));
        assert_eq!(decode_attention_launch(4, None, &[]), None);
        assert_eq!(decode_attention_launch(0, None, &[1]), None);
        assert!(decode_attention_launch(4, None, &[1; 256]).is_some());
        assert_eq!(decode_attention_launch(4, Some(513), &[1; 257]), None);
    }

    #[test]
    fn bytes_are_those_of_the_visible_positions() {
        let bytes = |window, positions: &[u32]| decode_attention_launch(4, window, positions).unwrap().1.bytes;
        // A new position adds its K and V, 512 bytes a head; a full window adds nothing.
        assert_eq!(bytes(None, &[100_000]) - bytes(None, &[99_999]), 2048);
        assert_eq!(bytes(Some(513), &[100_000]), bytes(Some(513), &[512]));
        assert_eq!(bytes(Some(513), &[511, 3]) + bytes(Some(513), &[0]), bytes(Some(513), &[511, 0, 3]));
    }

    #[test]
    fn partial_results_of_every_part_fit() {
        assert_eq!(decode_attention_partial_bytes(8, 4), 8 * 4 * 33 * 8 * 132 * 4);
    }
}
