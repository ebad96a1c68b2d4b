//! Plans against figures that were counted by hand from Flint's dimensions, and against each other.

use std::collections::BTreeSet;

use flint_rs::{
    checkpoint::DType,
    config::{Attention, FlintConfig, LayerKind, Mlp},
    kernels::Args,
    plan::{
        Bases, CHUNK_TOKENS, Card, Ending, Limits, Operation, Part, Path, Plan, Step, Totals, Types, distinct_experts,
        of_file,
    },
    tiles::TileFormat,
    weights::Weights,
};

const LIMITS: Limits =
    Limits { sequences: 8, context_tokens: 262_144, vocab_tokens: 150_144, chunk_tokens: CHUNK_TOKENS };

fn flint() -> FlintConfig {
    FlintConfig::flint(49, 150_144)
}

fn plan_of(config: &FlintConfig, dtype: DType, limits: Limits) -> Plan {
    Plan::new(config, &Types::of_synthetic(config, dtype).unwrap(), limits, Card::H200).unwrap()
}

fn steps(plan: &Plan, positions: &[u32], ending: Ending) -> Vec<Step> {
    plan.steps(&Bases::default(), positions, ending)
}

fn small() -> FlintConfig {
    let layer = |attention, mlp| LayerKind { attention, rope: attention == Attention::Sliding, mlp };
    FlintConfig {
        hidden_size: 75,
        vocab_size: 97,
        context_length: 4096,
        n_heads: 6,
        n_kv_heads: 3,
        head_dim: 22,
        dense_intermediate_size: 101,
        n_experts: 5,
        n_experts_per_token: 2,
        expert_intermediate_size: 37,
        shared_intermediate_size: 51,
        sliding_window: 17,
        layers: vec![
            layer(Attention::Full, Mlp::Dense),
            layer(Attention::Sliding, Mlp::Moe),
            layer(Attention::Full, Mlp::Moe),
        ],
        ..flint()
    }
}

const SMALL: Limits = Limits { sequences: 3, context_tokens: 1000, vocab_tokens: 97, chunk_tokens: CHUNK_TOKENS };

#[test]
fn flint_takes_the_fast_path_with_the_bytes_of_its_dimensions() {
    let plan = plan_of(&flint(), DType::Nvfp4, LIMITS);
    assert_eq!(*plan.path(), Path::Fast(TileFormat::Nvfp4));
    let all = steps(&plan, &[1023], Ending::Token);
    // Six kernels a layer, five where it is dense; embedding, LM head, sampler.
    assert_eq!(all.len(), 47 * 6 + 2 * 5 + 3);

    // Parameters read for one token, by hand.
    let attention = 49_u64 * 2048 * (4096 + 2 * 512 + 4096);
    let shared = 47 * 3 * 1024 * 2048;
    let routed = 47 * 6 * 3 * 512 * 2048;
    let dense = 2 * 3 * 6144 * 2048;
    let head = 150_144 * 2048;
    let packed = (attention + shared + routed + dense + head) as f64 * 0.5625;
    let router = f64::from(47 * 256 * 2048 * 4);
    let kv = f64::from((14 * 1024 + 35 * 513) * 2048);
    let bytes = Totals::of(&all).bytes as f64;
    // Activations and the logits come on top: a few megabytes.
    let counted = packed + router + kv;
    assert!(bytes > counted && bytes < counted * 1.01, "{bytes} for {counted}");

    // At 100,000 tokens the full layers read 28 KiB a token more.
    let long = Totals::of(&steps(&plan, &[99_999], Ending::Token)).bytes as f64;
    assert!((long - bytes - f64::from(100_000 - 1024) * 28.0 * 1024.0).abs() < 1.0);
}

