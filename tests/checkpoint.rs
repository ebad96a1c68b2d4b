//! Valid checkpoints: what is opened, what is read from it, and how a path is understood.

mod common;

use std::{fs, path::Path};

use common::{
    GgufFile, bools_value, config_json, f32_value, kind, list_value, pattern, shard, shard_header, string,
    string_value, strings_value, typed, u32_value,
};
use flint_rs::{
    Error,
    checkpoint::{
        Bytes, Checkpoint, DType,
        gguf::{Gguf, Value},
    },
    config::{Attention, FlintConfig, LayerKind, Mlp},
};
use proptest::prelude::*;
use serde_json::json;
use tempfile::TempDir;

fn expected_config() -> FlintConfig {
    let kind = |attention, rope, mlp| LayerKind { attention, rope, mlp };
    FlintConfig {
        hidden_size: 8,
        vocab_size: 11,
        context_length: 64,
        n_heads: 4,
        n_kv_heads: 2,
        head_dim: 4,
        dense_intermediate_size: 12,
        n_experts: 7,
        n_experts_per_token: 3,
        expert_intermediate_size: 6,
        shared_intermediate_size: 10,
        sliding_window: 5,
        rms_norm_eps: 1e-6,
        rope_theta: 5000.0,
        layers: vec![
            kind(Attention::Full, false, Mlp::Dense),
            kind(Attention::Sliding, true, Mlp::Dense),
            kind(Attention::Full, true, Mlp::Moe),
        ],
    }
}

fn open(path: &Path) -> Checkpoint {
    Checkpoint::open(path).unwrap_or_else(|error| panic!("{error}"))
}

fn refusal(path: &Path) -> String {
    Checkpoint::open(path).expect_err("not a checkpoint").to_string()
}

#[test]
fn a_gguf_gives_its_config_and_tensors() {
    let dir = TempDir::new().unwrap();
    for version in [2, 3] {
        let path = dir.path().join(format!("v{version}.gguf"));
        fs::write(&path, GgufFile { version, ..GgufFile::flint() }.bytes()).unwrap();
        let checkpoint = open(&path);
        assert_eq!(FlintConfig::from_checkpoint(&checkpoint).unwrap(), expected_config());
        let Checkpoint::Gguf(gguf) = checkpoint else { panic!("not a GGUF") };
        assert_eq!(gguf.tensors.keys().collect::<Vec<_>>(), ["output_norm.weight", "token_embd.weight"]);
        let embedding = &gguf.tensors["token_embd.weight"];
        assert_eq!((embedding.dtype, embedding.shape.as_slice()), (DType::Bf16, [11, 8].as_slice()));
        assert_eq!(&*embedding.data, pattern(8 * 11 * 2, 1));
        assert_eq!(&*gguf.tensors["output_norm.weight"].data, pattern(8 * 4, 2));
    }
}

#[test]
fn a_safetensors_folder_gives_the_same_config() {
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("config.json"), config_json().to_string()).unwrap();
    let header = shard_header(&[("a", "BF16", &[3, 2], 12), ("b", "F8_E4M3", &[5], 5), ("c", "F32", &[], 4)]);
    fs::write(dir.path().join("model.safetensors"), shard(&header, &pattern(21, 9))).unwrap();
    let checkpoint = open(dir.path());
    assert_eq!(FlintConfig::from_checkpoint(&checkpoint).unwrap(), expected_config());
    let Checkpoint::Safetensors(safetensors) = checkpoint else { panic!("not safetensors") };
    let found: Vec<_> = safetensors.tensors.values().map(|t| (t.dtype, t.shape.clone(), t.data.to_vec())).collect();
    let data = pattern(21, 9);
    assert_eq!(found[0], (DType::Bf16, vec![3, 2], data[..12].to_vec()));
    assert_eq!(found[1], (DType::F8E4m3, vec![5], data[12..17].to_vec()));
    assert_eq!(found[2], (DType::F32, vec![], data[17..].to_vec()));
}

