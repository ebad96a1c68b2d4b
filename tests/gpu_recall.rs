//! A model whose attention is known finds what was planted in 262,144 tokens. It needs a GPU, so `cargo test` counts it as
//! ignored; `make test-gpu` runs it.

#![cfg(feature = "cuda")]

mod cpu_support;

use cpu_support::Random;
use flint_rs::{
    cancel::Cancel,
    checkpoint::Bytes,
    config::{Attention, FlintConfig, LayerKind, Mlp},
    gpu::{GpuModel, RunOptions, Source},
    plan::{CHUNK_TOKENS, Limits, Path},
    weights::{LayerWeights, Matrix, MatrixData, MlpWeights, SwiGlu, Weights},
};
use half::bf16;

/// Needles have a name and a class; a query asks for the name of the needle of its class.
const NAMES: usize = 64;
const CLASSES: usize = 8;
const VOCAB: usize = 4096;
const CONTEXT: usize = 262_144;

// Inputs of the residual stream: what a token is, what the full layer found, what the sliding one found.
const NAME: usize = 0;
const CLASS: usize = 64;
const QUERY: usize = 80;
const NOISE: usize = 128;
const NOISE_LEN: usize = 1024;
const FULL_FOUND: usize = 1152;
const SLIDING_FOUND: usize = 1216;

// Tokens. Logits of tokens 0 to 63 say what the full layer found, those of 64 to 127 what the sliding one found.
const NEEDLES: usize = 128;
const QUERIES: usize = NEEDLES + NAMES * CLASSES;
const FILLERS: usize = QUERIES + CLASSES;

fn needle(name: usize, class: usize) -> u32 {
    (NEEDLES + class * NAMES + name) as u32
}

/// `[rows, cols]` with these values, and zeros.
fn sparse(rows: usize, cols: usize, values: impl IntoIterator<Item = (usize, usize, f32)>) -> Matrix {
    let mut bytes = vec![0; rows * cols * 2];
    for (row, col, value) in values {
        bytes[2 * (row * cols + col)..][..2].copy_from_slice(&bf16::from_f32(value).to_le_bytes());
    }
    Matrix { rows, cols, data: MatrixData::Bf16(Bytes::from(bytes)) }
}

fn embedding(random: &mut Random, d: usize) -> Matrix {
    let mut values = Vec::new();
    for token in NEEDLES..VOCAB {
        values.extend(
            (0..NOISE_LEN).map(|i| (token, NOISE + i, if random.bits().is_multiple_of(2) { 1.0 } else { -1.0 })),
        );
    }
    for class in 0..CLASSES {
        for name in 0..NAMES {
            let token = needle(name, class) as usize;
            values.extend([(token, NAME + name, 32.0), (token, CLASS + class, 32.0)]);
        }
        values.push((QUERIES + class, QUERY + class, 32.0));
    }
    sparse(VOCAB, d, values)
}

/// Attention that copies the name of the needle whose class is asked for to the inputs from `found` on, and no MLP.
///
/// A query of its class is 2 sqrt(128) long along one dim of a head, a key of that class almost as long along the same dim
/// (its noise takes a part), and no other key has anything there: scores are near 43 for it and 0 for all others, so 262,144
/// others have a share of e^-30 together. Tokens that ask for nothing weigh all keys alike.
fn layer(config: &FlintConfig, found: usize) -> LayerWeights {
    let (d, hd) = (config.hidden_size, config.head_dim);
    let heads = |n: usize| (0..n).map(move |head| head * hd);
    let zeros = |rows, cols| sparse(rows, cols, []);
    let keys = |row: usize| {
        let classes = (0..CLASSES).map(move |i| (row + i, CLASS + i, 1.0));
        classes.chain((CLASSES..hd).map(move |i| (row + i, NOISE + i, 1.0)))
    };
    let dense = config.dense_intermediate_size;
    LayerWeights {
        attn_norm: vec![1.0; d],
        q: sparse(
            config.n_heads * hd,
            d,
            heads(config.n_heads).flat_map(|row| (0..CLASSES).map(move |i| (row + i, QUERY + i, 1.0))),
        ),
        k: sparse(config.n_kv_heads * hd, d, heads(config.n_kv_heads).flat_map(keys)),
        v: sparse(
            config.n_kv_heads * hd,
            d,
            heads(config.n_kv_heads).flat_map(|row| (0..NAMES).map(move |i| (row + i, NAME + i, 1.0))),
        ),
        o: sparse(
            d,
            config.n_heads * hd,
            heads(config.n_heads).flat_map(|col| (0..NAMES).map(move |i| (found + i, col + i, 1.0))),
        ),
        q_norm: vec![2.0; hd],
        k_norm: vec![2.0; hd],
        sinks: vec![0.0; config.n_heads],
        mlp_norm: vec![1.0; d],
        mlp: MlpWeights::Dense(SwiGlu { gate: zeros(dense, d), up: zeros(dense, d), down: zeros(d, dense) }),
    }
}

