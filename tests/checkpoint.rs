//! Valid checkpoints: what is opened, what is read from it, and how a path is understood.

mod common;

use std::{fs, path::Path};

use common::{GgufFile, bool_value, config_json, kind, list_value, pattern, shard, shard_header, typed, u32_value};
use flint_rs::{
    checkpoint::{Bytes, Checkpoint, DType, gguf::Gguf},
    config::{Attention, FlintConfig, LayerKind, Mlp},
};
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
