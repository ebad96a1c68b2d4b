//! One layer of Flint's heads over narrow projections, so that a token is nearly all attention: decode behind contexts of
//! several lengths, and a block of 512 tokens.

use std::{hint::black_box, sync::Arc};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use flint_rs::{
    cancel::Cancel,
    checkpoint::DType,
    config::{Attention, FlintConfig, LayerKind, Mlp},
    cpu::{CpuModel, Kv, Options, Path, Positions, Precision},
    weights::Weights,
};

fn model(attention: Attention) -> CpuModel {
    let config = FlintConfig {
        hidden_size: 64,
        vocab_size: 64,
        context_length: 1 << 20,
        n_heads: 32,
        n_kv_heads: 4,
        head_dim: 128,
        dense_intermediate_size: 64,
        n_experts: 1,
        n_experts_per_token: 1,
        expert_intermediate_size: 64,
        shared_intermediate_size: 64,
        sliding_window: 513,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        layers: vec![LayerKind { attention, rope: attention == Attention::Sliding, mlp: Mlp::Dense }],
    };
    let weights = Arc::new(Weights::synthetic(config, 1, DType::Nvfp4).expect("widths are multiples of 64"));
    CpuModel::new(weights, Options { precision: Precision::Bfloat16, path: Path::Fast, threads: None })
        .expect("threads")
}

fn filled(model: &CpuModel, n: usize) -> Kv {
    let mut kv = model.new_kv();
    let tokens: Vec<u32> = (0..n).map(|i| (i * 7 % 64) as u32).collect();
    model.forward(&mut kv, &tokens, Positions::None, &Cancel::default()).expect("a prompt");
    kv
}

fn attention(c: &mut Criterion) {
    let cancel = Cancel::default();
    let mut group = c.benchmark_group("attention");
    group.sample_size(20);
    for (kind, name, contexts) in
        [(Attention::Sliding, "sliding", &[1024][..]), (Attention::Full, "full", &[1024, 8192][..])]
    {
        let model = model(kind);
        for &context in contexts {
            let kv = filled(&model, context);
            for n in [1, 512] {
                let tokens = vec![5; n];
                group.throughput(Throughput::Elements(n as u64));
                group.bench_function(BenchmarkId::new(format!("{name}/{n}"), context), |b| {
                    b.iter_batched_ref(
                        || kv.clone(),
                        |kv| black_box(model.forward(kv, &tokens, Positions::None, &cancel)).expect("tokens"),
                        criterion::BatchSize::LargeInput,
                    );
                });
            }
        }
    }
    group.finish();
}

criterion_group!(benches, attention);
criterion_main!(benches);
