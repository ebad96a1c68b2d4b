//! Chunks of prompts in plans, against figures that were counted by hand from Flint's dimensions, and against each other.

use flint_rs::{
    checkpoint::DType,
    config::{FlintConfig, Mlp},
    kernels::{Args, PrefillTile},
    kv::{KvBlocks, SequenceBlocks},
    plan::{Bases, CHUNK_TOKENS, Card, Limits, Operation, Part, Path, Plan, Step, Totals, Types},
};
use proptest::prelude::*;

const LIMITS: Limits =
    Limits { sequences: 8, context_tokens: 262_144, vocab_tokens: 150_144, chunk_tokens: CHUNK_TOKENS };
const BASES: Bases = Bases { weights: 1 << 50, buffers: 1 << 44, kv_full: 1 << 46, kv_window: 1 << 48, records: 0 };

fn plan(config: &FlintConfig, dtype: DType, limits: Limits) -> Plan {
    Plan::new(config, &Types::of_synthetic(config, dtype).unwrap(), limits, Card::H200).unwrap()
}

fn flint() -> Plan {
    plan(&FlintConfig::flint(49, 150_144), DType::Nvfp4, LIMITS)
}

/// A width that no tile has.
fn general(limits: Limits) -> Plan {
    let config = FlintConfig { hidden_size: 320, vocab_size: 150_144, ..FlintConfig::flint(3, 16) };
    plan(&config, DType::Bf16, limits)
}

fn part(slot: usize, first: usize, tokens: usize) -> Part {
    Part { slot, first, tokens }
}

fn operations(steps: &[Step]) -> Vec<Operation> {
    steps.iter().map(|step| step.operation).collect()
}

#[test]
fn the_largest_chunk_is_what_a_step_can_have() {
    assert_eq!(flint().chunk().tokens, 8192);
    let small = Limits { context_tokens: 1000, sequences: 3, ..LIMITS };
    assert_eq!(plan(&FlintConfig::flint(3, 150_144), DType::Bf16, small).chunk().tokens, 3000);
    assert_eq!(general(LIMITS).chunk().tokens, 64);
    assert_eq!(general(Limits { chunk_tokens: 10, ..LIMITS }).chunk().tokens, 10);
    // A chunk of all sequences has a block for every position, whatever was there before.
    for tokens in [1, 64, 1000, 8192] {
        let pools =
            plan(&FlintConfig::flint(3, 150_144), DType::Bf16, Limits { chunk_tokens: tokens, ..LIMITS }).pools();
        assert_eq!(pools.window_blocks, 8 * 10 + tokens.div_ceil(64));
    }
}

proptest! {
    /// Any mix of chunks and steps of decode: no pool ever runs dry, whatever positions the sequences are at.
    #[test]
    fn pools_suffice_for_any_mix(
        chunk_tokens in 1..400_usize,
        sequences in 1..9_usize,
        steps in proptest::collection::vec((any::<bool>(), proptest::collection::vec(1..400_usize, 8)), 1..60),
    ) {
        let config = FlintConfig::flint(3, 1024);
        let limits = Limits { sequences, context_tokens: 2500, vocab_tokens: 1024, chunk_tokens };
        let pools = plan(&config, DType::Bf16, limits).pools();
        let mut blocks = KvBlocks::new(&config, pools.full_blocks as u32, pools.window_blocks as u32);
        let mut all: Vec<SequenceBlocks> = (0..sequences).map(|_| SequenceBlocks::default()).collect();
        for (decode, wanted) in steps {
            let mut left = if decode { sequences } else { chunk_tokens };
            for (sequence, n) in all.iter_mut().zip(wanted) {
                let n = if decode { 1 } else { n }.min(left).min(limits.context_tokens - sequence.len());
                left -= n;
                if n > 0 {
                    blocks.append(sequence, n).unwrap();
                }
            }
            if !decode {
                for sequence in &mut all {
                    blocks.trim(sequence);
                }
            }
        }
        for sequence in all {
            blocks.free(sequence);
        }
    }
}

