//! The sampler against plain f64 definitions.

#![allow(clippy::float_cmp, reason = "ties and exact values are what is tested")]

use std::collections::{BTreeMap, BTreeSet};

use flint_rs::{
    Error,
    sampling::{MAX_LOGPROBS, Sampler, SamplingParams, TokenLogprobs},
};
use proptest::prelude::*;

/// Nothing but the model's distribution.
fn plain() -> SamplingParams {
    SamplingParams { top_k: 0, top_p: 1.0, seed: Some(1), ..SamplingParams::default() }
}

fn sampler(params: &SamplingParams, prompt: &[u32], vocab_size: usize) -> Sampler {
    Sampler::new(params, prompt, &[], vocab_size).unwrap()
}

/// The first token of a request.
fn first(params: &SamplingParams, prompt: &[u32], logits: &[f32]) -> u32 {
    sampler(params, prompt, logits.len()).sample(logits).unwrap().token_id
}

/// All first tokens that 4000 seeds give: every token of more than a few thousandths.
fn support(params: &SamplingParams, prompt: &[u32], logits: &[f32]) -> Vec<u32> {
    let params = |seed| SamplingParams { seed: Some(seed), ..params.clone() };
    let ids: BTreeSet<u32> = (0..4000).map(|seed| first(&params(seed), prompt, logits)).collect();
    ids.into_iter().collect()
}

/// The definition: softmax of logits / temperature, `min_p`, `top_k`, `top_p`, each renormalised, in f64.
fn distribution(logits: &[f32], params: &SamplingParams) -> Vec<f64> {
    let scaled: Vec<f64> = logits.iter().map(|l| f64::from(*l) / f64::from(params.temperature)).collect();
    let max = scaled.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|a, b| logits[*b].partial_cmp(&logits[*a]).unwrap().then(a.cmp(b)));
    let mut p: Vec<f64> = scaled.iter().map(|s| (s - max).exp()).collect();
    for w in &mut p {
        if *w < f64::from(params.min_p) {
            *w = 0.0;
        }
    }
    if params.top_k > 0 {
        for id in &order[(params.top_k as usize).min(logits.len())..] {
            p[*id] = 0.0;
        }
    }
    let total: f64 = p.iter().sum();
    let mut mass = 0.0;
    for id in order {
        if mass >= f64::from(params.top_p) * total {
            p[id] = 0.0;
        }
        mass += p[id];
    }
    let total: f64 = p.iter().sum();
    p.iter().map(|w| w / total).collect()
}

/// What chi-square with `df` degrees of freedom exceeds with a chance of 1e-4 (Wilson and Hilferty).
fn chi_square_limit(df: f64) -> f64 {
    let v = 2.0 / (9.0 * df);
    df * (1.0 - v + 3.719 * v.sqrt()).powi(3)
}

/// Whether `counts` of draws may come from `p`: chi-square, with tokens of less than 10 expected draws taken together.
fn assert_fits(counts: &[u64], p: &[f64], what: &str) {
    let draws = counts.iter().sum::<u64>() as f64;
    let mut cells = vec![(0.0, 0.0)];
    for (id, (count, p)) in counts.iter().zip(p).enumerate() {
        assert!(*p > 0.0 || *count == 0, "{what}: token {id} cannot be drawn");
        let cell = (*count as f64, p * draws);
        if cell.1 < 10.0 {
            cells[0].0 += cell.0;
            cells[0].1 += cell.1;
        } else {
            cells.push(cell);
        }
    }
    cells.retain(|(_, expected)| *expected >= 1.0);
    let chi_square: f64 = cells.iter().map(|(count, expected)| (count - expected).powi(2) / expected).sum();
    let limit = chi_square_limit(cells.len() as f64 - 1.0);
    assert!(cells.len() > 1 && chi_square < limit, "{what}: {chi_square} >= {limit} over {} cells", cells.len());
}

