//! Configurations, as GGUF keys and as config.json, that are not the Flint that this version runs. Every one is refused by
//! an error that names the key and says what stands there.

mod common;

use std::fs;

use common::{
    GgufFile, bool_value, bools_value, config_json, f32_value,
    hostile::{Counting, assert_refused, refusal},
    kind, list_value, pattern, shard, shard_header, string_value, strings_value, typed, u32_value,
};
use serde_json::{Value, json};
use tempfile::TempDir;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Keys without which a GGUF is refused.
const REQUIRED: [&str; 20] = [
    "general.architecture",
    "flint.block_count",
    "flint.context_length",
    "flint.embedding_length",
    "flint.feed_forward_length",
    "flint.attention.head_count",
    "flint.attention.head_count_kv",
    "flint.attention.key_length",
    "flint.attention.value_length",
    "flint.attention.layer_norm_rms_epsilon",
    "flint.attention.sliding_window",
    "flint.attention.sliding_window_pattern",
    "flint.attention.rope_pattern",
    "flint.leading_dense_block_count",
    "flint.expert_count",
    "flint.expert_used_count",
    "flint.expert_feed_forward_length",
    "flint.expert_shared_feed_forward_length",
    "flint.expert_gating_func",
    "flint.expert_weights_norm",
];

/// Opens a Flint with these keys changed.
fn gguf(case: &str, file: &GgufFile, key: &str, found: &str) {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("case.gguf");
    let bytes = file.bytes();
    fs::write(&path, &bytes).unwrap();
    assert_refused(case, &path, bytes.len(), key, found);
}

#[test]
fn gguf_keys_are_required() {
    for key in REQUIRED {
        gguf(key, &GgufFile::flint().without(key), key, "no such key");
    }
}

#[test]
fn gguf_keys_have_their_type() {
    for key in REQUIRED {
        gguf(key, &GgufFile::flint().key(key, strings_value(&["2"])), key, "");
        if key != "general.architecture" {
            gguf(key, &GgufFile::flint().key(key, string_value("2")), key, "\"2\"");
        }
    }
}

#[test]
fn gguf_values_are_those_of_a_flint() {
    let list = |values: &[u32]| {
        list_value(kind::U32, values.len() as u64, &values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>())
    };
    let i32_value = |value: i32| typed(kind::I32, &value.to_le_bytes());
    let u64_value = |value: u64| typed(kind::U64, &value.to_le_bytes());
    let cases: &[(&str, Vec<u8>, &str)] = &[
        ("general.architecture", string_value("llama"), "\"llama\""),
        ("general.architecture", string_value("Flint"), "\"Flint\""),
        ("general.architecture", u32_value(1), "1"),
        ("flint.block_count", u32_value(0), "0"),
        ("flint.block_count", u64_value(1 << 40), "1099511627776"),
        ("flint.block_count", i32_value(-3), "-3"),
        ("flint.context_length", u32_value(0), "0"),
        ("flint.context_length", u32_value(u32::MAX), "4294967295"),
        ("flint.embedding_length", u32_value(0), "0"),
        ("flint.embedding_length", u64_value(u64::MAX), "18446744073709551615"),
        ("flint.feed_forward_length", u32_value(0), "0"),
        ("flint.feed_forward_length", list(&[12, 12]), "2"),
        ("flint.attention.head_count", u32_value(0), "0"),
        ("flint.attention.head_count", list(&[4, 4, 8]), "several"),
        ("flint.attention.head_count_kv", u32_value(0), "0"),
        ("flint.attention.head_count_kv", u32_value(3), "3"),
        ("flint.attention.head_count_kv", u32_value(8), "8"),
        ("flint.attention.head_count_kv", list(&[2, 2]), "2"),
        ("flint.attention.head_count_kv", list(&[2, 1, 2]), "several"),
        ("flint.attention.head_count_kv", list(&[]), "0"),
        ("flint.attention.value_length", u32_value(8), "8"),
        ("flint.attention.sliding_window", u32_value(0), "0"),
        ("flint.attention.sliding_window_pattern", bools_value(&[false, true]), "2"),
        ("flint.attention.sliding_window_pattern", bools_value(&[true; 4]), "4"),
        ("flint.attention.sliding_window_pattern", bools_value(&[]), "0"),
        ("flint.attention.sliding_window_pattern", bool_value(true), "true"),
        ("flint.attention.sliding_window_pattern", u32_value(4), "4"),
        ("flint.attention.sliding_window_pattern", list(&[0, 1, 0]), "0"),
        ("flint.attention.rope_pattern", bools_value(&[false, true, false, false]), "4"),
        ("flint.attention.rope_pattern", list(&[0, 1, 0]), "0"),
        ("flint.attention.layer_norm_rms_epsilon", f32_value(0.0), "0"),
        ("flint.attention.layer_norm_rms_epsilon", f32_value(-1e-6), "-0.000001"),
        ("flint.attention.layer_norm_rms_epsilon", f32_value(f32::NAN), "NaN"),
        ("flint.attention.layer_norm_rms_epsilon", typed(kind::F64, &1e-60_f64.to_le_bytes()), "0"),
        ("flint.rope.freq_base", f32_value(f32::INFINITY), "inf"),
        ("flint.rope.freq_base", f32_value(0.0), "0"),
        ("flint.rope.freq_base", u32_value(10_000), "10000"),
        ("flint.rope.scaling.type", string_value("yarn"), "\"yarn\""),
        ("flint.rope.scaling.factor", f32_value(4.0), "4.0"),
        ("flint.rope.dimension_count", u32_value(2), "2"),
        ("flint.rope.freq_base_swa", f32_value(1e6), "1000000.0"),
        ("flint.leading_dense_block_count", u32_value(4), "4"),
        ("flint.expert_count", u32_value(0), "0"),
        ("flint.expert_used_count", u32_value(0), "0"),
        ("flint.expert_used_count", u32_value(8), "8"),
        ("flint.expert_feed_forward_length", u32_value(0), "0"),
        ("flint.expert_shared_feed_forward_length", u32_value(0), "0"),
        ("flint.expert_shared_count", u32_value(2), "2"),
        ("flint.expert_gating_func", u32_value(1), "1"),
        ("flint.expert_weights_norm", bool_value(false), "false"),
        ("flint.expert_weights_scale", f32_value(2.5), "2.5"),
        ("flint.expert_group_count", u32_value(8), "8"),
        ("flint.attention.causal", bool_value(false), "false"),
        ("flint.final_logit_softcapping", f32_value(30.0), "30.0"),
        ("flint.vocab_size", u32_value(0), "0"),
        ("flint.vocab_size", u32_value(u32::MAX), "4294967295"),
        ("general.tensor_extra.prec_a4", bools_value(&[false, true]), "true for entry 1"),
        ("general.tensor_extra.prec_a4", u32_value(1), "1"),
    ];
    for (key, value, found) in cases {
        gguf(&format!("{key} {value:?}"), &GgufFile::flint().key(key, value.clone()), key, found);
    }
    gguf(
        "odd head",
        &GgufFile::flint().key("flint.attention.key_length", u32_value(3)),
        "flint.attention.value_length",
        "4",
    );
    let odd = GgufFile::flint().key("flint.attention.value_length", u32_value(3));
    gguf("odd heads", &odd.key("flint.attention.key_length", u32_value(3)), "flint.attention.key_length", "3");
}

