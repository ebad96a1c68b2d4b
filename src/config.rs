//! What a Flint checkpoint says about itself: dimensions, the kind of each layer, rotary base.
//!
//! Both sources are read to the end: a key that this version does not know is refused by name when it could change the
//! arithmetic, because engines that passed over such keys answered wrongly without a word.

mod gguf_keys;
mod json_keys;

use std::collections::BTreeMap;

use serde::Serialize;

use crate::{
    checkpoint::{Checkpoint, gguf::Value},
    error::{Error, Result},
    nvfp4::BLOCK_LEN,
};

/// What the tokens of a layer attend to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Attention {
    /// Every earlier position.
    Full,
    /// The last `sliding_window` positions, the current one included.
    Sliding,
}

/// The feed-forward part of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mlp {
    /// One `SwiGLU` of `dense_intermediate_size`.
    Dense,
    /// Routed experts plus one shared expert.
    Moe,
}

/// The kind of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct LayerKind {
    /// What its tokens attend to.
    pub attention: Attention,
    /// Whether q and k are rotated by their position.
    pub rope: bool,
    /// Its feed-forward part.
    pub mlp: Mlp,
}

/// Dimensions of a Flint. Every field was checked by [`FlintConfig::validate`].
#[derive(Clone, Debug, PartialEq, Serialize)]
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
    /// Width of the `SwiGLU` of dense layers.
    pub dense_intermediate_size: usize,
    /// E, routed experts of a `MoE` layer.
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

/// Most layers that are accepted. Flint has 49.
const MAX_LAYERS: usize = 4096;
/// Most values that a dimension may have, so that a product of three fits 64 bits. The largest in Flint is its context,
/// 262,144.
const MAX_SIZE: usize = 1 << 20;
/// Most tokens of a vocabulary, a context or a window.
const MAX_TOKENS: usize = 1 << 24;

impl FlintConfig {
    /// The dimensions of the published model, with `n_layers` layers and a vocabulary of `vocab_size`; it has 49 and
    /// 150,144. Full attention without rotation on layers 0, 1, 5, 9 ... and the last; layers 0 and 1 are dense.
    pub fn flint(n_layers: usize, vocab_size: usize) -> Self {
        let layer = |index: usize| {
            let full = index == 0 || index % 4 == 1 || index + 1 == n_layers;
            LayerKind {
                attention: if full { Attention::Full } else { Attention::Sliding },
                rope: !full,
                mlp: if index < 2 { Mlp::Dense } else { Mlp::Moe },
            }
        };
        Self {
            hidden_size: 2048,
            vocab_size,
            context_length: 262_144,
            n_heads: 32,
            n_kv_heads: 4,
            head_dim: 128,
            dense_intermediate_size: 6144,
            n_experts: 256,
            n_experts_per_token: 6,
            expert_intermediate_size: 512,
            shared_intermediate_size: 1024,
            sliding_window: 513,
            rms_norm_eps: 1e-6,
            rope_theta: 10_000.0,
            layers: (0..n_layers).map(layer).collect(),
        }
    }

    /// The published model with the keys of `dims`, a JSON object as in a config.json, in place of its own. Kinds of layers
    /// that it does not name follow Flint's rule. Keys without a use here are passed over where `dims` is a whole
    /// config.json, which has them anyway, and refused where someone wrote them for this.
    ///
    /// Errors: [`Error::Value`] naming the key.
    pub fn flint_with(dims: &str, whole_file: bool) -> Result<Self> {
        json_keys::read_over(&Self::flint(49, 150_144), dims, whole_file)
    }

    /// Whether matrices of NVFP4 can have these dimensions, whose rows are whole blocks. Errors: [`Error::Value`] naming
    /// the dimension.
    pub fn check_nvfp4(&self) -> Result<()> {
        self.check_blocks(&FIELDS, str::to_owned)
    }

    /// The same with the names of [`Self::flint_with`].
    pub fn check_nvfp4_dims(&self) -> Result<()> {
        json_keys::check_nvfp4(self)
    }

    /// Reads and validates the configuration of a checkpoint: `general.architecture` and `flint.*` of a GGUF, or
    /// config.json as transformers and Recursive write it.
    pub fn from_checkpoint(checkpoint: &Checkpoint) -> Result<Self> {
        match checkpoint {
            Checkpoint::Gguf(gguf) => gguf_keys::read(gguf),
            Checkpoint::Safetensors(dir) => json_keys::read(&dir.path.join("config.json"), &dir.config),
        }
    }

    /// The `flint.*` keys of a GGUF that says the same. Errors: [`Error::Value`] for an order of layers that the keys cannot say.
    pub fn to_gguf_metadata(&self) -> Result<BTreeMap<String, Value>> {
        gguf_keys::write(self)
    }