#[test]
fn draws_follow_the_distribution() {
    // Odd sizes, ties, a wide range, a masked token.
    let logits: Vec<f32> = (0..37).map(|i| ((i * 29 % 37) as f32 / 6.0).floor() - 2.5).collect();
    let mut masked = logits.clone();
    masked[36] = f32::NEG_INFINITY;
    let few = [0.0, 3.0, -1.0, 2.5, 2.5];
    let sets = [
        plain(),
        SamplingParams { temperature: 0.7, ..plain() },
        SamplingParams { temperature: 3.0, ..plain() },
        SamplingParams { top_k: 5, ..plain() },
        SamplingParams { top_p: 0.8, ..plain() },
        SamplingParams { min_p: 0.1, ..plain() },
        SamplingParams { temperature: 1.5, top_k: 11, top_p: 0.9, min_p: 0.05, ..plain() },
        SamplingParams { top_k: -1, top_p: 0.95, ..plain() },
        SamplingParams { seed: Some(2), ..SamplingParams::default() },
    ];
    for logits in [&logits[..], &masked, &few] {
        for params in &sets {
            let p = distribution(logits, params);
            let mut along = vec![0; logits.len()];
            let mut sampler = sampler(params, &[], logits.len());
            for _ in 0..20_000 {
                along[sampler.sample(logits).unwrap().token_id as usize] += 1;
            }
            assert_fits(&along, &p, &format!("positions, {params:?}"));
            let mut across = vec![0; logits.len()];
            for seed in 0..20_000 {
                let params = SamplingParams { seed: Some(seed), ..params.clone() };
                across[first(&params, &[], logits) as usize] += 1;
            }
            assert_fits(&across, &p, &format!("seeds, {params:?}"));
        }
    }
}

#[test]
fn neighbouring_positions_and_seeds_are_independent() {
    let logits = [0.0; 4];
    let params = |seed| SamplingParams { seed: Some(seed), ..plain() };
    let (mut positions, mut seeds) = (vec![0; 16], vec![0; 16]);
    for seed in 0..20_000 {
        let mut sampler = sampler(&params(2 * seed), &[], 4);
        let here = sampler.sample(&logits).unwrap().token_id;
        positions[(here * 4 + sampler.sample(&logits).unwrap().token_id) as usize] += 1;
        seeds[(here * 4 + first(&params(2 * seed + 1), &[], &logits)) as usize] += 1;
    }
    assert_fits(&positions, &[1.0 / 16.0; 16], "pairs of positions");
    assert_fits(&seeds, &[1.0 / 16.0; 16], "pairs of seeds");
}

#[test]
fn a_large_vocabulary_is_drawn_evenly() {
    let v = 150_144;
    let logits = vec![1.5; v];
    let mut counts = vec![0; 8];
    let mut sampler = sampler(&plain(), &[], v);
    for _ in 0..200 {
        counts[sampler.sample(&logits).unwrap().token_id as usize * 8 / v] += 1;
    }
    assert_fits(&counts, &[1.0 / 8.0; 8], "eighths of the vocabulary");
}

#[test]
fn top_k_comes_before_top_p() {
    // 0.4 0.3 0.2 0.1. Of the first two, 0.4 / 0.7 = 0.57 is enough for 0.5; of all, 0.4 is not.
    let logits = [0.4f32, 0.3, 0.2, 0.1].map(f32::ln);
    assert_eq!(support(&SamplingParams { top_p: 0.5, ..plain() }, &[], &logits), [0, 1]);
    assert_eq!(support(&SamplingParams { top_k: 2, top_p: 0.5, ..plain() }, &[], &logits), [0]);
}

#[test]
fn min_p_comes_before_top_p() {
    // Without the last ten, 0.5 / 0.8 is enough for 0.6.
    let logits: Vec<f32> = [0.5, 0.3].into_iter().chain([0.02; 10]).map(f32::ln).collect();
    assert_eq!(support(&SamplingParams { top_p: 0.6, ..plain() }, &[], &logits), [0, 1]);
    assert_eq!(support(&SamplingParams { top_p: 0.6, min_p: 0.1, ..plain() }, &[], &logits), [0]);
}

