//! Each fast operation against the reference, in AVX2 and in plain code, on fresh random inputs.
#![allow(clippy::float_cmp)] // Where results are exact, equality is the test.

use super::{
    attention::Args,
    gemm::Packed,
    simd::{Isa, Panel, TILE_COLS, Tile},
    *,
};
use crate::{
    checkpoint::{Bytes, DType},
    config::{FlintConfig, LayerKind, Mlp},
    cpu::reference::{Cache, Routes},
    weights::{MatrixData, SwiGlu},
};

const TYPES: [DType; 5] = [DType::F32, DType::F16, DType::Bf16, DType::Q8_0, DType::Nvfp4];
const PRECISIONS: [Precision; 2] = [Precision::Float32, Precision::Bfloat16];

/// `SplitMix64` from a fresh seed, which is printed.
struct Random(u64);

impl Random {
    fn fresh() -> Self {
        let seed = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
        println!("seed {seed}");
        Self(seed)
    }

    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    /// Uniform in [-1, 1).
    fn value(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn values(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.value()).collect()
    }

    /// Values that `precision` keeps.
    fn kept(&mut self, n: usize, precision: Precision) -> Vec<f32> {
        (0..n).map(|_| precision.round(self.value())).collect()
    }

    /// Any codes and any valid block scales.
    fn matrix(&mut self, dtype: DType, rows: usize, cols: usize) -> Matrix {
        let n = rows * cols;
        let data = match dtype {
            DType::F32 => MatrixData::F32(Bytes::from(self.bytes(n, |r| r.value().to_le_bytes()))),
            DType::F16 => MatrixData::F16(Bytes::from(self.bytes(n, |r| half::f16::from_f32(r.value()).to_le_bytes()))),
            DType::Bf16 => {
                MatrixData::Bf16(Bytes::from(self.bytes(n, |r| half::bf16::from_f32(r.value()).to_le_bytes())))
            }
            DType::Q8_0 => MatrixData::Q8_0(Bytes::from(self.bytes(n / 32, |r| {
                let mut block: [u8; 34] = std::array::from_fn(|_| r.bits() as u8);
                block[..2].copy_from_slice(&half::f16::from_f32(r.value() / 100.0).to_le_bytes());
                block
            }))),
            _ => MatrixData::Nvfp4 {
                blocks: Bytes::from(self.bytes(n / 64, |r| -> [u8; 36] {
                    std::array::from_fn(|i| if i < 4 { r.bits() as u8 % 0xFF } else { r.bits() as u8 })
                })),
                scale: 0.001,
            },
        };
        Matrix { rows, cols, data }
    }

    fn bytes<const N: usize>(&mut self, n: usize, mut block: impl FnMut(&mut Self) -> [u8; N]) -> Vec<u8> {
        (0..n).flat_map(|_| block(self)).collect()
    }
}

fn isas() -> Vec<Isa> {
    let mut isas = vec![Isa::detect(), Isa::Portable];
    isas.dedup();
    isas
}

fn engines() -> Vec<Engine> {
    let mut engines: Vec<Engine> = isas().into_iter().map(|isa| Engine::with_isa(Some(3), isa).unwrap()).collect();
    engines.push(Engine::with_isa(Some(1), Isa::detect()).unwrap());
    engines
}

/// Equal up to the order of additions of sums whose terms have magnitudes that add up to `magnitude`, and one rounding.
fn assert_close(found: &[f32], expected: &[f32], magnitude: impl Fn(usize) -> f32, precision: Precision, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let rounding = if precision == Precision::Bfloat16 { expected.abs() / 128.0 } else { 0.0 };
        let bound = 2e-6 * magnitude(i) + rounding;
        assert!((found - expected).abs() <= bound, "{what}: {found} for {expected} at {i}, bound {bound}");
    }
}

fn row_of(matrix: &Matrix, row: usize) -> Vec<f32> {
    let mut out = vec![f32::NAN; matrix.cols];
    matrix.decode_row(row, &mut out);
    out
}

/// The sum of magnitudes behind element (t, n) of x W^T.
fn magnitude(matrix: &Matrix, x: &[f32], n: usize) -> f32 {
    matrix.scale() * row_of(matrix, n).iter().zip(x).map(|(w, x)| (w * x).abs()).sum::<f32>()
}

