//! NVFP4: repacking both ways, decoding, and quantising, on one core.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use flint_rs::nvfp4::{self, BLOCK_BYTES, BLOCK_LEN, BLOCK_SCALES};

/// 4 million values: 2.4 MB of blocks, past the second-level cache.
const BLOCKS: usize = 65_536;

fn repack(c: &mut Criterion) {
    let mut values: Vec<f32> =
        (0..BLOCKS * BLOCK_LEN).map(|i| (i as f32 * 0.37).sin() * (i as f32 * 0.011).cos()).collect();
    let scale = nvfp4::tensor_scale(nvfp4::amax(&values).expect("finite"));
    let mut blocks = vec![0; BLOCKS * BLOCK_BYTES];
    let (mut codes, mut scales) = (vec![0; BLOCKS * BLOCK_LEN / 2], vec![0; BLOCKS * BLOCK_SCALES]);

    let mut group = c.benchmark_group("nvfp4");
    group.sample_size(20);
    group.throughput(Throughput::Elements((BLOCKS * BLOCK_LEN) as u64));
    group.bench_function("amax", |b| b.iter(|| nvfp4::amax(&values)));
    group.bench_function("quantize", |b| b.iter(|| nvfp4::quantize(&values, scale, &mut blocks)));
    group.bench_function("decode", |b| b.iter(|| nvfp4::decode(&blocks, &mut values)));
    group.throughput(Throughput::Bytes((BLOCKS * BLOCK_BYTES) as u64));
    group.bench_function("to_pairs", |b| b.iter(|| nvfp4::to_pairs(&blocks, &mut codes, &mut scales)));
    group.bench_function("from_pairs", |b| b.iter(|| nvfp4::from_pairs(&codes, &scales, &mut blocks)));
    group.bench_function("find_invalid_scale", |b| b.iter(|| nvfp4::find_invalid_scale(&blocks)));
    group.finish();
}

criterion_group!(benches, repack);
criterion_main!(benches);
