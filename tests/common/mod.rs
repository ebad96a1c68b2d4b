//! Checkpoints built byte by byte, from the formats' descriptions and not with the readers' own code.
#![allow(dead_code, reason = "each test binary uses its part")]

pub mod hostile;

use std::fmt::Write as _;

/// Value types of GGUF by their number in the file.
pub mod kind {
    pub const U8: u32 = 0;
    pub const I8: u32 = 1;
    pub const U16: u32 = 2;
    pub const I16: u32 = 3;
    pub const U32: u32 = 4;
    pub const I32: u32 = 5;
    pub const F32: u32 = 6;
    pub const BOOL: u32 = 7;
    pub const STRING: u32 = 8;
    pub const ARRAY: u32 = 9;
    pub const U64: u32 = 10;
    pub const I64: u32 = 11;
    pub const F64: u32 = 12;
}

/// A length and the bytes.
pub fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

/// A value with its type in front, as it follows a key.
pub fn typed(kind: u32, bytes: &[u8]) -> Vec<u8> {
    [&kind.to_le_bytes(), bytes].concat()
}

pub fn u32_value(value: u32) -> Vec<u8> {
    typed(kind::U32, &value.to_le_bytes())
}

pub fn f32_value(value: f32) -> Vec<u8> {
    typed(kind::F32, &value.to_le_bytes())
}

pub fn bool_value(value: bool) -> Vec<u8> {
    typed(kind::BOOL, &[value.into()])
}

pub fn string_value(text: &str) -> Vec<u8> {
    typed(kind::STRING, &string(text))
}

/// A list of `count` elements of `kind` whose bytes are `elements`.
pub fn list_value(element: u32, count: u64, elements: &[u8]) -> Vec<u8> {
    typed(kind::ARRAY, &[&element.to_le_bytes(), &count.to_le_bytes()[..], elements].concat())
}

pub fn bools_value(values: &[bool]) -> Vec<u8> {
    list_value(kind::BOOL, values.len() as u64, &values.iter().map(|&b| b.into()).collect::<Vec<u8>>())
}

pub fn strings_value(texts: &[&str]) -> Vec<u8> {
    list_value(kind::STRING, texts.len() as u64, &texts.iter().flat_map(|text| string(text)).collect::<Vec<u8>>())
}

/// A tensor of a GGUF: dimensions in the file's order (contiguous first).
#[derive(Clone)]
pub struct GgufTensor {
    pub name: String,
    pub dims: Vec<u64>,
    pub kind: u32,
    pub offset: u64,
    pub data: Vec<u8>,
}

/// A GGUF whose every field can be set wrong.
#[derive(Clone)]
pub struct GgufFile {
    pub magic: [u8; 4],
    pub version: u32,
    /// The count that is written, when it is not the real one.
    pub tensor_count: Option<u64>,
    /// The count that is written, when it is not the real one.
    pub key_count: Option<u64>,
    /// Names, and values as [`typed`] makes them.
    pub keys: Vec<(String, Vec<u8>)>,
    pub tensors: Vec<GgufTensor>,
    pub alignment: usize,
}

impl GgufFile {
    pub fn empty() -> Self {
        Self {
            magic: *b"GGUF",
            version: 3,
            tensor_count: None,
            key_count: None,
            keys: vec![],
            tensors: vec![],
            alignment: 32,
        }
    }

    /// The smallest Flint whose configuration is accepted: three layers, the last of them of experts. It has two tensors.
    pub fn flint() -> Self {
        let mut file = Self::empty();
        file.keys = vec![("general.architecture".into(), string_value("flint"))];
        for (name, value) in [
            ("block_count", 3),
            ("context_length", 64),
            ("embedding_length", 8),
            ("feed_forward_length", 12),
            ("attention.head_count", 4),
            ("attention.head_count_kv", 2),
            ("attention.key_length", 4),
            ("attention.value_length", 4),
            ("attention.sliding_window", 5),
            ("leading_dense_block_count", 2),
            ("expert_count", 7),
            ("expert_used_count", 3),
            ("expert_feed_forward_length", 6),
            ("expert_shared_feed_forward_length", 10),
            ("expert_shared_count", 1),
            ("expert_gating_func", 2),
        ] {
            file = file.key(&format!("flint.{name}"), u32_value(value));
        }
        file.key("flint.attention.layer_norm_rms_epsilon", f32_value(1e-6))
            .key("flint.attention.sliding_window_pattern", bools_value(&[false, true, false]))
            .key("flint.attention.rope_pattern", bools_value(&[false, true, true]))
            .key("flint.rope.freq_base", f32_value(5000.0))
            .key("flint.rope.scaling.type", string_value("none"))
            .key("flint.expert_weights_norm", bool_value(true))
            .key("flint.expert_weights_scale", f32_value(1.0))
            .tensor("token_embd.weight", &[8, 11], 30, &pattern(8 * 11 * 2, 1))
            .tensor("output_norm.weight", &[8], 0, &pattern(8 * 4, 2))
    }