    /// Checks every size and the relations between them. Errors name the field.
    pub fn validate(&self) -> Result<()> {
        self.check(&FIELDS, |field, accepted, found| Error::value(field, found, accepted))
    }

    /// [`Self::validate`] with the names and the error of the source: `refuse(name, accepted, found)`.
    fn check(&self, names: &Names, refuse: impl Fn(&str, String, String) -> Error) -> Result<()> {
        for (name, value, most) in [
            (names.hidden_size, self.hidden_size, MAX_SIZE),
            (names.vocab_size, self.vocab_size, MAX_TOKENS),
            (names.context_length, self.context_length, MAX_TOKENS),
            (names.n_heads, self.n_heads, MAX_SIZE),
            (names.n_kv_heads, self.n_kv_heads, MAX_SIZE),
            (names.head_dim, self.head_dim, MAX_SIZE),
            (names.dense_intermediate_size, self.dense_intermediate_size, MAX_SIZE),
            (names.n_experts, self.n_experts, MAX_SIZE),
            (names.n_experts_per_token, self.n_experts_per_token, self.n_experts),
            (names.expert_intermediate_size, self.expert_intermediate_size, MAX_SIZE),
            (names.shared_intermediate_size, self.shared_intermediate_size, MAX_SIZE),
            (names.sliding_window, self.sliding_window, MAX_TOKENS),
            (names.layers, self.layers.len(), MAX_LAYERS),
        ] {
            if !(1..=most).contains(&value) {
                return Err(refuse(name, format!("1 to {most}"), value.to_string()));
            }
        }
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            let accepted = format!("a divisor of {}, {}", names.n_heads, self.n_heads);
            return Err(refuse(names.n_kv_heads, accepted, self.n_kv_heads.to_string()));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(refuse(names.head_dim, "an even number".into(), self.head_dim.to_string()));
        }
        for (name, value) in [(names.rms_norm_eps, self.rms_norm_eps), (names.rope_theta, self.rope_theta)] {
            if !(value.is_finite() && value > 0.0) {
                return Err(refuse(name, "a finite number above 0 in single precision".into(), value.to_string()));
            }
        }
        Ok(())
    }

    /// [`Self::check_nvfp4`] with the names of the source, as `call` puts them.
    fn check_blocks(&self, names: &Names, call: impl Fn(&str) -> String) -> Result<()> {
        let query = format!("{} * {}", call(names.n_heads), call(names.head_dim));
        let mut widths = vec![(call(names.hidden_size), self.hidden_size), (query, self.n_heads * self.head_dim)];
        for (mlp, name, width) in [
            (Mlp::Dense, names.dense_intermediate_size, self.dense_intermediate_size),
            (Mlp::Moe, names.expert_intermediate_size, self.expert_intermediate_size),
            (Mlp::Moe, names.shared_intermediate_size, self.shared_intermediate_size),
        ] {
            if self.layers.iter().any(|layer| layer.mlp == mlp) {
                widths.push((call(name), width));
            }
        }
        match widths.into_iter().find(|(_, width)| !width.is_multiple_of(BLOCK_LEN)) {
            Some((name, width)) => {
                let accepted = format!("a multiple of {BLOCK_LEN}, the values of an NVFP4 block");
                Err(Error::value(name, width.to_string(), accepted))
            }
            None => Ok(()),
        }
    }
}

/// How a source calls the fields.
struct Names {
    hidden_size: &'static str,
    vocab_size: &'static str,
    context_length: &'static str,
    n_heads: &'static str,
    n_kv_heads: &'static str,
    head_dim: &'static str,
    dense_intermediate_size: &'static str,
    n_experts: &'static str,
    n_experts_per_token: &'static str,
    expert_intermediate_size: &'static str,
    shared_intermediate_size: &'static str,
    sliding_window: &'static str,
    rms_norm_eps: &'static str,
    rope_theta: &'static str,
    layers: &'static str,
}

const FIELDS: Names = Names {
    hidden_size: "hidden_size",
    vocab_size: "vocab_size",
    context_length: "context_length",
    n_heads: "n_heads",
    n_kv_heads: "n_kv_heads",
    head_dim: "head_dim",
    dense_intermediate_size: "dense_intermediate_size",
    n_experts: "n_experts",
    n_experts_per_token: "n_experts_per_token",
    expert_intermediate_size: "expert_intermediate_size",
    shared_intermediate_size: "shared_intermediate_size",
    sliding_window: "sliding_window",
    rms_norm_eps: "rms_norm_eps",
    rope_theta: "rope_theta",
    layers: "layers",
};
