//! The general kernels against the CPU's reference, to the bit: Flint's dimensions, the small model's, and odd ones. They need
//! a GPU, so `cargo test` counts these as ignored; `make test-gpu` runs them.

#![cfg(feature = "cuda")]
#![allow(clippy::float_cmp, reason = "equal means the same bits")]

mod cpu_support;
mod kernel_support;

use cpu_support::{Kind, Random, matrix};
use flint_rs::{
    cancel::Cancel,
    cpu::{
        Precision,
        reference::{Routes, embed, project, rms_norm_residual, swiglu_act},
    },
    gpu::Buffer,
    kernels::{
        GENERAL_EMBED, GENERAL_EXPERTS_DOWN, GENERAL_NORM, GENERAL_PROJECT, GENERAL_ROUTER, GENERAL_SWIGLU,
        GeneralEmbedArgs, GeneralExpertsDownArgs, GeneralMatrix, GeneralNormArgs, GeneralProjectArgs,
        GeneralRouterArgs, GeneralSwigluArgs,
    },
    weights::{Matrix, SwiGlu},
};
use half::bf16;
use kernel_support::{
    Gpu,
    attention::{Path, Shape, check},
    output, to_bf16s, to_f32s, to_u32s,
};

/// Matrices of one kind and shape on the device, as the file has them.
struct Stack {
    data: Buffer,
    scales: Buffer,
    first: Matrix,
}

impl Stack {
    fn new(gpu: &Gpu, matrices: &[&Matrix]) -> Self {
        let bytes: Vec<u8> = matrices.iter().flat_map(|m| m.data.bytes().iter().copied()).collect();
        let scales: Vec<f32> = matrices.iter().map(|m| m.scale()).collect();
        Self { data: gpu.upload(&bytes), scales: gpu.f32s(&scales), first: matrices[0].clone() }
    }

    fn args(&self) -> GeneralMatrix {
        let Matrix { rows, cols, .. } = self.first;
        let dtype = self.first.data.dtype();
        // Without scales where all are 1.
        let scales = if self.first.scale() == 1.0 { 0 } else { self.scales.address() };
        GeneralMatrix::new(self.data.address(), scales, dtype, rows, cols).unwrap()
    }
}

/// Every kind that can store rows of `cols` values.
fn kinds(cols: usize) -> impl Iterator<Item = Kind> {
    Kind::ALL.into_iter().filter(move |kind| cols.is_multiple_of(kind.block()))
}

fn round(x: f32) -> f32 {
    bf16::from_f32(x).to_f32()
}

