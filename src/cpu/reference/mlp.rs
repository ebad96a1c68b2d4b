//! Feed-forward parts: `SwiGlu`, router, mixture of experts.

use super::{exp, project};
use crate::{
    cancel::Cancel,
    cpu::Precision,
    error::Result,
    weights::{Matrix, SwiGlu},
};

/// x / (1 + e^-x).
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// round(silu(gate x) * up x), from unrounded products.
///
/// `x` is `[T, D]`, the result `[T, F]`.
pub fn swiglu_act(weights: &SwiGlu, x: &[f32], precision: Precision, cancel: &Cancel) -> Result<Vec<f32>> {
    let gate = project(&weights.gate, x, Precision::Float32, cancel)?;
    let up = project(&weights.up, x, Precision::Float32, cancel)?;
    Ok(gate.iter().zip(&up).map(|(&gate, up)| precision.round(silu(gate) * up)).collect())
}

/// round(down act), act being [`swiglu_act`].
///
/// `x` and the result are `[T, D]`.
pub fn swiglu(weights: &SwiGlu, x: &[f32], precision: Precision, cancel: &Cancel) -> Result<Vec<f32>> {
    project(&weights.down, &swiglu_act(weights, x, precision, cancel)?, precision, cancel)
}

/// The chosen experts of each token.
#[derive(Clone, Debug, PartialEq)]
pub struct Routes {
    /// K.
    pub per_token: usize,
    /// `[T, K]`, highest score first.
    pub experts: Vec<usize>,
    /// `[T, K]`; the weights of a token add up to 1.
    pub weights: Vec<f32>,
}

impl Routes {
    /// Chooses from `logits` (`[T, E]`): the `per_token` highest sigmoid scores (ties: lowest index), divided by their sum.
    pub fn from_logits(logits: &[f32], n_experts: usize, per_token: usize) -> Self {
        let scores: Vec<f32> = logits.iter().map(|&x| 1.0 / (1.0 + exp(-x))).collect();
        Self::from_scores(&scores, n_experts, per_token)
    }

    /// The same from the sigmoids, `[T, E]`.
    pub fn from_scores(scores: &[f32], n_experts: usize, per_token: usize) -> Self {
        let mut routes = Self { per_token, experts: Vec::new(), weights: Vec::new() };
        for scores in scores.chunks_exact(n_experts) {
            let mut order: Vec<usize> = (0..n_experts).collect();
            order.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]));
            order.truncate(per_token);
            let sum: f32 = order.iter().map(|&e| scores[e]).sum();
            routes.weights.extend(order.iter().map(|&e| scores[e] / sum));
            routes.experts.extend(order);
        }
        routes
    }

    /// The experts and weights of token `t`.
    pub fn of(&self, t: usize) -> impl Iterator<Item = (usize, f32)> {
        let range = t * self.per_token..(t + 1) * self.per_token;
        self.experts[range.clone()].iter().copied().zip(self.weights[range].iter().copied())
    }
}

/// Router logits in fp32, unrounded, and the choice of [`Routes::from_logits`].
///
/// `router` is `[E, D]`, `x` `[T, D]`.
pub fn router_top_k(router: &Matrix, x: &[f32], per_token: usize, cancel: &Cancel) -> Result<Routes> {
    let logits = project(router, x, Precision::Float32, cancel)?;
    Ok(Routes::from_logits(&logits, router.rows, per_token))
}

/// round(routed + shared), where routed = round(sum of weight * expert(x) over the chosen experts), the sum in fp32 in the
/// order of the expert index, each expert(x) and shared(x) being a [`swiglu`], which rounds its output.
///
/// `x` and the result are `[T, D]`.
pub fn moe(
    experts: &[SwiGlu],
    shared: &SwiGlu,
    routes: &Routes,
    x: &[f32],
    precision: Precision,
    cancel: &Cancel,
) -> Result<Vec<f32>> {
    let d = shared.down.rows;
    let mut out = vec![0.0; x.len()];
    for (e, expert) in experts.iter().enumerate() {
        let chosen: Vec<(usize, f32)> = (0..x.len() / d)
            .filter_map(|t| routes.of(t).find(|&(chosen, _)| chosen == e).map(|(_, weight)| (t, weight)))
            .collect();
        if chosen.is_empty() {
            continue;
        }
        let x: Vec<f32> = chosen.iter().flat_map(|&(t, _)| &x[t * d..(t + 1) * d]).copied().collect();
        let y = swiglu(expert, &x, precision, cancel)?;
        for (&(t, weight), y) in chosen.iter().zip(y.chunks_exact(d)) {
            for (out, y) in out[t * d..(t + 1) * d].iter_mut().zip(y) {
                *out += weight * y;
            }
        }
    }
    let shared = swiglu(shared, x, precision, cancel)?;
    Ok(out.iter().zip(&shared).map(|(routed, shared)| precision.round(precision.round(*routed) + shared)).collect())
}