#[test]
fn memory_is_that_of_weights_and_of_every_position() {
    let limits = Limits { sequences: 1, ..LIMITS };
    let memory = plan_of(&flint(), DType::Nvfp4, limits).memory();
    // 39.8 B parameters: the embedding in BF16, the router in F32 and in three parts of BF16, all else in 4.5 bits.
    let embedding = 150_144 * 2048;
    let router = 47 * 256 * 2048;
    let matrices = 49 * 2048 * 9216 + 2 * 3 * 6144 * 2048 + 47 * 3 * 2048 * (256 * 512 + 1024) + embedding;
    let weights = matrices / 16 * 9 + 2 * embedding + 10 * router;
    let slack = memory.weights_bytes - weights;
    // Norms, sinks, scales of strips and alignment.
    assert!(slack < 20 << 20, "{slack}");
    // 513 positions and the 63 before the next block lie in 10 blocks of 64, wherever they start; a chunk has its own.
    let window = |sequences: usize| (10 * sequences + 8192 / 64) * 64 * 35 * 2048;
    assert_eq!(memory.kv_bytes, 262_144 * 14 * 2048 + window(1));
    let bf16 = plan_of(&flint(), DType::Bf16, limits).memory();
    assert!(bf16.weights_bytes.abs_diff(2 * matrices + 2 * embedding + 10 * router) < 20 << 20);
    assert_eq!(bf16.kv_bytes, memory.kv_bytes);
    let eight = plan_of(&flint(), DType::Nvfp4, LIMITS).memory();
    assert_eq!(eight.kv_bytes, 8 * 262_144 * 14 * 2048 + window(8));
}

#[test]
fn the_first_fact_that_forces_the_general_path_is_named() {
    let change = |change: fn(&mut FlintConfig)| {
        let mut config = FlintConfig::flint(5, 1024);
        change(&mut config);
        config
    };
    let limits = Limits { sequences: 1, context_tokens: 64, vocab_tokens: 16, ..LIMITS };
    for (config, fact) in [
        (change(|c| c.hidden_size = 2560), "hidden_size is 2560"),
        (change(|c| c.head_dim = 64), "head_dim is 64"),
        (change(|c| c.n_heads = 40), "n_heads is 40"),
        (change(|c| c.n_kv_heads = 8), "query heads a KV head is 4"),
        (change(|c| c.dense_intermediate_size = 512), "dense_intermediate_size is 512"),
        (change(|c| c.n_experts = 255), "n_experts is 255"),
        (change(|c| c.n_experts_per_token = 8), "n_experts_per_token is 8"),
        (change(|c| c.expert_intermediate_size = 1024), "expert_intermediate_size is 1024"),
        (change(|c| c.shared_intermediate_size = 512), "shared_intermediate_size is 512"),
        (change(|c| c.vocab_size = 1025), "vocab_size is 1025"),
    ] {
        let Path::General { because } = plan_of(&config, DType::Bf16, limits).path().clone() else {
            panic!("{fact}: the fast path");
        };
        assert!(because.starts_with(fact), "{because}");
    }
    // What the model does not have does not matter.
    let moe_only = change(|c| (c.dense_intermediate_size, c.layers) = (512, c.layers.split_off(2)));
    assert_eq!(*plan_of(&moe_only, DType::Bf16, limits).path(), Path::Fast(TileFormat::Bf16));
}

#[test]
fn what_decode_reads_before_it_waits_is_older_than_the_kernel_in_front() {
    let config = FlintConfig::flint(5, LIMITS.vocab_tokens);
    let types = Types::of_synthetic(&config, DType::Nvfp4).unwrap();
    let plan = Plan::new(&config, &types, LIMITS, Card::H200).unwrap();
    for rows in [1, 8] {
        let steps = plan.steps(&Bases::default(), &vec![0; rows], Ending::Token);
        let order: Vec<_> = steps.iter().map(|step| step.operation).collect();
        // The scores of the router, and the angles of the embedding.
        for too_close in [[Operation::Router, Operation::Down], [Operation::Embed, Operation::Attention]] {
            assert!(order.windows(2).all(|pair| pair != too_close), "{too_close:?}");
        }
        assert!(order.contains(&Operation::Down) && order.contains(&Operation::Attention));
    }
}

