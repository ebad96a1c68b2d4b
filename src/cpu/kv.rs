//! The KV cache of one sequence.

use half::bf16;

use super::{BLOCK_TOKENS, Precision};
use crate::config::{Attention, FlintConfig};

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

/// Rows of one width.
#[derive(Clone)]
pub(super) struct Store {
    width: usize,
    data: Data,
}

#[derive(Clone)]
enum Data {
    F32(Vec<f32>),
    Bf16(Vec<u16>),
}

/// A run of rows of a [`Store`].
#[derive(Clone, Copy)]
pub(super) enum Rows<'a> {
    F32(&'a [f32]),
    Bf16(&'a [u16]),
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
        self.layers.iter().map(|layer| layer.k.bytes() + layer.v.bytes()).sum()
    }

    /// Whether this cache was made for a model of these dimensions.
    pub(super) fn fits(&self, config: &FlintConfig, precision: Precision) -> bool {
        let width = config.n_kv_heads * config.head_dim;
        self.layers.len() == config.layers.len()
            && self.layers.iter().zip(&config.layers).all(|(layer, kind)| {
                let window = (kind.attention == Attention::Sliding).then_some(config.sliding_window);
                layer.window == window && layer.k.width == width && layer.k.precision() == precision
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
    /// from `start` on can see when a sliding layer is full. Whatever `start - 1` saw last stays until the next call.
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
        let data = match precision {
            Precision::Float32 => Data::F32(Vec::new()),
            Precision::Bfloat16 => Data::Bf16(Vec::new()),
        };
        Self { width, data }
    }

    fn precision(&self) -> Precision {
        match self.data {
            Data::F32(_) => Precision::Float32,
            Data::Bf16(_) => Precision::Bfloat16,
        }
    }

    fn bytes(&self) -> usize {
        match &self.data {
            Data::F32(data) => data.capacity() * 4,
            Data::Bf16(data) => data.capacity() * 2,
        }
    }

    /// Every row.
    pub(super) fn rows(&self) -> Rows<'_> {
        match &self.data {
            Data::F32(data) => Rows::F32(data),
            Data::Bf16(data) => Rows::Bf16(data),
        }
    }

    /// Every row as f32.
    pub(super) fn to_f32(&self) -> Vec<f32> {
        match &self.data {
            Data::F32(data) => data.clone(),
            Data::Bf16(data) => data.iter().map(|&bits| bf16::from_bits(bits).to_f32()).collect(),
        }
    }

    /// `values` were rounded to the store's precision before.
    fn extend(&mut self, values: &[f32]) {
        match &mut self.data {
            Data::F32(data) => data.extend_from_slice(values),
            Data::Bf16(data) => data.extend(values.iter().map(|&x| bf16::from_f32(x).to_bits())),
        }
    }

    fn drop_front(&mut self, rows: usize) {
        match &mut self.data {
            Data::F32(data) => drop(data.drain(..rows * self.width)),
            Data::Bf16(data) => drop(data.drain(..rows * self.width)),
        }
    }

    fn truncate(&mut self, rows: usize) {
        match &mut self.data {
            Data::F32(data) => data.truncate(rows * self.width),
            Data::Bf16(data) => data.truncate(rows * self.width),
        }
    }
}
