//! Converting: nothing is lost that the target can hold, and nothing half-written ever has the final name.
#![allow(clippy::float_cmp, reason = "values are equal to the bit, or wrong")]

mod formats;

use std::{fs, path::Path};

use flint_rs::{
    Error,
    cancel::Cancel,
    checkpoint::{
        Checkpoint, DType,
        gguf::{Gguf, Value},
    },
    config::FlintConfig,
    convert::{ConvertOptions, WeightType, convert},
    nvfp4,
    weights::Weights,
};

use self::formats::{
    EXPERTS, Random, Tensors, all_values, config_json, f32_bytes, gguf_tensors, is_projection, names, nearest_error,
    put, squared_error, to_safetensors, write_folder,
};

const NVFP4: ConvertOptions = ConvertOptions { weight_type: WeightType::Nvfp4, overwrite: false };
const BF16: ConvertOptions = ConvertOptions { weight_type: WeightType::Bf16, overwrite: false };

fn run(src: &Path, dst: &Path, options: ConvertOptions) -> Result<(), Error> {
    convert(src, dst, options, &mut |_, _| {}, &Cancel::default())
}

fn bind(path: &Path) -> Weights {
    let checkpoint = Checkpoint::open(path).unwrap();
    let config = FlintConfig::from_checkpoint(&checkpoint).unwrap();
    assert_eq!(config, formats::config());
    Weights::bind(&checkpoint, config, &mut |_, _| {}, &Cancel::default()).unwrap()
}

fn files_in(folder: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A folder with the checkpoint `src` of these tensors.
fn source(tensors: &Tensors) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    write_folder(&dir.path().join("src"), tensors);
    dir
}

#[test]
fn bf16_round_trips_exactly() {
    let dir = source(&to_safetensors(&gguf_tensors(1, DType::Bf16)));
    let (src, dst, again) = (dir.path().join("src"), dir.path().join("a.gguf"), dir.path().join("b.gguf"));
    run(&src, &dst, BF16).unwrap();
    assert!(all_values(&bind(&src)) == all_values(&bind(&dst)));
    run(&dst, &again, BF16).unwrap();
    assert!(fs::read(&dst).unwrap() == fs::read(&again).unwrap(), "a converted file converts to itself");
    assert_eq!(files_in(dir.path()), ["a.gguf", "b.gguf", "src"]);
}

#[test]
fn nvfp4_is_copied_bit_for_bit() {
    let tensors = gguf_tensors(2, DType::Nvfp4);
    let dir = source(&to_safetensors(&tensors));
    let (src, dst, again) = (dir.path().join("src"), dir.path().join("a.gguf"), dir.path().join("b.gguf"));
    run(&src, &dst, NVFP4).unwrap();
    run(&dst, &again, NVFP4).unwrap();
    for path in [&dst, &again] {
        let written = Gguf::open(path).unwrap().tensors;
        assert!(written.keys().eq(tensors.keys()), "{:?}", written.keys());
        for (name, tensor) in &tensors {
            let got = &written[name];
            assert_eq!((got.dtype, &got.shape), (tensor.dtype, &tensor.shape), "{name}");
            assert!(*got.data == *tensor.data, "{name}");
        }
    }
}

