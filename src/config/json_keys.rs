//! The configuration as a Hugging Face config.json.
//!
//! Keys that say how a model was trained, saved or tokenized are passed over. Any other key that this version does not
//! know is refused by name unless its value is null or false, which switch nothing on.

use std::path::Path;

use serde_json::{Map, Value as Json};

use super::{Attention, FlintConfig, LayerKind, MAX_LAYERS, MAX_SIZE, MAX_TOKENS, Mlp, Names};
use crate::error::{Error, Result};

const NAMES: Names = Names {
    hidden_size: "hidden_size",
    vocab_size: "vocab_size",
    context_length: "max_position_embeddings",
    n_heads: "num_attention_heads",
    n_kv_heads: "num_key_value_heads",
    head_dim: "head_dim",
    dense_intermediate_size: "intermediate_size",
    n_experts: "num_experts",
    n_experts_per_token: "num_experts_per_tok",
    expert_intermediate_size: "moe_intermediate_size",
    shared_intermediate_size: "shared_expert_intermediate_size",
    sliding_window: "sliding_window",
    rms_norm_eps: "rms_norm_eps",
    rope_theta: "rope_theta",
    layers: "num_hidden_layers",
};
/// The dense layers where the file does not name them.
const DEFAULT_DENSE: [usize; 2] = [0, 1];
const DEFAULT_THETA: f64 = 10_000.0;

/// Keys that do not touch the arithmetic of inference.
const PASSED_OVER: [&str; 20] = [
    "_name_or_path",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "label2id",
    "max_length",
    "num_labels",
    "pad_token_id",
    "return_dict",
    "router_aux_loss_coef",
    "output_router_logits",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "use_cache",
];

/// Reads every key of `config`; one that is left over is refused. `file` is used in error messages only.
pub(super) fn read(file: &Path, config: &Json) -> Result<FlintConfig> {
    let Some(object) = config.as_object() else {
        return Err(Error::format(file, "file", "a JSON object", config.to_string()));
    };
    // null is how transformers writes an absent value.
    let left = object.iter().filter(|(_, value)| !value.is_null()).map(|(k, v)| (k.clone(), v.clone())).collect();
    let mut keys = Keys { file, parent: None, left };
    keys.required_only("model_type", &"flint".into())?;
    keys.only("architectures", &Json::from(vec!["FlintForCausalLM"]))?;
    let n_layers = keys.size(NAMES.layers, MAX_LAYERS)?;
    let n_experts = keys.size(NAMES.n_experts, MAX_SIZE)?;
    let config = FlintConfig {
        hidden_size: keys.size(NAMES.hidden_size, MAX_SIZE)?,
        vocab_size: keys.size(NAMES.vocab_size, MAX_TOKENS)?,
        context_length: keys.size(NAMES.context_length, MAX_TOKENS)?,
        n_heads: keys.size(NAMES.n_heads, MAX_SIZE)?,
        n_kv_heads: keys.size(NAMES.n_kv_heads, MAX_SIZE)?,
        head_dim: keys.size(NAMES.head_dim, MAX_SIZE)?,
        dense_intermediate_size: keys.size(NAMES.dense_intermediate_size, MAX_SIZE)?,
        n_experts,
        n_experts_per_token: keys.size(NAMES.n_experts_per_token, n_experts)?,
        expert_intermediate_size: keys.size(NAMES.expert_intermediate_size, MAX_SIZE)?,
        shared_intermediate_size: keys.size(NAMES.shared_intermediate_size, MAX_SIZE)?,
        sliding_window: keys.size(NAMES.sliding_window, MAX_TOKENS)?,
        rms_norm_eps: keys.float(NAMES.rms_norm_eps)?.ok_or_else(|| keys.missing(NAMES.rms_norm_eps))? as f32,
        rope_theta: rope_theta(&mut keys)? as f32,
        layers: layers(&mut keys, n_layers)?,
    };
    for (key, accepted) in [
        ("hidden_act", Json::from("silu")),
        ("attention_bias", false.into()),
        ("tie_word_embeddings", false.into()),
        ("decoder_sparse_step", 1.into()),
        ("norm_topk_prob", true.into()),
        ("router_score_function", "sigmoid".into()),
        ("softmax_type", "learnable".into()),
    ] {
        keys.only(key, &accepted)?;
    }
    keys.quantization()?;
    keys.finish()?;
    config.check(&NAMES, |key, expected, found| keys.error(key, expected, found))?;
    Ok(config)
}

