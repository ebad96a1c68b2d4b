//! `cuda/decode_attention.cu`.

use std::mem::offset_of;

use super::{Kernel, Launch};

/// Attention of one new token a sequence, with its norms, rotation and KV write.
pub const DECODE_ATTENTION: Kernel =
    Kernel { symbol: c"decode_attention", args_bytes: size_of::<DecodeAttentionArgs>(), pdl: true };

/// The only head dimension of [`DECODE_ATTENTION`].
pub const DECODE_ATTENTION_HEAD_DIM: u32 = 128;
/// Its query heads a KV head.
pub const DECODE_ATTENTION_GROUP: u32 = 8;
/// Most splits of a row that it merges.
const MAX_SPLITS: u32 = 32;
/// fp32 values of a split's partial result: 8 heads of 128 sums, their maxima, their sums of probabilities.
const PARTIAL_LEN: u64 = 8 * 128 + 2 * 8;

/// The argument of [`DECODE_ATTENTION`], as in `cuda/args_attention.h`. B rows, G KV heads, 8 G query heads of 128 values.
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
    /// `[64]` f32, or 0 in a layer without rotation.
    pub inv_freq: u64,
    /// `[8 G]` f32.
    pub sinks: u64,
    /// Out: `[B, 8 G, 128]` bf16; a multiple of 8.
    pub attn: u64,
    /// Workspace of [`AttentionSplits::partial_bytes`]; a multiple of 16.
    pub partial: u64,
    /// `[B, G]` u32, zero before the first launch; every launch leaves zeros.
    pub counters: u64,
    /// bf16 values from one block to the next.
    pub block_stride: u64,
    /// Entries of a row of `blocks`.
    pub table_stride: u32,
    /// Positions that a token sees, itself included; 0 for all.
    pub window: u32,
    /// [`AttentionSplits::max`].
    pub max_splits: u32,
    /// [`AttentionSplits::positions`].
    pub split_positions: u32,
    /// Epsilon of the norms.
    pub eps: f32,
    /// Fills the struct.
    pub reserved: u32,
}

const _: () = assert!(
    size_of::<DecodeAttentionArgs>() == 120
        && offset_of!(DecodeAttentionArgs, q_norm) == 32
        && offset_of!(DecodeAttentionArgs, attn) == 64
        && offset_of!(DecodeAttentionArgs, block_stride) == 88
        && offset_of!(DecodeAttentionArgs, window) == 100
        && offset_of!(DecodeAttentionArgs, eps) == 112
);

/// How the positions of a row are divided. It sets the order of additions, so it depends on the kind of layer alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionSplits {
    /// Most splits of a row.
    pub max: u32,
    /// Positions of a split, until there are `max` of them.
    pub positions: u32,
    /// Warps that share a split.
    pub warps: u32,
}

impl AttentionSplits {
    /// Of a layer with this window, `None` for full attention. A warp takes 32 positions at a time. A long context needs
    /// all SMs (4 heads x 32 splits) and many loads in flight. A window is a matter of latency: each warp has one tile,
    /// loaded before the wait, and few partial results are merged; fewer warps leave room for the next kernel's.
    pub fn of(window: Option<u32>) -> Self {
        match window {
            None => Self { max: MAX_SPLITS, positions: 128, warps: 8 },
            Some(window) => Self { max: window.div_ceil(128).clamp(1, MAX_SPLITS), positions: 128, warps: 4 },
        }
    }

    /// Bytes of [`DecodeAttentionArgs::partial`] for `rows` rows.
    pub fn partial_bytes(self, rows: u32, n_kv_heads: u32) -> u64 {
        u64::from(rows) * u64::from(n_kv_heads) * u64::from(self.max) * PARTIAL_LEN * 4
    }
}

/// How to launch [`DECODE_ATTENTION`] for new tokens at `positions`, one a row; shape and splits depend on their number
/// only, `bytes` on their values. `None` without rows or KV heads, or with more than a grid can hold.
pub fn decode_attention_launch(n_kv_heads: u32, window: Option<u32>, positions: &[u32]) -> Option<Launch> {
    const GRID_LIMIT: u32 = 65_535;
    let rows = u32::try_from(positions.len()).ok().filter(|rows| (1..=GRID_LIMIT).contains(rows))?;
    if !(1..=GRID_LIMIT).contains(&n_kv_heads) {
        return None;
    }
    let splits = AttentionSplits::of(window);
    let seen = |&position: &u32| u64::from(position) + 1;
    let seen: u64 = positions.iter().map(|p| window.map_or(seen(p), |window| seen(p).min(window.into()))).sum();
    // K and V of every position; q in and attention out.
    let bytes = u64::from(n_kv_heads) * 2 * 128 * (2 * seen + 2 * 8 * u64::from(rows));
    Some(Launch { grid: [splits.max, n_kv_heads, rows], block: 32 * splits.warps, shared_bytes: 0, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_depend_on_the_kind_of_layer_and_the_number_of_rows() {
        let launch = decode_attention_launch(4, None, &[0]).unwrap();
        assert_eq!((launch.grid, launch.block), ([32, 4, 1], 256));
        assert_eq!(decode_attention_launch(4, None, &[99_999]).unwrap().grid, launch.grid);
        let launch = decode_attention_launch(4, Some(513), &[0, 7, 100_000]).unwrap();
        assert_eq!((launch.grid, launch.block), ([5, 4, 3], 128));
        assert_eq!(decode_attention_launch(1, Some(65), &[5]).unwrap().grid, [1, 1, 1]);
        assert_eq!(decode_attention_launch(1, Some(1 << 20), &[5]).unwrap().grid, [32, 1, 1]);
        assert_eq!(decode_attention_launch(4, None, &[]), None);
        assert_eq!(decode_attention_launch(0, None, &[1]), None);
    }

    #[test]
    fn bytes_are_those_of_the_visible_positions() {
        let bytes = |window, positions: &[u32]| decode_attention_launch(4, window, positions).unwrap().bytes;
        // A new position adds its K and V, 512 bytes a head; a full window adds nothing.
        assert_eq!(bytes(None, &[100_000]) - bytes(None, &[99_999]), 2048);
        assert_eq!(bytes(Some(513), &[100_000]), bytes(Some(513), &[512]));
        assert_eq!(bytes(Some(513), &[511, 3]) + bytes(Some(513), &[0]), bytes(Some(513), &[511, 0, 3]));
    }

    #[test]
    fn partial_results_of_every_split_fit() {
        let splits = AttentionSplits::of(None);
        assert_eq!(splits.partial_bytes(8, 4), 8 * 4 * 32 * 4160);
        assert_eq!(AttentionSplits::of(Some(513)).partial_bytes(1, 1), 5 * 4160);
    }
}
