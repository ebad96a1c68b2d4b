//! Prefill's embedding and norm against the CPU's reference, and the norm in decode's order to the bit. They need a GPU, so
//! `cargo test` counts these as ignored; `make test-gpu` runs them.

#![cfg(feature = "cuda")]
#![allow(clippy::float_cmp, reason = "equal means the same bits")]

mod cpu_support;
mod kernel_support;

use cpu_support::Random;
use flint_rs::{
    cpu::{Precision, reference::rms_norm_residual},
    kernels::{
        PREFILL_EMBED, PREFILL_NORM, PREFILL_NORM_FEW, PrefillEmbedArgs, PrefillNormArgs, decode::HIDDEN,
        prefill_embed_launch, prefill_norm_launch,
    },
};
use kernel_support::{Gpu, POISON, assert_close, bf16_bytes, bf16_step, output, rms, to_bf16s};

const ROWS: [usize; 8] = [1, 7, 8, 9, 64, 131, 1000, 1025];

/// Byte of input `column` of row `row` in panels of `panel_rows`, as `cuda/panel.cuh` says.
fn panel_byte(panel_rows: usize, row: usize, column: usize) -> usize {
    let (pair, panel) = (column % 64 / 2, column / 64);
    let part = (pair % 8) ^ (row % 8);
    2 * ((panel * panel_rows + row) * 64 + part * 8 + 2 * (pair / 8) + column % 2)
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn embed_copies_rows() {
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    let vocab = 321;
    let table = random.bf16s(vocab * HIDDEN);
    let embedding = gpu.bf16s(&table);
    for rows in ROWS {
        let mut tokens = random.tokens(rows, vocab);
        tokens[rows / 2] = vocab as u32 - 1;
        let ids = gpu.u32s(&tokens);
        let len = rows * HIDDEN * 2;
        let (delta, residual) = (gpu.poisoned(len), gpu.poisoned(len));
        let args = PrefillEmbedArgs {
            embedding: embedding.address(),
            tokens: ids.address(),
            delta: delta.address(),
            residual: residual.address(),
            rows: rows as u32,
            reserved: 0,
        };
        // SAFETY: every buffer has the extent that the struct states, and lives until the downloads below.
        unsafe { gpu.launch(PREFILL_EMBED, prefill_embed_launch(rows), true, &args) };
        let expected: Vec<f32> =
            tokens.iter().flat_map(|&t| &table[t as usize * HIDDEN..][..HIDDEN]).copied().collect();
        assert!(to_bf16s(&output(&delta, len)) == expected, "{rows} rows");
        assert!(output(&residual, len).iter().all(|&byte| byte == 0), "{rows} rows");
    }
}

/// The norm of a row in the order of the decode kernels, unrounded: a lane adds the squares of 8 consecutive values, 32 lanes add
/// by xor 16, 8, 4, 2, 1, and their sums, of 256 values each, are added in ascending order.
fn norm_as_decode_adds(s: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    let mut sum = 0.0;
    for group in s.chunks_exact(256) {
        let mut lanes: Vec<f32> =
            group.chunks_exact(8).map(|run| run.iter().fold(0.0, |sum, s| s.mul_add(*s, sum))).collect();
        for width in [16, 8, 4, 2, 1] {
            for i in 0..width {
                lanes[i] += lanes[i + width];
            }
        }
        sum += lanes[0];
    }
    let scale = 1.0 / (sum / s.len() as f32 + eps).sqrt();
    s.iter().zip(weight).map(|(s, weight)| weight * (s * scale)).collect()
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn norm_fills_panels_with_the_bits_of_decode() {
    const EPS: f32 = 1e-6;
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    for rows in ROWS {
        let (x, residual) = (random.bf16s(rows * HIDDEN), random.bf16s(rows * HIDDEN));
        let weight: Vec<f32> = (0..HIDDEN).map(|_| 1.0 + 0.2 * random.normal()).collect();
        let mut expected_residual = residual.clone();
        let expected = rms_norm_residual(&x, &mut expected_residual, &weight, EPS, Precision::Bfloat16);
        let sums: Vec<f32> = x.iter().zip(&residual).map(|(x, residual)| x + residual).collect();
        let normed: Vec<f32> = sums.chunks_exact(HIDDEN).flat_map(|s| norm_as_decode_adds(s, &weight, EPS)).collect();
        let (delta, residual, weight) = (gpu.bf16s(&x), gpu.bf16s(&residual), gpu.f32s(&weight));
        let panel_rows = rows.next_multiple_of(8) + 16;
        let panels = gpu.poisoned(panel_rows * HIDDEN * 2);
        let args = PrefillNormArgs {
            delta: delta.address(),
            residual: residual.address(),
            weight: weight.address(),
            normed: panels.address(),
            rows: rows as u32,
            panel_rows: panel_rows as u32,
            eps: EPS,
            reserved: 0,
        };
        let (kernel, launch) = prefill_norm_launch(rows);
        assert_eq!(kernel, if rows <= 1000 { PREFILL_NORM_FEW } else { PREFILL_NORM });
        // SAFETY: as above.
        unsafe { gpu.launch(kernel, launch, true, &args) };
        assert!(to_bf16s(&residual.download().unwrap()) == expected_residual, "{rows} rows: residual");
        let panels = output(&panels, panel_rows * HIDDEN * 2);
        let mut found = Vec::with_capacity(rows * HIDDEN * 2);
        for row in 0..rows {
            for column in 0..HIDDEN {
                let at = panel_byte(panel_rows, row, column);
                found.extend_from_slice(&panels[at..at + 2]);
            }
        }
        assert!(found == bf16_bytes(&normed), "{rows} rows differ from the order of decode");
        for (row, column) in (rows..panel_rows).flat_map(|row| (0..HIDDEN).map(move |column| (row, column))) {
            assert_eq!(panels[panel_byte(panel_rows, row, column)], POISON, "row {row} is written");
        }
        let expected_rms = rms(&expected);
        // The sum of squares in another order moves the factor by a few fp32 steps, which may cross a border of rounding.
        assert_close("normed", &to_bf16s(&found), &expected, |i| bf16_step(expected[i]).max(1e-6 * expected_rms));
    }
}