#[test]
fn decode_is_exact() {
    let mut random = Random::fresh();
    for dtype in TYPES {
        for cols in [1, 5, 8, 31, 64, 192, 1024].map(|n: usize| n.next_multiple_of(dtype.block_len())) {
            let matrix = random.matrix(dtype, 3, cols);
            for isa in isas() {
                let mut found = vec![f32::NAN; cols];
                isa.decode(dtype, matrix.row(1), &mut found);
                assert_eq!(found, row_of(&matrix, 1), "{dtype} {cols} {isa:?}");
            }
        }
    }
}

#[test]
fn dot_of_every_scale_and_code() {
    // One value of x at a time picks one weight out, so the result is exact.
    let mut blocks = Vec::new();
    for scale in 0..0xFF_u8 {
        blocks.extend([scale, scale.wrapping_add(1) % 0xFF, scale, 0x38]);
        blocks.extend((0..32).map(|i: u8| i.wrapping_mul(8).wrapping_add(scale)));
    }
    let cols = 64 * 0xFF;
    let matrix = Matrix { rows: 1, cols, data: MatrixData::Nvfp4 { blocks: blocks.into(), scale: 1.0 } };
    let weights = row_of(&matrix, 0);
    for isa in isas() {
        for block in 0..0xFF {
            for i in 0..64 {
                let mut x = vec![0.0; 64];
                x[i] = 3.0;
                let found = isa.dot(DType::Nvfp4, &matrix.row(0)[36 * block..][..36], &isa.arrange(&x));
                assert_eq!(found, 3.0 * weights[64 * block + i], "{isa:?}, block {block}, value {i}");
            }
        }
    }
}

#[test]
fn dot_equals_reference() {
    let mut random = Random::fresh();
    for dtype in TYPES {
        for cols in [1, 7, 8, 33, 100, 320, 2048].map(|n: usize| n.next_multiple_of(dtype.block_len())) {
            let matrix = random.matrix(dtype, 1, cols);
            let x = random.values(cols);
            let expected = reference::dot(&row_of(&matrix, 0), &x);
            for isa in isas() {
                let found = isa.dot(dtype, matrix.row(0), &isa.arrange(&x)) * matrix.scale();
                let bound = |_| magnitude(&matrix, &x, 0);
                assert_close(
                    &[found],
                    &[expected * matrix.scale()],
                    bound,
                    Precision::Float32,
                    &format!("{dtype} {cols} {isa:?}"),
                );
            }
        }
    }
}

#[test]
fn transpose_moves_every_value() {
    for k in [1, 7, 8, 9, 64, 250] {
        let rows: Vec<f32> = (0..TILE_COLS * k).map(|i| i as f32).collect();
        for isa in isas() {
            let mut panel = vec![f32::NAN; rows.len()];
            isa.transpose(&rows, &mut panel);
            for (i, x) in panel.iter().enumerate() {
                assert_eq!(*x, rows[i % TILE_COLS * k + i / TILE_COLS], "{k} {isa:?}");
            }
        }
    }
}

#[test]
fn tile_adds_products_and_touches_nothing_else() {
    let mut random = Random::fresh();
    for k in [0, 1, 2, 63, 256] {
        for rows in 1..=6 {
            for (row_stride, k_stride) in [(1, 6), (k + 3, 1)] {
                let (b_stride, c_stride) = (TILE_COLS + 5, TILE_COLS + 3);
                let a = random.values(6 * (k + 3) + 6 * k);
                let b = random.values(k * b_stride + TILE_COLS);
                let before = random.values(rows * c_stride);
                let expected: Vec<f32> = (0..before.len())
                    .map(|at| {
                        let (i, j) = (at / c_stride, at % c_stride);
                        let products = (0..k).map(|k| a[i * row_stride + k * k_stride] * b[k * b_stride + j]);
                        before[at] + if j < TILE_COLS { products.sum() } else { 0.0 }
                    })
                    .collect();
                for isa in isas() {
                    let mut c = before.clone();
                    let tile = Tile { values: &a, rows, row_stride, k, k_stride };
                    isa.tile(tile, Panel { values: &b, k_stride: b_stride }, &mut c, c_stride);
                    assert_close(&c, &expected, |_| k as f32 + 1.0, Precision::Float32, &format!("{k} {rows} {isa:?}"));
                    for (at, x) in c.iter().enumerate().filter(|(at, _)| at % c_stride >= TILE_COLS) {
                        assert_eq!(*x, before[at]);
                    }
                }
            }
        }
    }
}

