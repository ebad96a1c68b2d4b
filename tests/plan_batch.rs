//! Steps of more than 8 rows: their launches, where they read and write, and what memory a sequence takes.

use flint_rs::{
    checkpoint::DType,
    config::{FlintConfig, Mlp},
    kernels::{Args, decode_attention_partial_bytes},
    plan::{Bases, CHUNK_TOKENS, Card, Ending, Limits, Operation, Plan, Step, Totals, Types},
};

const LIMITS: Limits =
    Limits { sequences: 256, context_tokens: 2048, vocab_tokens: 150_000, chunk_tokens: CHUNK_TOKENS };
const BASES: Bases = Bases { weights: 1 << 50, buffers: 1 << 44, kv_full: 1 << 46, kv_window: 1 << 48, records: 0 };

fn plan(limits: Limits) -> Plan {
    let config = FlintConfig::flint(49, 150_144);
    Plan::new(&config, &Types::of_synthetic(&config, DType::Nvfp4).unwrap(), limits, Card::H200).unwrap()
}

fn steps(plan: &Plan, rows: usize, ending: Ending) -> Vec<Step> {
    plan.steps(&BASES, &vec![1023; rows], ending)
}

fn operations(steps: &[Step]) -> Vec<Operation> {
    steps.iter().map(|step| step.operation).collect()
}

#[test]
fn many_rows_take_the_products_of_prefill_and_the_attention_of_decode() {
    use Operation::{
        Attention, Choose, Combine, DenseDown, DenseUp, Embed, ExpertsDown, ExpertsUp, Gather, Group, LmHead, Norm,
        Output, Qkv, Router, Sample,
    };
    let plan = plan(LIMITS);
    let dense = [Qkv, Attention, Output, Norm, DenseUp, DenseDown, Norm];
    // The shared expert is in the launches of the others.
    let moe = [Qkv, Attention, Output, Norm, Router, Choose, Group, Gather, ExpertsUp, ExpertsDown, Combine];
    let mut expected = vec![Embed, Norm];
    for layer in &plan.config().layers {
        expected.extend(if layer.mlp == Mlp::Dense { &dense[..] } else { &moe });
    }
    for rows in [9, 64, 256] {
        assert_eq!(operations(&steps(&plan, rows, Ending::Nothing)), expected);
        assert_eq!(operations(&steps(&plan, rows, Ending::Logits))[expected.len()..], [LmHead]);
        let all = steps(&plan, rows, Ending::Token);
        assert_eq!(operations(&all)[expected.len()..], [LmHead, Sample]);
        assert_eq!(all.len(), 2 + 2 * 7 + 47 * 11 + 2);
        // The last layer's output goes through the final norm only if logits follow.
        let combined = |ending| {
            let steps = steps(&plan, rows, ending);
            let combines = steps.iter().rfind(|step| step.operation == Combine);
            combines.map(|step| step.kernel.symbol)
        };
        assert_eq!(combined(Ending::Nothing), Some(c"prefill_combine"));
        assert_eq!(combined(Ending::Logits), Some(c"prefill_combine_norm"));
        for step in &all {
            assert!(step.kernel.pdl, "{:?}", step.operation);
            let name = step.kernel.symbol.to_str().unwrap();
            let decode = matches!(step.operation, Embed | Attention | Sample);
            assert!(name.starts_with(if decode { "decode_" } else { "prefill_" }), "{name}");
        }
    }
    // What reads before it waits: one kernel stands between it and who wrote that.
    let order = operations(&steps(&plan, 9, Ending::Nothing));
    for too_close in [[Group, ExpertsUp], [Choose, Gather], [Gather, Combine]] {
        assert!(order.windows(2).all(|pair| pair != too_close));
    }
}

#[test]
fn steps_of_up_to_eight_rows_are_what_they_are_without_more_sequences() {
    let shape = |step: &Step| (step.operation, step.layer, step.kernel, step.launch);
    let (few, many) = (plan(Limits { sequences: 8, ..LIMITS }), plan(LIMITS));
    for rows in 1..=8 {
        let [few, many] = [&few, &many].map(|plan| steps(plan, rows, Ending::Token));
        assert_eq!(few.len(), 295);
        assert!(few.iter().map(shape).eq(many.iter().map(shape)), "{rows} rows");
        let attention = |step: &Step| match step.args {
            Args::DecodeAttention(args) => assert_eq!(args.panel_rows, 0),
            _ => assert!(step.kernel.symbol.to_str().unwrap().starts_with("decode_")),
        };
        many.iter().for_each(attention);
    }
}

