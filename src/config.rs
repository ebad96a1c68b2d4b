//! What a Flint checkpoint says about itself: dimensions, the kind of each layer, rotary base.

use crate::{checkpoint::Checkpoint, error::Result};

/// What the tokens of a layer attend to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attention {
    /// Every earlier position.
    Full,
    /// The last `sliding_window` positions, the current one included.
    Sliding,
}

/// The feed-forward part of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mlp {
    /// One SwiGLU of `dense_intermediate_size`.
    Dense,
    /// Routed experts plus one shared expert.
    Moe,
}

/// The kind of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerKind {
    /// What its tokens attend to.
    pub attention: Attention,
    /// Whether q and k are rotated by their position.
    pub rope: bool,
    /// Its feed-forward part.
    pub mlp: Mlp,
}

/// Dimensions of a Flint. Every field was checked by [`FlintConfig::validate`].
#[derive(Clone, Debug, PartialEq)]
pub struct FlintConfig {
    /// D, the width of the residual stream.
    pub hidden_size: usize,
    /// V, rows of the embedding and of the LM head.
    pub vocab_size: usize,
    /// Longest sequence in tokens.
    pub context_length: usize,
    /// H, query heads.
    pub n_heads: usize,
    /// G, key/value heads; divides H. Query head h reads KV head h / (H / G).
    pub n_kv_heads: usize,
    /// Values a head; even.
    pub head_dim: usize,
    /// Width of the SwiGLU of dense layers.
    pub dense_intermediate_size: usize,
    /// E, routed experts of a MoE layer.
    pub n_experts: usize,
    /// K, experts chosen for a token.
    pub n_experts_per_token: usize,
    /// F, width of a routed expert.
    pub expert_intermediate_size: usize,
    /// Width of the shared expert.
    pub shared_intermediate_size: usize,
    /// Positions a sliding layer sees, the current one included.
    pub sliding_window: usize,
    /// Epsilon of every RMS norm.
    pub rms_norm_eps: f32,
    /// Base of the rotary angles.
    pub rope_theta: f32,
    /// One entry a layer.
    pub layers: Vec<LayerKind>,
}

impl FlintConfig {
    /// From the GGUF keys or config.json.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Self> {
        let _ = checkpoint;
        unimplemented!()
    }
}
