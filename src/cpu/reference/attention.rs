//! Attention with sinks.

use std::{iter, ops::Range};

use super::{dot, exp};
use crate::{cancel::Cancel, cpu::Precision, error::Result};

/// Positions that are added up before they are added to others.
const PART: usize = 64;

/// Keys and values that attention reads.
#[derive(Clone, Copy, Debug)]
pub struct Cache<'a> {
    /// `[P, G, head_dim]`.
    pub k: &'a [f32],
    /// `[P, G, head_dim]`.
    pub v: &'a [f32],
    /// The position of row 0.
    pub first: usize,
    /// G.
    pub n_kv_heads: usize,
    /// Values a head.
    pub head_dim: usize,
}

impl<'a> Cache<'a> {
    /// The rows of KV head `g` at `positions` in `rows`, which is `k` or `v`.
    fn head(self, rows: &'a [f32], g: usize, positions: Range<usize>) -> impl Iterator<Item = &'a [f32]> {
        let width = self.n_kv_heads * self.head_dim;
        let rows = &rows[(positions.start - self.first) * width..(positions.end - self.first) * width];
        rows.chunks_exact(width).map(move |row| &row[g * self.head_dim..(g + 1) * self.head_dim])
    }
}

/// For each token and query head h: softmax over the scores q . k / sqrt(`head_dim`) of the visible positions and the sink of h,
/// whose share attends to nothing (it takes part in the maximum and in the denominator), then the mean of the values. Query
/// head h reads KV head h / (H / G). The token at position p sees p - window + 1 ... p, or 0 ... p without a window.
///
/// The softmax is exact over the whole row, in fp32; the *normalised* probabilities are rounded for the product with V, as
/// transformers does; that sum is in fp32 and rounded once. (A kernel that rescales while it runs rounds unnormalised
/// probabilities: the same relative error, other bits.)
///
/// `q` is `[T, H, head_dim]` with token 0 at position `start`, `sinks` `[H]`; the result is `[T, H, head_dim]`.
pub fn attention(
    q: &[f32],
    start: usize,
    cache: Cache<'_>,
    sinks: &[f32],
    window: Option<usize>,
    precision: Precision,
    cancel: &Cancel,
) -> Result<Vec<f32>> {
    let (n_heads, head_dim) = (sinks.len(), cache.head_dim);
    let scale = 1.0 / (head_dim as f32).sqrt();
    let mut out = vec![0.0; q.len()];
    for (row, (q, out)) in q.chunks_exact(head_dim).zip(out.chunks_exact_mut(head_dim)).enumerate() {
        cancel.check()?;
        let (position, h) = (start + row / n_heads, row % n_heads);
        let g = h / (n_heads / cache.n_kv_heads);
        let visible = window.map_or(0, |window| (position + 1).saturating_sub(window))..position + 1;
        let mut row: Vec<f32> = cache.head(cache.k, g, visible.clone()).map(|k| dot(q, k) * scale).collect();
        softmax_with_sink(&mut row, visible.start, sinks[h]);
        for p in &mut row {
            *p = precision.round(*p);
        }
        weighted_sum(&row, visible.start, cache.head(cache.v, g, visible), out);
        for out in out {
            *out = precision.round(*out);
        }
    }
    Ok(out)
}

/// Cuts a row whose first value is that of position `first` at the positions that are multiples of 64. Sums over positions are
/// sums of these parts' sums, so that long contexts lose no digits.
fn parts(row: &[f32], first: usize) -> impl Iterator<Item = &[f32]> {
    let (head, rest) = row.split_at(row.len().min(first.next_multiple_of(PART) - first));
    iter::once(head).chain(rest.chunks(PART))
}

/// exp(x - max) / (sum of exp(x - max) + exp(sink - max)), the maximum over `row` and `sink`; the first value of `row` is that
/// of position `first`.
pub(in crate::cpu) fn softmax_with_sink(row: &mut [f32], first: usize, sink: f32) {
    let max = row.iter().copied().fold(sink, f32::max);
    for x in row.iter_mut() {
        *x = exp(*x - max);
    }
    let sum: f32 = parts(row, first).map(|part| part.iter().sum::<f32>()).sum();
    let denominator = sum + exp(sink - max);
    for x in row {
        *x /= denominator;
    }
}

/// The sum of `weights[i] * rows[i]`, the first being that of position `first`.
fn weighted_sum<'a>(weights: &[f32], first: usize, mut rows: impl Iterator<Item = &'a [f32]>, out: &mut [f32]) {
    out.fill(0.0);
    let mut sum = vec![0.0; out.len()];
    for weights in parts(weights, first) {
        sum.fill(0.0);
        for (weight, row) in weights.iter().zip(&mut rows) {
            for (sum, x) in sum.iter_mut().zip(row) {
                *sum += weight * x;
            }
        }
        for (out, sum) in out.iter_mut().zip(&sum) {
            *out += sum;
        }
    }
}