    /// Sets a key, in its old place when it was there.
    pub fn key(mut self, name: &str, value: Vec<u8>) -> Self {
        match self.keys.iter_mut().find(|(key, _)| key == name) {
            Some(entry) => entry.1 = value,
            None => self.keys.push((name.into(), value)),
        }
        self
    }

    pub fn without(mut self, name: &str) -> Self {
        let before = self.keys.len();
        self.keys.retain(|(key, _)| key != name);
        assert_eq!(self.keys.len() + 1, before, "the valid file has no {name}");
        self
    }

    /// Adds a tensor after the data of those before.
    pub fn tensor(mut self, name: &str, dims: &[u64], kind: u32, data: &[u8]) -> Self {
        let end = self.tensors.last().map_or(0, |tensor| tensor.offset as usize + tensor.data.len());
        let offset = end.next_multiple_of(self.alignment) as u64;
        self.tensors.push(GgufTensor { name: name.into(), dims: dims.into(), kind, offset, data: data.into() });
        self
    }

    /// Changes the last tensor.
    pub fn last(mut self, change: impl FnOnce(&mut GgufTensor)) -> Self {
        change(self.tensors.last_mut().expect("a tensor"));
        self
    }

    /// The file. Data goes where the offsets say, and nowhere when they point far away.
    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.header();
        if self.tensors.is_empty() {
            return out;
        }
        let start = out.len().next_multiple_of(self.alignment);
        out.resize(start, 0);
        for tensor in self.tensors.iter().filter(|tensor| tensor.offset < 1 << 20) {
            let at = start + tensor.offset as usize;
            out.resize(out.len().max(at + tensor.data.len()), 0);
            out[at..at + tensor.data.len()].copy_from_slice(&tensor.data);
        }
        out
    }

    /// Everything before the padding and the data.
    pub fn header(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        out.extend(self.key_count.unwrap_or(self.keys.len() as u64).to_le_bytes());
        for (name, value) in &self.keys {
            out.extend(string(name));
            out.extend(value);
        }
        for tensor in &self.tensors {
            out.extend(string(&tensor.name));
            out.extend((tensor.dims.len() as u32).to_le_bytes());
            out.extend(tensor.dims.iter().flat_map(|dim| dim.to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            out.extend(tensor.offset.to_le_bytes());
        }
        out
    }
}

/// `len` bytes that differ from their neighbours and by `seed`.
pub fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(37).wrapping_add(seed)).collect()
}

/// A safetensors shard: its header as text, then the data.
pub fn shard(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// The header of tensors (name, type, shape, bytes), one after the other.
pub fn shard_header(tensors: &[(&str, &str, &[usize], usize)]) -> String {
    let mut out = String::from("{\"__metadata__\":{\"format\":\"pt\"}");
    let mut at = 0;
    for (name, dtype, shape, bytes) in tensors {
        let end = at + bytes;
        write!(out, ",\"{name}\":{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[{at},{end}]}}").unwrap();
        at = end;
    }
    out + "}"
}

/// A config.json with the same Flint as [`GgufFile::flint`], with the keys that transformers writes.
pub fn config_json() -> serde_json::Value {
    serde_json::json!({
        "architectures": ["FlintForCausalLM"],
        "attention_bias": false,
        "attention_dropout": 0.0,
        "bos_token_id": null,
        "decoder_sparse_step": 1,
        "dtype": "bfloat16",
        "eos_token_id": [2, 3],
        "head_dim": 4,
        "hidden_act": "silu",
        "hidden_size": 8,
        "initializer_range": 0.02,
        "intermediate_size": 12,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "max_position_embeddings": 64,
        "mlp_only_layers": [0, 1],
        "model_type": "flint",
        "moe_intermediate_size": 6,
        "no_rope_layer_indices": [0],
        "norm_topk_prob": true,
        "num_attention_heads": 4,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "output_router_logits": false,
        "pad_token_id": null,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
        "router_aux_loss_coef": 0.0005,
        "router_score_function": "sigmoid",
        "shared_expert_intermediate_size": 10,
        "sliding_window": 5,
        "softmax_type": "learnable",
        "tie_word_embeddings": false,
        "transformers_version": "5.24.0",
        "use_cache": true,
        "vocab_size": 11,
    })
}
