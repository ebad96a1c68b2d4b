//! Steps of more than 8 rows on the GPU: against each row decoded alone, and against themselves in other company. They
//! need a GPU, so `cargo test` counts these as ignored; `make test-gpu` runs them.

#![cfg(feature = "cuda")]

mod cpu_support;
mod gpu_support;

use cpu_support::{Random, mean_kl};
use flint_rs::{
    cancel::Cancel,
    gpu::{GpuModel, RunOptions, SequenceId},
    kernels::SampleStart,
    plan::Path,
    sampling::SamplingParams,
};
use gpu_support::{KL_BETWEEN_RUNS, bits, load, models, synthetic};

/// Sequences of the largest step here.
const MANY: usize = 40;
/// Of those, the ones that a smaller step has too.
const FEW: usize = 12;
/// Steps that a test compares.
const STEPS: usize = 6;

/// Lengths around the borders of blocks and of the window, the first ones being the most different.
fn prompts(random: &mut Random, vocab: usize) -> Vec<Vec<u32>> {
    let edges = [1, 2, 63, 64, 65, 511, 512, 513, 514, 600, 1100, 30];
    let length = |i: usize| edges.get(i).copied().unwrap_or(37 * i % 700 + 1);
    (0..MANY).map(|i| random.tokens(length(i) + STEPS, vocab)).collect()
}

/// Sequences with all but the last tokens of their prompts in the cache.
fn read(model: &mut GpuModel, prompts: &[Vec<u32>]) -> Vec<SequenceId> {
    let one = |prompt: &Vec<u32>| {
        let id = model.add_sequence().unwrap();
        model.prefill(id, &prompt[..prompt.len() - STEPS], &mut |_, _| {}, &Cancel::default()).unwrap();
        id
    };
    prompts.iter().map(one).collect()
}

fn remove(model: &mut GpuModel, ids: Vec<SequenceId>) {
    for id in ids {
        model.remove_sequence(id);
    }
}