#[test]
fn four_bit_activations_name_their_tensor() {
    let file = GgufFile::flint()
        .key("general.tensor_extra.name", strings_value(&["blk.0.attn_q.weight", "blk.1.attn_q.weight"]));
    let marked = file.clone().key("general.tensor_extra.prec_a4", bools_value(&[false, true]));
    gguf("marked", &marked, "general.tensor_extra.prec_a4", "true for \"blk.1.attn_q.weight\"");
}

#[test]
fn gguf_without_an_embedding_has_no_vocabulary() {
    let mut file = GgufFile::flint();
    file.tensors.remove(0);
    file.tensors[0].offset = 0;
    gguf("no embedding", &file, "token_embd.weight", "none");
    file.tensors[0].name = "token_embd.weight".into();
    gguf("flat embedding", &file, "token_embd.weight", "shape [8]");
}

/// Opens a folder with this config.json.
fn config(case: &str, text: &str, key: &str, found: &str) {
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("config.json"), text).unwrap();
    let header = shard_header(&[("a", "F32", &[2], 8)]);
    fs::write(dir.path().join("model.safetensors"), shard(&header, &pattern(8, 1))).unwrap();
    assert_refused(case, dir.path(), text.len(), key, found);
}

#[test]
fn config_keys_are_required() {
    for key in [
        "model_type",
        "hidden_size",
        "vocab_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "intermediate_size",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "sliding_window",
        "rms_norm_eps",
        "num_hidden_layers",
    ] {
        let mut json = config_json();
        json.as_object_mut().unwrap().remove(key).unwrap();
        config(key, &json.to_string(), key, "no such key");
        json[key] = Value::Null;
        config(key, &json.to_string(), key, "no such key");
        json[key] = json!(["2"]);
        config(key, &json.to_string(), key, "[\"2\"]");
    }
}

