//! Decode of a Flint that is nearly all LM head: one matrix times one token, for each type of weights.

use std::{hint::black_box, sync::Arc};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use flint_rs::{
    cancel::Cancel,
    checkpoint::DType,
    config::{Attention, FlintConfig, LayerKind, Mlp},
    cpu::{CpuModel, Options, Path, Positions, Precision},
    weights::Weights,
};

fn config() -> FlintConfig {
    FlintConfig {
        hidden_size: 2048,
        vocab_size: 32_000,
        context_length: 4096,
        n_heads: 1,
        n_kv_heads: 1,
        head_dim: 64,
        dense_intermediate_size: 64,
        n_experts: 1,
        n_experts_per_token: 1,
        expert_intermediate_size: 64,
        shared_intermediate_size: 64,
        sliding_window: 1,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        layers: vec![LayerKind { attention: Attention::Sliding, rope: true, mlp: Mlp::Dense }],
    }
}

fn gemv(c: &mut Criterion) {
    let mut group = c.benchmark_group("gemv");
    group.sample_size(20);
    for dtype in [DType::Nvfp4, DType::Bf16, DType::F32] {
        let weights = Arc::new(Weights::synthetic(config(), 1, dtype).expect("widths are multiples of 64"));
        group.throughput(Throughput::Bytes(weights.lm_head.data.bytes().len() as u64));
        let options = Options { precision: Precision::Bfloat16, path: Path::Fast, threads: None };
        let model = CpuModel::new(weights, options).expect("threads");
        let cancel = Cancel::default();
        group.bench_function(dtype.name(), |b| {
            b.iter(|| black_box(model.forward(&mut model.new_kv(), &[7], Positions::Last, &cancel)).expect("a token"));
        });
    }
    group.finish();
}

criterion_group!(benches, gemv);
criterion_main!(benches);