#[test]
fn every_card_takes_the_fast_path_with_what_it_has() {
    let config = FlintConfig::flint(5, 1024);
    let limits = Limits { sequences: 32, context_tokens: 4096, vocab_tokens: 1024, ..LIMITS };
    for dtype in [DType::Nvfp4, DType::Bf16] {
        for (major, ways, clusters) in [
            (8, "mma.sync, no clusters, no dependent launches", false),
            (9, "wgmma, clusters, dependent launches", true),
            (10, "mma.sync, clusters, dependent launches", true),
            (12, "mma.sync, clusters, dependent launches", true),
        ] {
            // What a block has on cards of 9.0 and 10.0, and on those of 8.6, 8.9 and 12.0.
            let block_shared_bytes = if (9..12).contains(&major) { 227 << 10 } else { 99 << 10 };
            let card = Card { major, processors: 84, block_shared_bytes };
            let plan = Plan::new(&config, &Types::of_synthetic(&config, dtype).unwrap(), limits, card).unwrap();
            assert!(matches!(plan.path(), Path::Fast(_)), "{major}: {}", plan.path());
            let text = plan.to_string();
            assert!(
                text.starts_with(&format!("card       84 multiprocessors of compute capability {major}.x: {ways}\n"))
            );
            let mut steps = Vec::new();
            for rows in [1, 8, 9, 32] {
                steps.extend(plan.steps(&Bases::default(), &vec![4095; rows], Ending::Token));
            }
            for tokens in [1, 300, 4096] {
                steps.extend(plan.chunk_steps(&Bases::default(), &[Part { slot: 0, first: 0, tokens }], true));
                steps.extend(plan.logits_steps(&Bases::default(), 0, tokens.min(9)));
            }
            for step in &steps {
                let name = step.kernel.symbol.to_str().unwrap();
                assert!(step.launch.shared_bytes as usize <= block_shared_bytes, "{name}: {:?}", step.launch);
                let product =
                    ["linear", "logits", "swiglu", "experts"].iter().any(|p| name.starts_with(&format!("prefill_{p}")));
                assert!(!product || major == 9 || name.ends_with("_mma"), "{major}: {name}");
                assert!(major == 9 || !name.contains("hopper"), "{major}: {name}");
                if name == "decode_sample" {
                    assert_eq!(step.launch.grid[0], if clusters { 8 } else { 1 });
                }
            }
        }
    }
}