#[test]
fn inputs_are_tokens_and_where_they_stand() {
    let tokens: Vec<u32> = (0..100).collect();
    let parts = [(part(3, 70, 5), &tokens[..5]), (part(0, 0, 33), &tokens[5..38])];
    let plan = flint();
    let inputs = plan.chunk().inputs;
    let words = plan.chunk_inputs(&parts);
    let at = |address: u64| ((address - inputs.tokens) / 4) as usize;
    assert_eq!(words[..38], tokens[..38]);
    assert!(inputs.tiles.is_multiple_of(16) && words.len() <= inputs.words);
    let tiles = PrefillTile::cut([(3, 70..75), (0, 0..33)]);
    let expected: Vec<u32> = tiles.into_iter().flat_map(PrefillTile::words).collect();
    assert_eq!(words[at(inputs.tiles)..], expected);

    let plan = general(LIMITS);
    let inputs = plan.chunk().inputs;
    let words = plan.chunk_inputs(&parts);
    let at = |address: u64| ((address - inputs.tokens) / 4) as usize;
    assert_eq!(words[..38], tokens[..38]);
    let (positions, slots) = (&words[at(inputs.positions)..], &words[at(inputs.slots)..]);
    assert_eq!(positions[..38], (70..75).chain(0..33).collect::<Vec<u32>>());
    assert_eq!(slots[..38], [[3; 5].as_slice(), &[0; 33]].concat());
    // The most that a chunk can have fits, however it lies.
    for (first, tokens) in [(15, 8192), (1, 8191), (0, 1)] {
        let ids = vec![7; tokens];
        let plan = flint();
        assert!(plan.chunk_inputs(&[(part(0, first, tokens), &ids)]).len() <= plan.chunk().inputs.words);
    }
    let ids = vec![7; 1024];
    let eight: Vec<_> = (0..8).map(|slot| (part(slot, 15, 1024), ids.as_slice())).collect();
    assert!(flint().chunk_inputs(&eight).len() <= flint().chunk().inputs.words);
}

#[test]
fn flint_runs_its_kernels_in_order() {
    use Operation::{
        Attention, Choose, Combine, DenseDown, DenseUp, Embed, ExpertsDown, ExpertsUp, Gather, Group, LmHead, Norm,
        Output, Qkv, QkvFinish, Router, SharedDown, SharedUp,
    };
    let plan = flint();
    let attention = [Qkv, QkvFinish, Attention, Output, Norm];
    let dense = [DenseUp, DenseDown, Norm];
    let moe = [Router, Choose, Group, Gather, ExpertsUp, ExpertsDown, SharedUp, SharedDown, Combine];
    let steps = plan.chunk_steps(&BASES, &[part(0, 0, 8192)], true);
    let mut expected = vec![Embed, Norm];
    for layer in &plan.config().layers {
        expected.extend(attention);
        expected.extend(if layer.mlp == Mlp::Dense { &dense[..] } else { &moe });
    }
    assert_eq!(operations(&steps), expected);
    assert_eq!(steps.len(), 2 + 49 * 5 + 2 * 3 + 47 * 9);
    assert_eq!(operations(&plan.logits_steps(&BASES, 8000, 192)), [Norm, LmHead]);
    // Without logits nothing follows the last keys and values.
    assert_eq!(operations(&plan.chunk_steps(&BASES, &[part(0, 0, 8192)], false)), expected[..expected.len() - 12]);
    // The same launches for a chunk of one token and of several sequences, but that the shared expert is in those of the
    // others.
    expected.retain(|operation| ![SharedUp, SharedDown].contains(operation));
    for parts in [vec![part(0, 5, 1)], vec![part(1, 5, 100), part(0, 900, 30)]] {
        assert_eq!(operations(&plan.chunk_steps(&BASES, &parts, true)), expected);
    }
}

#[test]
fn operations_and_bytes_are_those_of_the_dimensions() {
    let plan = flint();
    let flops = |parts: &[Part]| -> u64 {
        plan.chunk_steps(&BASES, parts, true).iter().map(|step| plan.chunk_flops(step, parts)).sum()
    };
    let parts = [part(0, 0, 8192)];
    let steps = plan.chunk_steps(&BASES, &parts, true);
    // Parameters that a token meets.
    let projections = 49 * 2048 * (4096 + 2 * 512 + 4096) + 2 * 3 * 6144 * 2048;
    let moe = 47 * 2048 * (3 * 1024 + 6 * 3 * 512 + 256);
    // 14 layers see everything before, 35 see 513 positions; two products of 128 values, 32 heads.
    let pairs = 14 * (8192 * 8193 / 2) + 35 * (513 * 514 / 2 + (8192 - 513) * 513);
    let expected = 2 * 8192 * (projections + moe) + 2 * 2 * 128 * 32 * pairs;
    assert_eq!(flops(&parts), expected);
    assert!((46e12..47e12).contains(&(expected as f64)), "{expected}");
    // Few tokens go through other kernels.
    let pairs = 49 * (100 * 101 / 2);
    assert_eq!(flops(&[part(0, 0, 100)]), 2 * 100 * (projections + moe) + 2 * 2 * 128 * 32 * pairs);

    // Every packed weight but the embedding and the LM head once, at least.
    let bytes = Totals::of(&steps).bytes;
    let weights = plan.memory().weights_bytes as u64;
    assert!(bytes > weights - 3 * 150_144 * 2048, "{bytes} for {weights}");

    // A chunk behind others costs attention more, and nothing else.
    let late = [part(0, 100_000, 8192)];
    for (early, late_step) in steps.iter().zip(plan.chunk_steps(&BASES, &late, true)) {
        let (a, b) = (plan.chunk_flops(early, &parts), plan.chunk_flops(&late_step, &late));
        assert!(if early.operation == Operation::Attention { a < b } else { a == b }, "{:?}", early.operation);
    }
}