/// No value differs in a bit.
fn assert_same(what: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let differing: Vec<usize> = (0..found.len()).filter(|&i| found[i].to_bits() != expected[i].to_bits()).collect();
    if let Some(&i) = differing.first() {
        let (found, expected) = (found[i], expected[i]);
        panic!("{what}: {} values differ, the first is value {i}: {found:e} for {expected:e}", differing.len());
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn embed_decodes_rows_exactly() {
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    for (vocab, cols) in [(500, 2048), (97, 320), (5, 75), (3, 1), (4, 513)] {
        for kind in kinds(cols) {
            let table = matrix(&mut random, kind, vocab, cols);
            let tokens = [0, vocab as u32 - 1, random.below(vocab) as u32, 1, 2, 0, 1, 2];
            let (stack, token_buffer) = (Stack::new(&gpu, &[&table]), gpu.u32s(&tokens));
            for rows in [1, 3, 8] {
                let (delta, residual) = (gpu.poisoned(rows * cols * 2), gpu.poisoned(rows * cols * 2));
                let args = GeneralEmbedArgs {
                    table: stack.args(),
                    tokens: token_buffer.address(),
                    delta: delta.address(),
                    residual: residual.address(),
                    cols: cols as u32,
                    reserved: 0,
                };
                // SAFETY: every buffer has the extent that the struct states, and lives until the download.
                unsafe { gpu.launch(GENERAL_EMBED, args.launch(rows as u32), true, &args) };
                let found = to_bf16s(&output(&delta, rows * cols * 2));
                assert!(found == embed(&table, &tokens[..rows], Precision::Bfloat16), "{kind:?} {vocab} x {cols}");
                assert!(output(&residual, rows * cols * 2).iter().all(|&byte| byte == 0));
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn norm_adds_the_residual_and_is_the_same_alone() {
    const EPS: f32 = 1e-6;
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    for cols in [2048, 320, 257, 75, 8, 1, 9001] {
        let rows = 8;
        let (x, residual) = (random.bf16s(rows * cols), random.bf16s(rows * cols));
        let weight: Vec<f32> = (0..cols).map(|_| 1.0 + 0.2 * random.normal()).collect();
        let mut expected_residual = residual.clone();
        let expected = rms_norm_residual(&x, &mut expected_residual, &weight, EPS, Precision::Bfloat16);
        let weight = gpu.f32s(&weight);
        let run = |first: usize, n: usize, pdl| {
            let range = first * cols..(first + n) * cols;
            let (x, residual_in) = (gpu.bf16s(&x[range.clone()]), gpu.bf16s(&residual[range]));
            let (residual_out, normed) = (gpu.poisoned(n * cols * 2), gpu.poisoned(n * cols * 2));
            let args = GeneralNormArgs {
                delta: x.address(),
                residual_in: residual_in.address(),
                weight: weight.address(),
                residual_out: residual_out.address(),
                normed: normed.address(),
                cols: cols as u32,
                eps: EPS,
            };
            // SAFETY: as above.
            unsafe { gpu.launch(GENERAL_NORM, args.launch(n as u32), pdl, &args) };
            (to_bf16s(&output(&residual_out, n * cols * 2)), to_bf16s(&output(&normed, n * cols * 2)))
        };
        let together = run(0, rows, false);
        assert!(together.0 == expected_residual, "the sum of two is exact before its one rounding");
        assert_same(&format!("norm of {cols}"), &together.1, &expected);
        assert!(together == run(0, rows, true));
        for row in 0..rows {
            let (residual, normed) = run(row, 1, false);
            let range = row * cols..(row + 1) * cols;
            assert!(residual == together.0[range.clone()] && normed == together.1[range], "row {row} of {cols}");
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn project_in_every_type() {
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    // Outputs, inputs, and where in a wider row they go.
    for (rows, cols, stride, offset) in
        [(512, 2048, 5120, 4096), (320, 4096, 320, 0), (1024, 320, 1280, 128), (37, 75, 41, 3), (1, 64, 1, 0)]
    {
        for kind in kinds(cols) {
            let weights = matrix(&mut random, kind, rows, cols);
            let stack = Stack::new(&gpu, &[&weights]);
            let x = random.bf16s(8 * cols);
            let run = |first: usize, n: usize, f32: bool| {
                let x = gpu.bf16s(&x[first * cols..(first + n) * cols]);
                let bytes = n * stride * if f32 { 4 } else { 2 };
                let out = gpu.poisoned(bytes);
                let args = GeneralProjectArgs {
                    matrix: stack.args(),
                    x: x.address(),
                    out: out.address(),
                    rows: rows as u32,
                    cols: cols as u32,
                    out_stride: stride as u32,
                    offset: offset as u32,
                    n: n as u32,
                    f32: f32.into(),
                };
                // SAFETY: as above.
                unsafe { gpu.launch(GENERAL_PROJECT, args.launch(), true, &args) };
                let bytes = output(&out, bytes);
                let all = if f32 { to_f32s(&bytes) } else { to_bf16s(&bytes) };
                let mut found = Vec::new();
                for row in all.chunks_exact(stride) {
                    found.extend(&row[offset..offset + rows]);
                    let around = row[..offset].iter().chain(&row[offset + rows..]);
                    assert!(around.copied().all(f32::is_nan), "written beside {offset}..{}", offset + rows);
                }
                found
            };
            let what = format!("{kind:?} {rows} x {cols}");
            let together = run(0, 8, true);
            let expected = project(&weights, &x, Precision::Float32, &Cancel::default()).unwrap();
            assert_same(&what, &together, &expected);
            assert!(run(0, 8, false).iter().zip(&together).all(|(&a, &b)| a == round(b)), "{what}: one rounding");
            for (first, n) in [(0, 1), (7, 1), (2, 3), (1, 5)] {
                assert!(run(first, n, true) == together[first * rows..(first + n) * rows], "{what}: {n} rows");
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn attention_of_any_shape() {
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    let flint = Shape { n_heads: 32, n_kv_heads: 4, head_dim: 128, window: Some(513), rope: true, sharpness: 1.0 };
    let small = Shape { n_heads: 8, n_kv_heads: 1, window: Some(65), ..flint };
    let odd = Shape { n_heads: 6, n_kv_heads: 3, head_dim: 22, window: Some(17), rope: true, sharpness: 3.0 };
    let positions = [0, 1, 62, 63, 64, 65, 66, 514];
    for shape in [
        flint,
        Shape { window: None, rope: false, ..flint },
        small,
        Shape { window: None, ..small },
        odd,
        Shape { window: None, rope: false, ..odd },
        Shape { n_heads: 3, n_kv_heads: 3, head_dim: 256, window: Some(1), ..odd },
        Shape { n_heads: 2, n_kv_heads: 1, head_dim: 2, ..odd },
    ] {
        check(&gpu, &mut random, Path::General, shape, &positions);
    }
    // More blocks than scores are kept of, and as many.
    check(&gpu, &mut random, Path::General, Shape { window: None, rope: false, ..odd }, &[4_095, 4_096, 4_200]);
    check(&gpu, &mut random, Path::General, flint, &[262_143, 100_001, 511, 512, 513]);
    check(&gpu, &mut random, Path::General, Shape { window: None, rope: false, ..small }, &[100_001, 4095]);
}

/// Logits on a grid of 1/64, so that equal ones are common, and free ones.
#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn router_orders_scores_and_breaks_ties_by_index() {
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    for (n_experts, chosen) in [(256, 6), (16, 6), (5, 5), (1, 1), (1024, 32), (33, 2)] {
        let mut logits: Vec<f32> = (0..8 * n_experts).map(|_| random.below(1024) as f32 / 64.0 - 8.0).collect();
        for logit in &mut logits[3 * n_experts..4 * n_experts] {
            *logit = random.normal();
        }
        // Row 1: all equal. Row 2: scores that fp32 cannot tell from 1, at the end.
        logits[n_experts..2 * n_experts].fill(-3.0);
        for (i, logit) in logits[2 * n_experts..3 * n_experts].iter_mut().rev().take(2).enumerate() {
            *logit = 40.0 + i as f32;
        }
        let run = |first: usize, rows: usize| {
            let logits = gpu.f32s(&logits[first * n_experts..(first + rows) * n_experts]);
            let bytes = rows * chosen * 4;
            let (experts, weights) = (gpu.poisoned(bytes), gpu.poisoned(bytes));
            let args = GeneralRouterArgs {
                logits: logits.address(),
                experts: experts.address(),
                weights: weights.address(),
                n_experts: n_experts as u32,
                chosen: chosen as u32,
            };
            // SAFETY: as above.
            unsafe { gpu.launch(GENERAL_ROUTER, args.launch(rows as u32), true, &args) };
            (to_u32s(&output(&experts, bytes)), to_f32s(&output(&weights, bytes)))
        };
        let routes = Routes::from_logits(&logits, n_experts, chosen);
        let (experts, weights) = run(0, 8);
        let (mut expected_experts, mut expected_weights) = (Vec::new(), Vec::new());
        for row in 0..8 {
            let mut chosen: Vec<(usize, f32)> = routes.of(row).collect();
            chosen.sort_by_key(|&(expert, _)| expert);
            expected_experts.extend(chosen.iter().map(|&(expert, _)| expert as u32));
            expected_weights.extend(chosen.iter().map(|&(_, weight)| weight));
        }
        assert!(experts == expected_experts, "{chosen} of {n_experts}");
        assert_same("weights", &weights, &expected_weights);
        for row in 0..8 {
            let range = row * chosen..(row + 1) * chosen;
            assert!(run(row, 1) == (experts[range.clone()].to_vec(), weights[range].to_vec()), "row {row}");
        }
    }
}

/// A type beside `kind` that rows of `cols` values may have: the halves of a warp then read differently.
fn other_kind(kind: Kind, cols: usize) -> Kind {
    kinds(cols).find(|&other| other != kind).unwrap()
}

/// D, F, shared width, experts, chosen: Flint's but for the number of experts, the small model's, odd ones; with the shared expert
/// as many as are done at a time, more, and the most that there may be.
const MOE: [(usize, usize, usize, usize, usize); 6] = [
    (2048, 512, 1024, 8, 6),
    (320, 128, 256, 16, 6),
    (75, 37, 51, 5, 5),
    (75, 37, 51, 9, 7),
    (75, 37, 51, 12, 9),
    (75, 37, 51, 33, 32),
];

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn swiglu_of_one_matrix_and_of_chosen_experts() {
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    for (d, f, _, n_experts, chosen) in MOE {
        for kind in kinds(d).filter(|kind| f.is_multiple_of(kind.block())) {
            let mut expert = || SwiGlu {
                gate: matrix(&mut random, kind, f, d),
                up: matrix(&mut random, other_kind(kind, d), f, d),
                down: matrix(&mut random, kind, d, f),
            };
            let experts: Vec<SwiGlu> = (0..n_experts).map(|_| expert()).collect();
            let gate = Stack::new(&gpu, &experts.iter().map(|e| &e.gate).collect::<Vec<_>>());
            let up = Stack::new(&gpu, &experts.iter().map(|e| &e.up).collect::<Vec<_>>());
            let x = random.bf16s(3 * d);
            let choices: Vec<u32> = (0..3 * chosen).map(|_| random.below(n_experts) as u32).collect();
            let run = |first: usize, rows: usize, slots: usize| {
                let x = gpu.bf16s(&x[first * d..(first + rows) * d]);
                let choice_buffer = gpu.u32s(&choices[first * chosen..(first + rows) * chosen]);
                let act = gpu.poisoned(rows * slots * f * 2);
                let args = GeneralSwigluArgs {
                    gate: gate.args(),
                    up: up.args(),
                    x: x.address(),
                    experts: if slots == 1 { 0 } else { choice_buffer.address() },
                    act: act.address(),
                    rows: f as u32,
                    cols: d as u32,
                };
                // SAFETY: as above.
                unsafe { gpu.launch(GENERAL_SWIGLU, args.launch(rows as u32, slots as u32), true, &args) };
                to_bf16s(&output(&act, rows * slots * f * 2))
            };
            let what = format!("{kind:?} {f} x {d}");
            let check = |found: &[f32], expert: &SwiGlu, x: &[f32]| {
                assert_same(&what, found, &swiglu_act(expert, x, Precision::Bfloat16, &Cancel::default()).unwrap());
            };
            for (found, x) in run(0, 3, 1).chunks_exact(f).zip(x.chunks_exact(d)) {
                check(found, &experts[0], x);
            }
            let routed = run(0, 3, chosen);
            for (i, found) in routed.chunks_exact(f).enumerate() {
                let row = i / chosen;
                check(found, &experts[choices[i] as usize], &x[row * d..(row + 1) * d]);
            }
            assert!(run(2, 1, chosen) == routed[2 * chosen * f..], "{what}: alone");
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn experts_down_rounds_each_expert_their_sum_and_the_output() {
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    for (d, f, shared_width, n_experts, chosen) in MOE {
        for kind in kinds(f).filter(|kind| shared_width.is_multiple_of(kind.block())) {
            let downs: Vec<Matrix> = (0..n_experts).map(|_| matrix(&mut random, kind, d, f)).collect();
            let shared = matrix(&mut random, other_kind(kind, shared_width), d, shared_width);
            let stack = Stack::new(&gpu, &downs.iter().collect::<Vec<_>>());
            let shared_stack = Stack::new(&gpu, &[&shared]);
            let (act, act_shared) = (random.bf16s(3 * chosen * f), random.bf16s(3 * shared_width));
            let choices: Vec<u32> = (0..3 * chosen).map(|_| random.below(n_experts) as u32).collect();
            let weights: Vec<f32> = (0..3 * chosen).map(|_| random.below(1000) as f32 / 1000.0).collect();
            let run = |first: usize, rows: usize| {
                let act = gpu.bf16s(&act[first * chosen * f..(first + rows) * chosen * f]);
                let act_shared = gpu.bf16s(&act_shared[first * shared_width..(first + rows) * shared_width]);
                let choices = gpu.u32s(&choices[first * chosen..(first + rows) * chosen]);
                let weights = gpu.f32s(&weights[first * chosen..(first + rows) * chosen]);
                let delta = gpu.poisoned(rows * d * 2);
                let args = GeneralExpertsDownArgs {
                    experts: stack.args(),
                    shared: shared_stack.args(),
                    chosen: choices.address(),
                    weights: weights.address(),
                    act: act.address(),
                    act_shared: act_shared.address(),
                    delta: delta.address(),
                    rows: d as u32,
                    cols: f as u32,
                    shared_cols: shared_width as u32,
                    n_chosen: chosen as u32,
                };
                // SAFETY: as above.
                unsafe { gpu.launch(GENERAL_EXPERTS_DOWN, args.launch(rows as u32), true, &args) };
                to_bf16s(&output(&delta, rows * d * 2))
            };

            let product = |m: &Matrix, x: &[f32]| project(m, x, Precision::Bfloat16, &Cancel::default()).unwrap();
            let mut expected = product(&shared, &act_shared);
            for (row, expected) in expected.chunks_exact_mut(d).enumerate() {
                let mut routed = vec![0.0; d];
                for slot in row * chosen..(row + 1) * chosen {
                    let y = product(&downs[choices[slot] as usize], &act[slot * f..(slot + 1) * f]);
                    for (routed, y) in routed.iter_mut().zip(y) {
                        *routed += weights[slot] * y;
                    }
                }
                for (expected, routed) in expected.iter_mut().zip(routed) {
                    *expected = round(round(routed) + *expected);
                }
            }
            let what = format!("{kind:?} {d} x {f}");
            let together = run(0, 3);
            assert_same(&what, &together, &expected);
            assert!(run(1, 1) == together[d..2 * d], "{what}: alone");
        }
    }
}
