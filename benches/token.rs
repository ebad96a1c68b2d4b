//! Whole tokens of a small synthetic Flint on both paths: decode behind 100 tokens, and a prompt of 512.

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
    let layer = |i| LayerKind {
        attention: if i % 4 == 1 { Attention::Full } else { Attention::Sliding },
        rope: i % 4 != 1,
        mlp: if i < 2 { Mlp::Dense } else { Mlp::Moe },
    };
    FlintConfig {
        hidden_size: 256,
        vocab_size: 8192,
        context_length: 4096,
        n_heads: 8,
        n_kv_heads: 1,
        head_dim: 128,
        dense_intermediate_size: 768,
        n_experts: 16,
        n_experts_per_token: 6,
        expert_intermediate_size: 64,
        shared_intermediate_size: 128,
        sliding_window: 65,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        layers: (0..8).map(layer).collect(),
    }
}

fn token(c: &mut Criterion) {
    let weights = Arc::new(Weights::synthetic(config(), 1, DType::Nvfp4).expect("widths are multiples of 64"));
    let cancel = Cancel::default();
    let tokens: Vec<u32> = (0..512).map(|i| i * 13 % 8192).collect();
    let mut group = c.benchmark_group("token");
    group.sample_size(10);
    for (path, name) in [(Path::Fast, "fast"), (Path::Reference, "reference")] {
        let options = Options { precision: Precision::Bfloat16, path, threads: None };
        let model = CpuModel::new(Arc::clone(&weights), options).expect("threads");
        let mut kv = model.new_kv();
        model.forward(&mut kv, &tokens[..100], Positions::None, &cancel).expect("a prompt");
        group.throughput(Throughput::Elements(1));
        group.bench_function(format!("{name}/decode"), |b| {
            b.iter_batched_ref(
                || kv.clone(),
                |kv| black_box(model.forward(kv, &[7], Positions::Last, &cancel)).expect("a token"),
                criterion::BatchSize::SmallInput,
            );
        });
        group.throughput(Throughput::Elements(tokens.len() as u64));
        group.bench_function(format!("{name}/prefill"), |b| {
            b.iter(|| {
                black_box(model.forward(&mut model.new_kv(), &tokens, Positions::Last, &cancel)).expect("a prompt")
            });
        });
    }
    group.finish();
}

criterion_group!(benches, token);
criterion_main!(benches);
