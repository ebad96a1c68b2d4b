//! The KV cache of one sequence.

use std::ops::Range;

use super::{BLOCK_TOKENS, Precision};
use crate::{
    checkpoint::DType,
    config::{Attention, FlintConfig},
    weights::decode,
};

/// The KV cache of one sequence: BF16 or f32 by the model's [`Precision`]. Layers of full attention grow with the
/// sequence; sliding layers hold at most `sliding_window - 1 + 512` positions.
#[derive(Clone)]
pub struct Kv {
    pub(super) len: usize,
    pub(super) layers: Vec<LayerKv>,
}

/// Keys and values of one layer: a contiguous run of positions that ends with the newest.
#[derive(Clone)]
pub(super) struct LayerKv {
    /// Positions that later tokens can still see, for a sliding layer.
    window: Option<usize>,
    /// Position of the first stored row.
    first: usize,
    /// `[positions, G, head_dim]`, rotated where the layer rotates.
    pub(super) k: Store,
    /// `[positions, G, head_dim]`.
    pub(super) v: Store,
}

/// Rows of one width, packed like those of a weight matrix.
#[derive(Clone)]
pub(super) struct Store {
    width: usize,
    pub(super) dtype: DType,
    bytes: Vec<u8>,
}

/// What a failed [`super::CpuModel::forward`] needs to undo its work.
pub(super) struct Checkpoint {
    len: usize,
    /// The sliding layers, when more than one block follows: a later block may drop rows that position `len` still sees.
    sliding: Vec<(usize, LayerKv)>,
}

/// Bytes that the rows of `tokens` positions fill, at most.
pub(super) fn bytes_at(config: &FlintConfig, precision: Precision, tokens: usize) -> usize {
    let value_bytes = match precision {
        Precision::Float32 => 4,
        Precision::Bfloat16 => 2,
    };
    let rows = config.layers.iter().map(|kind| match kind.attention {
        Attention::Full => tokens,
        Attention::Sliding => tokens.min(config.sliding_window - 1 + BLOCK_TOKENS),
    });
    2 * rows.sum::<usize>() * config.n_kv_heads * config.head_dim * value_bytes
}

impl Kv {
    pub(super) fn new(config: &FlintConfig, precision: Precision) -> Self {
        let store = || Store::new(config.n_kv_heads * config.head_dim, precision);
        let layers = config
            .layers
            .iter()
            .map(|kind| LayerKv {
                window: (kind.attention == Attention::Sliding).then_some(config.sliding_window),
                first: 0,
                k: store(),
                v: store(),
            })
            .collect();
        Self { len: 0, layers }
    }

    /// Tokens whose keys and values are stored.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is stored.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes held now.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(|layer| layer.k.bytes.capacity() + layer.v.bytes.capacity()).sum()
    }

    /// Whether this cache was made for a model of these dimensions.
    pub(super) fn fits(&self, config: &FlintConfig, precision: Precision) -> bool {
        let width = config.n_kv_heads * config.head_dim;
        self.layers.len() == config.layers.len()
            && self.layers.iter().zip(&config.layers).all(|(layer, kind)| {
                let window = (kind.attention == Attention::Sliding).then_some(config.sliding_window);
                layer.window == window && layer.k.width == width && layer.k.dtype == dtype(precision)
            })
    }

    /// Taken before a call that appends `n_tokens`.
    pub(super) fn checkpoint(&self, n_tokens: usize) -> Checkpoint {
        let sliding = |(_, layer): &(usize, &LayerKv)| layer.window.is_some() && n_tokens > BLOCK_TOKENS;
        let saved = self.layers.iter().enumerate().filter(sliding).map(|(i, layer)| (i, layer.clone())).collect();
        Checkpoint { len: self.len, sliding: saved }
    }

    /// Back to the state at `checkpoint`.
    pub(super) fn restore(&mut self, checkpoint: Checkpoint) {
        self.len = checkpoint.len;
        for (i, layer) in checkpoint.sliding {
            self.layers[i] = layer;
        }
        for layer in &mut self.layers {
            layer.truncate(self.len);
        }
    }
}

impl LayerKv {
    /// Appends the keys and values of the positions from `start` on, `[T, G, head_dim]` each, dropping first what no token
    /// from `start` on can see when a sliding layer is full: until the next call, `start` can be computed again.
    pub(super) fn append(&mut self, start: usize, k: &[f32], v: &[f32]) {
        let stored = start - self.first;
        if let Some(window) = self.window {
            let visible = stored.min(window - 1);
            if stored + k.len() / self.k.width > window - 1 + BLOCK_TOKENS {
                self.k.drop_front(stored - visible);
                self.v.drop_front(stored - visible);
                self.first = start - visible;
            }
        }
        self.k.extend(k);
        self.v.extend(v);
    }