#[test]
fn a_product_that_a_card_has_no_shared_memory_for_is_cut_in_two() {
    let config = FlintConfig::flint(3, 1024);
    let types = Types::of_synthetic(&config, DType::Nvfp4).unwrap();
    let limits = Limits { sequences: 8, context_tokens: 64, vocab_tokens: 16, ..LIMITS };
    for (shared, rows, parts) in [
        (227 << 10, 8, vec![8]),
        (163 << 10, 8, vec![8]),
        (99 << 10, 8, vec![4, 4]),
        (99 << 10, 5, vec![4, 1]),
        (99 << 10, 4, vec![4]),
    ] {
        let card = Card { block_shared_bytes: shared, ..Card::H200 };
        let plan = Plan::new(&config, &types, limits, card).unwrap();
        let steps = plan.steps(&Bases::default(), &vec![7; rows], Ending::Logits);
        let downs: Vec<_> = steps.iter().filter(|s| s.operation == Operation::DenseDown && s.layer == 1).collect();
        let args: Vec<_> = downs
            .iter()
            .map(|step| match step.args {
                Args::DecodeLinear(args) => args,
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(args.iter().map(|args| args.norm.rows as usize).collect::<Vec<_>>(), parts);
        for (i, found) in args.iter().enumerate() {
            // Rows of 6,144 inputs and of 2,048 outputs, of BF16.
            assert_eq!((found.x - args[0].x, found.out - args[0].out), (i as u64 * 4 * 12_288, i as u64 * 4 * 4096));
            assert_eq!((found.weights, found.scales), (args[0].weights, args[0].scales));
        }
    }
}

#[test]
fn types_that_are_not_tiles_force_the_general_path() {
    let config = FlintConfig::flint(3, 1024);
    let limits = Limits { sequences: 1, context_tokens: 64, vocab_tokens: 16, ..LIMITS };
    let types = Types::of_synthetic(&config, DType::Nvfp4).unwrap();
    let with = |name: &str, dtype: Option<DType>| {
        let mut types = types.clone();
        types.0.iter_mut().find(|matrix| matrix.name == name).unwrap().dtype = dtype;
        Plan::new(&config, &types, limits, Card::H200)
    };
    for (name, dtype, because) in [
        ("token_embd.weight", DType::Nvfp4, "token_embd.weight is NVFP4, the tiled kernels need BF16"),
        ("output.weight", DType::Q8_0, "output.weight is Q8_0, the tiled kernels need NVFP4 or BF16"),
        ("blk.1.attn_k.weight", DType::Bf16, "blk.1.attn_k.weight is BF16, the tiled kernels need one type for all"),
    ] {
        let Path::General { because: found } = with(name, Some(dtype)).unwrap().path().clone() else {
            panic!("{name}: the fast path");
        };
        assert!(found.starts_with(because), "{found}");
    }
    // The router becomes fp32 whatever it is.
    let router = with("blk.2.ffn_gate_inp.weight", Some(DType::Bf16)).unwrap();
    assert_eq!(*router.path(), Path::Fast(TileFormat::Nvfp4));
    let error = with("blk.2.ffn_up_exps.weight", None).unwrap_err().to_string();
    assert!(error.contains("blk.2.ffn_up_exps.weight has experts of several types"), "{error}");
}

#[test]
fn limits_out_of_range_are_named() {
    let config = flint();
    let types = Types::of_synthetic(&config, DType::Nvfp4).unwrap();
    for (limits, text) in [
        (Limits { sequences: 0, ..LIMITS }, "sequences: expected 1 to 256, found 0"),
        (Limits { sequences: 257, ..LIMITS }, "sequences: expected 1 to 256, found 257"),
        (Limits { context_tokens: 262_145, ..LIMITS }, "context_tokens: expected 1 to 262144, found 262145"),
        (Limits { vocab_tokens: 150_145, ..LIMITS }, "vocab_tokens: expected 1 to 150144, found 150145"),
        (Limits { chunk_tokens: 0, ..LIMITS }, "chunk_tokens: expected 1 to 65536, found 0"),
        (Limits { chunk_tokens: 65_537, ..LIMITS }, "chunk_tokens: expected 1 to 65536, found 65537"),
    ] {
        assert_eq!(Plan::new(&config, &types, limits, Card::H200).unwrap_err().to_string(), text);
    }
}

#[test]
fn a_graph_of_one_batch_size_serves_every_position() {
    for plan in [plan_of(&flint(), DType::Nvfp4, LIMITS), plan_of(&small(), DType::Bf16, SMALL)] {
        for rows in 1..=3 {
            let early = steps(&plan, &vec![0; rows], Ending::Token);
            let late = steps(&plan, &vec![900; rows], Ending::Token);
            assert_eq!(early.len(), late.len());
            for (early, late) in early.iter().zip(&late) {
                assert_eq!((early.operation, early.kernel), (late.operation, late.kernel));
                assert_eq!(early.launch.grid, late.launch.grid);
                assert_eq!(format!("{:?}", early.args), format!("{:?}", late.args));
            }
        }
    }
}

#[test]
fn endings_add_their_kernels_only() {
    for plan in [plan_of(&flint(), DType::Nvfp4, LIMITS), plan_of(&small(), DType::Bf16, SMALL)] {
        let operations = |ending| steps(&plan, &[5, 6], ending).iter().map(|s| s.operation).collect::<Vec<_>>();
        let (nothing, logits, token) =
            (operations(Ending::Nothing), operations(Ending::Logits), operations(Ending::Token));
        assert!(logits.starts_with(&nothing) && token.starts_with(&logits));
        assert_eq!(logits.last(), Some(&Operation::LmHead));
        assert_eq!(token[logits.len()..], [Operation::Sample]);
        assert!(!nothing.contains(&Operation::LmHead));
    }
}

#[test]
fn the_general_path_reads_what_the_kernel_before_wrote() {
    use Operation::{
        Attention, Choose, DenseDown, DenseUp, Down, Embed, ExpertsUp, LmHead, Norm, Output, Qkv, QkvFinish, Router,
        SharedUp,
    };
    let plan = plan_of(&small(), DType::Bf16, SMALL);
    let all = steps(&plan, &[3, 4], Ending::Logits);
    let attention = [Norm, Qkv, Qkv, Qkv, QkvFinish, Attention, Output];
    let moe = [Norm, Router, Choose, ExpertsUp, SharedUp, Down];
    let expected =
        [&[Embed], &attention[..], &[Norm, DenseUp, DenseDown], &attention, &moe, &attention, &moe, &[Norm, LmHead]]
            .concat();
    assert_eq!(all.iter().map(|step| step.operation).collect::<Vec<_>>(), expected);

    // The residual goes from norm to norm.
    let mut residual = None;
    let mut windows = BTreeSet::new();
    for step in &all {
        match &step.args {
            Args::GeneralEmbed(args) => residual = Some(args.residual),
            Args::GeneralNorm(args) => {
                assert_eq!(residual, Some(args.residual_in));
                assert_ne!(args.residual_in, args.residual_out);
                residual = Some(args.residual_out);
            }
            Args::GeneralAttention(args) => {
                windows.insert(args.window);
                assert!(args.scale > 0.2132 && args.scale < 0.2133, "1 / sqrt(22) is not {}", args.scale);
            }
            Args::GeneralQkvFinish(args) => {
                assert_eq!(args.inv_freq != 0, step.layer == 1, "layer {}", step.layer);
            }
            _ => {}
        }
    }
    assert_eq!(windows, [0, 17].into());
}

#[test]
fn layers_have_their_own_part_of_a_pool() {
    let bases = Bases { kv_full: 1 << 40, kv_window: 2 << 40, ..Bases::default() };
    for (config, dtype, limits) in [(flint(), DType::Nvfp4, LIMITS), (small(), DType::Bf16, SMALL)] {
        let plan = plan_of(&config, dtype, limits);
        let parts: Vec<(u64, u64)> = plan
            .steps(&bases, &[0], Ending::Nothing)
            .iter()
            .filter_map(|step| match &step.args {
                Args::DecodeAttention(args) => Some((args.kv, args.block_stride)),
                Args::GeneralAttention(args) => Some((args.kv, args.block_stride)),
                _ => None,
            })
            .collect();
        // K and V of 64 positions of all KV heads.
        let part = (2 * config.n_kv_heads * 64 * config.head_dim * 2) as u64;
        let (mut full, mut window) = (0, 0);
        for (layer, (kv, stride)) in config.layers.iter().zip(parts) {
            let (base, index) = match layer.attention {
                Attention::Full => (bases.kv_full, &mut full),
                Attention::Sliding => (bases.kv_window, &mut window),
            };
            assert_eq!(kv, base + *index * part);
            *index += 1;
            let of_kind = config.layers.iter().filter(|other| other.attention == layer.attention).count() as u64;
            assert_eq!(2 * stride, of_kind * part);
        }
    }
}

#[test]
fn types_of_loaded_weights_are_those_of_the_recipe() {
    let config = FlintConfig { vocab_size: 64, head_dim: 64, hidden_size: 64, ..small() };
    let config = FlintConfig { dense_intermediate_size: 64, expert_intermediate_size: 64, ..config };
    let config = FlintConfig { shared_intermediate_size: 128, n_heads: 3, ..config };
    for dtype in [DType::F32, DType::Bf16, DType::Nvfp4] {
        let weights = Weights::synthetic(config.clone(), 1, dtype).unwrap();
        assert_eq!(Types::of_weights(&weights), Types::of_synthetic(&config, dtype).unwrap());
    }
}

#[test]
fn a_plan_of_a_file_is_that_of_its_header() {
    let path = std::path::Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/python/flint_rs/models/flint-small.gguf"));
    let plan = of_file(path, 2, Some(128)).unwrap();
    let weights = std::fs::metadata(path).unwrap().len() as usize;
    // The file has a tokenizer beside the weights, the device alignment and a scale a matrix.
    assert!(
        plan.memory().weights_bytes.abs_diff(weights) < weights / 10,
        "{} for {weights}",
        plan.memory().weights_bytes
    );
    assert!(matches!(plan.path(), Path::General { .. }));
    assert_eq!(plan.limits().context_tokens, 128);
    let error = of_file(path, 2, Some(1 << 24)).unwrap_err().to_string();
    assert!(error.starts_with("context_tokens"), "{error}");
}

#[test]
fn distinct_experts_are_those_of_independent_choices() {
    assert_eq!(distinct_experts(256, 6, 1), 6);
    // 256 (1 - (250/256)^8) = 44.2
    assert_eq!(distinct_experts(256, 6, 8), 44);
    assert_eq!(distinct_experts(5, 5, 1), 5);
    assert_eq!(distinct_experts(5, 5, 8), 5);
}

#[test]
fn a_printed_plan_says_path_memory_and_kernels() {
    let text = plan_of(&flint(), DType::Nvfp4, Limits { sequences: 1, ..LIMITS }).to_string();
    for part in [
        "path       fast, NVFP4 tiles",
        "295 kernels",
        "decode_attention",
        "decode_lm_head_nvfp4_1",
        "1 x 262144 tokens",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
    let text = plan_of(&small(), DType::Bf16, SMALL).to_string();
    assert!(text.contains("general, because hidden_size is 75"), "{text}");
}