/// The name of a key in errors about `dims`.
fn in_dims(key: &str) -> String {
    format!("dims[{key:?}]")
}

/// [`FlintConfig::check_nvfp4_dims`].
pub(super) fn check_nvfp4(config: &FlintConfig) -> Result<()> {
    config.check_blocks(&NAMES, in_dims)
}

/// `base`, whose layers follow Flint's rule, with the keys of `dims` in place of its own; see [`FlintConfig::flint_with`].
pub(super) fn read_over(base: &FlintConfig, dims: &str, whole_file: bool) -> Result<FlintConfig> {
    let refuse = |name: &str, found: String, accepted: String| Error::value(name, found, accepted);
    let dims: Json = serde_json::from_str(dims).map_err(|why| refuse("dims", why.to_string(), "JSON".into()))?;
    let Json::Object(dims) = dims else {
        return Err(refuse("dims", dims.to_string(), "the keys of a config.json".into()));
    };
    let unused = |(key, value): &(&String, &Json)| PASSED_OVER.contains(&key.as_str()) && !value.is_null();
    if let Some((key, value)) = dims.iter().find(unused).filter(|_| !whole_file) {
        let accepted = "only keys that change a model of random weights, which has no tokenizer and was not trained";
        return Err(refuse(&in_dims(key), value.to_string(), accepted.into()));
    }
    let mut keys: Map<String, Json> = [("model_type", "flint".into()), (NAMES.rms_norm_eps, base.rms_norm_eps.into())]
        .into_iter()
        .chain(
            [
                (NAMES.hidden_size, base.hidden_size),
                (NAMES.vocab_size, base.vocab_size),
                (NAMES.context_length, base.context_length),
                (NAMES.n_heads, base.n_heads),
                (NAMES.n_kv_heads, base.n_kv_heads),
                (NAMES.head_dim, base.head_dim),
                (NAMES.dense_intermediate_size, base.dense_intermediate_size),
                (NAMES.n_experts, base.n_experts),
                (NAMES.n_experts_per_token, base.n_experts_per_token),
                (NAMES.expert_intermediate_size, base.expert_intermediate_size),
                (NAMES.shared_intermediate_size, base.shared_intermediate_size),
                (NAMES.sliding_window, base.sliding_window),
                (NAMES.layers, base.layers.len()),
            ]
            .map(|(name, size)| (name, size.into())),
        )
        .map(|(name, value): (&str, Json)| (name.to_owned(), value))
        .collect();
    keys.extend(dims);
    read(Path::new("dims"), &Json::Object(keys)).map_err(|error| match error {
        Error::Format { name, expected, found, .. } => refuse(&in_dims(&name), found, expected),
        other => other,
    })
}

/// The kind of each layer; Flint's rule where a list is absent.
fn layers(keys: &mut Keys, n_layers: usize) -> Result<Vec<LayerKind>> {
    let is_full = |index| index < 2 || index % 4 == 1 || index == n_layers - 1;
    let attention = match keys.left.remove("layer_types") {
        None => (0..n_layers).map(|index| if is_full(index) { Attention::Full } else { Attention::Sliding }).collect(),
        Some(list) => layer_types(keys, n_layers, &list)?,
    };
    let no_rope = keys.indices("no_rope_layer_indices", n_layers)?;
    let dense = match keys.left.get("mlp_only_layers") {
        // transformers writes its default whatever the number of layers.
        Some(list) if *list == Json::from(DEFAULT_DENSE.as_slice()) => {
            keys.left.remove("mlp_only_layers");
            None
        }
        _ => keys.indices("mlp_only_layers", n_layers)?,
    };
    let dense = dense.unwrap_or_else(|| DEFAULT_DENSE.to_vec());
    let kinds = attention.into_iter().enumerate().map(|(index, attention)| LayerKind {
        attention,
        rope: no_rope.as_ref().map_or(attention == Attention::Sliding, |list| !list.contains(&index)),
        mlp: if dense.contains(&index) { Mlp::Dense } else { Mlp::Moe },
    });
    Ok(kinds.collect())
}