#[test]
fn shards_are_found_with_and_without_an_index() {
    let (a, b) = (shard_header(&[("a", "F16", &[3], 6)]), shard_header(&[("b", "F32", &[1, 2], 8)]));
    let index = json!({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}).to_string();
    let numbered = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    for (names, index) in [(["one.safetensors", "two.safetensors"], Some(index)), (numbered, None)] {
        let dir = TempDir::new().unwrap();
        fs::write(dir.path().join("config.json"), config_json().to_string()).unwrap();
        fs::write(dir.path().join(names[0]), shard(&a, &pattern(6, 1))).unwrap();
        fs::write(dir.path().join(names[1]), shard(&b, &pattern(8, 2))).unwrap();
        if let Some(index) = index {
            fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
            // The index decides: what it does not list is not read.
            fs::write(dir.path().join("optimizer.safetensors"), "junk").unwrap();
        }
        let Checkpoint::Safetensors(safetensors) = open(dir.path()) else { panic!("not safetensors") };
        let tensors: Vec<_> = safetensors.tensors.values().collect();
        assert_eq!((&*tensors[0].data, tensors[0].dtype), (&pattern(6, 1)[..], DType::F16));
        assert_eq!((&*tensors[1].data, &tensors[1].shape[..]), (&pattern(8, 2)[..], &[1, 2][..]));
        assert_eq!(tensors[1].file.file_name().unwrap().to_str().unwrap(), names[1]);
    }
}

#[test]
fn a_folder_is_what_it_holds() {
    let dir = TempDir::new().unwrap();
    let write = |name: &str, bytes: &[u8]| fs::write(dir.path().join(name), bytes).unwrap();
    let check = |found: &str| {
        let text = refusal(dir.path());
        assert!(text.contains("checkpoint: expected a .gguf file, a folder") && text.ends_with(found), "{text}");
    };
    check("found a folder of 0 files, none of them a GGUF or config.json");
    write("README.md", b"");
    check("found a folder of 1 files, none of them a GGUF or config.json");
    write("config.json", config_json().to_string().as_bytes());
    check("found a config.json without safetensors or GGUF");
    write("flint.gguf", &GgufFile::flint().bytes());
    assert!(matches!(open(dir.path()), Checkpoint::Gguf(_)));
    write("other.GGUF", &GgufFile::flint().bytes());
    check("found 2 GGUF models, flint.gguf and other.GGUF among them");
    write("model.safetensors", &shard("{}", &[]));
    assert!(matches!(open(dir.path()), Checkpoint::Safetensors(_)));
    fs::remove_file(dir.path().join("config.json")).unwrap();
    fs::remove_file(dir.path().join("flint.gguf")).unwrap();
    assert!(matches!(open(dir.path()), Checkpoint::Gguf(_)));
    fs::remove_file(dir.path().join("other.GGUF")).unwrap();
    check("found safetensors without a config.json");
}

#[test]
fn a_path_is_understood_or_named() {
    let dir = TempDir::new().unwrap();
    let at = |name: &str| dir.path().join(name);
    assert!(matches!(Checkpoint::open(&at("missing.gguf")), Err(Error::Io { path, .. }) if path == at("missing.gguf")));
    fs::write(at("model.safetensors"), shard("{}", &[])).unwrap();
    assert!(
        refusal(&at("model.safetensors")).ends_with("found a single .safetensors file; give the folder that holds it")
    );
    fs::write(at("model.bin"), GgufFile::flint().bytes()).unwrap();
    assert!(refusal(&at("model.bin")).ends_with("found a file whose extension is \"bin\""));
    fs::create_dir(at("folder.gguf")).unwrap();
    assert!(refusal(&at("folder.gguf")).contains("found a folder of 0 files"));
    fs::create_dir(at("outer")).unwrap();
    fs::create_dir(at("outer/inner.gguf")).unwrap();
    assert!(refusal(&at("outer")).ends_with("inner.gguf: file: expected a regular file, found a folder"));
}

#[cfg(unix)]
#[test]
fn a_pipe_is_refused_at_once() {
    let dir = TempDir::new().unwrap();
    let pipe = dir.path().join("pipe.gguf");
    let made = std::process::Command::new("mkfifo").arg(&pipe).status().expect("mkfifo runs");
    assert!(made.success());
    assert!(refusal(&pipe).ends_with("file: expected a regular file, found a pipe, device or socket"));
}