#[test]
fn the_number_of_rows_alone_makes_a_step() {
    let plan = plan(LIMITS);
    for rows in [9, 100, 256] {
        let [early, late] = [0, 2047].map(|position| plan.steps(&BASES, &vec![position; rows], Ending::Token));
        for (early, late) in early.iter().zip(&late) {
            let shape = |step: &Step| (step.kernel, step.launch.grid, step.launch.shared_bytes);
            assert_eq!(shape(early), shape(late));
            assert_eq!(format!("{:?}", early.args), format!("{:?}", late.args));
        }
    }
}

/// What a launch reads and what it writes, as far as a step hands it on: address and bytes of each.
fn hand_over(args: &Args, rows: u64) -> [Vec<(u64, u64)>; 2] {
    let row = |width: u64| rows * width * 2;
    match args {
        Args::DecodeEmbed(a) => [vec![], vec![(a.delta, row(2048)), (a.residual, row(2048)), (a.rope, rows * 512)]],
        Args::PrefillNorm(a) => {
            let residual = (a.residual, row(2048));
            [vec![(a.delta, row(2048)), residual], vec![residual, (a.normed, u64::from(a.panel_rows) * 4096)]]
        }
        Args::DecodeAttention(a) => {
            assert!(a.panel_rows.is_multiple_of(8) && u64::from(a.panel_rows) >= rows && u64::from(a.rows) == rows);
            let rope = (a.rope != 0).then_some((a.rope, rows * 512));
            let reads = [Some((a.qkv, row(5120))), rope].into_iter().flatten().collect();
            [reads, vec![(a.attn, u64::from(a.panel_rows) * 8192)]]
        }
        Args::PrefillCombine(a) => {
            [vec![(a.y, 0), (a.shared, 0), (a.sorted, 0), (a.weights, 0)], vec![(a.delta, row(2048))]]
        }
        Args::PrefillCombineNorm(a) => {
            let residual = (a.residual, row(2048));
            let normed = (a.normed, u64::from(a.panel_rows) * 4096);
            [vec![(a.y, 0), (a.shared, 0), (a.sorted, 0), (a.weights, 0), residual], vec![residual, normed]]
        }
        Args::PrefillRoute(a) => [
            vec![(a.logits, 0)],
            vec![(a.experts, rows * 24), (a.weights, rows * 24), (a.masks, rows.div_ceil(32) * 1024)],
        ],
        Args::PrefillGroup(a) => {
            let tiles = (a.tiles, 16 * (256 + 6 * rows / u64::from(a.most_columns)));
            [vec![(a.masks, 0)], vec![(a.places, rows.div_ceil(32) * 1024), tiles, (a.n_tiles, 4)]]
        }
        Args::PrefillGather(a) => {
            let out = (a.out, u64::from(a.sorted_rows) * 4096);
            [vec![(a.x, 0), (a.experts, 0), (a.masks, 0), (a.places, 0)], vec![(a.sorted, rows * 24), out]]
        }
        Args::PrefillExperts(a) => {
            assert!(u64::from(a.shared_rows) == rows && u64::from(a.panel_rows) == rows.next_multiple_of(8));
            let width = if a.shared_scales == 0 { 2048 } else { 1024 };
            let reads = vec![(a.x, 0), (a.tiles, 0), (a.n_tiles, 0), (a.shared_x, row(3072 - width))];
            [reads, vec![(a.out, 0), (a.shared_out, row(width))]]
        }
        _ => [vec![], vec![]],
    }
}

#[test]
fn every_kernel_finds_what_the_one_before_left() {
    let plan = plan(LIMITS);
    let workspace = BASES.buffers..BASES.buffers + plan.memory().workspace_bytes as u64;
    for rows in [9, 64, 255, 256] {
        let mut written = Vec::new();
        for step in steps(&plan, rows, Ending::Token) {
            let [reads, writes] = hand_over(&step.args, rows as u64);
            let mut reads: Vec<u64> = reads.iter().map(|read| read.0).collect();
            match &step.args {
                Args::PrefillLinear(args) => {
                    assert_eq!((args.rows, args.panel_rows), (rows as u32, rows.next_multiple_of(8) as u32));
                    reads.push(args.x);
                    written.push(args.out);
                }
                Args::DecodeSample(args) => {
                    reads.push(args.logits);
                    assert_eq!(args.ring_rows, 256);
                    // What the next step's embedding reads.
                    assert_eq!((args.tokens, args.positions), {
                        let b = plan.buffers().at(BASES.buffers);
                        (b.tokens, b.positions)
                    });
                }
                _ => {}
            }
            for read in reads {
                assert!(written.contains(&read), "{:?} reads what nobody wrote", step.operation);
            }
            for (address, bytes) in writes {
                assert!(workspace.start <= address && address + bytes <= workspace.end, "{:?}", step.operation);
                written.push(address);
            }
        }
    }
}

