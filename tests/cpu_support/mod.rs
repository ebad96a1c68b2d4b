//! Random Flints and bounds for tests of the CPU backend.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::sync::Arc;

use flint_rs::{
    checkpoint::Bytes,
    config::{Attention, FlintConfig, LayerKind, Mlp},
    weights::{LayerWeights, Matrix, MatrixData, MlpWeights, SwiGlu, Weights},
};
use half::{bf16, f16};

/// Whether a case of this size is run: every one is, but under compute-sanitizer, which takes a thousand times as long, only
/// those of at most the size that `FLINT_RS_SANITIZER` says.
pub fn affordable(size: usize) -> bool {
    let most = std::env::var("FLINT_RS_SANITIZER").map_or(usize::MAX, |most| most.parse().expect("a number"));
    let affordable = size <= most;
    if !affordable {
        println!("left out under a sanitizer: a case of size {size}");
    }
    affordable
}

/// `SplitMix64`.
pub struct Random(u64);

impl Random {
    /// A fresh seed, printed so that a failure can be repeated.
    pub fn fresh() -> Self {
        let seed = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos() as u64;
        println!("seed {seed}");
        Self(seed)
    }

    pub fn seeded(seed: u64) -> Self {
        Self(seed)
    }

    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// Near-normal, mean 0, variance 1.
    pub fn normal(&mut self) -> f32 {
        let bits = self.bits();
        let sum: u64 = (0..4).map(|i| bits >> (16 * i) & 0xFFFF).sum();
        (sum as f32 / 65536.0 - 2.0) * 3f32.sqrt()
    }

    pub fn normals(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.normal()).collect()
    }

    pub fn bf16s(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| bf16::from_f32(self.normal()).to_f32()).collect()
    }

    pub fn tokens(&mut self, n: usize, vocab_size: usize) -> Vec<u32> {
        (0..n).map(|_| self.below(vocab_size) as u32).collect()
    }
}

/// How the matrices of a random Flint are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    F32,
    F16,
    Bf16,
    Q8_0,
    Nvfp4,
}

impl Kind {
    pub const ALL: [Self; 5] = [Self::F32, Self::F16, Self::Bf16, Self::Q8_0, Self::Nvfp4];

    pub fn block(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q8_0 => 32,
            Self::Nvfp4 => 64,
        }
    }
}

/// A matrix of about unit gain: values of size 1 / sqrt(cols).
pub fn matrix(random: &mut Random, kind: Kind, rows: usize, cols: usize) -> Matrix {
    let (n, size) = (rows * cols, 1.0 / (cols as f32).sqrt());
    let bytes = |values: Vec<u8>| Bytes::from(values);
    let data = match kind {
        Kind::F32 => MatrixData::F32(bytes((0..n).flat_map(|_| (size * random.normal()).to_le_bytes()).collect())),
        Kind::F16 => {
            MatrixData::F16(bytes((0..n).flat_map(|_| f16::from_f32(size * random.normal()).to_le_bytes()).collect()))
        }
        Kind::Bf16 => {
            MatrixData::Bf16(bytes((0..n).flat_map(|_| bf16::from_f32(size * random.normal()).to_le_bytes()).collect()))
        }
        Kind::Q8_0 => {
            let mut out = Vec::with_capacity(n / 32 * 34);
            for _ in 0..n / 32 {
                out.extend(f16::from_f32(size / 64.0).to_le_bytes());
                for _ in 0..4 {
                    out.extend(random.bits().to_le_bytes());
                }
            }
            MatrixData::Q8_0(bytes(out))
        }
        Kind::Nvfp4 => {
            let mut out = Vec::with_capacity(n / 64 * 36);
            for _ in 0..n / 64 {
                for _ in 0..4 {
                    out.push(0x30 + random.below(16) as u8); // 0.5 to 1.875
                }
                for _ in 0..4 {
                    out.extend(random.bits().to_le_bytes());
                }
            }
            MatrixData::Nvfp4 { blocks: bytes(out), scale: size / 3.5 }
        }
    };
    Matrix { rows, cols, data }
}

fn norm(random: &mut Random, n: usize) -> Vec<f32> {
    (0..n).map(|_| 1.0 + 0.2 * random.normal()).collect()
}

fn swiglu(random: &mut Random, kind: Kind, f: usize, d: usize) -> SwiGlu {
    SwiGlu { gate: matrix(random, kind, f, d), up: matrix(random, kind, f, d), down: matrix(random, kind, d, f) }
}

