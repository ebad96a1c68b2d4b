//! Whole models on the GPU against the CPU backend, and against themselves: alone and in a batch, with and without PDL and
//! graphs. They need a GPU, so `cargo test` counts these as ignored; `make test-gpu` runs them.

#![cfg(feature = "cuda")]

mod cpu_support;
mod gpu_support;

use std::sync::Arc;

use cpu_support::{Kind, Random, configs, weights};
use flint_rs::{
    cancel::Cancel,
    checkpoint::{Checkpoint, DType},
    config::FlintConfig,
    cpu::{self, Precision},
    gpu::{GpuModel, RunOptions, SequenceId, Source},
    kernels::SampleStart,
    plan::{CHUNK_TOKENS, Limits, Path},
    sampling::SamplingParams,
    tokenizer::{ControlTokens, Tokenizer},
    weights::Weights,
};
use gpu_support::{bits, cpu_logits, decode_logits, five_layers_diverge_no_more_than_the_cpu, load};
use rayon::prelude::*;

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn small_models_of_every_type_say_what_the_cpu_says() {
    let mut random = Random::fresh();
    for kind in Kind::ALL {
        for config in configs(kind.block() > 1) {
            let weights = weights(&mut random, &config, kind);
            let tokens = random.tokens(200, config.vocab_size);
            let mut model = load(Source::Weights(&weights), 1, CHUNK_TOKENS);
            assert!(matches!(model.plan().path(), Path::General { .. }));
            let found = decode_logits(&mut model, &tokens);
            let expected = cpu_logits(&weights, Precision::Bfloat16, cpu::Path::Reference, &tokens);
            let first = (0..200).find(|t| {
                let row = t * config.vocab_size..(t + 1) * config.vocab_size;
                bits(&found[row.clone()]) != bits(&expected[row])
            });
            assert_eq!(first, None, "{kind:?}, {config:?}: other bits than the reference's");
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn five_layers_at_full_width_diverge_from_fp32_no_more_than_the_cpu() {
    five_layers_diverge_no_more_than_the_cpu(decode_logits);
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn the_shipped_model_says_what_the_cpu_says() {
    // Where it was built, or where the bundle is run.
    let file = std::path::Path::new("python/flint_rs/models/flint-small.gguf");
    let built = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    let path = if built.exists() { built.as_path() } else { file };
    let checkpoint = Checkpoint::open(path).unwrap();
    let config = FlintConfig::from_checkpoint(&checkpoint).unwrap();
    let text = include_str!("data/heldout.txt");
    let tokens = Tokenizer::from_checkpoint(&checkpoint).unwrap().encode(text, ControlTokens::AsText).unwrap();
    let weights = Arc::new(Weights::bind(&checkpoint, config, &mut |_, _| {}, &Cancel::default()).unwrap());
    let mut model = load(Source::Weights(&weights), 1, CHUNK_TOKENS);

    let vocab = weights.config.vocab_size;
    let best = |logits: &[f32]| -> Vec<usize> {
        let best = |row: &[f32]| (0..vocab).max_by(|&a, &b| row[a].total_cmp(&row[b])).unwrap();
        logits.chunks_exact(vocab).map(best).collect()
    };
    let texts: Vec<&[u32]> = tokens.chunks_exact(1100).take(5).collect();
    // The reference has one thread, so each text gets one.
    let references: Vec<Vec<f32>> = (texts.par_iter())
        .map(|tokens| cpu_logits(&weights, Precision::Bfloat16, cpu::Path::Reference, tokens))
        .collect();
    let (mut equal, mut same_bits, mut read) = (0, 0, 0);
    for (tokens, expected) in texts.iter().zip(&references) {
        let found = decode_logits(&mut model, tokens);
        equal += best(&found).iter().zip(&best(expected)).filter(|(a, b)| a == b).count();
        let rows = found.chunks_exact(vocab).zip(expected.chunks_exact(vocab));
        same_bits += rows.filter(|(found, expected)| bits(found) == bits(expected)).count();
        read += tokens.len();
    }
    println!("of {read} tokens, {equal} have the same first choice, {same_bits} the same bits");
    assert_eq!(read, 5500, "the text is long enough");
    assert_eq!(same_bits, read);
}

/// Models of both paths and all formats that the device can make itself, with room for 8 sequences.
fn synthetic_models() -> Vec<(FlintConfig, DType)> {
    // Both have full and sliding layers, dense and mixed.
    let small = configs(true).pop().unwrap();
    let full_width = FlintConfig::flint(4, 1024);
    vec![
        (small.clone(), DType::F32),
        (small.clone(), DType::Bf16),
        (small, DType::Nvfp4),
        (full_width.clone(), DType::Bf16),
        (full_width, DType::Nvfp4),
    ]
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn weights_made_on_the_device_are_those_made_on_the_host() {
    let mut random = Random::fresh();
    for (config, dtype) in synthetic_models() {
        let tokens = random.tokens(20, config.vocab_size);
        let weights = Weights::synthetic(config.clone(), 9, dtype).unwrap();
        let uploaded = decode_logits(&mut load(Source::Weights(&weights), 1, CHUNK_TOKENS), &tokens);
        let made =
            decode_logits(&mut load(Source::Synthetic { config: &config, seed: 9, dtype }, 1, CHUNK_TOKENS), &tokens);
        assert!(bits(&uploaded) == bits(&made), "{dtype}, hidden size {}", config.hidden_size);
        let other =
            decode_logits(&mut load(Source::Synthetic { config: &config, seed: 10, dtype }, 1, CHUNK_TOKENS), &tokens);
        assert!(bits(&uploaded) != bits(&other));
    }
}

/// Feeds 8 sequences of different lengths, then runs them together; returns each one's logits, `[steps, V]`.
fn in_a_batch(model: &mut GpuModel, prompts: &[Vec<u32>], steps: usize) -> Vec<Vec<f32>> {
    let vocab = model.config().vocab_size;
    let ids: Vec<SequenceId> = prompts.iter().map(|_| model.add_sequence().unwrap()).collect();
    for (&id, prompt) in ids.iter().zip(prompts) {
        for &token in &prompt[..prompt.len() - steps] {
            model.forward(&[(id, token)]).unwrap();
        }
    }
    let mut logits = vec![Vec::new(); prompts.len()];
    for step in 0..steps {
        // Rows change places, and the last steps leave the first sequence out.
        let skip = usize::from(step >= steps / 2 && prompts.len() > 1);
        let mut order: Vec<usize> = (skip..prompts.len()).collect();
        order.rotate_left(step % prompts.len().min(3));
        let next = |&i: &usize| (ids[i], prompts[i][prompts[i].len() - steps + step]);
        let rows: Vec<_> = order.iter().map(next).collect();
        let found = model.forward(&rows).unwrap();
        for (&i, found) in order.iter().zip(found.chunks_exact(vocab)) {
            logits[i].extend_from_slice(found);
        }
    }
    for id in ids {
        model.remove_sequence(id);
    }
    logits
}

/// A sequence that goes to another row, takes a block there, and comes back: its first row's block table must follow.
#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn a_row_that_a_sequence_comes_back_to_knows_its_blocks() {
    let mut random = Random::fresh();
    for (config, dtype) in synthetic_models() {
        let mut model = load(Source::Synthetic { config: &config, seed: 5, dtype }, 2, CHUNK_TOKENS);
        let tokens = random.tokens(80, config.vocab_size);
        let (other, moving) = (model.add_sequence().unwrap(), model.add_sequence().unwrap());
        let mut found = Vec::new();
        for (step, &token) in tokens.iter().enumerate() {
            // Row 1, then row 0 over the border of a block, then row 1 again.
            if (60..70).contains(&step) {
                found.extend(model.forward(&[(moving, token)]).unwrap());
            } else {
                let both = model.forward(&[(other, tokens[0]), (moving, token)]).unwrap();
                found.extend_from_slice(&both[config.vocab_size..]);
            }
        }
        let alone =
            decode_logits(&mut load(Source::Synthetic { config: &config, seed: 5, dtype }, 1, CHUNK_TOKENS), &tokens);
        assert!(bits(&found) == bits(&alone), "{dtype}, hidden size {}", config.hidden_size);
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn a_sequence_is_the_same_alone_and_in_any_batch_however_it_is_launched() {
    const STEPS: usize = 12;
    let mut random = Random::fresh();
    for (config, dtype) in synthetic_models() {
        let mut model = load(Source::Synthetic { config: &config, seed: 3, dtype }, 8, CHUNK_TOKENS);
        let lengths = [1, 7, 52, 64, 100, 130, 300, 601];
        let prompts: Vec<Vec<u32>> = lengths.iter().map(|n| random.tokens(n + STEPS, config.vocab_size)).collect();
        let batch = in_a_batch(&mut model, &prompts, STEPS);
        for (prompt, batch) in prompts.iter().zip(&batch) {
            let alone = in_a_batch(&mut model, std::slice::from_ref(prompt), STEPS).remove(0);
            assert!(bits(&alone[..batch.len()]) == bits(batch), "{dtype}: {} tokens alone", prompt.len());
        }
        for (pdl, graphs) in [(false, true), (true, false), (false, false)] {
            model.set_options(RunOptions { pdl, graphs });
            let again = in_a_batch(&mut model, &prompts, STEPS);
            assert!(
                again.iter().map(|x| bits(x)).eq(batch.iter().map(|x| bits(x))),
                "{dtype}: PDL {pdl}, graphs {graphs}"
            );
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn the_decode_loop_feeds_itself_what_the_logits_say() {
    const TOKENS: usize = 150;
    let mut random = Random::fresh();
    let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    for (config, dtype) in synthetic_models() {
        let mut model = load(Source::Synthetic { config: &config, seed: 4, dtype }, 3, CHUNK_TOKENS);
        let vocab = config.vocab_size;
        let start = SampleStart::new(&greedy, 1, [&[], &[]], &[], vocab, 0).unwrap();
        let ids: Vec<_> = (0..3).map(|_| model.add_sequence().unwrap()).collect();
        // The rows begin at different positions of a block.
        for (row, &id) in ids.iter().enumerate() {
            for token in random.tokens(40 * row, vocab) {
                model.forward(&[(id, token)]).unwrap();
            }
        }
        let first = random.tokens(3, vocab);
        let rows: Vec<_> = ids.iter().zip(&first).map(|(&id, &token)| (id, token, &start)).collect();
        model.begin_decode(&rows).unwrap();
        let mut chosen = vec![first];
        while chosen.len() <= TOKENS {
            // The host knows the token of one step only when the next is on its way.
            if chosen.len() < TOKENS {
                model.continue_decode().unwrap();
            }
            let records = model.read_step().unwrap().expect("a step is on its way");
            chosen.push(records.iter().map(|record| record.sampled(&greedy, 0).unwrap().token_id).collect());
        }
        assert!(model.read_step().unwrap().is_none());

        // The first row began with nothing before it: fed the same tokens by the host, it has these as its largest logits.
        for id in ids {
            model.remove_sequence(id);
        }
        let id = model.add_sequence().unwrap();
        for step in 0..TOKENS {
            let logits = model.forward(&[(id, chosen[step][0])]).unwrap();
            let best = (0..vocab).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
            assert_eq!(best as u32, chosen[step + 1][0], "{dtype}, step {step}");
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn misuse_is_refused_and_changes_nothing() {
    let config = configs(true).swap_remove(0);
    let limits =
        Limits { sequences: 2, context_tokens: 5, vocab_tokens: config.vocab_size, chunk_tokens: CHUNK_TOKENS };
    let source = Source::Synthetic { config: &config, seed: 1, dtype: DType::Bf16 };
    let mut model = GpuModel::load(source, limits, RunOptions::default(), &mut |_, _| {}, &Cancel::default()).unwrap();
    let (a, b) = (model.add_sequence().unwrap(), model.add_sequence().unwrap());
    let text = |result: flint_rs::Result<Vec<f32>>| result.unwrap_err().to_string();
    let third = model.add_sequence().unwrap_err().to_string();
    assert_eq!(third, "another sequence is not available: all 2 sequences of the plan are in use");
    assert_eq!(text(model.forward(&[])), "rows: expected 1 to 2, found 0");
    assert_eq!(text(model.forward(&[(a, 97)])), "tokens: expected ids below 97, found 97");
    assert!(text(model.forward(&[(a, 1), (a, 2)])).starts_with("rows[1]: expected each sequence once"));
    assert_eq!((model.sequence_len(a), model.sequence_len(b)), (0, 0));
    for token in 0..5 {
        model.forward(&[(a, token)]).unwrap();
    }
    assert_eq!(text(model.forward(&[(b, 1), (a, 5)])), "rows[1]: expected at most 5, found 6 positions");
    assert_eq!((model.sequence_len(a), model.sequence_len(b)), (5, 0));
    model.remove_sequence(a);
    assert!(text(model.forward(&[(a, 1)])).starts_with("rows[0]: expected a sequence of this model"));
    assert!(model.add_sequence().is_ok());
    // The ring has four lines.
    model.remove_sequence(b);
    let c = model.add_sequence().unwrap();
    let start = SampleStart::new(&SamplingParams::default(), 1, [&[], &[]], &[], 97, 0).unwrap();
    model.begin_decode(&[(c, 1, &start)]).unwrap();
    for _ in 0..3 {
        model.continue_decode().unwrap();
    }
    assert!(model.continue_decode().unwrap_err().to_string().starts_with("continue_decode: expected at most 3"));
    model.read_step().unwrap().unwrap();
    model.continue_decode().unwrap();
    model.read_step().unwrap().unwrap();
    assert!(model.continue_decode().unwrap_err().to_string().starts_with("rows[0]: expected at most 5"));
}
