//! RMS norms and rotation.

use super::{super::rope::RopeTable, dot};
use crate::cpu::Precision;

/// The residual stream and its norm: s = x + residual; residual = round(s);
/// out = round(w * s * rsqrt(mean(s^2) + eps)), from the unrounded s.
///
/// `x`, `residual` and the result are `[T, D]`, `weight` is `[D]`.
///
/// # Panics
/// When `x` and `residual` differ in length.
pub fn rms_norm_residual(x: &[f32], residual: &mut [f32], weight: &[f32], eps: f32, precision: Precision) -> Vec<f32> {
    assert_eq!(x.len(), residual.len());
    let mut out = Vec::with_capacity(x.len());
    for (x, residual) in x.chunks_exact(weight.len()).zip(residual.chunks_exact_mut(weight.len())) {
        let s: Vec<f32> = x.iter().zip(residual.iter()).map(|(x, residual)| x + residual).collect();
        let scale = inverse_rms(&s, eps);
        out.extend(s.iter().zip(weight).map(|(s, w)| precision.round(w * (s * scale))));
        for (residual, s) in residual.iter_mut().zip(s) {
            *residual = precision.round(s);
        }
    }
    out
}

/// The norm of each head of q or k, then its rotation where `table` is given: dimension i of a head pairs with
/// i + `head_dim` / 2. Both steps round.
///
/// `x` and the result are `[T, heads, head_dim]`, `weight` is `[head_dim]`, row t of `table` belongs to token t.
pub fn qk_norm_rope(
    x: &[f32],
    heads: usize,
    weight: &[f32],
    eps: f32,
    table: Option<&RopeTable>,
    precision: Precision,
) -> Vec<f32> {
    let head_dim = weight.len();
    let mut out = Vec::with_capacity(x.len());
    for (t, x) in x.chunks_exact(heads * head_dim).enumerate() {
        for x in x.chunks_exact(head_dim) {
            let scale = inverse_rms(x, eps);
            let normed: Vec<f32> = x.iter().zip(weight).map(|(x, w)| precision.round(w * (x * scale))).collect();
            let Some(table) = table else {
                out.extend(normed);
                continue;
            };
            let (cos, sin) = table.at(t);
            let (x1, x2) = normed.split_at(head_dim / 2);
            out.extend((0..cos.len()).map(|i| precision.round(x1[i] * cos[i] - x2[i] * sin[i])));
            out.extend((0..cos.len()).map(|i| precision.round(x2[i] * cos[i] + x1[i] * sin[i])));
        }
    }
    out
}

fn inverse_rms(x: &[f32], eps: f32) -> f32 {
    1.0 / (dot(x, x) / x.len() as f32 + eps).sqrt()
}