/// A Flint with matrices of one kind; the embedding is BF16 (or F32 in an F32 model) and the router F32, as in the files.
pub fn weights(random: &mut Random, config: &FlintConfig, kind: Kind) -> Arc<Weights> {
    let (d, query, kv) = (config.hidden_size, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim);
    let layers = config
        .layers
        .iter()
        .map(|layer| LayerWeights {
            attn_norm: norm(random, d),
            q: matrix(random, kind, query, d),
            k: matrix(random, kind, kv, d),
            v: matrix(random, kind, kv, d),
            o: matrix(random, kind, d, query),
            q_norm: norm(random, config.head_dim),
            k_norm: norm(random, config.head_dim),
            sinks: random.normals(config.n_heads),
            mlp_norm: norm(random, d),
            mlp: match layer.mlp {
                Mlp::Dense => MlpWeights::Dense(swiglu(random, kind, config.dense_intermediate_size, d)),
                Mlp::Moe => MlpWeights::Moe {
                    router: matrix(random, Kind::F32, config.n_experts, d),
                    experts: (0..config.n_experts)
                        .map(|_| swiglu(random, kind, config.expert_intermediate_size, d))
                        .collect(),
                    shared: swiglu(random, kind, config.shared_intermediate_size, d),
                },
            },
        })
        .collect();
    let embedding = if kind == Kind::F32 { Kind::F32 } else { Kind::Bf16 };
    Arc::new(Weights {
        config: config.clone(),
        embedding: matrix(random, embedding, config.vocab_size, d),
        layers,
        final_norm: norm(random, d),
        lm_head: matrix(random, kind, config.vocab_size, d),
    })
}

/// Layer kinds as Flint orders them: full attention without rotation on layers 0, 1, 5, 9 ... and the last, dense on 0 and 1.
pub fn layers(n: usize) -> Vec<LayerKind> {
    (0..n)
        .map(|i| {
            let full = i == 0 || i % 4 == 1 || i + 1 == n;
            LayerKind {
                attention: if full { Attention::Full } else { Attention::Sliding },
                rope: !full,
                mlp: if i < 2 { Mlp::Dense } else { Mlp::Moe },
            }
        })
        .collect()
}

/// Small shapes that differ in everything: head dimensions, KV heads, windows, experts, odd widths (all multiples of 64 when
/// `blocked`, as block formats need).
pub fn configs(blocked: bool) -> Vec<FlintConfig> {
    let base = FlintConfig {
        hidden_size: 128,
        vocab_size: 97,
        context_length: 4096,
        n_heads: 4,
        n_kv_heads: 2,
        head_dim: 64,
        dense_intermediate_size: 192,
        n_experts: 8,
        n_experts_per_token: 2,
        expert_intermediate_size: 64,
        shared_intermediate_size: 128,
        sliding_window: 9,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        layers: layers(5),
    };
    let mut all = vec![
        FlintConfig {
            n_heads: 8,
            n_kv_heads: 1,
            head_dim: 128,
            layers: layers(3),
            n_experts_per_token: 6,
            ..base.clone()
        },
        FlintConfig {
            n_kv_heads: 4,
            n_experts: 5,
            n_experts_per_token: 5,
            sliding_window: 1,
            layers: layers(7),
            ..base.clone()
        },
        base.clone(),
    ];
    if !blocked {
        all.push(FlintConfig {
            hidden_size: 75,
            n_heads: 6,
            n_kv_heads: 3,
            head_dim: 22,
            dense_intermediate_size: 101,
            expert_intermediate_size: 37,
            shared_intermediate_size: 51,
            sliding_window: 17,
            rope_theta: 500.0,
            ..base
        });
    }
    all
}

/// The median over rows of KL(p | q) of two `[T, V]` arrays of logits.
pub fn median_kl(p: &[f32], q: &[f32], vocab_size: usize) -> f64 {
    let mut all = kls(p, q, vocab_size);
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// The mean over rows of the same.
pub fn mean_kl(p: &[f32], q: &[f32], vocab_size: usize) -> f64 {
    let all = kls(p, q, vocab_size);
    all.iter().sum::<f64>() / all.len() as f64
}

fn kls(p: &[f32], q: &[f32], vocab_size: usize) -> Vec<f64> {
    assert!(p.len() == q.len() && p.len().is_multiple_of(vocab_size) && !p.is_empty());
    let log_softmax = |row: &[f32]| -> Vec<f64> {
        let max = row.iter().fold(f32::NEG_INFINITY, |max, x| max.max(*x));
        let sum: f64 = row.iter().map(|x| f64::from(x - max).exp()).sum();
        row.iter().map(|x| f64::from(x - max) - sum.ln()).collect()
    };
    (p.chunks_exact(vocab_size).zip(q.chunks_exact(vocab_size)))
        .map(|(p, q)| {
            let (p, q) = (log_softmax(p), log_softmax(q));
            p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum()
        })
        .collect()
}
