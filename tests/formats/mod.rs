//! A small Flint as tensors of either kind of checkpoint, made without the code under test: names and shapes are written
//! out from the format, NVFP4 bytes are random, and repacking is a plain loop over nibbles.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use flint_rs::{
    checkpoint::{Checkpoint, DType, Tensor, gguf::Gguf, safetensors::SafetensorsDir},
    config::{Attention, FlintConfig, LayerKind, Mlp},
    nvfp4,
    weights::{Matrix, MlpWeights, SwiGlu, Weights},
};

pub type Tensors = BTreeMap<String, Tensor>;

pub const EXPERTS: usize = 3;

/// Three layers: dense, then two of experts. No two widths are equal.
pub fn config() -> FlintConfig {
    let layer = |attention, rope, mlp| LayerKind { attention, rope, mlp };
    FlintConfig {
        hidden_size: 128,
        vocab_size: 70,
        context_length: 500,
        n_heads: 6,
        n_kv_heads: 3,
        head_dim: 64,
        dense_intermediate_size: 320,
        n_experts: EXPERTS,
        n_experts_per_token: 2,
        expert_intermediate_size: 64,
        shared_intermediate_size: 256,
        sliding_window: 9,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        layers: vec![
            layer(Attention::Full, false, Mlp::Dense),
            layer(Attention::Sliding, true, Mlp::Moe),
            layer(Attention::Full, false, Mlp::Moe),
        ],
    }
}

/// (GGUF name, safetensors name, shape) of every tensor of [`config`]; the safetensors name of experts has `{}` for the number.
pub fn names() -> Vec<(String, String, Vec<usize>)> {
    let mut all: Vec<(String, String, Vec<usize>)> = vec![
        ("token_embd.weight".into(), "model.embed_tokens.weight".into(), vec![70, 128]),
        ("output_norm.weight".into(), "model.norm.weight".into(), vec![128]),
        ("output.weight".into(), "lm_head.weight".into(), vec![70, 128]),
    ];
    for n in 0..3 {
        let mut layer = vec![
            ("attn_norm", "input_layernorm.weight", vec![128]),
            ("attn_q", "self_attn.q_proj.weight", vec![384, 128]),
            ("attn_k", "self_attn.k_proj.weight", vec![192, 128]),
            ("attn_v", "self_attn.v_proj.weight", vec![192, 128]),
            ("attn_output", "self_attn.o_proj.weight", vec![128, 384]),
            ("attn_q_norm", "self_attn.q_norm.weight", vec![64]),
            ("attn_k_norm", "self_attn.k_norm.weight", vec![64]),
            ("attn_sinks", "self_attn.softmax_offset", vec![6]),
            ("ffn_norm", "post_attention_layernorm.weight", vec![128]),
        ];
        layer.extend(if n == 0 {
            vec![
                ("ffn_gate", "mlp.gate_proj.weight", vec![320, 128]),
                ("ffn_up", "mlp.up_proj.weight", vec![320, 128]),
                ("ffn_down", "mlp.down_proj.weight", vec![128, 320]),
            ]
        } else {
            vec![
                ("ffn_gate_inp", "mlp.gate.weight", vec![3, 128]),
                ("ffn_gate_exps", "mlp.experts.{}.gate_proj.weight", vec![3, 64, 128]),
                ("ffn_up_exps", "mlp.experts.{}.up_proj.weight", vec![3, 64, 128]),
                ("ffn_down_exps", "mlp.experts.{}.down_proj.weight", vec![3, 128, 64]),
                ("ffn_gate_shexp", "mlp.shared_expert.gate_proj.weight", vec![256, 128]),
                ("ffn_up_shexp", "mlp.shared_expert.up_proj.weight", vec![256, 128]),
                ("ffn_down_shexp", "mlp.shared_expert.down_proj.weight", vec![128, 256]),
            ]
        });
        let full = |(gguf, hf, shape)| (format!("blk.{n}.{gguf}.weight"), format!("model.layers.{n}.{hf}"), shape);
        all.extend(layer.into_iter().map(full));
    }
    all
}

