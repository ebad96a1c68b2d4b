//! Addresses before there is a device: offsets into one allocation.

use super::{Limits, Path, act_width, fast, table_stride};
use crate::{
    config::FlintConfig,
    kernels::{
        SAMPLE_ROW_BYTES,
        decode::{CHOSEN, EXPERTS},
        decode_attention_partial_bytes,
        prefill::{ROWS_STEP, expert_tiles, sorted_rows},
    },
    tiles::PARTS,
};

/// Alignment of everything that is placed.
const ALIGN: usize = 256;
/// Fewest rows of a tile of experts, whatever kernels are chosen.
const EXPERT_COLUMNS_LEAST: u32 = 16;

/// Hands out offsets one after the other.
#[derive(Clone, Copy, Debug, Default)]
pub struct Space {
    used: usize,
}

impl Space {
    /// The offset of `bytes` new bytes, a multiple of 256.
    pub fn take(&mut self, bytes: usize) -> u64 {
        let offset = self.used;
        self.used += bytes.next_multiple_of(ALIGN);
        offset as u64
    }

    /// Bytes that were handed out.
    pub fn bytes(self) -> usize {
        self.used
    }

    /// What follows all of `spaces`, which began at one place because they are never in use together.
    pub fn behind<const N: usize>(spaces: [Self; N]) -> Self {
        Self { used: spaces.map(|space| space.used).into_iter().max().unwrap_or(0) }
    }
}

macro_rules! buffers {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Offsets, or addresses, of the buffers of a step. N is the number of sequences; R rows are 8 on the fast path, and
        /// on the general one N or a chunk. Letters as in [`FlintConfig`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct Buffers {
            $($(#[$doc])* pub $name: u64,)*
            /// Entries of a row of both block tables.
            pub table_stride: usize,
        }

        impl Buffers {
            /// The same as addresses, in an allocation at `base`.
            #[must_use]
            pub fn at(&self, base: u64) -> Self {
                Self { $($name: base + self.$name,)* ..*self }
            }
        }
    };
}

buffers! {
    /// `[N]` u32, the input token of each row; its position follows at once, so that one copy sets both.
    tokens,
    /// `[N]` u32.
    positions,
    /// `[N, table_stride]` u32, the KV block of each 64 positions, of full-attention layers.
    blocks_full,
    /// The same of sliding layers; entries of what no window sees are old.
    blocks_window,
    /// `[R, D]` bf16, output of the block before, not yet added to the residual.
    delta,
    /// `[R, D]` bf16, the residual stream at the start of a layer.
    residual,
    /// `[R, D]` bf16, the same in the middle of a layer: a kernel that adds reads one and writes the other.
    residual_mid,
    /// `[R, D]` bf16.
    normed,
    /// `[R, (H + 2G) head_dim]` bf16.
    qkv,
    /// `[R, H head_dim]` bf16.
    attn,
    /// Partial results of attention, of the fast path.
    attn_partial,
    /// `[N, H]` u32, zero between launches.
    attn_counters,
    /// `[R, E]` f32: the router's scores, or its logits on the general path.
    router_scores,
    /// `[R, K]` u32, the chosen experts, of the general path.
    chosen,
    /// `[R, K]` f32, their weights.
    chosen_weights,
    /// `[R, K, F]` bf16 by slot, or `[R, dense]` in dense layers.
    act,
    /// `[R, shared]` bf16.
    act_shared,
    /// `[max(N, R), V]` f32.
    logits,
    /// `[N]` [`crate::kernels::SampleRow`].
    sample_rows,
    /// `[N, 2, ceil(vocab_tokens / 32)]` u32.
    sample_masks,
    /// `[N, vocab_tokens]` f32.
    sample_bias,
    /// `[N, vocab_tokens]` u32.
    sample_seen,
    /// `[N, vocab_tokens]` f32.
    sample_workspace,
    /// `[head_dim / 2]` f32, rotary frequencies.
    inv_freq,
    /// `[N, 2, head_dim / 2]` f32, cosines and sines of a step's positions, of the fast path.
    rope,
}