#[test]
fn what_rows_hold_does_not_meet() {
    // Few tokens of a chunk, so that the rows of a step are what buffers are sized by.
    for limits in [LIMITS, Limits { chunk_tokens: 10, ..LIMITS }] {
        let plan = plan(limits);
        let b = plan.buffers();
        let mut regions = vec![
            ("tokens", b.tokens, 256 * 4),
            ("positions", b.positions, 256 * 4),
            ("full blocks", b.blocks_full, 256 * 4 * b.table_stride as u64),
            ("window blocks", b.blocks_window, 256 * 4 * b.table_stride as u64),
            ("partial", b.attn_partial, decode_attention_partial_bytes(256, 4) as u64),
            ("counters", b.attn_counters, 256 * 16),
            ("rope", b.rope, 256 * 512),
            ("logits", b.logits, 256 * 4 * 150_144),
            ("sampler's rows", b.sample_rows, 256 * 64),
            ("masks", b.sample_masks, 256 * 2 * 4 * 150_000_u64.div_ceil(32)),
            ("bias", b.sample_bias, 256 * 4 * 150_000),
            ("seen", b.sample_seen, 256 * 4 * 150_000),
            ("workspace", b.sample_workspace, 256 * 4 * 150_000),
        ];
        for step in plan.steps(&Bases::default(), &[0; 256], Ending::Nothing).iter().take(5) {
            for (address, bytes) in hand_over(&step.args, 256)[1].clone() {
                regions.push((step.kernel.symbol.to_str().unwrap(), address, bytes));
            }
        }
        regions.sort_by_key(|region| region.1);
        regions.dedup_by_key(|region| region.1);
        for pair in regions.windows(2) {
            assert!(pair[0].1 + pair[0].2 <= pair[1].1, "{} and {}", pair[0].0, pair[1].0);
        }
        let last = regions.last().unwrap();
        assert!(last.1 + last.2 <= plan.memory().workspace_bytes as u64);
    }
}

#[test]
fn memory_is_that_of_the_sequences_asked_for() {
    let workspace = |sequences: usize| plan(Limits { sequences, ..LIMITS }).memory().workspace_bytes;
    // Of a sequence: logits, the sampler's bias, counts and workspace, its masks, and attention's partial results.
    let each =
        4 * 150_144 + 3 * 4 * 150_000 + 2 * 4 * 150_000_usize.div_ceil(32) + decode_attention_partial_bytes(1, 4);
    let grown = workspace(256) - workspace(16);
    assert!(grown.abs_diff(240 * each) < 240 * each / 100, "{grown} for {}", 240 * each);
    // KV memory of 256 sequences of 1K beside the weights of an H200.
    let memory = plan(Limits { context_tokens: 1312, ..LIMITS }).memory();
    assert!(memory.total_bytes() < 60 << 30, "{}", memory.total_bytes());
}

#[test]
fn the_bytes_of_a_step_are_those_of_the_experts_that_rows_choose() {
    let plan = plan(LIMITS);
    let bytes = |rows: usize| Totals::of(&steps(&plan, rows, Ending::Token)).bytes as f64;
    // 199 of 256 experts a layer: 47 * 199 * 3 * 512 * 2048 parameters of 4.5 bits, 16.5 GB; the rest of the weights, KV of
    // 64 rows, activations.
    assert!((16.5e9..28e9).contains(&bytes(64)), "{}", bytes(64));
    assert!(bytes(9) < bytes(64) && bytes(64) < bytes(256));
    println!("{plan}");
}

#[test]
fn the_general_path_takes_as_many_rows() {
    let config = FlintConfig { hidden_size: 320, vocab_size: 1024, ..FlintConfig::flint(3, 16) };
    let limits = Limits { vocab_tokens: 1024, ..LIMITS };
    let types = Types::of_synthetic(&config, DType::Bf16).unwrap();
    let plan = Plan::new(&config, &types, limits, Card::H200).unwrap();
    let one: Vec<_> = operations(&plan.steps(&BASES, &[5], Ending::Token));
    let all = plan.steps(&BASES, &[5; 256], Ending::Token);
    assert_eq!(operations(&all), one);
    let end = BASES.buffers + plan.memory().workspace_bytes as u64;
    for step in &all {
        match &step.args {
            Args::GeneralProject(args) => {
                assert_eq!(args.n, 256);
                let value = if args.f32 == 1 { 4 } else { 2 };
                assert!(args.out + 256 * value * u64::from(args.out_stride) <= end);
            }
            Args::GeneralNorm(args) => assert!(args.normed + 256 * 640 <= end),
            _ => {}
        }
    }
}
