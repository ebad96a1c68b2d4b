//! The whole list of tensors that a Flint has, with their names in both kinds of checkpoint.

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