/// The F32 values of a tensor.
fn floats(tensors: &Tensors, name: &str) -> Vec<f32> {
    tensors[name].data.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

#[test]
fn quantises_each_matrix_no_worse_than_nearest_rounding() {
    let tensors = gguf_tensors(3, DType::F32);
    let dir = source(&to_safetensors(&tensors));
    let dst = dir.path().join("a.gguf");
    run(&dir.path().join("src"), &dst, NVFP4).unwrap();
    let (written, bound) = (Gguf::open(&dst).unwrap().tensors, all_values(&bind(&dst)));
    let check = |name: &str, want: &[f32]| {
        let (ours, nearest) = (squared_error(want, &bound[name]), nearest_error(want));
        assert!(0.0 < ours && ours < 0.95 * nearest, "{name}: {ours} against {nearest}");
    };
    for (name, _, shape) in names() {
        let base = name.trim_end_matches(".weight");
        if !is_projection(&name, &shape) {
            assert_eq!(written[&name].dtype, if base == "token_embd" { DType::Bf16 } else { DType::F32 });
            assert!(*written[&name].data == *tensors[&name].data, "{name}");
            continue;
        }
        assert_eq!(written[&name].dtype, DType::Nvfp4);
        let want = floats(&tensors, &name);
        if shape.len() == 3 {
            let experts = want.chunks(want.len() / EXPERTS).enumerate();
            experts.for_each(|(e, want)| check(&format!("{base}[{e}]"), want));
        } else {
            check(base, &want);
        }
    }
}

#[test]
fn rounds_once_to_bf16() {
    for dtype in [DType::Nvfp4, DType::F16, DType::F32, DType::Q8_0] {
        let tensors = gguf_tensors(4, dtype);
        let dir = tempfile::tempdir().unwrap();
        let (src, dst) = (dir.path().join("src.gguf"), dir.path().join("dst.gguf"));
        write_gguf(&src, &tensors);
        run(&src, &dst, BF16).unwrap();
        let (from, to) = (all_values(&bind(&src)), all_values(&bind(&dst)));
        for (name, values) in &from {
            let projection = !name.contains("norm") && !name.contains("sinks") && !name.contains("gate_inp");
            for (i, (from, to)) in values.iter().zip(&to[name]).enumerate() {
                let want = if projection { half::bf16::from_f32(*from).to_f32() } else { *from };
                assert_eq!(want, *to, "{dtype} {name}, value {i}");
            }
        }
    }
}

/// A GGUF by the format's definition: keys as typed bytes, then tensors.
fn write_gguf(path: &Path, tensors: &Tensors) {
    let string = |text: &str| [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat();
    let u32_of = |value: u32| [4_u32.to_le_bytes(), value.to_le_bytes()].concat();
    let f32_of = |value: f32| [6_u32.to_le_bytes(), value.to_le_bytes()].concat();
    let text = |value: &str| [8_u32.to_le_bytes().to_vec(), string(value)].concat();
    let list = |kind: u32, values: &[Vec<u8>]| {
        let head = [9_u32.to_le_bytes(), kind.to_le_bytes()].concat();
        [head, (values.len() as u64).to_le_bytes().to_vec(), values.concat()].concat()
    };
    let bools = |values: [u8; 3]| list(7, &values.map(|value| vec![value]));
    let tokens: Vec<String> =
        (0..69_u8).map(|i| format!("{}", char::from(b'!' + i))).chain(["<|user|>".into()]).collect();
    let kinds: Vec<Vec<u8>> = (0..70).map(|i| if i == 69 { 3_i32 } else { 1 }.to_le_bytes().to_vec()).collect();
    let mut keys = vec![
        ("general.architecture", text("flint")),
        ("general.license", text("apache-2.0")),
        ("general.file_type", u32_of(1)),
        ("general.alignment", u32_of(64)),
        ("general.tensor_extra.prec_a4", list(7, &[vec![0]])),
        ("flint.rope.scaling.type", text("none")),
        ("flint.attention.layer_norm_rms_epsilon", f32_of(1e-6)),
        ("flint.rope.freq_base", f32_of(10_000.0)),
        ("flint.expert_weights_scale", f32_of(1.0)),
        ("flint.expert_weights_norm", [7_u32.to_le_bytes().to_vec(), vec![1]].concat()),
        ("flint.attention.sliding_window_pattern", bools([0, 1, 0])),
        ("flint.attention.rope_pattern", bools([0, 1, 0])),
        ("tokenizer.ggml.model", text("gpt2")),
        ("tokenizer.ggml.pre", text("flint")),
        ("tokenizer.ggml.tokens", list(8, &tokens.iter().map(|token| string(token)).collect::<Vec<_>>())),
        ("tokenizer.ggml.token_type", list(5, &kinds)),
        ("tokenizer.ggml.merges", list(8, &[])),
    ];
    keys.extend(
        [
            ("flint.block_count", 3),
            ("flint.context_length", 500),
            ("flint.embedding_length", 128),
            ("flint.feed_forward_length", 320),
            ("flint.attention.head_count", 6),
            ("flint.attention.head_count_kv", 3),
            ("flint.attention.key_length", 64),
            ("flint.attention.value_length", 64),
            ("flint.attention.sliding_window", 9),
            ("flint.leading_dense_block_count", 1),
            ("flint.expert_count", 3),
            ("flint.expert_used_count", 2),
            ("flint.expert_feed_forward_length", 64),
            ("flint.expert_shared_feed_forward_length", 256),
            ("flint.expert_shared_count", 1),
            ("flint.expert_gating_func", 2),
        ]
        .map(|(key, value)| (key, u32_of(value))),
    );
    let mut bytes = b"GGUF\x03\0\0\0".to_vec();
    bytes.extend((tensors.len() as u64).to_le_bytes());
    bytes.extend((keys.len() as u64).to_le_bytes());
    for (key, value) in keys {
        bytes.extend([string(key), value].concat());
    }
    let mut data = Vec::new();
    for tensor in tensors.values() {
        bytes.extend(string(&tensor.name));
        bytes.extend((tensor.shape.len() as u32).to_le_bytes());
        tensor.shape.iter().rev().for_each(|dim| bytes.extend((*dim as u64).to_le_bytes()));
        let number = match tensor.dtype {
            DType::F32 => 0_u32,
            DType::F16 => 1,
            DType::Q8_0 => 8,
            DType::Bf16 => 30,
            _ => 40,
        };
        bytes.extend(number.to_le_bytes());
        bytes.extend((data.len() as u64).to_le_bytes());
        data.extend_from_slice(&tensor.data);
        data.resize(data.len().next_multiple_of(64), 0xEE);
    }
    bytes.resize(bytes.len().next_multiple_of(64), 0xEE);
    fs::write(path, [bytes, data].concat()).unwrap();
}

#[test]
fn writes_the_keys_that_readers_expect() {
    let dir = source(&to_safetensors(&gguf_tensors(5, DType::Bf16)));
    let dst = dir.path().join("a.gguf");
    for (options, file_type) in [(NVFP4, 39), (ConvertOptions { overwrite: true, ..BF16 }, 32)] {
        run(&dir.path().join("src"), &dst, options).unwrap();
        let keys = Gguf::open(&dst).unwrap().metadata;
        let unsigned = |key: &str| match keys[key] {
            Value::Unsigned(value) => value,
            ref other => panic!("{key} is {other:?}"),
        };
        assert_eq!(unsigned("general.file_type"), file_type);
        assert_eq!(unsigned("general.alignment"), 32);
        assert_eq!(unsigned("flint.vocab_size"), 70);
        assert_eq!(unsigned("flint.expert_gating_func"), 2);
        assert_eq!(keys["general.name"], Value::String("src".into()));
        assert_eq!(keys["tokenizer.chat_template"], Value::String("{{ messages }}".into()));
        assert_eq!(
            keys["flint.attention.sliding_window_pattern"],
            Value::Array([false, true, false].map(Value::Bool).into())
        );
        let (Value::Array(tokens), Value::Array(kinds)) =
            (&keys["tokenizer.ggml.tokens"], &keys["tokenizer.ggml.token_type"])
        else {
            panic!("no lists");
        };
        // llama.cpp takes the vocabulary's size from this list.
        assert_eq!((tokens.len(), kinds.len()), (70, 70));
        assert_eq!(tokens[59..61], ["<|user|>", "[PAD60]"].map(|text| Value::String(text.into())));
        assert_eq!(kinds[58..61], [3, 3, 5].map(Value::Signed));
    }

    let (src, dst) = (dir.path().join("b.gguf"), dir.path().join("c.gguf"));
    write_gguf(&src, &gguf_tensors(5, DType::Bf16));
    run(&src, &dst, NVFP4).unwrap();
    let keys = Gguf::open(&dst).unwrap().metadata;
    assert_eq!(keys["general.license"], Value::String("apache-2.0".into()));
    assert_eq!(keys["general.file_type"], Value::Unsigned(39));
    assert!(!keys.contains_key("general.tensor_extra.prec_a4"));
}

#[test]
fn a_cancelled_conversion_leaves_nothing() {
    let dir = source(&to_safetensors(&gguf_tensors(6, DType::Bf16)));
    let (src, dst) = (dir.path().join("src"), dir.path().join("a.gguf"));
    let mut reports = Vec::new();
    convert(&src, &dst, NVFP4, &mut |done, total| reports.push((done, total)), &Cancel::default()).unwrap();
    let total = reports[0].1;
    assert!(reports.is_sorted() && reports[reports.len() - 1] == (total, total) && reports.len() > 50, "{reports:?}");
    fs::remove_file(&dst).unwrap();
    for stop_after in 1..=reports.len() {
        let (cancel, mut calls) = (Cancel::default(), 0);
        let mut progress = |_, _| {
            calls += 1;
            // What a crash here would leave has another name.
            assert!(!dst.exists() && files_in(dir.path()).iter().any(|name| name.ends_with(".partial")));
            if calls == stop_after {
                cancel.cancel();
            }
        };
        assert!(matches!(convert(&src, &dst, NVFP4, &mut progress, &cancel), Err(Error::Cancelled)), "{stop_after}");
        assert_eq!(files_in(dir.path()), ["src"]);
    }
}

/// Asserts that a conversion fails with an error that says each of `parts`, and leaves the folder as it was.
fn refuses(dir: &Path, dst: &Path, options: ConvertOptions, parts: &[&str]) {
    let before = files_in(dir);
    let error = run(&dir.join("src"), dst, options).unwrap_err().to_string();
    for part in parts {
        assert!(error.contains(part), "{error} lacks {part}");
    }
    assert_eq!(files_in(dir), before);
}

#[test]
fn refuses_values_that_the_target_cannot_hold() {
    let name = "model.layers.2.mlp.experts.1.up_proj.weight";
    for (bad, options, accepted) in [
        (f32::NAN, NVFP4, false),
        (f32::NEG_INFINITY, NVFP4, false),
        (f32::NAN, BF16, false),
        (f32::INFINITY, BF16, false),
        (f32::MAX, BF16, false),
        (f32::MAX, NVFP4, true),
    ] {
        let mut tensors = to_safetensors(&gguf_tensors(7, DType::F32));
        let mut values = floats(&tensors, name);
        values[5 * 128 + 17] = bad;
        put(&mut tensors, name, DType::F32, &[64, 128], f32_bytes(&values));
        let dir = source(&tensors);
        let dst = dir.path().join("a.gguf");
        if accepted {
            run(&dir.path().join("src"), &dst, options).unwrap();
            assert!(bind(&dst).layers.len() == 3);
        } else {
            refuses(dir.path(), &dst, options, &[name, "row 5, column 17", &bad.to_string()]);
        }
    }
}

#[test]
fn refuses_a_destination_that_is_in_the_way() {
    let dir = source(&to_safetensors(&gguf_tensors(8, DType::Bf16)));
    let (src, dst) = (dir.path().join("src"), dir.path().join("a.gguf"));
    fs::write(&dst, "something of value").unwrap();
    refuses(dir.path(), &dst, NVFP4, &["dst", "does not exist"]);
    assert_eq!(fs::read_to_string(&dst).unwrap(), "something of value");
    run(&src, &dst, ConvertOptions { overwrite: true, ..NVFP4 }).unwrap();
    bind(&dst);

    let overwrite = ConvertOptions { overwrite: true, ..BF16 };
    let again = dir.path().join(".").join("a.gguf");
    let error = run(&dst, &again, overwrite).unwrap_err().to_string();
    assert!(error.contains("other than the source"), "{error}");
    bind(&dst);

    refuses(dir.path(), &dir.path().join("b.safetensors"), NVFP4, &["dst", ".gguf"]);
    refuses(dir.path(), &dir.path().join("no/such/a.gguf"), NVFP4, &["no/such"]);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let (mode, plain) = (dst.metadata().unwrap().permissions().mode(), dir.path().join("src/config.json"));
        assert_eq!(mode, plain.metadata().unwrap().permissions().mode(), "permissions of a new file");
    }
}

#[test]
fn refuses_what_a_gguf_cannot_say() {
    let dir = source(&to_safetensors(&gguf_tensors(9, DType::Bf16)));
    let mut config = config_json();
    config["mlp_only_layers"] = serde_json::json!([0, 2]);
    fs::write(dir.path().join("src/config.json"), config.to_string()).unwrap();
    refuses(dir.path(), &dir.path().join("a.gguf"), BF16, &["a dense layer 2"]);
    fs::write(dir.path().join("src/config.json"), config_json().to_string()).unwrap();

    fs::remove_file(dir.path().join("src/tokenizer.json")).unwrap();
    refuses(dir.path(), &dir.path().join("a.gguf"), BF16, &["tokenizer"]);
}

#[test]
fn nvfp4_needs_rows_of_whole_blocks() {
    // A shared expert of 224 is no multiple of 64.
    let mut tensors = to_safetensors(&gguf_tensors(10, DType::Bf16));
    let mut random = Random(10);
    for n in 1..3 {
        let base = format!("model.layers.{n}.mlp.shared_expert");
        for (part, shape) in [("gate_proj", [224, 128]), ("up_proj", [224, 128]), ("down_proj", [128, 224])] {
            let data = random.bytes(DType::Bf16, 224 * 128);
            put(&mut tensors, &format!("{base}.{part}.weight"), DType::Bf16, &shape, data);
        }
    }
    let dir = source(&tensors);
    let mut config = config_json();
    config["shared_expert_intermediate_size"] = 224.into();
    fs::write(dir.path().join("src/config.json"), config.to_string()).unwrap();
    let name = "model.layers.1.mlp.shared_expert.down_proj.weight";
    refuses(dir.path(), &dir.path().join("a.gguf"), NVFP4, &[name, "rows of 224"]);
    run(&dir.path().join("src"), &dir.path().join("a.gguf"), BF16).unwrap();
}

#[test]
fn refuses_an_invalid_block_scale() {
    let mut tensors = to_safetensors(&gguf_tensors(11, DType::Nvfp4));
    let name = "lm_head.weight_scale";
    let mut data = tensors[name].data.to_vec();
    data[3] = nvfp4::INVALID_SCALE;
    let shape = tensors[name].shape.clone();
    put(&mut tensors, name, DType::F8E4m3, &shape, data);
    let dir = source(&tensors);
    refuses(dir.path(), &dir.path().join("a.gguf"), NVFP4, &[name, "0xFF"]);
}