fn weights(random: &mut Random) -> Weights {
    let kind = |attention| LayerKind { attention, rope: false, mlp: Mlp::Dense };
    let layers = vec![kind(Attention::Full), kind(Attention::Sliding)];
    let config = FlintConfig { layers, ..FlintConfig::flint(2, VOCAB) };
    let found = |token: usize| if token < NAMES { FULL_FOUND + token } else { SLIDING_FOUND + token - NAMES };
    Weights {
        embedding: embedding(random, config.hidden_size),
        layers: vec![layer(&config, FULL_FOUND), layer(&config, SLIDING_FOUND)],
        final_norm: vec![1.0; config.hidden_size],
        lm_head: sparse(VOCAB, config.hidden_size, (0..2 * NAMES).map(|token| (token, found(token), 1.0))),
        config,
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn a_planted_token_is_found_at_any_depth_and_forgotten_behind_the_window() {
    let mut random = Random::fresh();
    let weights = weights(&mut random);
    let window = weights.config.sliding_window;
    let limits = Limits { sequences: 1, context_tokens: CONTEXT, vocab_tokens: VOCAB, chunk_tokens: CHUNK_TOKENS };
    let mut model =
        GpuModel::load(Source::Weights(&weights), limits, RunOptions::default(), &mut |_, _| {}, &Cancel::default())
            .unwrap();
    assert!(matches!(model.plan().path(), Path::Fast(_)));

    // The queries are the last tokens; the sliding layer just misses the needle of one, and just sees that of another.
    let asked = CONTEXT - 2 * CLASSES;
    let mut tokens: Vec<u32> = (0..CONTEXT).map(|_| (FILLERS + random.below(VOCAB - FILLERS)) as u32).collect();
    let mut depths = vec![asked + 4 - window, asked + 5 - (window - 1), 0];
    while depths.len() < CLASSES {
        let depth = random.below(asked);
        if !depths.contains(&depth) {
            depths.push(depth);
        }
    }
    // Classes 4 and 5 are those at the edge of the window.
    depths.rotate_right(4);
    let names: Vec<usize> = (0..CLASSES).map(|_| random.below(NAMES)).collect();
    for class in 0..CLASSES {
        tokens[depths[class]] = needle(names[class], class);
        // Once by prefill and once by decode.
        tokens[asked + class] = (QUERIES + class) as u32;
        tokens[asked + CLASSES + class] = (QUERIES + class) as u32;
    }

    let id = model.add_sequence().unwrap();
    model.prefill(id, &tokens[..asked], &mut |_, _| {}, &Cancel::default()).unwrap();
    let mut logits = Vec::new();
    let mut sink = |rows: &[f32]| {
        logits.extend_from_slice(rows);
        Ok(())
    };
    model.prompt_logits(id, &tokens[asked..][..CLASSES], &mut sink, &Cancel::default()).unwrap();
    for &token in &tokens[asked + CLASSES..] {
        logits.extend(model.forward(&[(id, token)]).unwrap());
    }
    for (i, logits) in logits.chunks_exact(VOCAB).enumerate() {
        let (class, position) = (i % CLASSES, asked + i);
        let (full, sliding) = logits[..2 * NAMES].split_at(NAMES);
        let best = |of: &[f32]| (0..NAMES).max_by(|&a, &b| of[a].total_cmp(&of[b])).unwrap();
        let second = |of: &[f32]| (0..NAMES).filter(|&n| n != best(of)).map(|n| of[n]).fold(f32::MIN, f32::max);
        println!(
            "class {class}, {} back: full {:.3e} and {:.3e}, sliding {:.3e}",
            position - depths[class],
            full[best(full)],
            second(full),
            sliding[best(sliding)]
        );
        assert_eq!(best(full), names[class], "class {class} at {}", depths[class]);
        assert!(full[names[class]] > 100.0 * second(full).abs(), "class {class} at {}", depths[class]);
        if position - depths[class] < window {
            assert_eq!(best(sliding), names[class], "class {class} at {}", depths[class]);
            assert!(sliding[names[class]] > 100.0 * second(sliding).abs());
        } else {
            // Whatever else the window shows has a share of it only if it is a needle too.
            let seen = depths.iter().any(|&depth| depth < position && position - depth < window);
            assert!(seen || sliding.iter().all(|&x| x == 0.0), "class {class} at {}: {sliding:?}", depths[class]);
            assert!(sliding[names[class]].abs() < 0.01 * full[names[class]], "class {class} at {}", depths[class]);
        }
    }
}