#[test]
fn config_values_are_those_of_a_flint() {
    let cases: &[(&str, Value, &str)] = &[
        ("model_type", json!("qwen3_moe"), "qwen3_moe"),
        ("architectures", json!(["LlamaForCausalLM"]), "LlamaForCausalLM"),
        ("architectures", json!("FlintForCausalLM"), "\"FlintForCausalLM\""),
        ("num_hidden_layers", json!(0), "0"),
        ("num_hidden_layers", json!(1_u64 << 40), "1099511627776"),
        ("num_hidden_layers", json!(-3), "-3"),
        ("num_hidden_layers", json!(3.5), "3.5"),
        ("hidden_size", json!(0), "0"),
        ("hidden_size", json!(1e300), "1e+300"),
        ("hidden_size", json!(u64::MAX), "18446744073709551615"),
        ("vocab_size", json!(1_u64 << 32), "4294967296"),
        ("num_attention_heads", json!(5), "2"),
        ("num_key_value_heads", json!(3), "3"),
        ("num_key_value_heads", json!([2, 2, 2]), "[2,2,2]"),
        ("head_dim", json!(5), "5"),
        ("num_experts_per_tok", json!(8), "8"),
        ("sliding_window", json!(0), "0"),
        ("rms_norm_eps", json!(0), "0"),
        ("rms_norm_eps", json!("1e-6"), "\"1e-6\""),
        ("layer_types", json!(["full_attention", "sliding_attention"]), "a list of 2"),
        ("layer_types", json!([]), "a list of 0"),
        ("layer_types", json!(["full_attention", "full_attention", "linear_attention"]), "linear_attention"),
        ("layer_types", json!("full_attention"), "\"full_attention\""),
        ("no_rope_layer_indices", json!([0, 3]), "3"),
        ("no_rope_layer_indices", json!([0, 0]), "0"),
        ("no_rope_layer_indices", json!([-1]), "-1"),
        ("no_rope_layer_indices", json!(1), "1"),
        ("mlp_only_layers", json!([0, 1, 2, 3]), "3"),
        ("mlp_only_layers", json!([1.0]), "1.0"),
        ("mlp_only_layers", json!({"0": true}), "{\"0\":true}"),
        ("hidden_act", json!("gelu"), "\"gelu\""),
        ("attention_bias", json!(true), "true"),
        ("tie_word_embeddings", json!(true), "true"),
        ("decoder_sparse_step", json!(2), "2"),
        ("norm_topk_prob", json!(false), "false"),
        ("router_score_function", json!("softmax"), "\"softmax\""),
        ("softmax_type", json!("vanilla"), "\"vanilla\""),
        ("rope_theta", json!(1e6), "1000000"),
        ("rope_theta", json!("1e4"), "\"1e4\""),
        ("rope_scaling", json!("linear"), "\"linear\""),
        ("quantization_config", json!({"quant_method": "gptq"}), "gptq"),
        ("quantization_config", json!(4), "no such key"),
        ("logit_scale", json!(0.5), "0.5"),
        ("query_pre_attn_scalar", json!(64), "64"),
    ];
    for (key, value, found) in cases {
        let mut json = config_json();
        json[key] = value.clone();
        let named = match *key {
            "quantization_config" => "quantization_config.quant_method",
            // Two heads do not divide five: the error is about the divisor.
            "num_attention_heads" => "num_key_value_heads",
            key => key,
        };
        config(&format!("{key} {value}"), &json.to_string(), named, found);
    }
    let rope: &[(&str, Value, &str)] = &[
        ("rope_type", json!("yarn"), "\"yarn\""),
        ("type", json!("linear"), "\"linear\""),
        ("rope_theta", json!(0.0), "0"),
        ("rope_theta", json!([1]), "[1]"),
        ("factor", json!(8.0), "8.0"),
        ("partial_rotary_factor", json!(0.5), "0.5"),
        ("sliding_attention", json!({"rope_theta": 1e4}), "{\"rope_theta\":10000.0}"),
    ];
    for (key, value, found) in rope {
        let mut json = config_json();
        json["rope_parameters"][key] = value.clone();
        let named =
            if *key == "rope_theta" && value.is_number() { (*key).into() } else { format!("rope_parameters.{key}") };
        config(&format!("rope_parameters {key} {value}"), &json.to_string(), &named, found);
    }
}

#[test]
fn a_config_is_a_json_object() {
    let deep = "[".repeat(100_000);
    let long = format!("{{\"a\": [{}0]}}", "0,".repeat(1 << 19));
    for (case, text, found) in [
        ("empty", "", "EOF"),
        ("a list", "[1]", "a list"),
        ("null", "null", "null"),
        ("cut", "{\"model_type\": \"flint", "EOF"),
        ("nested 100,000 deep", &deep, "recursion limit"),
        ("a megabyte of zeros", &long, "1048586 bytes"),
        ("a number out of range", "{\"hidden_size\": 1e999}", "number out of range"),
        ("text behind", "{} {}", "trailing"),
        ("not UTF-8", "\u{fffd}", "expected value"),
    ] {
        config(case, text, "file", found);
    }
}

#[test]
fn a_refusal_of_the_config_names_its_file() {
    let dir = TempDir::new().unwrap();
    fs::write(dir.path().join("config.json"), "{}").unwrap();
    let header = shard_header(&[("a", "F32", &[2], 8)]);
    fs::write(dir.path().join("model.safetensors"), shard(&header, &pattern(8, 1))).unwrap();
    assert_eq!(refusal("no model_type", dir.path(), 2), "model_type: expected \"flint\", found no such key");
    let checkpoint = flint_rs::checkpoint::Checkpoint::open(dir.path()).unwrap();
    let error = flint_rs::config::FlintConfig::from_checkpoint(&checkpoint).unwrap_err().to_string();
    assert!(error.starts_with(dir.path().join("config.json").to_str().unwrap()), "{error}");
}
