//! Products with weight matrices.

use crate::{cancel::Cancel, cpu::Precision, error::Result, weights::Matrix};

/// The sum of `a[i] * b[i]` in fp32, over 16 interleaved partial sums that are then added pairwise: the error of a row of
/// thousands stays near 1e-6 of the sum of magnitudes.
///
/// # Panics
/// When the lengths differ.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let mut lanes = [0f32; 16];
    let (a_chunks, b_chunks) = (a.chunks_exact(16), b.chunks_exact(16));
    let (a_rest, b_rest) = (a_chunks.remainder(), b_chunks.remainder());
    for (a, b) in a_chunks.zip(b_chunks) {
        for (lane, (a, b)) in lanes.iter_mut().zip(a.iter().zip(b)) {
            *lane += a * b;
        }
    }
    for (lane, (a, b)) in lanes.iter_mut().zip(a_rest.iter().zip(b_rest)) {
        *lane += a * b;
    }
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
    }
    lanes[0]
}

/// Rows of the embedding `[V, D]`: `[T, D]`, rounded (a BF16 file loses nothing).
pub fn embed(embedding: &Matrix, tokens: &[u32], precision: Precision) -> Vec<f32> {
    let mut out = vec![0.0; tokens.len() * embedding.cols];
    for (out, &token) in out.chunks_exact_mut(embedding.cols).zip(tokens) {
        embedding.decode_row(token as usize, out);
        for out in out {
            *out = precision.round(*out * embedding.scale());
        }
    }
    out
}

/// out = round(scale * x W^T): exact products, fp32 accumulation, the scale of the tensor on the accumulator, one rounding.
///
/// `matrix` is `[N, M]`, `x` `[T, M]`, the result `[T, N]`.
pub fn project(matrix: &Matrix, x: &[f32], precision: Precision, cancel: &Cancel) -> Result<Vec<f32>> {
    let scale = matrix.scale();
    let mut row = vec![0.0; matrix.cols];
    let mut out = vec![0.0; x.len() / matrix.cols * matrix.rows];
    for n in 0..matrix.rows {
        cancel.check()?;
        matrix.decode_row(n, &mut row);
        for (out, x) in out.chunks_exact_mut(matrix.rows).zip(x.chunks_exact(matrix.cols)) {
            out[n] = precision.round(dot(&row, x) * scale);
        }
    }
    Ok(out)
}

/// The LM head `[V, D]` on `x` `[T, D]`: logits `[T, V]`, never rounded.
pub fn logits(lm_head: &Matrix, x: &[f32], cancel: &Cancel) -> Result<Vec<f32>> {
    project(lm_head, x, Precision::Float32, cancel)
}