#[test]
fn temperature_comes_before_min_p_and_top_p() {
    let logits = [0.6f32, 0.3, 0.1].map(f32::ln);
    // At 2: 0.473 0.334 0.193, so the second is 0.7 of the first, not 0.5.
    let params = SamplingParams { min_p: 0.6, ..plain() };
    assert_eq!(support(&params, &[], &logits), [0]);
    assert_eq!(support(&SamplingParams { temperature: 2.0, ..params }, &[], &logits), [0, 1]);
    let params = SamplingParams { top_p: 0.58, ..plain() };
    assert_eq!(support(&params, &[], &logits), [0]);
    assert_eq!(support(&SamplingParams { temperature: 2.0, ..params }, &[], &logits), [0, 1]);
}

#[test]
fn penalties_come_before_temperature() {
    // Presence 2 takes the seen token from 2 to 0, under 1: after a temperature of 0.5 it would go from 4 to 2, level.
    let params = SamplingParams { temperature: 0.5, presence_penalty: 2.0, top_k: 1, ..plain() };
    let mut sampler = sampler(&params, &[], 2);
    assert_eq!(sampler.sample(&[2.0, 1.0]).unwrap().token_id, 0);
    assert_eq!(sampler.sample(&[2.0, 1.0]).unwrap().token_id, 1);
    // And before top_k and top_p: the penalised token falls out of the first two.
    let params = SamplingParams { top_k: 2, repetition_penalty: 4.0, ..plain() };
    assert_eq!(support(&params, &[0], &[3.0, 2.9, 2.8]), [1, 2]);
    let params = SamplingParams { top_p: 0.6, repetition_penalty: 10.0, ..plain() };
    assert_eq!(support(&params, &[0], &[9.0, 2.8, 2.8]), [1, 2]);
}

#[test]
fn bias_comes_before_penalties() {
    // (1 + 3) / 4 = 1 is under 1.5; 1 / 4 + 3 would be above.
    let params =
        SamplingParams { temperature: 0.0, repetition_penalty: 4.0, logit_bias: BTreeMap::from([(0, 3.0)]), ..plain() };
    assert_eq!(first(&params, &[0], &[1.0, 1.5]), 1);
    assert_eq!(first(&params, &[], &[1.0, 1.5]), 0);
}

/// The exact logit that token 0 has after penalties: greedy picks it over a rival with the next lower logit, and the
/// rival with the next higher one.
fn assert_penalised(params: &SamplingParams, prompt: &[u32], output: usize, logit: f32, expected: f32) {
    for (rival, chosen) in [(expected.next_down(), 0), (expected.next_up(), 1)] {
        let params = SamplingParams { temperature: 0.0, ..params.clone() };
        let mut sampler = sampler(&params, prompt, 2);
        for _ in 0..output {
            assert_eq!(sampler.sample(&[0.0, f32::NEG_INFINITY]).unwrap().token_id, 0);
        }
        let found = sampler.sample(&[logit, rival]).unwrap().token_id;
        assert_eq!(found, chosen, "{logit} after {output} tokens, expecting {expected}");
    }
}

#[test]
fn penalties_have_their_exact_values() {
    let repetition = SamplingParams { repetition_penalty: 1.3, ..plain() };
    assert_penalised(&repetition, &[], 0, 2.0, 2.0);
    assert_penalised(&repetition, &[0, 0], 0, 2.0, 2.0 / 1.3);
    assert_penalised(&repetition, &[], 1, 2.0, 2.0 / 1.3);
    assert_penalised(&repetition, &[0], 3, -2.0, -2.0 * 1.3);
    let frequency = SamplingParams { frequency_penalty: 0.3, ..plain() };
    assert_penalised(&frequency, &[0, 0], 0, 2.0, 2.0);
    assert_penalised(&frequency, &[0], 3, 2.0, 2.0 - 0.3 * 3.0);
    let presence = SamplingParams { presence_penalty: -1.7, ..plain() };
    assert_penalised(&presence, &[0], 0, 2.0, 2.0);
    assert_penalised(&presence, &[], 1, 2.0, 2.0 + 1.7);
    assert_penalised(&presence, &[0], 5, 2.0, 2.0 + 1.7);
    let all = SamplingParams { repetition_penalty: 0.5, frequency_penalty: -0.25, presence_penalty: 1.1, ..plain() };
    assert_penalised(&all, &[0], 2, 1.1, 1.1 / 0.5 + 0.25 * 2.0 - 1.1);
}