/// splitmix64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    /// In [-1, 1), with 24 bits.
    pub fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// `count` values as bytes of `dtype`; NVFP4 scales and e4m3 values stay at 0x7E and below.
    pub fn bytes(&mut self, dtype: DType, count: usize) -> Vec<u8> {
        let mut out = Vec::new();
        for _ in 0..count / dtype.block_len() {
            match dtype {
                DType::F32 => out.extend(self.float().to_le_bytes()),
                DType::F16 => out.extend(half::f16::from_f32(self.float()).to_le_bytes()),
                DType::Bf16 => out.extend(half::bf16::from_f32(self.float()).to_le_bytes()),
                DType::Q8_0 => {
                    out.extend(half::f16::from_f32(self.float()).to_le_bytes());
                    out.extend((0..32).map(|_| self.next() as u8));
                }
                DType::Nvfp4 => {
                    out.extend((0..4).map(|_| (self.next() % 0x7F) as u8));
                    out.extend((0..32).map(|_| self.next() as u8));
                }
                DType::U8 => out.push(self.next() as u8),
                DType::F8E4m3 => out.push((self.next() % 0x7F) as u8),
                other => panic!("no random {other}"),
            }
        }
        out
    }
}

pub fn tensor(name: &str, dtype: DType, shape: &[usize], data: Vec<u8>) -> Tensor {
    let file = Arc::new(PathBuf::from("test-file"));
    Tensor { name: name.into(), dtype, shape: shape.into(), data: data.into(), file }
}

pub fn put(tensors: &mut Tensors, name: &str, dtype: DType, shape: &[usize], data: Vec<u8>) {
    tensors.insert(name.into(), tensor(name, dtype, shape, data));
}

pub fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Whether the tensor of this GGUF name is a quantised matrix in the published file.
pub fn is_projection(name: &str, shape: &[usize]) -> bool {
    shape.len() > 1 && name != "token_embd.weight" && !name.contains("ffn_gate_inp")
}

/// A GGUF's tensors: projections of `dtype` (NVFP4 with companions), the rest as in the published file.
pub fn gguf_tensors(seed: u64, dtype: DType) -> Tensors {
    let mut random = Random(seed);
    let mut tensors = Tensors::new();
    for (name, _, shape) in names() {
        let dtype = match () {
            () if is_projection(&name, &shape) => dtype,
            () if name == "token_embd.weight" => DType::Bf16,
            () => DType::F32,
        };
        put(&mut tensors, &name, dtype, &shape, random.bytes(dtype, shape.iter().product()));
        if dtype == DType::Nvfp4 {
            let n = if shape.len() == 3 { EXPERTS } else { 1 };
            let scales: Vec<f32> = (0..n).map(|_| random.float().abs() + 0.01).collect();
            put(&mut tensors, &name.replace("weight", "scale"), DType::F32, &[n], f32_bytes(&scales));
        }
    }
    tensors
}

/// The same numbers under the names of safetensors, experts one by one. NVFP4 becomes `ModelOpt`'s form.
pub fn to_safetensors(gguf: &Tensors) -> Tensors {
    let mut out = Tensors::new();
    for (gguf_name, name, shape) in names() {
        let from = &gguf[&gguf_name];
        if shape.len() < 3 {
            put_one(&mut out, gguf, &gguf_name, &name, 0, &shape, &from.data);
        } else {
            for (e, data) in from.data.chunks(from.data.len() / EXPERTS).enumerate() {
                put_one(&mut out, gguf, &gguf_name, &name.replace("{}", &e.to_string()), e, &shape[1..], data);
            }
        }
    }
    out
}

fn put_one(
    out: &mut Tensors,
    gguf: &Tensors,
    gguf_name: &str,
    name: &str,
    expert: usize,
    shape: &[usize],
    data: &[u8],
) {
    let dtype = gguf[gguf_name].dtype;
    if dtype != DType::Nvfp4 {
        return put(out, name, dtype, shape, data.to_vec());
    }
    let (codes, scales) = pairs(data);
    put(out, name, DType::U8, &[shape[0], shape[1] / 2], codes);
    put(out, &format!("{name}_scale"), DType::F8E4m3, &[shape[0], shape[1] / 16], scales);
    let companion = &gguf[&gguf_name.replace("weight", "scale")].data[4 * expert..][..4];
    put(out, &format!("{name}_scale_2"), DType::F32, &[], companion.to_vec());
    put(out, &name.replace("weight", "input_scale"), DType::F32, &[], f32_bytes(&[0.5]));
}