impl Buffers {
    pub(super) fn new(
        space: &mut Space,
        config: &FlintConfig,
        path: &Path,
        limits: Limits,
        chunk_tokens: usize,
    ) -> Self {
        let (d, heads, kv_heads) = (config.hidden_size, config.n_heads, config.n_kv_heads);
        let (sequences, table_stride) = (limits.sequences, table_stride(limits));
        let (n_rows, fast_rows) = match path {
            Path::Fast(_) => (fast::MAX_ROWS, sequences),
            Path::General { .. } => (chunk_tokens.max(sequences), 0),
        };
        let tokens = space.take(sequences * 2 * 4);
        let attn_partial = space.take(decode_attention_partial_bytes(fast_rows, kv_heads));
        let rope = space.take(fast_rows * config.head_dim * 4);
        let inv_freq = space.take(config.head_dim / 2 * 4);
        let mut take = |n: usize, width: usize, element_bytes: usize| space.take(n * width * element_bytes);
        let blocks = [(); 2].map(|()| take(sequences, table_stride, 4));
        let counters = take(fast_rows, heads, 4);
        let mut sampler = |width: usize, element_bytes: usize| take(sequences, width, element_bytes);
        let sample_rows = sampler(SAMPLE_ROW_BYTES, 1);
        let sample_masks = sampler(2 * limits.vocab_tokens.div_ceil(32), 4);
        let [sample_bias, sample_seen, sample_workspace] = [(); 3].map(|()| sampler(limits.vocab_tokens, 4));
        let logits = take(n_rows.max(sequences), config.vocab_size, 4);
        let mut rows = |width: usize, element_bytes: usize| take(n_rows, width, element_bytes);
        Self {
            tokens,
            positions: tokens + 4 * sequences as u64,
            blocks_full: blocks[0],
            blocks_window: blocks[1],
            delta: rows(d, 2),
            residual: rows(d, 2),
            residual_mid: rows(d, 2),
            normed: rows(d, 2),
            qkv: rows((heads + 2 * kv_heads) * config.head_dim, 2),
            attn: rows(heads * config.head_dim, 2),
            attn_partial,
            attn_counters: counters,
            router_scores: rows(config.n_experts, 4),
            chosen: rows(config.n_experts_per_token, 4),
            chosen_weights: rows(config.n_experts_per_token, 4),
            act: rows(act_width(config), 2),
            act_shared: rows(config.shared_intermediate_size, 2),
            logits,
            sample_rows,
            sample_masks,
            sample_bias,
            sample_seen,
            sample_workspace,
            rope,
            inv_freq,
            table_stride,
        }
    }
}

macro_rules! prefill_buffers {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Offsets, or addresses, of the buffers of a chunk of T tokens, or of a step of as many sequences; S sorted rows.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) struct PrefillBuffers {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl PrefillBuffers {
            /// The same as addresses, in an allocation at `base`.
            pub fn at(&self, base: u64) -> Self {
                Self { $($name: base + self.$name,)* }
            }
        }
    };
}

prefill_buffers! {
    /// `[T, D]` bf16, output of the block before, not yet added to the residual.
    delta,
    /// `[T, D]` bf16.
    residual,
    /// Panels `[D / 64, T, 64]` bf16.
    normed,
    /// `[1]` u32 of kernels that deal out work, zero between launches.
    counter,
    /// `[T, (H + 2G) 128]` bf16.
    qkv,
    /// Panels `[2 H, T, 64]` bf16.
    attn,
    /// Panels `[dense / 64, T, 64]` bf16.
    act_dense,
    /// `[T, 3, E]` f32, of the router's parts.
    router_logits,
    /// `[T, K]` u32.
    chosen,
    /// `[T, K]` f32.
    chosen_weights,
    /// `[T / 32, E]` u32, the tokens that chose an expert, as bits.
    masks,
    /// `[T / 32, E]` u32, where they lie among the sorted rows.
    places,
    /// The tiles over sorted rows.
    expert_tiles,
    /// `[1]` u32.
    n_expert_tiles,
    /// `[T, K]` u32, the sorted row of each choice.
    sorted,
    /// Panels `[D / 64, S, 64]` bf16; then `[S, D]` bf16, what the experts make of them.
    sorted_rows,
    /// Panels `[F / 64, S, 64]` bf16.
    act,
    /// Panels `[shared / 64, T, 64]` bf16.
    act_shared,
    /// `[T, D]` bf16, output of the shared expert.
    shared,
    /// `[256, V]` f32.
    logits,
}

impl PrefillBuffers {
    pub fn new(space: &mut Space, config: &FlintConfig, tokens: usize, logits_rows: usize) -> Self {
        let (d, hd) = (config.hidden_size, config.head_dim);
        let rows = tokens.next_multiple_of(ROWS_STEP);
        let (sorted, words) = (sorted_rows(tokens), tokens.div_ceil(32) * EXPERTS);
        let [delta, residual, normed] = [(); 3].map(|()| space.take(rows * d * 2));
        let counter = space.take(4);
        // Attention, a dense layer, a MoE layer and logits take turns.
        let (mut attention, mut dense, mut moe, mut ending) = (*space, *space, *space, *space);
        let buffers = Self {
            delta,
            residual,
            normed,
            counter,
            qkv: attention.take(rows * (config.n_heads + 2 * config.n_kv_heads) * hd * 2),
            attn: attention.take(rows * config.n_heads * hd * 2),
            act_dense: dense.take(rows * config.dense_intermediate_size * 2),
            router_logits: moe.take(rows * PARTS * EXPERTS * 4),
            chosen: moe.take(rows * CHOSEN * 4),
            chosen_weights: moe.take(rows * CHOSEN * 4),
            masks: moe.take(words * 4),
            places: moe.take(words * 4),
            expert_tiles: moe.take(expert_tiles(tokens, EXPERT_COLUMNS_LEAST) * 16),
            n_expert_tiles: moe.take(4),
            sorted: moe.take(rows * CHOSEN * 4),
            sorted_rows: moe.take(sorted * d * 2),
            act: moe.take(sorted * config.expert_intermediate_size * 2),
            act_shared: moe.take(rows * config.shared_intermediate_size * 2),
            shared: moe.take(rows * d * 2),
            logits: ending.take(logits_rows * config.vocab_size * 4),
        };
        *space = Space::behind([attention, dense, moe, ending]);
        buffers
    }
}
