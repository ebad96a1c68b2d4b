//! The fast path on whole models: against the specification, across threads and chunks, cancelled, misused.

mod cpu_support;

use std::{sync::Arc, thread, time::Duration};

use cpu_support::{Kind, Random, configs, median_kl, weights};
use flint_rs::{
    Error,
    cancel::Cancel,
    cpu::{CpuModel, Options, Path, Positions, Precision},
    weights::Weights,
};

const FAST: Options = Options { precision: Precision::Bfloat16, path: Path::Fast, threads: Some(2) };

fn model(weights: &Arc<Weights>, options: Options) -> CpuModel {
    CpuModel::new(Arc::clone(weights), options).unwrap()
}

fn logits(model: &CpuModel, tokens: &[u32]) -> Vec<f32> {
    model.forward(&mut model.new_kv(), tokens, Positions::All, &Cancel::default()).unwrap()
}

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn equals_the_reference() {
    let mut random = Random::fresh();
    for kind in Kind::ALL {
        for config in configs(kind.block() > 1) {
            let weights = weights(&mut random, &config, kind);
            let tokens = random.tokens(45, config.vocab_size);
            let run =
                |precision, path| logits(&model(&weights, Options { precision, path, threads: Some(2) }), &tokens);
            let exact = run(Precision::Float32, Path::Reference);
            let largest = exact.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
            for (i, (x, y)) in run(Precision::Float32, Path::Fast).iter().zip(&exact).enumerate() {
                assert!((x - y).abs() <= 2e-5 * largest, "{kind:?} {config:?}: {x} for {y} at {i}");
            }
            // Two runs that round at the same points differ from fp32 by the same noise, not by the same bits. The median,
            // because a choice of experts that falls otherwise at one position says nothing.
            let vocab = config.vocab_size;
            let reference = median_kl(&exact, &run(Precision::Bfloat16, Path::Reference), vocab);
            let fast = median_kl(&exact, &run(Precision::Bfloat16, Path::Fast), vocab);
            assert!(fast <= 2.0 * reference, "{kind:?} {config:?}: KL {fast}, reference {reference}");
        }
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    let mut random = Random::fresh();
    for config in configs(true) {
        let weights = weights(&mut random, &config, Kind::Nvfp4);
        let tokens = random.tokens(30, config.vocab_size);
        let run = |threads| {
            let model = model(&weights, Options { threads, ..FAST });
            let mut kv = model.new_kv();
            let cancel = Cancel::default();
            let mut all = model.forward(&mut kv, &tokens[..20], Positions::All, &cancel).unwrap();
            for token in &tokens[20..] {
                all.extend(model.forward(&mut kv, &[*token], Positions::Last, &cancel).unwrap());
            }
            bits(&all)
        };
        let one = run(Some(1));
        for threads in [Some(2), Some(7), None] {
            assert_eq!(run(threads), one, "{threads:?} threads");
        }
    }
}

#[test]
fn chunks_change_only_the_order_of_additions() {
    let mut random = Random::fresh();
    let cancel = Cancel::default();
    let mut config = configs(true).remove(2);
    config.sliding_window = 130;
    let weights = weights(&mut random, &config, Kind::Nvfp4);
    let tokens = random.tokens(1100, config.vocab_size);
    let model = model(&weights, Options { precision: Precision::Float32, ..FAST });
    let whole = logits(&model, &tokens);
    for chunk in [513, 100] {
        let mut kv = model.new_kv();
        let mut pieces = Vec::new();
        for tokens in tokens.chunks(chunk) {
            pieces.extend(model.forward(&mut kv, tokens, Positions::All, &cancel).unwrap());
        }
        for (i, (x, y)) in pieces.iter().zip(&whole).enumerate() {
            assert!((x - y).abs() <= 1e-4, "chunks of {chunk}: {x} for {y} at {i}");
        }
    }
}

#[test]
fn cancelled_work_leaves_the_cache_as_it_was() {
    let mut random = Random::fresh();
    let mut config = configs(true).remove(2);
    config.sliding_window = 40;
    let weights = weights(&mut random, &config, Kind::Nvfp4);
    let (first, long, next) = (random.tokens(50, 97), random.tokens(3000, 97), random.tokens(3, 97));
    for path in [Path::Reference, Path::Fast] {
        let model = model(&weights, Options { path, ..FAST });
        let mut kv = model.new_kv();
        model.forward(&mut kv, &first, Positions::None, &Cancel::default()).unwrap();
        let expected = model.forward(&mut kv.clone(), &next, Positions::All, &Cancel::default()).unwrap();
        // Sooner and later, so that it hits the first and the following blocks.
        for delay_ms in [0, 1, 5, 25, 100] {
            let cancel = Cancel::default();
            let flag = cancel.clone();
            let timer = thread::spawn(move || {
                thread::sleep(Duration::from_millis(delay_ms));
                flag.cancel();
            });
            let mut kv_copy = kv.clone();
            match model.forward(&mut kv_copy, &long, Positions::None, &cancel) {
                Err(Error::Cancelled) => {
                    assert_eq!(kv_copy.len(), 50);
                    let after = model.forward(&mut kv_copy, &next, Positions::All, &Cancel::default()).unwrap();
                    assert_eq!(bits(&after), bits(&expected), "{path:?} cancelled after {delay_ms} ms");
                }
                Ok(_) => assert!(delay_ms > 0, "{path:?} did not stop"),
                Err(error) => panic!("{error}"),
            }
            timer.join().unwrap();
        }
        let cancel = Cancel::default();
        cancel.cancel();
        assert!(matches!(model.forward(&mut kv, &next, Positions::All, &cancel), Err(Error::Cancelled)));
        assert_eq!(kv.len(), 50);
    }
}

#[test]
fn misuse_is_refused_by_name() {
    let mut random = Random::fresh();
    let cancel = Cancel::default();
    let mut config = configs(true).remove(2);
    config.context_length = 20;
    let weights = weights(&mut random, &config, Kind::Nvfp4);
    let refused = |result: Result<Vec<f32>, Error>, field: &str, found: &str| match result {
        Err(Error::Value { field: f, found: v, .. }) => assert!(f == field && v.contains(found), "{f}: {v}"),
        other => panic!("{field} {found}: {other:?}"),
    };
    for path in [Path::Reference, Path::Fast] {
        let model = model(&weights, Options { path, ..FAST });
        let mut kv = model.new_kv();
        assert!(kv.is_empty());
        refused(model.forward(&mut kv, &[], Positions::Last, &cancel), "tokens", "none");
        refused(model.forward(&mut kv, &[1, 97], Positions::Last, &cancel), "tokens", "97");
        refused(model.forward(&mut kv, &[1; 21], Positions::Last, &cancel), "tokens", "21");
        model.forward(&mut kv, &[1; 19], Positions::Last, &cancel).unwrap();
        refused(model.forward(&mut kv, &[1; 2], Positions::Last, &cancel), "tokens", "21");
        assert_eq!(model.forward(&mut kv, &[1], Positions::Last, &cancel).unwrap().len(), 97);
        assert_eq!(kv.len(), 20);

        let other = CpuModel::new(Arc::clone(&weights), Options { path, precision: Precision::Float32, threads: None });
        refused(model.forward(&mut other.unwrap().new_kv(), &[1], Positions::Last, &cancel), "kv", "another");
        let zero = CpuModel::new(Arc::clone(&weights), Options { path, threads: Some(0), ..FAST });
        assert!(matches!(zero, Err(Error::Value { field, .. }) if field == "threads"));
    }
}

#[test]
fn several_threads_share_a_model() {
    let mut random = Random::fresh();
    let config = configs(true).remove(2);
    let model = model(&weights(&mut random, &config, Kind::Nvfp4), FAST);
    let prompts: Vec<Vec<u32>> = (1..5).map(|n| random.tokens(7 * n, config.vocab_size)).collect();
    let alone: Vec<Vec<u32>> = prompts.iter().map(|tokens| bits(&logits(&model, tokens))).collect();
    thread::scope(|scope| {
        let running: Vec<_> = prompts.iter().map(|tokens| scope.spawn(|| bits(&logits(&model, tokens)))).collect();
        for (running, alone) in running.into_iter().zip(alone) {
            assert_eq!(running.join().unwrap(), alone);
        }
    });
}

#[test]
fn cache_size_follows_the_layers() {
    let mut random = Random::fresh();
    let cancel = Cancel::default();
    let config = configs(true).remove(2);
    let model = model(&weights(&mut random, &config, Kind::Nvfp4), FAST);
    let mut kv = model.new_kv();
    assert_eq!(kv.bytes(), 0);
    let tokens = random.tokens(2500, config.vocab_size);
    model.forward(&mut kv, &tokens, Positions::None, &cancel).unwrap();
    let row_bytes = 2 * 2 * config.n_kv_heads * config.head_dim;
    let (full, sliding) = (3, 2);
    let needed = row_bytes * (full * 2500 + sliding * (config.sliding_window - 1));
    let held = row_bytes * (full * 5000 + sliding * 2 * (config.sliding_window + 511));
    assert!((needed..=held).contains(&kv.bytes()), "{} of {needed} to {held}", kv.bytes());
}