#[test]
fn memory_grows_with_the_chunk() {
    let workspace = |chunk_tokens: usize, sequences: usize| {
        let limits = Limits { chunk_tokens, sequences, ..LIMITS };
        plan(&FlintConfig::flint(49, 150_144), DType::Nvfp4, limits).memory().workspace_bytes
    };
    // What a token takes: residual, delta, normed; 6 sorted rows with their activations, the shared expert's, the router's
    // logits in three parts, the choice.
    let token = 3 * 4096 + 6 * (4096 + 1024) + 2048 + 4096 + 3 * 1024 + 3 * 24 + 2 * 32;
    let grown = workspace(8192, 1) - workspace(4096, 1);
    assert!(grown.abs_diff(4096 * token) < 4096 * token / 50, "{grown} for {}", 4096 * token);
    assert!(workspace(8192, 1) < 600 << 20, "{}", workspace(8192, 1));
}

/// Where arguments say that something lies in the workspace, and how long it is.
fn regions(args: &Args, config: &FlintConfig) -> Vec<(&'static str, u64, u64)> {
    let d = config.hidden_size as u64;
    let sorted = |rows: u32| u64::from(rows) * d * 2;
    match args {
        Args::PrefillEmbed(a) => {
            let bytes = u64::from(a.rows) * d * 2;
            vec![
                ("tokens", a.tokens, 4 * u64::from(a.rows)),
                ("delta", a.delta, bytes),
                ("residual", a.residual, bytes),
            ]
        }
        Args::PrefillNorm(a) => vec![("normed", a.normed, u64::from(a.panel_rows) * d * 2)],
        Args::PrefillKv(a) => vec![("tiles", a.tiles, 16)],
        Args::PrefillAttention(a) => vec![
            ("attn", a.attn, u64::from(a.panel_rows) * 4096 * 2),
            ("counter", a.counter, 4),
            ("qkv", a.qkv, u64::from(a.panel_rows) * 5120 * 2),
        ],
        Args::PrefillRoute(a) => {
            let rows = u64::from(a.rows);
            let bits = rows.div_ceil(32) * 1024;
            vec![
                ("logits", a.logits, rows * 3 * 1024),
                ("chosen", a.experts, rows * 24),
                ("weights", a.weights, rows * 24),
                ("masks", a.masks, bits),
            ]
        }
        Args::PrefillGroup(a) => {
            let bits = u64::from(a.rows).div_ceil(32) * 1024;
            let tiles = 256 + 6 * u64::from(a.rows / a.most_columns);
            vec![("places", a.places, bits), ("expert tiles", a.tiles, 16 * tiles), ("n_tiles", a.n_tiles, 4)]
        }
        Args::PrefillGather(a) => {
            assert!(a.sorted_rows.is_multiple_of(8) && a.sorted_rows >= 6 * a.rows + 256 * 7);
            vec![("sorted", a.sorted, u64::from(a.rows) * 24), ("sorted rows", a.out, sorted(a.sorted_rows))]
        }
        Args::PrefillCombine(a) => vec![("shared", a.shared, u64::from(a.rows) * d * 2)],
        Args::PrefillCombineNorm(a) => {
            let bytes = u64::from(a.rows) * d * 2;
            vec![("shared", a.shared, bytes), ("residual", a.residual, bytes)]
        }
        _ => vec![],
    }
}