#[test]
fn softmax_equals_reference() {
    let mut random = Random::fresh();
    for n in [1, 7, 8, 513, 5000] {
        for (spread, sink) in [(1.0, 0.3), (40.0, -3.0), (40.0, 60.0), (200.0, 0.0)] {
            let scores: Vec<f32> = (0..n).map(|_| spread * random.value()).collect();
            let mut expected: Vec<f32> = scores.iter().map(|x| x * 0.125).collect();
            reference::softmax_with_sink(&mut expected, 0, sink);
            for isa in isas() {
                let mut found = scores.clone();
                isa.softmax(&mut found, 0.125, sink, Precision::Float32);
                assert_close(
                    &found,
                    &expected,
                    |i| expected[i] + 1e-30,
                    Precision::Float32,
                    &format!("{n} {spread} {isa:?}"),
                );
            }
        }
    }
}

#[test]
fn silu_equals_reference() {
    let mut random = Random::fresh();
    let mut gate: Vec<f32> = (0..1001).map(|_| 30.0 * random.value()).collect();
    gate.extend([0.0, -0.0, 1e-30, 60.0, -60.0, 200.0, -200.0]);
    let up = random.values(gate.len());
    let expected: Vec<f32> = gate.iter().zip(&up).map(|(g, u)| reference::silu(g * 0.5) * (u * 3.0)).collect();
    for isa in isas() {
        let mut found = gate.clone();
        isa.silu_mul(&mut found, 0.5, &up, 3.0, Precision::Float32);
        assert_close(&found, &expected, |i| expected[i].abs() + 1e-30, Precision::Float32, &format!("{isa:?}"));
        let mut nan = [f32::NAN; 8];
        isa.silu_mul(&mut nan, 1.0, &[1.0; 8], 1.0, Precision::Bfloat16);
        assert!(nan.iter().all(|x| x.is_nan()), "{isa:?} hides NaN");
    }
}

#[test]
fn projections_equal_reference() {
    let mut random = Random::fresh();
    let cancel = Cancel::default();
    for engine in engines() {
        for dtype in TYPES {
            for (n_tokens, cols) in [(1, 1), (1, 300), (2, 75), (6, 257), (13, 520), (63, 64)] {
                let cols = usize::next_multiple_of(cols, dtype.block_len());
                let matrices = [1, 16, 37].map(|rows| random.matrix(dtype, rows, cols));
                for precision in PRECISIONS {
                    let x = random.kept(n_tokens * cols, precision);
                    let all: Vec<&Matrix> = matrices.iter().collect();
                    let found = if n_tokens == 1 {
                        engine.pool.install(|| engine.gemv(&all, &engine.isa.arrange(&x), precision, &cancel))
                    } else {
                        let row = |t: usize| &x[t * cols..(t + 1) * cols];
                        engine.pool.install(|| {
                            let packed = Packed::new(n_tokens, cols, row, &cancel)?;
                            engine.gemm(&all, &packed, precision, &cancel)
                        })
                    };
                    for (matrix, found) in matrices.iter().zip(found.unwrap()) {
                        let expected = reference::project(matrix, &x, precision, &cancel).unwrap();
                        let bound = |i: usize| magnitude(matrix, &x[i / matrix.rows * cols..], i % matrix.rows);
                        assert_close(&found, &expected, bound, precision, &format!("{dtype} {n_tokens} x {cols}"));
                    }
                }
            }
        }
    }
}