    /// Position of row 0 of `k` and `v`.
    pub(super) fn first(&self) -> usize {
        self.first
    }

    fn truncate(&mut self, len: usize) {
        self.k.truncate(len - self.first);
        self.v.truncate(len - self.first);
    }
}

impl Store {
    fn new(width: usize, precision: Precision) -> Self {
        Self { width, dtype: dtype(precision), bytes: Vec::new() }
    }

    /// The packed values of row `row` at `columns`.
    pub(super) fn part(&self, row: usize, columns: Range<usize>) -> &[u8] {
        let at = |column| (row * self.width + column) * self.dtype.block_bytes();
        &self.bytes[at(columns.start)..at(columns.end)]
    }

    /// Every row as f32.
    pub(super) fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.bytes.len() / self.dtype.block_bytes()];
        decode(self.dtype, &self.bytes, &mut out);
        out
    }

    /// `values` were rounded to the store's precision before.
    fn extend(&mut self, values: &[f32]) {
        let end = self.bytes.len();
        let added = values.len() * self.dtype.block_bytes();
        // By an eighth, not by doubling: a long context is most of the memory that a model holds.
        if self.bytes.capacity() - end < added {
            self.bytes.reserve_exact(added.max(end / 8));
        }
        self.bytes.resize(end + added, 0);
        let new = &mut self.bytes[end..];
        if self.dtype == DType::F32 {
            for (out, x) in new.chunks_exact_mut(4).zip(values) {
                out.copy_from_slice(&x.to_le_bytes());
            }
        } else {
            for (out, x) in new.chunks_exact_mut(2).zip(values) {
                out.copy_from_slice(&((x.to_bits() >> 16) as u16).to_le_bytes());
            }
        }
    }

    fn drop_front(&mut self, rows: usize) {
        self.bytes.drain(..rows * self.row_bytes());
    }

    fn truncate(&mut self, rows: usize) {
        self.bytes.truncate(rows * self.row_bytes());
    }

    fn row_bytes(&self) -> usize {
        self.width * self.dtype.block_bytes()
    }
}

fn dtype(precision: Precision) -> DType {
    match precision {
        Precision::Float32 => DType::F32,
        Precision::Bfloat16 => DType::Bf16,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{LayerKind, Mlp};

    fn kv(window: usize) -> Kv {
        let layer = |attention| LayerKind { attention, rope: false, mlp: Mlp::Dense };
        let config = FlintConfig {
            hidden_size: 4,
            vocab_size: 4,
            context_length: 100_000,
            n_heads: 1,
            n_kv_heads: 1,
            head_dim: 2,
            dense_intermediate_size: 4,
            n_experts: 1,
            n_experts_per_token: 1,
            expert_intermediate_size: 4,
            shared_intermediate_size: 4,
            sliding_window: window,
            rms_norm_eps: 1e-6,
            rope_theta: 10_000.0,
            layers: vec![layer(Attention::Full), layer(Attention::Sliding)],
        };
        Kv::new(&config, Precision::Float32)
    }

    fn append(kv: &mut Kv, n: usize) {
        let rows: Vec<f32> = (kv.len..kv.len + n).flat_map(|p| [p as f32, -(p as f32)]).collect();
        let start = kv.len;
        for layer in &mut kv.layers {
            layer.append(start, &rows, &rows);
        }
        kv.len += n;
    }

    fn assert_holds(kv: &Kv, window: usize) {
        for (layer, visible) in kv.layers.iter().zip([kv.len, kv.len.min(window - 1)]) {
            let rows = layer.v.to_f32();
            assert_eq!(rows.len() / 2, kv.len - layer.first());
            for position in kv.len - visible..kv.len {
                assert_eq!(rows[2 * (position - layer.first())].to_bits(), (position as f32).to_bits());
            }
        }
    }

    #[test]
    fn windows_are_kept_and_bounded() {
        for window in [1, 2, 9, 513] {
            let mut kv = kv(window);
            for n in [1, 2, 512, 300, 511, 1, 1, 512, 512, 7] {
                append(&mut kv, n);
                assert_holds(&kv, window);
                assert!(kv.layers[1].k.to_f32().len() / 2 < window + BLOCK_TOKENS);
            }
        }
    }

    #[test]
    fn restore_brings_back_what_later_blocks_dropped() {
        for window in [1, 9, 513] {
            for blocks in [vec![3], vec![512], vec![512, 512, 100]] {
                let mut kv = kv(window);
                append(&mut kv, 400);
                append(&mut kv, 300);
                let checkpoint = kv.checkpoint(blocks.iter().sum());
                for n in blocks {
                    append(&mut kv, n);
                }
                kv.restore(checkpoint);
                assert_eq!(kv.len(), 700);
                assert_holds(&kv, window);
            }
        }
    }
}