fn layer_types(keys: &Keys, n_layers: usize, list: &Json) -> Result<Vec<Attention>> {
    let key = "layer_types";
    let Some(list) = list.as_array().filter(|list| list.len() == n_layers) else {
        let found = list.as_array().map_or_else(|| list.to_string(), |list| format!("a list of {}", list.len()));
        return Err(keys.error(key, format!("a list of {n_layers}, as {} says", NAMES.layers), found));
    };
    let kinds = list.iter().map(|kind| match kind.as_str() {
        Some("full_attention") => Ok(Attention::Full),
        Some("sliding_attention") => Ok(Attention::Sliding),
        _ => Err(keys.error(key, "\"full_attention\" or \"sliding_attention\"", kind.to_string())),
    });
    kinds.collect()
}

/// The rotary base, from `rope_parameters`, its older name `rope_scaling`, or a key of its own. Only the plain kind is
/// known.
fn rope_theta(keys: &mut Keys) -> Result<f64> {
    let mut theta = keys.float(NAMES.rope_theta)?;
    for name in ["rope_parameters", "rope_scaling"] {
        let Some(value) = keys.left.remove(name) else { continue };
        let Json::Object(left) = value else { return Err(keys.error(name, "an object", value.to_string())) };
        let mut inner = Keys { file: keys.file, parent: Some(name), left };
        for kind in ["rope_type", "type"] {
            inner.only(kind, &"default".into())?;
        }
        if let Some(inner_theta) = inner.float(NAMES.rope_theta)? {
            if let Some(theta) = theta.filter(|theta| theta.to_bits() != inner_theta.to_bits()) {
                return Err(keys.error(NAMES.rope_theta, format!("{inner_theta}, as in {name}"), theta.to_string()));
            }
            theta = Some(inner_theta);
        }
        inner.only("partial_rotary_factor", &1.0.into())?;
        inner.finish()?;
    }
    Ok(theta.unwrap_or(DEFAULT_THETA))
}

/// The keys that were not read yet.
struct Keys<'a> {
    file: &'a Path,
    /// The key that holds these, when they are not at the top.
    parent: Option<&'a str>,
    left: Map<String, Json>,
}

impl Keys<'_> {
    fn error(&self, key: &str, expected: impl Into<String>, found: impl Into<String>) -> Error {
        let name = self.parent.map_or(key.to_owned(), |parent| format!("{parent}.{key}"));
        Error::format(self.file, name, expected, found)
    }

    fn missing(&self, key: &str) -> Error {
        self.error(key, "a value", "no such key")
    }

    /// A size from 1 to `most`.
    fn size(&mut self, key: &str, most: usize) -> Result<usize> {
        let value = self.left.remove(key).ok_or_else(|| self.missing(key))?;
        let size = as_index(&value).filter(|size| (1..=most).contains(size));
        size.ok_or_else(|| self.error(key, format!("1 to {most}"), value.to_string()))
    }

    fn float(&mut self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.left.remove(key) else { return Ok(None) };
        value.as_f64().map(Some).ok_or_else(|| self.error(key, "a number", value.to_string()))
    }

    /// A list of layers, none of them twice.
    fn indices(&mut self, key: &str, n_layers: usize) -> Result<Option<Vec<usize>>> {
        let Some(value) = self.left.remove(key) else { return Ok(None) };
        let expected = || format!("a list of different layers from 0 to {}", n_layers - 1);
        let Some(list) = value.as_array() else { return Err(self.error(key, expected(), value.to_string())) };
        let mut indices = Vec::new();
        for entry in list {
            match as_index(entry).filter(|index| *index < n_layers && !indices.contains(index)) {
                Some(index) => indices.push(index),
                None => return Err(self.error(key, expected(), entry.to_string())),
            }
        }
        Ok(Some(indices))
    }

    /// A key that may be absent and else has one accepted value.
    fn only(&mut self, key: &str, accepted: &Json) -> Result<()> {
        match self.left.remove(key) {
            Some(value) if !same(&value, accepted) => Err(self.error(key, accepted.to_string(), value.to_string())),
            _ => Ok(()),
        }
    }

    fn required_only(&mut self, key: &str, accepted: &Json) -> Result<()> {
        if !self.left.contains_key(key) {
            return Err(self.error(key, accepted.to_string(), "no such key"));
        }
        self.only(key, accepted)
    }

    /// Quantised weights come from `ModelOpt`; their types are checked where the tensors are bound.
    fn quantization(&mut self) -> Result<()> {
        let Some(value) = self.left.remove("quantization_config") else { return Ok(()) };
        match value.get("quant_method") {
            Some(Json::String(method)) if method == "modelopt" => Ok(()),
            other => {
                let found = other.map_or("no such key".into(), Json::to_string);
                Err(self.error("quantization_config.quant_method", "\"modelopt\"", found))
            }
        }
    }

    fn finish(&self) -> Result<()> {
        let unknown = |(key, value): &(&String, &Json)| {
            !PASSED_OVER.contains(&key.as_str()) && !matches!(value, Json::Null | Json::Bool(false))
        };
        match self.left.iter().find(unknown) {
            Some((key, value)) => Err(self.error(key, "only keys that this version knows", value.to_string())),
            None => Ok(()),
        }
    }
}

