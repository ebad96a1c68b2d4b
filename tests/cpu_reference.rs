//! The specification path: chunking, KV handling, errors.

mod cpu_support;

use std::sync::Arc;

use cpu_support::{Kind, Random, configs, weights};
use flint_rs::{
    cancel::Cancel,
    cpu::{CpuModel, Options, Path, Positions, Precision},
    weights::Weights,
};

const REFERENCE: Options = Options { precision: Precision::Bfloat16, path: Path::Reference, threads: None };

fn model(weights: &Arc<Weights>, options: Options) -> CpuModel {
    CpuModel::new(Arc::clone(weights), options).unwrap()
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn result_does_not_depend_on_chunks() {
    let mut random = Random::fresh();
    let cancel = Cancel::default();
    for (kind, blocked) in [(Kind::Nvfp4, true), (Kind::Bf16, false)] {
        for config in configs(blocked) {
            let weights = weights(&mut random, &config, kind);
            let tokens = random.tokens(40, config.vocab_size);
            for precision in [Precision::Float32, Precision::Bfloat16] {
                let model = model(&weights, Options { precision, ..REFERENCE });
                let whole = model.forward(&mut model.new_kv(), &tokens, Positions::All, &cancel).unwrap();
                assert!(whole.iter().all(|x| x.is_finite()));
                for chunk in [1, 7, 39] {
                    let mut kv = model.new_kv();
                    let mut pieces = Vec::new();
                    for tokens in tokens.chunks(chunk) {
                        pieces.extend(model.forward(&mut kv, tokens, Positions::All, &cancel).unwrap());
                    }
                    assert_eq!(kv.len(), tokens.len());
                    assert_eq!(bits(&whole), bits(&pieces), "{config:?} {precision:?} chunks of {chunk}");
                }
            }
        }
    }
}

#[test]
fn result_does_not_depend_on_block_borders() {
    let mut random = Random::fresh();
    let cancel = Cancel::default();
    let mut config = configs(true).remove(1);
    config.sliding_window = 100;
    let weights = weights(&mut random, &config, Kind::Nvfp4);
    let tokens = random.tokens(600, config.vocab_size);
    let model = model(&weights, REFERENCE);
    let whole = model.forward(&mut model.new_kv(), &tokens, Positions::All, &cancel).unwrap();
    let mut kv = model.new_kv();
    let mut pieces = Vec::new();
    for tokens in tokens.chunks(333) {
        pieces.extend(model.forward(&mut kv, tokens, Positions::All, &cancel).unwrap());
    }
    assert_eq!(bits(&whole), bits(&pieces));
}

#[test]
fn positions_choose_rows() {
    let mut random = Random::fresh();
    let cancel = Cancel::default();
    let config = configs(true).remove(0);
    let model = model(&weights(&mut random, &config, Kind::Nvfp4), REFERENCE);
    let tokens = random.tokens(11, config.vocab_size);
    let all = model.forward(&mut model.new_kv(), &tokens, Positions::All, &cancel).unwrap();
    let last = model.forward(&mut model.new_kv(), &tokens, Positions::Last, &cancel).unwrap();
    let mut kv = model.new_kv();
    assert!(model.forward(&mut kv, &tokens, Positions::None, &cancel).unwrap().is_empty());
    assert_eq!(kv.len(), 11);
    assert_eq!(all.len(), 11 * config.vocab_size);
    assert_eq!(bits(&all[10 * config.vocab_size..]), bits(&last));
}
