//! Prompts on the GPU: against decoding token by token, and against themselves in other chunks and other company. They need
//! a GPU, so `cargo test` counts these as ignored; `make test-gpu` runs them.

#![cfg(feature = "cuda")]

mod cpu_support;
mod gpu_support;

use cpu_support::{Random, configs, mean_kl};
use flint_rs::{
    cancel::Cancel,
    checkpoint::{Checkpoint, DType},
    config::FlintConfig,
    error::Error,
    gpu::{GpuModel, RunOptions, SequenceId, Source},
    kernels::SampleStart,
    plan::{CHUNK_TOKENS, Limits, Path},
    sampling::SamplingParams,
    tokenizer::{ControlTokens, Tokenizer},
    weights::Weights,
};
use gpu_support::{
    KL_BETWEEN_RUNS, bits, decode_logits, five_layers_diverge_no_more_than_the_cpu, load, models, synthetic,
};

/// `[T, V]` by prefill, in pieces of so many tokens.
fn prompt_logits(model: &mut GpuModel, tokens: &[u32], piece: usize) -> Vec<f32> {
    let id = model.add_sequence().unwrap();
    let mut logits = Vec::new();
    let mut sink = |rows: &[f32]| {
        logits.extend_from_slice(rows);
        Ok(())
    };
    for tokens in tokens.chunks(piece) {
        model.prompt_logits(id, tokens, &mut sink, &Cancel::default()).unwrap();
    }
    assert_eq!(model.sequence_len(id), tokens.len());
    model.remove_sequence(id);
    logits
}

