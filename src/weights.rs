//! The weights of a Flint, bound by name from a checkpoint with type and shape checked: the whole list that the model
//! needs, and nothing else. Backends read these and never a file.

use crate::{
    cancel::Cancel,
    checkpoint::{Bytes, Checkpoint},
    config::FlintConfig,
    error::Result,
};

/// A matrix of `rows` outputs by `cols` inputs, stored row after row.
#[derive(Clone, Debug)]
pub struct Matrix {
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// The elements.
    pub data: MatrixData,
}

/// The elements of a [`Matrix`], as the file stores them. Nothing is aligned beyond one byte.
#[derive(Clone, Debug)]
pub enum MatrixData {
    /// `rows * cols` little-endian singles.
    F32(Bytes),
    /// `rows * cols` halves.
    F16(Bytes),
    /// `rows * cols` bfloat16 values.
    Bf16(Bytes),
    /// `rows * cols / 32` blocks of 34 bytes.
    Q8_0(Bytes),
    /// `rows * cols / 64` blocks of 36 bytes in GGUF order; a value is code * block scale * `scale`.
    Nvfp4 {
        /// The blocks, see [`crate::nvfp4`].
        blocks: Bytes,
        /// The companion `.scale` of the tensor or expert; 1 when the file has none.
        scale: f32,
    },
}

/// down(silu(gate(x)) * up(x)).
#[derive(Clone, Debug)]
pub struct SwiGlu {
    /// `[F, D]`.
    pub gate: Matrix,
    /// `[F, D]`.
    pub up: Matrix,
    /// `[D, F]`.
    pub down: Matrix,
}

/// The feed-forward weights of a layer.
#[derive(Clone, Debug)]
pub enum MlpWeights {
    /// A dense layer.
    Dense(SwiGlu),
    /// A mixture of experts.
    Moe {
        /// `[E, D]`; its logits stay fp32.
        router: Matrix,
        /// E routed experts.
        experts: Vec<SwiGlu>,
        /// Added in full, without a gate.
        shared: SwiGlu,
    },
}

/// The weights of one layer.
#[derive(Clone, Debug)]
pub struct LayerWeights {
    /// `[D]`, before attention.
    pub attn_norm: Vec<f32>,
    /// `[H * head_dim, D]`.
    pub q: Matrix,
    /// `[G * head_dim, D]`.
    pub k: Matrix,
    /// `[G * head_dim, D]`.
    pub v: Matrix,
    /// `[D, H * head_dim]`.
    pub o: Matrix,
    /// `[head_dim]`, shared by the query heads.
    pub q_norm: Vec<f32>,
    /// `[head_dim]`, shared by the key heads.
    pub k_norm: Vec<f32>,
    /// `[H]`, one softmax logit a query head that attends to nothing.
    pub sinks: Vec<f32>,
    /// `[D]`, before the feed-forward part.
    pub mlp_norm: Vec<f32>,
    /// The feed-forward part.
    pub mlp: MlpWeights,
}

/// All weights of a Flint.
#[derive(Clone, Debug)]
pub struct Weights {
    /// The dimensions that every shape below was checked against.
    pub config: FlintConfig,
    /// `[V, D]`; a token's row is its embedding.
    pub embedding: Matrix,
    /// One entry a layer.
    pub layers: Vec<LayerWeights>,
    /// `[D]`, before the LM head.
    pub final_norm: Vec<f32>,
    /// `[V, D]`.
    pub lm_head: Matrix,
}

impl Weights {
    /// Binds every tensor of `checkpoint`. `progress` gets (bytes checked, bytes in all).
    pub fn bind(
        checkpoint: &Checkpoint,
        config: FlintConfig,
        progress: &mut dyn FnMut(u64, u64),
        cancel: &Cancel,
    ) -> Result<Self> {
        let _ = (checkpoint, config, progress, cancel);
        unimplemented!()
    }

    /// Bytes of all weights as stored.
    pub fn bytes(&self) -> usize {
        unimplemented!()
    }
}