#[test]
fn allowed_banned_and_min_tokens_mask() {
    let logits = [5.0, 4.0, 3.0, 2.0];
    let params = SamplingParams { allowed_token_ids: Some(vec![1, 3, 3]), ..plain() };
    assert_eq!(support(&params, &[], &logits), [1, 3]);
    let params = SamplingParams { banned_token_ids: vec![0, 2], ..params };
    assert_eq!(support(&params, &[], &logits), [1, 3]);
    let params = SamplingParams { banned_token_ids: vec![1], ..params };
    assert_eq!(support(&params, &[], &logits), [3]);
    // Bias lifts no mask.
    let params = SamplingParams { logit_bias: BTreeMap::from([(0, 100.0), (1, 100.0)]), ..params };
    assert_eq!(support(&params, &[], &logits), [3]);

    let params = SamplingParams { temperature: 0.0, min_tokens: 2, stop_token_ids: vec![1], ..plain() };
    let mut sampler = Sampler::new(&params, &[], &[0], 4).unwrap();
    let tokens: Vec<u32> = (0..3).map(|_| sampler.sample(&logits).unwrap().token_id).collect();
    assert_eq!(tokens, [2, 2, 0]);
}

#[test]
fn seeds_make_requests_reproducible_on_their_own() {
    let logits: Vec<f32> = (0..1000).map(|i| ((i * 7919) % 1000) as f32 / 400.0).collect();
    let params = |seed| SamplingParams { seed: Some(seed), ..plain() };
    let run = |seed, others: usize| -> Vec<u32> {
        let mut mine = sampler(&params(seed), &[], 1000);
        let mut other = sampler(&plain(), &[], 1000);
        (0..50)
            .map(|_| {
                for _ in 0..others {
                    other.sample(&logits).unwrap();
                }
                mine.sample(&logits).unwrap().token_id
            })
            .collect()
    };
    assert_eq!(run(7, 0), run(7, 3));
    assert_ne!(run(7, 0), run(8, 0));
    assert_ne!(run(7, 0), run(7 + (1 << 32), 0));
    let tokens: BTreeSet<u32> = run(7, 0).into_iter().collect();
    assert!(tokens.len() > 25, "positions differ: {tokens:?}");

    let free = || sampler(&SamplingParams { seed: None, ..plain() }, &[], 1000);
    let (mut a, b) = (free(), free());
    assert_ne!(a.seed(), b.seed());
    let mut again = sampler(&params(a.seed()), &[], 1000);
    for _ in 0..20 {
        assert_eq!(a.sample(&logits).unwrap(), again.sample(&logits).unwrap());
    }
    assert_eq!(sampler(&params(7), &[], 1000).seed(), 7);
}

/// Tokens found by a plain script in f64: every version, machine and device must give these for this seed.
#[test]
fn draws_do_not_change() {
    let logits: Vec<f32> = (0..500).map(|i| ((i * 7919) % 500) as f32 / 50.0).collect();
    let run = |params: &SamplingParams| -> Vec<u32> {
        let mut sampler = sampler(params, &[], 500);
        (0..8).map(|_| sampler.sample(&logits).unwrap().token_id).collect()
    };
    assert_eq!(
        run(&SamplingParams { seed: Some(42), ..SamplingParams::default() }),
        [247, 173, 321, 321, 426, 142, 389, 210]
    );
    assert_eq!(
        run(&SamplingParams { seed: Some(42), temperature: 2.0, top_p: 0.9, ..plain() }),
        [241, 167, 328, 335, 420, 144, 373, 206]
    );
}