fn prefill(model: &mut GpuModel, id: SequenceId, tokens: &[u32]) {
    model.prefill(id, tokens, &mut |_, _| {}, &Cancel::default()).unwrap();
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn a_prompt_says_what_decoding_it_says() {
    let mut random = Random::fresh();
    for (config, dtype) in models() {
        let mut model = load(synthetic(&config, dtype), 1, CHUNK_TOKENS);
        let tokens = random.tokens(1100, config.vocab_size);
        let (prompt, decoded) = (prompt_logits(&mut model, &tokens, 1100), decode_logits(&mut model, &tokens));
        assert!(prompt.iter().all(|x| x.is_finite()));
        let kl = mean_kl(&decoded, &prompt, config.vocab_size);
        println!("{dtype}, {}: KL {kl:.2e}", model.plan().path());
        if matches!(model.plan().path(), Path::General { .. }) {
            // The same kernels.
            assert!(bits(&prompt) == bits(&decoded), "{dtype}");
        } else {
            assert!(kl <= KL_BETWEEN_RUNS, "{dtype}: {kl}");
        }
        // What the prompt leaves is what decoding goes on from: the last token by decode, after the others by prefill.
        let id = model.add_sequence().unwrap();
        prefill(&mut model, id, &tokens[..1099]);
        let last = model.forward(&[(id, tokens[1099])]).unwrap();
        let expected = &decoded[1099 * config.vocab_size..];
        let kl = mean_kl(expected, &last, config.vocab_size);
        println!("{dtype}, the token after: KL {kl:.2e}");
        // One token, not a mean over many.
        assert!(kl <= 10.0 * KL_BETWEEN_RUNS, "{dtype}: {kl}");
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn five_layers_at_full_width_diverge_from_fp32_no_more_than_the_cpu() {
    five_layers_diverge_no_more_than_the_cpu(|model, tokens| prompt_logits(model, tokens, tokens.len()));
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn a_prompt_is_the_same_however_it_is_cut() {
    let mut random = Random::fresh();
    for (config, dtype) in models() {
        let vocab = config.vocab_size;
        let mut model = load(synthetic(&config, dtype), 1, CHUNK_TOKENS);
        let fast = matches!(model.plan().path(), Path::Fast(_));
        let tokens = random.tokens(if fast { 2100 } else { 400 }, vocab);
        let whole = prompt_logits(&mut model, &tokens, tokens.len());
        assert_eq!(whole.len(), tokens.len() * vocab);
        for piece in [1, 9, 63, 64, 65, 127, 513, 1000] {
            // One by one is slow: of those only the first.
            let n = if piece < 9 { 600.min(tokens.len()) } else { tokens.len() };
            let cut = prompt_logits(&mut model, &tokens[..n], piece);
            let first = (0..n).find(|t| bits(&cut[t * vocab..][..vocab]) != bits(&whole[t * vocab..][..vocab]));
            assert_eq!(first, None, "{dtype}, {}: pieces of {piece} differ", model.plan().path());
        }
        // What `prefill` leaves out of the last layer is not missed.
        let after = |model: &mut GpuModel, logits: bool| {
            let id = model.add_sequence().unwrap();
            if logits {
                model.prompt_logits(id, &tokens, &mut |_| Ok(()), &Cancel::default()).unwrap();
            } else {
                prefill(model, id, &tokens);
            }
            let found = model.forward(&[(id, 1)]).unwrap();
            model.remove_sequence(id);
            bits(&found)
        };
        assert!(after(&mut model, true) == after(&mut model, false), "{dtype}: with logits and without");
        // Chunks of the plan's own.
        let mut model = load(synthetic(&config, dtype), 1, 100);
        let cut = prompt_logits(&mut model, &tokens, tokens.len());
        assert!(bits(&cut) == bits(&whole), "{dtype}: chunks of 100");
        // Without the overlap of kernels.
        model.set_options(RunOptions { pdl: false, graphs: false });
        let cut = prompt_logits(&mut model, &tokens, tokens.len());
        assert!(bits(&cut) == bits(&whole), "{dtype}: without PDL");
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn a_prompt_is_the_same_in_any_company() {
    let mut random = Random::fresh();
    for (config, dtype) in models() {
        let mut model = load(synthetic(&config, dtype), 6, CHUNK_TOKENS);
        let most = model.plan().chunk().tokens;
        let vocab = config.vocab_size;
        // Two decode, four have prompts, of which two begin behind something; the last two tokens of each are decoded.
        let prompts: Vec<Vec<u32>> = [1, 200, 7, 64, 33, 120].iter().map(|n| random.tokens(n + 40, vocab)).collect();
        let alone: Vec<Vec<f32>> = prompts
            .iter()
            .map(|prompt| {
                let id = model.add_sequence().unwrap();
                let (read, rest) = prompt.split_at(prompt.len() - 2);
                prefill(&mut model, id, read);
                let logits = rest.iter().flat_map(|&token| model.forward(&[(id, token)]).unwrap()).collect();
                model.remove_sequence(id);
                logits
            })
            .collect();

        let ids: Vec<SequenceId> = prompts.iter().map(|_| model.add_sequence().unwrap()).collect();
        let read: Vec<&[u32]> = prompts.iter().map(|prompt| &prompt[..prompt.len() - 2]).collect();
        for i in [0, 1] {
            prefill(&mut model, ids[i], read[i]);
        }
        for (i, n) in [(2, 17), (3, 40)] {
            model.prefill_batch(&[(ids[i], &read[i][..n])]).unwrap();
        }
        let rows: Vec<_> = (0..2).map(|i| (ids[i], prompts[i][read[i].len()])).collect();
        let share = (most / 4).min(50);
        let mut done = [0, 0, 17, 40, 0, 0];
        let part = |i: usize, done: &mut [usize; 6]| {
            let end = read[i].len().min(done[i] + share);
            let tokens = &read[i][done[i]..end];
            done[i] = end;
            (ids[i], tokens)
        };
        let parts: Vec<_> = [4, 2, 5, 3].into_iter().map(|i| part(i, &mut done)).collect();
        let first = model.step(&rows, &parts).unwrap();
        while let Some(i) = (2..6).find(|&i| done[i] < read[i].len()) {
            let tokens = part(i, &mut done);
            model.prefill_batch(&[tokens]).unwrap();
        }
        let mut found: Vec<Vec<f32>> = vec![Vec::new(); 6];
        found[..2].iter_mut().zip(first.chunks_exact(vocab)).for_each(|(to, row)| to.extend_from_slice(row));
        // The rows of the mixed step are one ahead.
        for step in 0..2 {
            let order: Vec<usize> = (0..6).rev().filter(|&i| found[i].len() == step * vocab).collect();
            let rows: Vec<_> = order.iter().map(|&i| (ids[i], prompts[i][read[i].len() + step])).collect();
            let logits = model.forward(&rows).unwrap();
            for (&i, row) in order.iter().zip(logits.chunks_exact(vocab)) {
                found[i].extend_from_slice(row);
            }
        }
        for (i, (found, alone)) in found.iter().zip(&alone).enumerate() {
            assert!(bits(found) == bits(alone), "{dtype}, {}: sequence {i}", model.plan().path());
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn the_decode_loop_goes_on_beside_prompts() {
    let mut random = Random::fresh();
    let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    for (config, dtype) in models() {
        let vocab = config.vocab_size;
        let mut model = load(synthetic(&config, dtype), 3, CHUNK_TOKENS);
        let prompts = [random.tokens(30, vocab), random.tokens(200, vocab)];
        let start = SampleStart::new(&greedy, 1, [&[], &[]], &[], vocab, 0).unwrap();
        let mut run = |beside: bool| {
            let ids = [(); 3].map(|()| model.add_sequence().unwrap());
            prefill(&mut model, ids[0], &prompts[0]);
            model.begin_decode(&[(ids[0], 5, &start), (ids[2], 6, &start)]).unwrap();
            let mut pieces = prompts[1].chunks(30);
            let mut chosen = Vec::new();
            for _ in 0..20 {
                if beside && let Some(piece) = pieces.next() {
                    model.prefill_batch(&[(ids[1], piece)]).unwrap();
                }
                model.continue_decode().unwrap();
                let records = model.read_step().unwrap().unwrap();
                chosen.extend(records.iter().map(|record| record.sampled(&greedy, 0).unwrap().token_id));
            }
            while model.read_step().unwrap().is_some() {}
            if !beside {
                prefill(&mut model, ids[1], &prompts[1]);
            }
            let after = model.forward(&[(ids[1], 7)]).unwrap();
            for id in ids {
                model.remove_sequence(id);
            }
            (chosen, bits(&after))
        };
        assert!(run(true) == run(false), "{dtype}");
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn cancel_stops_at_the_border_of_a_chunk() {
    let mut random = Random::fresh();
    for (config, dtype) in models() {
        let mut model = load(synthetic(&config, dtype), 1, 60);
        let tokens = random.tokens(1001, config.vocab_size);
        let run = |model: &mut GpuModel, stop_at: usize| {
            let id = model.add_sequence().unwrap();
            let cancel = Cancel::default();
            let mut seen = Vec::new();
            let mut progress = |done, all| {
                assert_eq!(all, 1000);
                seen.push(done);
                if done >= stop_at {
                    cancel.cancel();
                }
            };
            let result = model.prefill(id, &tokens[..1000], &mut progress, &cancel);
            let done = model.sequence_len(id);
            if stop_at <= 1000 {
                assert!(matches!(result, Err(Error::Cancelled)));
                assert!(done.is_multiple_of(60) && done >= stop_at && done <= stop_at + 2 * 60, "{done} positions");
                prefill(model, id, &tokens[done..1000]);
            } else {
                result.unwrap();
                assert_eq!(seen, [(0..1000).step_by(60).collect(), vec![1000]].concat());
            }
            let logits = model.forward(&[(id, tokens[1000])]).unwrap();
            model.remove_sequence(id);
            bits(&logits)
        };
        let whole = run(&mut model, usize::MAX);
        for stop_at in [0, 60, 480] {
            assert!(run(&mut model, stop_at) == whole, "{dtype}, cancelled at {stop_at}");
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn misuse_is_refused_and_changes_nothing() {
    let config = configs(true).swap_remove(0);
    let limits = Limits { sequences: 2, context_tokens: 100, vocab_tokens: config.vocab_size, chunk_tokens: 50 };
    let source = synthetic(&config, DType::Bf16);
    let mut model = GpuModel::load(source, limits, RunOptions::default(), &mut |_, _| {}, &Cancel::default()).unwrap();
    let (a, b) = (model.add_sequence().unwrap(), model.add_sequence().unwrap());
    let tokens = vec![1; 101];
    let text = |result: flint_rs::Result<()>| result.unwrap_err().to_string();
    assert_eq!(text(model.prefill_batch(&[(a, &[97])])), "tokens: expected ids below 97, found 97");
    assert_eq!(
        text(model.prefill_batch(&[(a, &tokens[..51])])),
        "parts: expected 1 to 50, and some of each part, found 51 tokens"
    );
    assert!(text(model.prefill_batch(&[(a, &[1]), (b, &[])])).starts_with("parts: expected"));
    assert!(text(model.prefill_batch(&[(a, &[1]), (a, &[2])])).starts_with("parts[1]: expected each sequence once"));
    let all = model.prefill(a, &tokens, &mut |_, _| {}, &Cancel::default());
    assert_eq!(text(all), "parts[0]: expected at most 100, found 101 positions");
    let both = model.step(&[(a, 1)], &[(a, &[2])]).unwrap_err().to_string();
    assert!(both.starts_with("parts[0]: expected each sequence once"), "{both}");
    assert_eq!((model.sequence_len(a), model.sequence_len(b)), (0, 0));
    prefill(&mut model, a, &[]);
    prefill(&mut model, a, &tokens[..100]);
    assert_eq!(model.sequence_len(a), 100);
    model.remove_sequence(a);
    assert!(text(model.prefill_batch(&[(a, &[1])])).starts_with("parts[0]: expected a sequence of this model"));
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn the_shipped_model_reads_prompts_as_it_decodes() {
    // Where it was built, or where the bundle is run.
    let file = std::path::Path::new("python/flint_rs/models/flint-small.gguf");
    let built = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    let path = if built.exists() { built.as_path() } else { file };
    let checkpoint = Checkpoint::open(path).unwrap();
    let config = FlintConfig::from_checkpoint(&checkpoint).unwrap();
    let text = concat!(include_str!("../README.md"), include_str!("../CONTRIBUTING.md"));
    let mut tokens = Tokenizer::from_checkpoint(&checkpoint).unwrap().encode(text, ControlTokens::AsText).unwrap();
    tokens.truncate(700);
    let weights = Weights::bind(&checkpoint, config, &mut |_, _| {}, &Cancel::default()).unwrap();
    let mut model = load(Source::Weights(&weights), 1, CHUNK_TOKENS);
    let n = tokens.len();
    let (prompt, decoded) = (prompt_logits(&mut model, &tokens, n), decode_logits(&mut model, &tokens));
    assert!(bits(&prompt) == bits(&decoded));
}