#[test]
fn values_of_every_type_are_read() {
    let list = [string("é"), string("")].concat();
    let cases: Vec<(Vec<u8>, Value)> = vec![
        (typed(kind::U8, &[200]), Value::Unsigned(200)),
        (typed(kind::I8, &[200]), Value::Signed(-56)),
        (typed(kind::U16, &[1, 2]), Value::Unsigned(513)),
        (typed(kind::I16, &[0, 128]), Value::Signed(-32768)),
        (u32_value(u32::MAX), Value::Unsigned(u32::MAX.into())),
        (typed(kind::I32, &i32::MIN.to_le_bytes()), Value::Signed(i32::MIN.into())),
        (f32_value(0.1), Value::Float(0.1_f32.into())),
        (typed(kind::BOOL, &[1]), Value::Bool(true)),
        (string_value("🦀"), Value::String("🦀".into())),
        (typed(kind::U64, &u64::MAX.to_le_bytes()), Value::Unsigned(u64::MAX)),
        (typed(kind::I64, &i64::MIN.to_le_bytes()), Value::Signed(i64::MIN)),
        (typed(kind::F64, &0.1_f64.to_le_bytes()), Value::Float(0.1)),
        (
            list_value(kind::STRING, 2, &list),
            Value::Array(vec![Value::String("é".into()), Value::String(String::new())]),
        ),
        (list_value(kind::I16, 2, &[255, 255, 1, 0]), Value::Array(vec![Value::Signed(-1), Value::Signed(1)])),
        (list_value(kind::F64, 0, &[]), Value::Array(vec![])),
    ];
    for (bytes, value) in cases {
        let file = GgufFile::empty().key("key", bytes).bytes();
        let gguf = Gguf::from_bytes(Path::new("memory"), &Bytes::from(file)).unwrap();
        assert_eq!(gguf.metadata["key"], value);
    }
}

#[test]
fn optional_gguf_keys_may_be_absent_or_repeat_what_is_known() {
    let heads = list_value(kind::I32, 3, &[2, 0, 0, 0].repeat(3));
    let more = GgufFile::flint()
        .key("flint.attention.head_count_kv", heads)
        .key("flint.rope.dimension_count", u32_value(4))
        .key("flint.attention.key_length_swa", u32_value(4))
        .key("flint.vocab_size", u32_value(11))
        .key("general.tensor_extra.name", strings_value(&["blk.0.attn_q.weight"]))
        .key("general.tensor_extra.prec_a4", bools_value(&[false]))
        .key("tokenizer.ggml.model", string_value("gpt2"));
    let fewer = GgufFile::flint()
        .without("flint.rope.scaling.type")
        .without("flint.expert_weights_scale")
        .without("flint.expert_shared_count")
        .without("flint.rope.freq_base");
    for (file, rope_theta) in [(more, 5000.0), (fewer, 10_000.0)] {
        let gguf = Gguf::from_bytes(Path::new("memory"), &Bytes::from(file.bytes())).unwrap();
        let config = FlintConfig::from_checkpoint(&Checkpoint::Gguf(gguf)).unwrap();
        assert_eq!(config, FlintConfig { rope_theta, ..expected_config() });
    }
}

