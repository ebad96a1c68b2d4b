//! The specification of Flint's arithmetic: one function an operation, one thread, plain loops. Each computes in fp32 and
//! rounds its output once, by [`Precision`]; nothing depends on the other tokens of a call, so a prompt cut into any
//! chunks gives the same bits. Kernels are tested against these functions one by one.
//!
//! Shapes use fixed letters: T tokens, D hidden width, H query heads, G KV heads, E experts, K chosen experts, F the
//! inner width of a `SwiGlu`, V vocabulary, P cached positions. All arrays are row-major, the last letter contiguous.

mod attention;
mod exp;
mod mlp;
mod norm;
mod project;

pub(super) use attention::softmax_with_sink;
pub use attention::{Cache, attention};
pub use exp::exp;
pub use mlp::{Routes, moe, router_top_k, silu, swiglu, swiglu_act};
pub use norm::{qk_norm_rope, rms_norm_residual};
pub use project::{dot, embed, logits, project};

use super::{
    Kv, Positions, Precision,
    rope::{Rope, RopeTable},
};
use crate::{
    cancel::Cancel,
    config::Attention,
    error::Result,
    weights::{LayerWeights, MlpWeights, Weights},
};

/// Appends `tokens` to `kv`'s layers, without moving its length, and returns the logits that `positions` asks for.
pub(super) fn forward_block(
    weights: &Weights,
    rope: &Rope,
    precision: Precision,
    kv: &mut Kv,
    tokens: &[u32],
    positions: Positions,
    cancel: &Cancel,
) -> Result<Vec<f32>> {
    let config = &weights.config;
    let start = kv.len;
    let table = rope.table(start..start + tokens.len());
    let mut residual = vec![0.0; tokens.len() * config.hidden_size];
    let mut x = embed(&weights.embedding, tokens, precision);
    for index in 0..weights.layers.len() {
        x = layer(weights, index, &table, precision, kv, &x, &mut residual, cancel)?;
    }
    let d = config.hidden_size;
    let wanted = match positions {
        Positions::None => return Ok(Vec::new()),
        Positions::Last => (tokens.len() - 1) * d..,
        Positions::All => 0..,
    };
    let x = &x[wanted.clone()];
    let normed = rms_norm_residual(x, &mut residual[wanted], &weights.final_norm, config.rms_norm_eps, precision);
    logits(&weights.lm_head, &normed, cancel)
}

/// One layer: attention and feed-forward of `x` (`[T, D]`, the output of the layer before), to be added to `residual` by the
/// next norm.
#[allow(clippy::too_many_arguments, reason = "a layer's inputs, each once")]
fn layer(
    weights: &Weights,
    index: usize,
    table: &RopeTable,
    precision: Precision,
    kv: &mut Kv,
    x: &[f32],
    residual: &mut [f32],
    cancel: &Cancel,
) -> Result<Vec<f32>> {
    let config = &weights.config;
    let (layer, kind): (&LayerWeights, _) = (&weights.layers[index], config.layers[index]);
    let eps = config.rms_norm_eps;
    let table = kind.rope.then_some(table);

    let x = rms_norm_residual(x, residual, &layer.attn_norm, eps, precision);
    let q = project(&layer.q, &x, precision, cancel)?;
    let k = project(&layer.k, &x, precision, cancel)?;
    let v = project(&layer.v, &x, precision, cancel)?;
    let q = qk_norm_rope(&q, config.n_heads, &layer.q_norm, eps, table, precision);
    let k = qk_norm_rope(&k, config.n_kv_heads, &layer.k_norm, eps, table, precision);
    let start = kv.len;
    let layer_kv = &mut kv.layers[index];
    layer_kv.append(start, &k, &v);
    let (k, v) = (layer_kv.k.to_f32(), layer_kv.v.to_f32());
    let cache =
        Cache { k: &k, v: &v, first: layer_kv.first(), n_kv_heads: config.n_kv_heads, head_dim: config.head_dim };
    let window = (kind.attention == Attention::Sliding).then_some(config.sliding_window);
    let x = attention(&q, start, cache, &layer.sinks, window, precision, cancel)?;
    let x = project(&layer.o, &x, precision, cancel)?;

    let x = rms_norm_residual(&x, residual, &layer.mlp_norm, eps, precision);
    match &layer.mlp {
        MlpWeights::Dense(mlp) => swiglu(mlp, &x, precision, cancel),
        MlpWeights::Moe { router, experts, shared } => {
            let routes = router_top_k(router, &x, config.n_experts_per_token, cancel)?;
            moe(experts, shared, &routes, &x, precision, cancel)
        }
    }
}