#[test]
fn buffers_that_are_in_use_together_do_not_meet() {
    let plan = flint();
    let workspace = BASES.buffers..BASES.buffers + plan.memory().workspace_bytes as u64;
    for parts in [vec![part(0, 0, 8192)], vec![part(0, 3, 8191)], vec![part(0, 0, 9)], vec![part(0, 7, 1)]] {
        let steps = plan.chunk_steps(&BASES, &parts, true);
        for layer in [1, 2] {
            // Of attention, and of what follows: they take turns with the same bytes.
            for attention in [true, false] {
                let in_half = |step: &&Step| {
                    let first = matches!(step.operation, Operation::QkvFinish | Operation::Attention);
                    step.layer == layer && step.operation != Operation::Norm && first == attention
                };
                let always = [&steps[0], &steps[1]];
                let mut all: Vec<_> = (steps.iter().filter(in_half).chain(always))
                    .flat_map(|step| regions(&step.args, plan.config()))
                    .collect();
                let act = steps.iter().filter(in_half).find_map(|step| match &step.args {
                    Args::PrefillExperts(a) if step.operation == Operation::ExpertsUp => {
                        Some(("act", a.out, u64::from(a.sorted_rows) * 1024))
                    }
                    _ => None,
                });
                all.extend(act);
                all.sort_by_key(|region| region.1);
                all.dedup_by_key(|region| region.1);
                for pair in all.windows(2) {
                    assert!(pair[0].1 + pair[0].2 <= pair[1].1, "{} and {}", pair[0].0, pair[1].0);
                }
                for (name, first, len) in all {
                    assert!(workspace.start <= first && first + len <= workspace.end, "{name}");
                }
            }
        }
        // What the experts make takes the place of their inputs, and the sum reads it there.
        for step in &steps {
            let y = match &step.args {
                Args::PrefillCombine(combine) => Some(combine.y),
                Args::PrefillCombineNorm(combine) => Some(combine.y),
                _ => None,
            };
            if let Some(y) = y {
                let down =
                    steps.iter().rfind(|other| other.layer == step.layer && other.operation == Operation::ExpertsDown);
                let Some(Args::PrefillExperts(down)) = down.map(|step| &step.args) else { panic!("no experts") };
                assert_eq!(down.out, y);
                assert_ne!(down.out, down.x);
            }
        }
    }
    let logits = plan.logits_steps(&BASES, 8000, 192);
    let Args::PrefillLinear(head) = &logits[1].args else { panic!("no product") };
    assert_eq!(head.out, BASES.buffers + plan.chunk_logits());
    assert!(head.out + 4 * 256 * 150_144 <= workspace.end);
    let Args::PrefillNorm(norm) = &logits[0].args else { panic!("no norm") };
    assert!(norm.residual + 192 * 4096 <= head.out, "logits lie on the residual stream");
}

#[test]
fn the_general_path_takes_rows_of_one_sequence() {
    let plan = general(LIMITS);
    assert!(matches!(plan.path(), Path::General { .. }));
    let steps = plan.chunk_steps(&BASES, &[part(2, 100, 60), part(5, 0, 4)], true);
    let inputs = plan.chunk().inputs.at(BASES.buffers);
    for step in &steps {
        match &step.args {
            Args::GeneralEmbed(args) => assert_eq!((args.tokens, step.launch.grid[1]), (inputs.tokens, 64)),
            Args::GeneralQkvFinish(args) => assert_eq!((args.positions, args.slots), (inputs.positions, inputs.slots)),
            Args::GeneralAttention(args) => {
                assert_eq!((args.positions, args.slots, step.launch.grid[1]), (inputs.positions, inputs.slots, 64));
            }
            Args::GeneralProject(args) => assert_eq!((args.n, step.launch.grid[1]), (64, 16)),
            _ => {}
        }
    }
    let keys = plan.chunk_steps(&BASES, &[part(2, 100, 60)], false);
    assert_eq!(keys.last().map(|step| (step.operation, step.layer)), Some((Operation::QkvFinish, 2)));
    let Args::GeneralNorm(norm) = &plan.logits_steps(&BASES, 10, 54)[0].args else { panic!("no norm") };
    let Args::GeneralNorm(first) = &plan.logits_steps(&BASES, 0, 64)[0].args else { panic!("no norm") };
    assert_eq!(norm.residual_in - first.residual_in, 10 * 320 * 2);
    assert_eq!(norm.normed, first.normed);
}

#[test]
fn a_printed_plan_has_chunks() {
    let text = flint().to_string();
    for part in
        ["chunk of 8192 at position 0: 664 kernels", "chunk of 8192 at position 253952", "TFLOP", "prefill_norm"]
    {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    println!("{text}");
    for (plan, line) in [
        (flint(), "chunk      8192 tokens of prompts at a time\n"),
        (
            plan(&FlintConfig::flint(3, 1024), DType::Bf16, Limits { chunk_tokens: 2048, vocab_tokens: 9, ..LIMITS }),
            "chunk      2048 tokens of prompts at a time, where 8192 would suit 132 multiprocessors\n",
        ),
        (general(LIMITS), "chunk      64 tokens of prompts at a time\n"),
    ] {
        let text = plan.to_string();
        assert!(text.contains(line), "{line} is not in\n{text}");
    }
}