/// Codes in consecutive pairs and scales, nibble by nibble.
fn pairs(blocks: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for block in blocks.chunks(36) {
        scales.extend(&block[..4]);
        for group in block[4..].chunks(8) {
            let mut values: Vec<u8> = group.iter().map(|byte| byte & 15).collect();
            values.extend(group.iter().map(|byte| byte >> 4));
            codes.extend(values.chunks(2).map(|two| two[0] | two[1] << 4));
        }
    }
    (codes, scales)
}

/// Replaces the experts of [`to_safetensors`] by stacks.
pub fn stack_experts(tensors: &mut Tensors) {
    for n in 1..3 {
        let base = format!("model.layers.{n}.mlp.experts");
        let mut dtype = DType::F32;
        let mut take = |name: String| {
            let tensor = tensors.remove(&name).unwrap();
            dtype = tensor.dtype;
            tensor.data.to_vec()
        };
        let (mut gate_up, mut down) = (Vec::new(), Vec::new());
        for e in 0..EXPERTS {
            gate_up.extend(take(format!("{base}.{e}.gate_proj.weight")));
            gate_up.extend(take(format!("{base}.{e}.up_proj.weight")));
            down.extend(take(format!("{base}.{e}.down_proj.weight")));
        }
        put(tensors, &format!("{base}.gate_up_proj"), dtype, &[EXPERTS, 128, 128], gate_up);
        put(tensors, &format!("{base}.down_proj"), dtype, &[EXPERTS, 128, 64], down);
    }
}

pub fn gguf(tensors: Tensors) -> Checkpoint {
    Checkpoint::Gguf(Gguf { path: "test-file".into(), metadata: BTreeMap::new(), tensors })
}

pub fn folder(tensors: Tensors) -> Checkpoint {
    let config = serde_json::Value::Null;
    Checkpoint::Safetensors(SafetensorsDir { path: "test-folder".into(), config, tensors })
}

/// Every value of a matrix, the tensor scale included.
pub fn values(matrix: &Matrix) -> Vec<f32> {
    let mut row = vec![f32::NAN; matrix.cols];
    let mut all = Vec::new();
    for r in 0..matrix.rows {
        matrix.decode_row(r, &mut row);
        all.extend(row.iter().map(|value| value * matrix.scale()));
    }
    all
}

/// Every value of `weights` under its GGUF name; experts are `NAME[e]`.
pub fn all_values(weights: &Weights) -> BTreeMap<String, Vec<f32>> {
    let mut all = BTreeMap::new();
    all.insert("token_embd".to_string(), values(&weights.embedding));
    all.insert("output".into(), values(&weights.lm_head));
    all.insert("output_norm".into(), weights.final_norm.clone());
    for (n, layer) in weights.layers.iter().enumerate() {
        let mut put = |name: String, values| assert!(all.insert(format!("blk.{n}.{name}"), values).is_none());
        put("attn_norm".into(), layer.attn_norm.clone());
        put("attn_q_norm".into(), layer.q_norm.clone());
        put("attn_k_norm".into(), layer.k_norm.clone());
        put("attn_sinks".into(), layer.sinks.clone());
        put("ffn_norm".into(), layer.mlp_norm.clone());
        put("attn_q".into(), values(&layer.q));
        put("attn_k".into(), values(&layer.k));
        put("attn_v".into(), values(&layer.v));
        put("attn_output".into(), values(&layer.o));
        let mut swiglu = |suffix: String, w: &SwiGlu| {
            put(format!("ffn_gate{suffix}"), values(&w.gate));
            put(format!("ffn_up{suffix}"), values(&w.up));
            put(format!("ffn_down{suffix}"), values(&w.down));
        };
        match &layer.mlp {
            MlpWeights::Dense(dense) => swiglu(String::new(), dense),
            MlpWeights::Moe { router, experts, shared } => {
                swiglu("_shexp".into(), shared);
                experts.iter().enumerate().for_each(|(e, expert)| swiglu(format!("_exps[{e}]"), expert));
                put("ffn_gate_inp".into(), values(router));
            }
        }
    }
    all
}