#[test]
fn attention_equals_reference() {
    let mut random = Random::fresh();
    let cancel = Cancel::default();
    // Heads, KV heads, head dimension, window, tokens before, tokens.
    let cases = [
        (8, 1, 128, Some(513), 0, 1),
        (8, 1, 128, Some(513), 600, 1),
        (8, 2, 64, Some(513), 500, 63),
        (6, 3, 22, Some(1), 3, 2),
        (4, 4, 64, Some(17), 0, 513),
        (2, 1, 64, None, 0, 200),
        (16, 2, 64, None, 1000, 1),
        (3, 1, 6, None, 70, 5),
    ];
    for (n_heads, n_kv_heads, head_dim, window, before, n_tokens) in cases {
        let config = config(n_heads, n_kv_heads, head_dim, window);
        for precision in PRECISIONS {
            let width = n_kv_heads * head_dim;
            let (k, v) = (
                random.kept((before + n_tokens) * width, precision),
                random.kept((before + n_tokens) * width, precision),
            );
            let q: Vec<f32> = random.kept(n_tokens * n_heads * head_dim, precision).iter().map(|x| 4.0 * x).collect();
            let sinks = random.values(n_heads);
            let mut kv = Kv::new(&config, precision);
            for (start, end) in [(0, before), (before, before + n_tokens)] {
                for start in (start..end).step_by(512) {
                    let rows = start * width..end.min(start + 512) * width;
                    kv.layers[0].append(start, &k[rows.clone()], &v[rows]);
                }
            }
            let cache = Cache { k: &k, v: &v, first: 0, n_kv_heads, head_dim };
            let expected = reference::attention(&q, before, cache, &sinks, window, precision, &cancel).unwrap();
            for engine in engines() {
                let args = Args { config: &config, kv: &kv.layers[0], sinks: &sinks, window, start: before, precision };
                let found = engine.pool.install(|| engine.attention(&q, &args, &cancel)).unwrap();
                // Scores reach 4 * head_dim terms below 1, so probabilities differ by that many units of 1e-7; in BF16 a
                // probability may also fall to the other side of a tie.
                let bound = if precision == Precision::Float32 { 20.0 } else { 1000.0 };
                assert_close(&found, &expected, |_| bound, precision, &format!("{config:?} {before} {n_tokens}"));
            }
        }
    }
}

fn config(n_heads: usize, n_kv_heads: usize, head_dim: usize, window: Option<usize>) -> FlintConfig {
    let attention = if window.is_some() { Attention::Sliding } else { Attention::Full };
    FlintConfig {
        hidden_size: 64,
        vocab_size: 10,
        context_length: 4096,
        n_heads,
        n_kv_heads,
        head_dim,
        dense_intermediate_size: 64,
        n_experts: 4,
        n_experts_per_token: 2,
        expert_intermediate_size: 64,
        shared_intermediate_size: 64,
        sliding_window: window.unwrap_or(9),
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        layers: vec![LayerKind { attention, rope: true, mlp: Mlp::Dense }],
    }
}

#[test]
fn feed_forward_equals_reference() {
    let mut random = Random::fresh();
    let cancel = Cancel::default();
    let (d, n_experts) = (128, 5);
    for dtype in [DType::Nvfp4, DType::Bf16] {
        let mut swiglu = |f: usize| SwiGlu {
            gate: random.matrix(dtype, f, d),
            up: random.matrix(dtype, f, d),
            down: random.matrix(dtype, d, f),
        };
        let shared = swiglu(192);
        let experts: Vec<SwiGlu> = (0..n_experts).map(|_| swiglu(64)).collect();
        for (n_tokens, per_token) in [(1, 3), (2, 1), (7, 3), (40, 5), (1, 0), (9, 0)] {
            let logits = random.values(n_tokens * n_experts);
            let routes = Routes::from_logits(&logits, n_experts, per_token);
            for precision in PRECISIONS {
                let x = random.kept(n_tokens * d, precision);
                let expected = reference::moe(&experts, &shared, &routes, &x, precision, &cancel).unwrap();
                let size = expected.iter().fold(0.0, |size: f32, x| size.max(x.abs()));
                for engine in engines() {
                    let found = engine
                        .pool
                        .install(|| engine.feed_forward(&experts, &shared, &routes, &x, precision, &cancel))
                        .unwrap();
                    // In BF16 each of some values may be rounded to the other side.
                    let bound = if precision == Precision::Float32 { 2.0 } else { 4000.0 };
                    assert_close(
                        &found,
                        &expected,
                        |_| bound * size,
                        precision,
                        &format!("{dtype} {n_tokens} {per_token}"),
                    );
                }
            }
        }
    }
}
