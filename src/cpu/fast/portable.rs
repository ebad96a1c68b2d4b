//! The inner loops in plain code. What each computes is said in [`super::simd::Isa`].

use super::simd::{Panel, TILE_COLS, Tile, packed_len};
use crate::{
    checkpoint::DType,
    cpu::{
        Precision,
        reference::{self, silu},
    },
    weights,
};

pub fn dot(dtype: DType, row: &[u8], x: &[f32]) -> f32 {
    let mut values = [0.0; 256];
    let row = row.chunks(packed_len(dtype, values.len()));
    x.chunks(values.len())
        .zip(row)
        .map(|(x, row)| {
            let values = &mut values[..x.len()];
            weights::decode(dtype, row, values);
            reference::dot(values, x)
        })
        .sum()
}

pub fn decode(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    weights::decode(dtype, bytes, out);
}

pub fn transpose(rows: &[f32], panel: &mut [f32]) {
    let k = rows.len() / TILE_COLS;
    for (i, panel) in panel.chunks_exact_mut(TILE_COLS).enumerate() {
        for (j, out) in panel.iter_mut().enumerate() {
            *out = rows[j * k + i];
        }
    }
}

pub fn tile<const R: usize>(a: Tile<'_>, b: Panel<'_>, c: &mut [f32], c_stride: usize) {
    let mut sums = [[0f32; TILE_COLS]; R];
    for k in 0..a.k {
        let b = &b.values[k * b.k_stride..][..TILE_COLS];
        for (i, sums) in sums.iter_mut().enumerate() {
            let a = a.values[i * a.row_stride + k * a.k_stride];
            for (sum, b) in sums.iter_mut().zip(b) {
                *sum += a * b;
            }
        }
    }
    for (i, sums) in sums.iter().enumerate() {
        for (c, sum) in c[i * c_stride..].iter_mut().zip(sums) {
            *c += sum;
        }
    }
}

pub fn softmax(row: &mut [f32], scale: f32, sink: f32, precision: Precision) {
    for x in row.iter_mut() {
        *x *= scale;
    }
    reference::softmax_with_sink(row, 0, sink);
    for x in row {
        *x = precision.round(*x);
    }
}

pub fn silu_mul(gate: &mut [f32], gate_scale: f32, up: &[f32], up_scale: f32, precision: Precision) {
    for (gate, up) in gate.iter_mut().zip(up) {
        *gate = precision.round(silu(*gate * gate_scale) * (up * up_scale));
    }
}