fn logit() -> impl Strategy<Value = f32> {
    prop_oneof![
        8 => -8.0f32..8.0,
        4 => prop::sample::select(vec![0.0, -0.0, 1.0, 2.5, -3.0]),
        1 => prop::sample::select(vec![f32::NEG_INFINITY, f32::MIN, f32::MAX, f32::MIN_POSITIVE, -1e-45, 3e38, -3e38]),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn temperature_0_is_top_k_1_is_the_lowest_of_the_largest(
        mut logits in prop::collection::vec(logit(), 1..200),
        seed: u64,
        temperature in prop::sample::select(vec![1e-45f32, 1e-6, 0.7, 1.0, 100.0, f32::MAX]),
    ) {
        logits[0] = logits[0].max(-100.0);
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let expected = logits.iter().position(|l| *l == max).unwrap() as u32;
        let greedy = SamplingParams { temperature: 0.0, seed: Some(seed), ..SamplingParams::default() };
        prop_assert_eq!(first(&greedy, &[], &logits), expected);
        let one = SamplingParams { temperature, top_k: 1, top_p: 1.0, seed: Some(seed), ..SamplingParams::default() };
        prop_assert_eq!(first(&one, &[], &logits), expected);
        let narrow = SamplingParams { temperature, top_p: 1e-45, seed: Some(seed), ..plain() };
        prop_assert_eq!(first(&narrow, &[], &logits), expected);
    }

    /// Whatever the values, a token comes from the kept set; f64 and integers may differ on the border by rounding.
    #[test]
    fn tokens_come_from_the_kept_set(
        mut logits in prop::collection::vec(logit(), 1..200),
        seed: u64,
        temperature in 0.05f32..4.0,
        top_k in -1i64..50,
        top_p in 0.01f32..=1.0,
        min_p in prop_oneof![Just(0.0f32), 0.0f32..=1.0],
    ) {
        logits[0] = logits[0].max(-100.0);
        let params = SamplingParams { temperature, top_k, top_p, min_p, seed: Some(seed), ..plain() };
        let slack = SamplingParams {
            top_p: (top_p * 1.00001).min(1.0),
            min_p: min_p * 0.99999,
            ..params.clone()
        };
        let id = first(&params, &[], &logits) as usize;
        prop_assert!(distribution(&logits, &slack)[id] > 0.0, "token {}", id);
    }

    #[test]
    fn log_probabilities_are_those_of_the_raw_logits(
        mut logits in prop::collection::vec(logit(), 1..300),
        chosen: prop::sample::Index,
        top_n in 0usize..25,
    ) {
        logits[0] = logits[0].max(-100.0);
        let chosen = chosen.index(logits.len());
        let found = TokenLogprobs::new(&logits, chosen as u32, top_n).unwrap();
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|l| (f64::from(*l) - f64::from(max)).exp()).sum();
        let logprob = |id: usize| f64::from(logits[id]) - f64::from(max) - sum.ln();
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].partial_cmp(&logits[*a]).unwrap().then(a.cmp(b)));
        let rank = |id: usize| order.iter().position(|other| *other == id).unwrap() + 1;
        for (found, id) in found.top.iter().zip(&order).chain([(&found.chosen, &chosen)]) {
            prop_assert_eq!((found.token_id as usize, found.rank), (*id, rank(*id)));
            let expected = logprob(*id) as f32;
            let close = (found.logprob - expected).abs() <= 1e-6 + expected.abs() * 1e-6;
            prop_assert!(close || found.logprob == expected, "{} for {}", found.logprob, expected);
        }
        let possible = logits.iter().filter(|l| **l > f32::NEG_INFINITY).count();
        prop_assert_eq!(found.top.len(), top_n.min(possible));
    }
}

