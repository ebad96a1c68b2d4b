//! Whole models for tests on a GPU, and what they say.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::sync::Arc;

use flint_rs::{
    cancel::Cancel,
    checkpoint::DType,
    config::FlintConfig,
    cpu::{self, CpuModel, Positions, Precision},
    gpu::{GpuModel, RunOptions, Source},
    plan::Limits,
    weights::Weights,
};

use super::cpu_support::configs;

pub fn load(source: Source<'_>, sequences: usize, chunk_tokens: usize) -> GpuModel {
    let config = source.config();
    let limits = Limits {
        sequences,
        context_tokens: config.context_length.min(4096),
        vocab_tokens: config.vocab_size,
        chunk_tokens,
    };
    let mut last = (0, 0);
    let mut progress = |done, all| last = (done, all);
    let model = GpuModel::load(source, limits, RunOptions::default(), &mut progress, &Cancel::default()).unwrap();
    assert!(last.0 == last.1 && last.1 > 0, "progress ended at {last:?}");
    println!("{}: {}", model.device().name().unwrap(), model.plan().path());
    model
}

/// Models of both paths and both formats of tiles, with all kinds of layers.
pub fn models() -> Vec<(FlintConfig, DType)> {
    let small = configs(true).pop().unwrap();
    let full_width = FlintConfig::flint(5, 1024);
    vec![(small, DType::Bf16), (full_width.clone(), DType::Bf16), (full_width, DType::Nvfp4)]
}

pub fn synthetic(config: &FlintConfig, dtype: DType) -> Source<'_> {
    Source::Synthetic { config, seed: 3, dtype }
}

/// `[T, V]`, token by token.
pub fn decode_logits(model: &mut GpuModel, tokens: &[u32]) -> Vec<f32> {
    let id = model.add_sequence().unwrap();
    let logits = tokens.iter().flat_map(|&token| model.forward(&[(id, token)]).unwrap()).collect();
    model.remove_sequence(id);
    logits
}

/// `[T, V]` by the CPU.
pub fn cpu_logits(weights: &Arc<Weights>, precision: Precision, path: cpu::Path, tokens: &[u32]) -> Vec<f32> {
    let options = cpu::Options { precision, path, threads: None };
    let model = CpuModel::new(Arc::clone(weights), options).unwrap();
    model.forward(&mut model.new_kv(), tokens, Positions::All, &Cancel::default()).unwrap()
}

pub fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|x| x.to_bits()).collect()
}
