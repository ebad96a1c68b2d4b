//! The whole list of tensors that a Flint has, with their names in both kinds of checkpoint.

use serde::Serialize;

use crate::config::{FlintConfig, Mlp};

/// One tensor, or one tensor an expert.
#[derive(Clone, Debug)]
pub(crate) struct Spec {
    /// Its name in a GGUF.
    pub gguf: String,
    /// Its name in safetensors, without the prefix `model.`; `{}` stands for the number of the expert.
    pub safetensors: String,
    /// Its shape.
    pub shape: Shape,
}

/// What a tensor must look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// Values of a norm, or sinks.
    Vector(usize),
    /// A projection `[rows, cols]`.
    Matrix(usize, usize),
    /// A router `[rows, cols]`, whose top-k choice is too sensitive for a quantised type.
    Router(usize, usize),
    /// So many projections `[rows, cols]`; a GGUF stacks them, the expert outermost.
    Experts(usize, usize, usize),
}

/// Weights of a Flint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ParameterCount {
    /// All of them.
    pub total: u64,
    /// Those that one token uses: its row of the embedding, its experts, and everything that is not one of many.
    pub active: u64,
}

/// The weights of a Flint of these dimensions.
pub fn parameter_count(config: &FlintConfig) -> ParameterCount {
    let mut count = ParameterCount { total: 0, active: 0 };
    for spec in list(config) {
        let (total, active) = match spec.shape {
            Shape::Vector(len) => (len, len),
            Shape::Matrix(rows, cols) if spec.gguf == "token_embd.weight" => (rows * cols, cols),
            Shape::Matrix(rows, cols) | Shape::Router(rows, cols) => (rows * cols, rows * cols),
            Shape::Experts(n, rows, cols) => (n * rows * cols, config.n_experts_per_token * rows * cols),
        };
        // A header may claim more than there can be; each part fits 64 bits, their sum need not.
        count.total = count.total.saturating_add(total as u64);
        count.active = count.active.saturating_add(active as u64);
    }
    count
}

/// The tensors of a Flint of these dimensions, in the order in which a file is written.
pub(crate) fn list(config: &FlintConfig) -> Vec<Spec> {
    use Shape::{Experts, Matrix, Router, Vector};
    let (d, v, e) = (config.hidden_size, config.vocab_size, config.n_experts);
    let (q, kv) = (config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim);
    let spec =
        |gguf: &str, safetensors: &str, shape| Spec { gguf: gguf.into(), safetensors: safetensors.into(), shape };
    let mut list = vec![
        spec("token_embd.weight", "embed_tokens.weight", Matrix(v, d)),
        spec("output_norm.weight", "norm.weight", Vector(d)),
        spec("output.weight", "lm_head.weight", Matrix(v, d)),
    ];
    for (n, layer) in config.layers.iter().enumerate() {
        let mut add = |gguf: &str, safetensors: &str, shape| {
            list.push(spec(&format!("blk.{n}.{gguf}.weight"), &format!("layers.{n}.{safetensors}"), shape));
        };
        add("attn_norm", "input_layernorm.weight", Vector(d));
        add("attn_q", "self_attn.q_proj.weight", Matrix(q, d));
        add("attn_k", "self_attn.k_proj.weight", Matrix(kv, d));
        add("attn_v", "self_attn.v_proj.weight", Matrix(kv, d));
        add("attn_output", "self_attn.o_proj.weight", Matrix(d, q));
        add("attn_q_norm", "self_attn.q_norm.weight", Vector(config.head_dim));
        add("attn_k_norm", "self_attn.k_norm.weight", Vector(config.head_dim));
        add("attn_sinks", "self_attn.softmax_offset", Vector(config.n_heads));
        add("ffn_norm", "post_attention_layernorm.weight", Vector(d));
        match layer.mlp {
            Mlp::Dense => {
                let f = config.dense_intermediate_size;
                add("ffn_gate", "mlp.gate_proj.weight", Matrix(f, d));
                add("ffn_up", "mlp.up_proj.weight", Matrix(f, d));
                add("ffn_down", "mlp.down_proj.weight", Matrix(d, f));
            }
            Mlp::Moe => {
                let f = config.expert_intermediate_size;
                add("ffn_gate_inp", "mlp.gate.weight", Router(e, d));
                add("ffn_gate_exps", "mlp.experts.{}.gate_proj.weight", Experts(e, f, d));
                add("ffn_up_exps", "mlp.experts.{}.up_proj.weight", Experts(e, f, d));
                add("ffn_down_exps", "mlp.experts.{}.down_proj.weight", Experts(e, d, f));
                let f = config.shared_intermediate_size;
                add("ffn_gate_shexp", "mlp.shared_expert.gate_proj.weight", Matrix(f, d));
                add("ffn_up_shexp", "mlp.shared_expert.up_proj.weight", Matrix(f, d));
                add("ffn_down_shexp", "mlp.shared_expert.down_proj.weight", Matrix(d, f));
            }
        }
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_the_published_model() {
        let config = FlintConfig::flint(49, 150_144);
        let ParameterCount { total, active } = parameter_count(&config);
        assert!((total as f64 / 39.8e9 - 1.0).abs() < 0.002 && (active as f64 / 2.5e9 - 1.0).abs() < 0.02);
        // The published file has 779 weights, 485 of them NVFP4: every matrix but embedding and routers.
        let list = list(&config);
        assert_eq!(list.len(), 3 + 2 * 12 + 47 * 16);
        let matrices = list.iter().filter(|spec| matches!(spec.shape, Shape::Matrix(..) | Shape::Experts(..)));
        assert_eq!(matrices.count() - 1, 485);
    }
}