#[test]
fn log_probabilities_ignore_what_shapes_the_draw() {
    let logits = [2.0, 1.0, 0.0, 1.0];
    let params = SamplingParams {
        temperature: 0.3,
        banned_token_ids: vec![0],
        logit_bias: BTreeMap::from([(3, 50.0)]),
        logprobs: Some(2),
        ..plain()
    };
    let sampled = sampler(&params, &[], 4).sample(&logits).unwrap();
    assert_eq!(sampled.token_id, 3);
    let found = sampled.logprobs.unwrap();
    assert_eq!(found, TokenLogprobs::new(&logits, 3, 2).unwrap());
    assert_eq!((found.chosen.rank, found.top[0].token_id, found.top[1].token_id), (3, 0, 1));
    assert_eq!(sampler(&plain(), &[], 4).sample(&logits).unwrap().logprobs, None);
}

#[test]
fn one_possible_token_is_chosen_whatever_the_parameters() {
    let mut logits = vec![f32::NEG_INFINITY; 100];
    logits[57] = -1e30;
    for params in [
        plain(),
        SamplingParams::default(),
        SamplingParams { temperature: 0.0, ..plain() },
        SamplingParams { min_p: 1.0, top_p: 0.01, ..plain() },
    ] {
        assert_eq!(support(&params, &[], &logits), [57]);
    }
}

/// The field that an error names.
fn field<T: std::fmt::Debug>(result: flint_rs::Result<T>) -> String {
    match result.unwrap_err() {
        Error::Value { field, .. } => field,
        other => panic!("{other:?}"),
    }
}

#[test]
fn logits_that_are_no_distribution_are_refused() {
    for params in [plain(), SamplingParams { top_k: 2, ..plain() }, SamplingParams { temperature: 0.0, ..plain() }] {
        let mut sampler = sampler(&params, &[], 3);
        for logits in [[0.0, f32::NAN, 1.0], [f32::INFINITY, 0.0, 1.0], [f32::NEG_INFINITY; 3], [-f32::NAN, 1.0, 2.0]] {
            assert_eq!(field(sampler.sample(&logits)), "logits");
            assert_eq!(field(TokenLogprobs::new(&logits, 0, 1)), "logits");
        }
        assert_eq!(field(sampler.sample(&[0.0; 2])), "logits");
        // The failed calls took no place in the output.
        let again = first(&params, &[], &[0.0, 0.5, 0.2]);
        assert_eq!(sampler.sample(&[0.0, 0.5, 0.2]).unwrap().token_id, again);
    }
    assert_eq!(field(TokenLogprobs::new(&[0.0; 3], 3, 1)), "token_id");
}

#[test]
fn a_request_that_leaves_no_token_is_told_why() {
    let refused = |params: SamplingParams, logits: [f32; 2]| {
        field(Sampler::new(&params, &[0, 1], &[1], 2).unwrap().sample(&logits))
    };
    let banned = SamplingParams { banned_token_ids: vec![0, 1], ..plain() };
    assert_eq!(refused(banned, [0.0; 2]), "banned_token_ids");
    let allowed = SamplingParams { allowed_token_ids: Some(vec![1]), min_tokens: 1, ..plain() };
    assert_eq!(refused(allowed.clone(), [0.0; 2]), "allowed_token_ids with min_tokens");
    let allowed = SamplingParams { min_tokens: 0, ..allowed };
    assert_eq!(refused(allowed, [0.0, f32::NEG_INFINITY]), "allowed_token_ids");
    for (penalty, logit) in [(1e-30, 1e30), (1e30, -1e30)] {
        let overflowing = SamplingParams { repetition_penalty: penalty, ..plain() };
        assert_eq!(refused(overflowing, [logit; 2]), "repetition_penalty");
    }
}

type Set = fn(&mut SamplingParams);