/// The configuration of config.json after a change.
fn changed(change: impl FnOnce(&mut serde_json::Map<String, serde_json::Value>)) -> FlintConfig {
    let dir = TempDir::new().unwrap();
    let mut json = config_json();
    change(json.as_object_mut().unwrap());
    fs::write(dir.path().join("config.json"), json.to_string()).unwrap();
    fs::write(dir.path().join("model.safetensors"), shard("{}", &[])).unwrap();
    FlintConfig::from_checkpoint(&open(dir.path())).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn absent_layer_lists_follow_the_rule_of_flint() {
    for n_layers in [1, 2, 3, 6, 49] {
        let config = changed(|json| {
            json.insert("num_hidden_layers".into(), n_layers.into());
            json.remove("layer_types");
            json.remove("no_rope_layer_indices");
            json.remove("mlp_only_layers");
        });
        let full: Vec<_> = (0..n_layers).filter(|&i| config.layers[i].attention == Attention::Full).collect();
        let expected: &[usize] = match n_layers {
            1 => &[0],
            2 => &[0, 1],
            3 => &[0, 1, 2],
            6 => &[0, 1, 5],
            _ => &[0, 1, 5, 9, 13, 17, 21, 25, 29, 33, 37, 41, 45, 48],
        };
        assert_eq!(full, expected);
        for (index, layer) in config.layers.iter().enumerate() {
            assert_eq!(layer.rope, layer.attention == Attention::Sliding);
            assert_eq!(layer.mlp, if index < 2 { Mlp::Dense } else { Mlp::Moe });
        }
    }
}

#[test]
fn layer_lists_decide() {
    let config = changed(|json| {
        json.insert("no_rope_layer_indices".into(), json!([2, 1]));
        json.insert("mlp_only_layers".into(), json!([2]));
    });
    assert_eq!(config.layers.iter().map(|layer| layer.rope).collect::<Vec<_>>(), [true, false, false]);
    assert_eq!(config.layers.iter().map(|layer| layer.mlp).collect::<Vec<_>>(), [Mlp::Moe, Mlp::Moe, Mlp::Dense]);
    let none = changed(|json| {
        json.insert("mlp_only_layers".into(), json!([]));
    });
    assert!(none.layers.iter().all(|layer| layer.mlp == Mlp::Moe));
    let one = changed(|json| {
        json.insert("num_hidden_layers".into(), 1.into());
        json.insert("layer_types".into(), json!(["full_attention"]));
    });
    assert_eq!(one.layers, [LayerKind { attention: Attention::Full, rope: false, mlp: Mlp::Dense }]);
}

#[test]
fn the_rotary_base_may_stand_in_three_places() {
    let old = changed(|json| {
        json.remove("rope_parameters");
        json.insert("rope_theta".into(), 20_000.into());
        json.insert("rope_scaling".into(), serde_json::Value::Null);
    });
    let neither = changed(|json| drop(json.remove("rope_parameters")));
    let both = changed(|json| drop(json.insert("rope_theta".into(), 5000.into())));
    let bases = [old, neither, both].map(|config| config.rope_theta.to_string());
    assert_eq!(bases, ["20000", "10000", "5000"]);
}

#[test]
fn unknown_config_keys_that_switch_nothing_on_are_passed_over() {
    let config = changed(|json| {
        json.insert("some_new_switch".into(), false.into());
        json.insert("some_new_size".into(), serde_json::Value::Null);
        json.insert("quantization_config".into(), json!({"quant_method": "modelopt", "quant_algo": "NVFP4"}));
    });
    assert_eq!(config, expected_config());
}

#[test]
fn validate_names_the_field() {
    type Change = fn(&mut FlintConfig);
    let wrong: [(&str, Change); 6] = [
        ("hidden_size", |c| c.hidden_size = 0),
        ("n_kv_heads", |c| c.n_kv_heads = 3),
        ("head_dim", |c| c.head_dim = 3),
        ("n_experts_per_token", |c| c.n_experts_per_token = 8),
        ("rms_norm_eps", |c| c.rms_norm_eps = f32::NAN),
        ("layers", |c| c.layers.clear()),
    ];
    expected_config().validate().unwrap();
    for (name, change) in wrong {
        let mut config = expected_config();
        change(&mut config);
        assert!(matches!(config.validate(), Err(Error::Value { field, .. }) if field == name), "{name}");
    }
}

/// Fuzzing starts from these; a seed that no reader accepts any more would start it from nothing.
#[test]
fn fuzz_seeds_are_accepted() {
    let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds");
    let config = FlintConfig::from_checkpoint(&open(&seeds.join("gguf/flint.gguf"))).unwrap();
    assert_eq!(config, expected_config());
    let dir = TempDir::new().unwrap();
    for seed in ["config/config.json", "safetensors/model.safetensors"] {
        let name = Path::new(seed).file_name().unwrap();
        fs::copy(seeds.join(seed), dir.path().join(name)).unwrap();
    }
    assert_eq!(FlintConfig::from_checkpoint(&open(dir.path())).unwrap(), expected_config());
}

/// A shape and a type with its number in a GGUF, its name in safetensors (`None` where it has none), and its bytes.
fn any_tensor() -> impl Strategy<Value = (Vec<usize>, u32, Option<&'static str>, usize)> {
    let dims = prop::collection::vec(1_usize..5, 0..4);
    let kinds = prop::sample::select(vec![
        (0, Some("F32"), 1, 4),
        (1, Some("F16"), 1, 2),
        (30, Some("BF16"), 1, 2),
        (8, None, 32, 34),
        (40, None, 64, 36),
    ]);
    (dims, 1_usize..6, kinds).prop_map(|(mut shape, blocks, (number, name, block, block_bytes))| {
        let bytes = shape.iter().product::<usize>() * blocks * block_bytes;
        shape.push(blocks * block);
        (shape, number, name, bytes)
    })
}

proptest! {
    #[test]
    fn any_gguf_round_trips(
        tensors in prop::collection::btree_map("[a-z.]{1,64}", any_tensor(), 0..12),
        strings in prop::collection::btree_map(".{1,20}", ".{0,30}", 0..8),
        alignment in prop::sample::select(vec![8_usize, 32, 64, 4096]),
        version in 2..=3_u32,
    ) {
        let mut file = GgufFile { version, alignment, ..GgufFile::empty() };
        for (key, text) in &strings {
            file = file.key(key, string_value(text));
        }
        file = file.key("general.alignment", u32_value(alignment as u32));
        for (i, (name, (shape, number, _, bytes))) in tensors.iter().enumerate() {
            let dims: Vec<u64> = shape.iter().rev().map(|&dim| dim as u64).collect();
            file = file.tensor(name, &dims, *number, &pattern(*bytes, i as u8));
        }
        let gguf = Gguf::from_bytes(Path::new("memory"), &Bytes::from(file.bytes())).unwrap();
        prop_assert_eq!(gguf.metadata.len(), strings.len() + 1);
        for (key, text) in &strings {
            prop_assert_eq!(&gguf.metadata[key], &Value::String(text.clone()));
        }
        prop_assert!(gguf.tensors.keys().eq(tensors.keys()));
        for (i, (found, (shape, _, _, bytes))) in gguf.tensors.values().zip(tensors.values()).enumerate() {
            prop_assert_eq!(&found.shape, shape);
            prop_assert_eq!(&*found.data, &pattern(*bytes, i as u8)[..]);
        }
    }

    #[test]
    fn any_shard_round_trips(tensors in prop::collection::btree_map("[a-zé\"\\\\.]{1,40}", any_tensor(), 0..12)) {
        // The safetensors crate writes what our reader of the format reads.
        use safetensors::{Dtype, serialize, tensor::TensorView};
        let dtype = |name| match name {
            "F32" => Dtype::F32,
            "F16" => Dtype::F16,
            _ => Dtype::BF16,
        };
        let plain: Vec<_> = tensors.iter().filter_map(|(key, (shape, _, name, bytes))| Some((key, shape, (*name)?, *bytes))).collect();
        let data: Vec<_> = plain.iter().enumerate().map(|(i, (.., bytes))| pattern(*bytes, i as u8)).collect();
        let views = plain.iter().zip(&data).map(|((key, shape, name, _), data)| {
            (key.as_str(), TensorView::new(dtype(name), (*shape).clone(), data).unwrap())
        });
        let file = serialize(views, None).unwrap();
        let found = flint_rs::checkpoint::safetensors::read_shard(Path::new("memory"), &Bytes::from(file)).unwrap();
        prop_assert_eq!(found.len(), plain.len());
        for ((key, shape, name, _), data) in plain.into_iter().zip(data) {
            let tensor = found.iter().find(|tensor| tensor.name == *key).unwrap();
            prop_assert_eq!((&tensor.shape, tensor.dtype.name()), (shape, name));
            prop_assert_eq!(&*tensor.data, &data[..]);
        }
    }

    #[test]
    fn damage_never_panics(
        flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in any::<prop::sample::Index>(),
        truncate in any::<bool>(),
    ) {
        let header = shard_header(&[("a", "BF16", &[3, 2], 12), ("b", "U8", &[5], 5)]);
        for (is_gguf, whole) in [(true, GgufFile::flint().bytes()), (false, shard(&header, &pattern(17, 1)))] {
            let mut bytes = whole;
            for (at, byte) in &flips {
                let at = at.index(bytes.len());
                bytes[at] = *byte;
            }
            if truncate {
                bytes.truncate(cut.index(bytes.len()));
            }
            let (path, bytes) = (Path::new("memory"), Bytes::from(bytes));
            // Whatever is accepted has as many bytes as its shape needs.
            let tensors = if is_gguf {
                Gguf::from_bytes(path, &bytes).map(|gguf| {
                    let tensors: Vec<_> = gguf.tensors.values().cloned().collect();
                    let _ = FlintConfig::from_checkpoint(&Checkpoint::Gguf(gguf));
                    tensors
                })
            } else {
                flint_rs::checkpoint::safetensors::read_shard(path, &bytes)
            };
            for tensor in tensors.unwrap_or_default() {
                prop_assert_eq!(tensor.dtype.bytes_of(&tensor.shape), Some(tensor.data.len()));
            }
        }
    }
}