fn as_index(value: &Json) -> Option<usize> {
    usize::try_from(value.as_u64()?).ok()
}

/// Equality that does not mind whether a number is written as an integer.
fn same(a: &Json, b: &Json) -> bool {
    a == b || a.as_f64().is_some_and(|number| b.as_f64() == Some(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dims_replace_keys_of_the_published_model() {
        assert_eq!(FlintConfig::flint_with("{}", false).unwrap(), FlintConfig::flint(49, 150_144));
        let small = FlintConfig::flint_with(r#"{"num_hidden_layers": 5, "vocab_size": 1024}"#, false).unwrap();
        assert_eq!(small, FlintConfig::flint(5, 1024));
        let whole = r#"{"num_hidden_layers": 5, "vocab_size": 1024, "eos_token_id": 7, "dtype": "bfloat16"}"#;
        assert_eq!(FlintConfig::flint_with(whole, true).unwrap(), small);
        for (dims, error) in [
            ("{", "dims: expected JSON, found "),
            ("[1]", "dims: expected the keys of a config.json, found [1]"),
            (r#"{"hidden_size": 0}"#, r#"dims["hidden_size"]: expected 1 to 1048576, found 0"#),
            (r#"{"hidden_size": -1}"#, r#"dims["hidden_size"]: expected 1 to 1048576, found -1"#),
            (r#"{"vocab_size": 36893488147419103232}"#, r#"dims["vocab_size"]: expected 1 to 16777216, found 3.689"#),
            (r#"{"num_experts_per_tok": 300}"#, r#"dims["num_experts_per_tok"]: expected 1 to 256, found 300"#),
            (
                r#"{"eos_token_id": 7}"#,
                r#"dims["eos_token_id"]: expected only keys that change a model of random weights"#,
            ),
            (r#"{"width": 5}"#, r#"dims["width"]: expected only keys that this version knows, found 5"#),
        ] {
            let found = FlintConfig::flint_with(dims, false).unwrap_err().to_string();
            assert!(found.starts_with(error), "{found}");
        }
    }

    #[test]
    fn nvfp4_names_the_dimension_whose_rows_are_no_whole_blocks() {
        for (dims, named) in [
            (r#"{"hidden_size": 100}"#, Some(("dims[\"hidden_size\"]", 100))),
            (
                r#"{"num_attention_heads": 4, "head_dim": 24}"#,
                Some(("dims[\"num_attention_heads\"] * dims[\"head_dim\"]", 96)),
            ),
            (r#"{"intermediate_size": 65}"#, Some(("dims[\"intermediate_size\"]", 65))),
            (r#"{"moe_intermediate_size": 32}"#, Some(("dims[\"moe_intermediate_size\"]", 32))),
            (r#"{"shared_expert_intermediate_size": 8}"#, Some(("dims[\"shared_expert_intermediate_size\"]", 8))),
            // Without a layer that has the matrix, its width is nobody's.
            (r#"{"num_hidden_layers": 2, "moe_intermediate_size": 32}"#, None),
            (r#"{"vocab_size": 1001}"#, None),
        ] {
            let found = FlintConfig::flint_with(dims, false).unwrap().check_nvfp4_dims().err();
            let expected = named.map(|(name, width)| {
                format!("{name}: expected a multiple of 64, the values of an NVFP4 block, found {width}")
            });
            assert_eq!(found.map(|error| error.to_string()), expected, "{dims}");
        }
    }
}