#[test]
fn every_field_is_checked() {
    let vocab_size = 10;
    SamplingParams::default().validate(vocab_size).unwrap();
    let refused: &[(&str, &[Set])] = &[
        ("temperature", &[|p| p.temperature = -0.1, |p| p.temperature = f32::NAN, |p| p.temperature = f32::INFINITY]),
        ("top_k", &[|p| p.top_k = -2, |p| p.top_k = i64::MIN]),
        ("top_p", &[|p| p.top_p = 0.0, |p| p.top_p = 1.01, |p| p.top_p = -0.5, |p| p.top_p = f32::NAN]),
        ("min_p", &[|p| p.min_p = -0.1, |p| p.min_p = 1.1, |p| p.min_p = f32::NAN]),
        (
            "repetition_penalty",
            &[
                |p| p.repetition_penalty = 0.0,
                |p| p.repetition_penalty = -1.0,
                |p| p.repetition_penalty = f32::INFINITY,
                |p| p.repetition_penalty = f32::NAN,
            ],
        ),
        ("frequency_penalty", &[|p| p.frequency_penalty = 2.1, |p| p.frequency_penalty = f32::NAN]),
        ("presence_penalty", &[|p| p.presence_penalty = -2.1, |p| p.presence_penalty = f32::NAN]),
        ("logit_bias", &[|p| _ = p.logit_bias.insert(10, 0.0)]),
        ("logit_bias[3]", &[|p| _ = p.logit_bias.insert(3, 100.5), |p| _ = p.logit_bias.insert(3, f32::NAN)]),
        ("allowed_token_ids", &[|p| p.allowed_token_ids = Some(vec![]), |p| p.allowed_token_ids = Some(vec![0, 10])]),
        ("banned_token_ids", &[|p| p.banned_token_ids = vec![10]]),
        ("stop_token_ids", &[|p| p.stop_token_ids = vec![u32::MAX]]),
        ("max_tokens", &[|p| p.max_tokens = Some(0)]),
        (
            "min_tokens",
            &[|p| {
                p.min_tokens = 6;
                p.max_tokens = Some(5);
            }],
        ),
        ("stop", &[|p| p.stop = vec!["a".into(), String::new()]]),
        ("logprobs", &[|p| p.logprobs = Some(MAX_LOGPROBS + 1)]),
        ("prompt_logprobs", &[|p| p.prompt_logprobs = Some(MAX_LOGPROBS + 1)]),
    ];
    for (name, cases) in refused {
        for set in *cases {
            let mut params = SamplingParams::default();
            set(&mut params);
            assert_eq!(field(params.validate(vocab_size)), *name, "{params:?}");
            assert_eq!(field(Sampler::new(&params, &[], &[], vocab_size).map(|_| ())), *name);
        }
    }
    let accepted: &[Set] = &[
        |p| p.temperature = 0.0,
        |p| p.top_k = -1,
        |p| p.top_k = i64::MAX,
        |p| p.top_p = 1.0,
        |p| p.min_p = 1.0,
        |p| p.repetition_penalty = 5.0,
        |p| p.frequency_penalty = -2.0,
        |p| _ = p.logit_bias.insert(9, -100.0),
        |p| p.logprobs = Some(MAX_LOGPROBS),
        |p| {
            p.min_tokens = 5;
            p.max_tokens = Some(5);
        },
    ];
    for set in accepted {
        let mut params = SamplingParams::default();
        set(&mut params);
        params.validate(vocab_size).unwrap();
        sampler(&params, &[], vocab_size).sample(&[0.5; 10]).unwrap();
    }
    assert_eq!(field(Sampler::new(&plain(), &[10], &[], vocab_size).map(|_| ())), "prompt");
    assert_eq!(field(Sampler::new(&plain(), &[], &[10], vocab_size).map(|_| ())), "end_token_ids");
    let message = SamplingParams { top_p: 1.5, ..plain() }.validate(vocab_size).unwrap_err().to_string();
    assert_eq!(message, "top_p: expected a number in (0, 1], found 1.5");
}