/// [`config`] as a config.json.
pub fn config_json() -> serde_json::Value {
    serde_json::json!({
        "model_type": "flint", "architectures": ["FlintForCausalLM"],
        "hidden_size": 128, "vocab_size": 70, "max_position_embeddings": 500, "num_attention_heads": 6,
        "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 320, "num_experts": EXPERTS,
        "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 256,
        "sliding_window": 9, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"], "mlp_only_layers": [0], "eos_token_id": 58,
    })
}

/// A tokenizer of 60 tokens: 58 letters from A on, and two control tokens.
pub fn tokenizer_json() -> serde_json::Value {
    use serde_json::json;
    let split =
        |regex: &str| json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
    let vocab: serde_json::Map<_, _> = (0..58_u8).map(|i| (char::from(b'A' + i).to_string(), json!(i))).collect();
    let control = |id: u32, content: &str| {
        json!({"id": id, "content": content, "special": true, "normalized": false, "single_word": false, "lstrip": false,
               "rstrip": false})
    };
    json!({
        "added_tokens": [control(58, "<|endoftext|>"), control(59, "<|user|>")],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            split(r"\p{N}{1,3}"),
            split("[一-龥぀-ゟ゠-ヿ]+"),
            split(concat!(
                r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
                r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
                r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            )),
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        ]},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    })
}

/// Writes a checkpoint folder of these tensors.
pub fn write_folder(folder: &std::path::Path, tensors: &Tensors) {
    std::fs::create_dir_all(folder).unwrap();
    let views = tensors.values().map(|tensor| {
        let dtype = match tensor.dtype {
            DType::F32 => safetensors::Dtype::F32,
            DType::F16 => safetensors::Dtype::F16,
            DType::Bf16 => safetensors::Dtype::BF16,
            DType::U8 => safetensors::Dtype::U8,
            DType::F8E4m3 => safetensors::Dtype::F8_E4M3,
            other => panic!("safetensors have no {other}"),
        };
        (&tensor.name, safetensors::tensor::TensorView::new(dtype, tensor.shape.clone(), &tensor.data).unwrap())
    });
    safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
    std::fs::write(folder.join("config.json"), config_json().to_string()).unwrap();
    std::fs::write(folder.join("tokenizer.json"), tokenizer_json().to_string()).unwrap();
    std::fs::write(folder.join("chat_template.jinja"), "{{ messages }}").unwrap();
}

/// An e4m3 byte by its definition, without the rules for single bytes.
pub fn e4m3(byte: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
    if exponent == 0 { mantissa * 2f64.powi(-9) } else { (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7) }
}

/// A code by its definition: 1 sign, 2 exponent (bias 1), 1 mantissa bit.
pub fn e2m1(code: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(code >> 1 & 3), f64::from(code & 1));
    let magnitude = if exponent == 0 { mantissa / 2.0 } else { (1.0 + mantissa / 2.0) * 2f64.powi(exponent - 1) };
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// Squared error of plain rounding, by search over all values: the scale nearest to amax / 6, then the nearest codes.
pub fn nearest_error(values: &[f32]) -> f64 {
    let scale = f64::from(nvfp4::tensor_scale(nvfp4::amax(values).unwrap()));
    let nearest = |x: f64, all: &mut dyn Iterator<Item = f64>| {
        all.min_by(|a, b| (a - x).abs().total_cmp(&(b - x).abs())).unwrap()
    };
    let group_error = |group: &[f32]| -> f64 {
        let largest = group.iter().fold(0.0_f32, |m, v| m.max(v.abs()));
        let block = scale * nearest(f64::from(largest) / 6.0 / scale, &mut (0..=0x7E).map(e4m3));
        group
            .iter()
            .map(|v| {
                let v = f64::from(*v);
                (v - nearest(v, &mut (0..16).map(|code| e2m1(code) * block))).powi(2)
            })
            .sum()
    };
    values.chunks(16).map(group_error).sum()
}

pub fn squared_error(values: &[f32], other: &[f32]) -> f64 {
    values.iter().zip(other).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum()
}