/// The last steps of `prompts` together; each one's logits, `[STEPS, V]`. Rows change places from step to step.
fn together(model: &mut GpuModel, prompts: &[Vec<u32>]) -> Vec<Vec<f32>> {
    let vocab = model.config().vocab_size;
    let ids = read(model, prompts);
    let mut logits = vec![Vec::new(); prompts.len()];
    for step in 0..STEPS {
        let mut order: Vec<usize> = (0..prompts.len()).collect();
        order.rotate_left(step * 5 % prompts.len());
        let rows: Vec<_> = order.iter().map(|&i| (ids[i], prompts[i][prompts[i].len() - STEPS + step])).collect();
        let found = model.forward(&rows).unwrap();
        for (&i, row) in order.iter().zip(found.chunks_exact(vocab)) {
            logits[i].extend_from_slice(row);
        }
    }
    remove(model, ids);
    logits
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn a_row_among_many_says_what_it_says_alone() {
    let mut random = Random::fresh();
    for (config, dtype) in models() {
        let mut model = load(synthetic(&config, dtype), MANY, 8192);
        let prompts = prompts(&mut random, config.vocab_size);
        let many = together(&mut model, &prompts);
        let alone: Vec<Vec<f32>> =
            prompts.iter().flat_map(|prompt| together(&mut model, std::slice::from_ref(prompt))).collect();
        assert!(many.iter().flatten().all(|x| x.is_finite()));
        if matches!(model.plan().path(), Path::General { .. }) {
            // The same kernels.
            assert!(many.iter().zip(&alone).all(|(a, b)| bits(a) == bits(b)), "{dtype}");
            continue;
        }
        let kl: Vec<f64> = alone.iter().zip(&many).map(|(a, b)| mean_kl(a, b, config.vocab_size)).collect();
        let mean = kl.iter().sum::<f64>() / kl.len() as f64;
        let (row, worst) = kl.iter().copied().enumerate().max_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
        println!("{dtype}: KL {mean:.2e}, at most {worst:.2e} in row {row}");
        assert!(mean <= KL_BETWEEN_RUNS, "{dtype}: {mean}");
        // Of a few tokens, not a mean over many.
        assert!(worst <= 20.0 * KL_BETWEEN_RUNS, "{dtype}, row {row}: {worst}");
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn a_row_has_the_same_bits_in_every_large_step_however_it_is_launched() {
    let mut random = Random::fresh();
    for (config, dtype) in models() {
        // With chunks of fewer tokens than a step has rows, the buffers of both are those of the step.
        for chunk_tokens in [8192, 16] {
            let mut model = load(synthetic(&config, dtype), MANY, chunk_tokens);
            let prompts = prompts(&mut random, config.vocab_size);
            let many = together(&mut model, &prompts);
            for few in [9, FEW, 16, 17, 33] {
                let found = together(&mut model, &prompts[..few]);
                for (i, (a, b)) in many.iter().zip(&found).enumerate() {
                    assert!(bits(a) == bits(b), "{dtype}: row {i} among {few} and among {MANY}");
                }
            }
            for (pdl, graphs) in [(false, true), (true, false), (false, false)] {
                model.set_options(RunOptions { pdl, graphs });
                let again = together(&mut model, &prompts);
                assert!(
                    again.iter().zip(&many).all(|(a, b)| bits(a) == bits(b)),
                    "{dtype}: PDL {pdl}, graphs {graphs}"
                );
            }
        }
    }
}

/// What the decode loop chooses for each of `prompts`, every other row by chance.
fn choose(model: &mut GpuModel, prompts: &[Vec<u32>], steps: usize) -> Vec<Vec<u32>> {
    let vocab = model.config().vocab_size;
    let params = |row: usize| SamplingParams {
        temperature: if row.is_multiple_of(2) { 0.0 } else { 1.0 },
        repetition_penalty: if row.is_multiple_of(3) { 1.1 } else { 1.0 },
        ..SamplingParams::default()
    };
    let ids = read(model, prompts);
    let starts: Vec<SampleStart> = (0..prompts.len())
        .map(|row| SampleStart::new(&params(row), row as u64, [&prompts[row], &[]], &[], vocab, 0).unwrap())
        .collect();
    let rows: Vec<_> =
        (ids.iter().zip(prompts).zip(&starts)).map(|((&id, prompt), start)| (id, prompt[0], start)).collect();
    model.begin_decode(&rows).unwrap();
    let mut chosen = vec![Vec::new(); prompts.len()];
    for step in 0..steps {
        if step + 1 < steps {
            model.continue_decode().unwrap();
        }
        let records = model.read_step().unwrap().expect("a step is on its way");
        for (row, record) in records.iter().enumerate() {
            chosen[row].push(record.sampled(&params(row), step).unwrap().token_id);
        }
    }
    remove(model, ids);
    chosen
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn the_decode_loop_of_many_rows_feeds_itself() {
    const TOKENS: usize = 80;
    let mut random = Random::fresh();
    for (config, dtype) in models() {
        let mut model = load(synthetic(&config, dtype), MANY, 8192);
        let (prompts, vocab) = (prompts(&mut random, config.vocab_size), config.vocab_size);
        let chosen = choose(&mut model, &prompts, TOKENS);
        assert!(choose(&mut model, &prompts[..FEW], TOKENS) == chosen[..FEW], "{dtype}: tokens depend on the company");

        // The same tokens from the host: their logits have what a greedy row chose on top.
        let ids = read(&mut model, &prompts);
        for step in 0..TOKENS {
            let token = |row: usize| if step == 0 { prompts[row][0] } else { chosen[row][step - 1] };
            let rows: Vec<_> = ids.iter().enumerate().map(|(row, &id)| (id, token(row))).collect();
            let logits = model.forward(&rows).unwrap();
            for (row, logits) in logits.chunks_exact(vocab).enumerate() {
                if row.is_multiple_of(2) && !row.is_multiple_of(3) {
                    let best = (0..vocab).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap();
                    assert_eq!(best as u32, chosen[row][step], "{dtype}, row {row}, step {step}");
                }
            }
        }
        remove(&mut model, ids);
    }
}

/// More kinds of steps than graphs are kept, and prompts between them.
#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn steps_of_every_size_follow_each_other() {
    let mut random = Random::fresh();
    for (config, dtype) in models() {
        let mut model = load(synthetic(&config, dtype), MANY, 64);
        let vocab = config.vocab_size;
        let prompts = prompts(&mut random, vocab);
        let run = |model: &mut GpuModel| {
            let ids = read(model, &prompts);
            let mut found = Vec::new();
            for rows in (1..=MANY).chain((1..=MANY).rev()) {
                let rows: Vec<_> = ids[..rows].iter().map(|&id| (id, 5)).collect();
                found.extend(bits(&model.forward(&rows).unwrap()[..vocab]));
                if let Some(&id) = ids.last().filter(|_| rows.len() < MANY) {
                    model.prefill_batch(&[(id, &prompts[0][..3])]).unwrap();
                }
            }
            remove(model, ids);
            found
        };
        let first = run(&mut model);
        model.set_options(RunOptions { pdl: true, graphs: false });
        assert!(run(&mut model) == first, "{dtype}");
    }
}
