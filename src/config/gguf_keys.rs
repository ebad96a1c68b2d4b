//! The configuration as GGUF keys.

use std::{collections::BTreeMap, path::Path};

use super::{Attention, FlintConfig, LayerKind, MAX_LAYERS, Mlp, Names};
use crate::{
    checkpoint::gguf::{Gguf, Value},
    error::{Error, Result},
};

const PREFIX: &str = "flint.";
const NAMES: Names = Names {
    hidden_size: "flint.embedding_length",
    vocab_size: "flint.vocab_size",
    context_length: "flint.context_length",
    n_heads: "flint.attention.head_count",
    n_kv_heads: "flint.attention.head_count_kv",
    head_dim: "flint.attention.key_length",
    dense_intermediate_size: "flint.feed_forward_length",
    n_experts: "flint.expert_count",
    n_experts_per_token: "flint.expert_used_count",
    expert_intermediate_size: "flint.expert_feed_forward_length",
    shared_intermediate_size: "flint.expert_shared_feed_forward_length",
    sliding_window: "flint.attention.sliding_window",
    rms_norm_eps: "flint.attention.layer_norm_rms_epsilon",
    rope_theta: "flint.rope.freq_base",
    layers: "flint.block_count",
};
const DENSE_LAYERS: &str = "flint.leading_dense_block_count";
const SLIDING: &str = "flint.attention.sliding_window_pattern";
const ROPE: &str = "flint.attention.rope_pattern";
const VALUE_LENGTH: &str = "flint.attention.value_length";
const GATING: &str = "flint.expert_gating_func";
/// The router's scores, as [`GATING`] numbers them.
const SIGMOID: u64 = 2;
const WEIGHTS_NORM: &str = "flint.expert_weights_norm";
const WEIGHTS_SCALE: &str = "flint.expert_weights_scale";
const SHARED_COUNT: &str = "flint.expert_shared_count";
const ROPE_SCALING: &str = "flint.rope.scaling.type";

/// Reads every `flint.*` key; one that is left over is refused.
pub(super) fn read(gguf: &Gguf) -> Result<FlintConfig> {
    match gguf.metadata.get("general.architecture") {
        Some(Value::String(name)) if name == "flint" => {}
        other => {
            let found = other.map_or("no such key".into(), Value::describe);
            return Err(Error::format(&gguf.path, "general.architecture", "\"flint\"", found));
        }
    }
    refuse_four_bit_activations(gguf)?;
    let mut keys = Keys::new(gguf);
    let n_layers = keys.size(NAMES.layers)?;
    if !(1..=MAX_LAYERS).contains(&n_layers) {
        return Err(keys.error(NAMES.layers, format!("1 to {MAX_LAYERS}"), n_layers.to_string()));
    }
    let dense_layers = keys.size(DENSE_LAYERS)?;
    if dense_layers > n_layers {
        let expected = format!("at most {} of {n_layers}", NAMES.layers);
        return Err(keys.error(DENSE_LAYERS, expected, dense_layers.to_string()));
    }
    let (sliding, rope) = (keys.pattern(SLIDING, n_layers)?, keys.pattern(ROPE, n_layers)?);
    let layers = sliding.into_iter().zip(rope).enumerate().map(|(index, (sliding, rope))| LayerKind {
        attention: if sliding { Attention::Sliding } else { Attention::Full },
        rope,
        mlp: if index < dense_layers { Mlp::Dense } else { Mlp::Moe },
    });
    let config = FlintConfig {
        hidden_size: keys.size(NAMES.hidden_size)?,
        vocab_size: vocab_size(gguf, &mut keys)?,
        context_length: keys.size(NAMES.context_length)?,
        n_heads: keys.size_of_all(NAMES.n_heads, n_layers)?,
        n_kv_heads: keys.size_of_all(NAMES.n_kv_heads, n_layers)?,
        head_dim: keys.size(NAMES.head_dim)?,
        dense_intermediate_size: keys.size_of_all(NAMES.dense_intermediate_size, n_layers)?,
        n_experts: keys.size(NAMES.n_experts)?,
        n_experts_per_token: keys.size_of_all(NAMES.n_experts_per_token, n_layers)?,
        expert_intermediate_size: keys.size(NAMES.expert_intermediate_size)?,
        shared_intermediate_size: keys.size(NAMES.shared_intermediate_size)?,
        sliding_window: keys.size(NAMES.sliding_window)?,
        rms_norm_eps: keys.float(NAMES.rms_norm_eps, None)?,
        rope_theta: keys.float(NAMES.rope_theta, Some(10_000.0))?,
        layers: layers.collect(),
    };
    let integer = |value: usize| Value::Unsigned(value as u64);
    let head_dim = integer(config.head_dim);
    keys.required_only(VALUE_LENGTH, &head_dim)?;
    keys.required_only(GATING, &Value::Unsigned(SIGMOID))?;
    // Absent means false to llama.cpp, so that only a file that says true means the same everywhere.
    keys.required_only(WEIGHTS_NORM, &Value::Bool(true))?;
    keys.only(WEIGHTS_SCALE, &Value::Float(1.0))?;
    keys.only(SHARED_COUNT, &Value::Unsigned(1))?;
    keys.only(ROPE_SCALING, &Value::String("none".into()))?;
    // Written by some converters beside the keys that the format needs; each may only repeat what those say.
    keys.only("flint.rope.dimension_count", &head_dim)?;
    keys.only("flint.rope.dimension_count_swa", &head_dim)?;
    keys.only("flint.attention.key_length_swa", &head_dim)?;
    keys.only("flint.attention.value_length_swa", &head_dim)?;
    keys.only("flint.rope.freq_base_swa", &Value::Float(config.rope_theta.into()))?;
    keys.only("flint.attention.causal", &Value::Bool(true))?;
    keys.finish()?;
    config.check(&NAMES, |key, expected, found| keys.error(key, expected, found))?;
    Ok(config)
}

/// The keys that [`read`] reads. Errors: [`Error::Value`] when dense layers follow others, which GGUF cannot say.
pub(super) fn write(config: &FlintConfig) -> Result<BTreeMap<String, Value>> {
    let dense_layers = config.layers.iter().take_while(|layer| layer.mlp == Mlp::Dense).count();
    if let Some(index) = config.layers[dense_layers..].iter().position(|layer| layer.mlp == Mlp::Dense) {
        let accepted = "dense layers before all others: a GGUF only counts the leading ones";
        return Err(Error::value("layers", format!("a dense layer {}", dense_layers + index), accepted));
    }
    let size = |value: usize| Value::Unsigned(value as u64);
    let pattern = |is: fn(&LayerKind) -> bool| Value::Array(config.layers.iter().map(|l| Value::Bool(is(l))).collect());
    let keys = [
        (NAMES.layers, size(config.layers.len())),
        (NAMES.hidden_size, size(config.hidden_size)),
        (NAMES.vocab_size, size(config.vocab_size)),
        (NAMES.context_length, size(config.context_length)),
        (NAMES.n_heads, size(config.n_heads)),
        (NAMES.n_kv_heads, size(config.n_kv_heads)),
        (NAMES.head_dim, size(config.head_dim)),
        (VALUE_LENGTH, size(config.head_dim)),
        (NAMES.dense_intermediate_size, size(config.dense_intermediate_size)),
        (NAMES.n_experts, size(config.n_experts)),
        (NAMES.n_experts_per_token, size(config.n_experts_per_token)),
        (NAMES.expert_intermediate_size, size(config.expert_intermediate_size)),
        (NAMES.shared_intermediate_size, size(config.shared_intermediate_size)),
        (NAMES.sliding_window, size(config.sliding_window)),
        (NAMES.rms_norm_eps, Value::Float(config.rms_norm_eps.into())),
        (NAMES.rope_theta, Value::Float(config.rope_theta.into())),
        (DENSE_LAYERS, size(dense_layers)),
        (SLIDING, pattern(|layer| layer.attention == Attention::Sliding)),
        (ROPE, pattern(|layer| layer.rope)),
        (GATING, Value::Unsigned(SIGMOID)),
        (WEIGHTS_NORM, Value::Bool(true)),
        (WEIGHTS_SCALE, Value::Float(1.0)),
        (SHARED_COUNT, Value::Unsigned(1)),
        (ROPE_SCALING, Value::String("none".into())),
    ];
    Ok(keys.into_iter().map(|(key, value)| (key.to_owned(), value)).collect())
}

/// The key, else the rows of the embedding.
fn vocab_size(gguf: &Gguf, keys: &mut Keys) -> Result<usize> {
    if keys.left.contains_key(NAMES.vocab_size) {
        return keys.size(NAMES.vocab_size);
    }
    let embedding = "token_embd.weight";
    match gguf.tensors.get(embedding).map(|tensor| tensor.shape.as_slice()) {
        Some([rows, _]) => Ok(*rows),
        Some(other) => Err(keys.error(embedding, "two dimensions", format!("shape {other:?}"))),
        None => Err(keys.error(embedding, "this tensor, as no key gives the vocabulary's size", "none")),
    }
}

/// Refuses a file that asks for a tensor's input to be rounded to four bits, which this version never does.
fn refuse_four_bit_activations(gguf: &Gguf) -> Result<()> {
    let key = "general.tensor_extra.prec_a4";
    let refuse = |found: String| Err(Error::format(&gguf.path, key, "a list of bools, all false", found));
    let marks = match gguf.metadata.get(key) {
        None => return Ok(()),
        Some(Value::Array(marks)) => marks,
        Some(other) => return refuse(other.describe()),
    };
    let Some(marked) = marks.iter().position(|mark| !matches!(mark, Value::Bool(false))) else { return Ok(()) };
    let tensor = match gguf.metadata.get("general.tensor_extra.name") {
        Some(Value::Array(names)) => names.get(marked).map(Value::describe),
        _ => None,
    };
    let tensor = tensor.unwrap_or_else(|| format!("entry {marked}"));
    refuse(format!("{} for {tensor}", marks[marked].describe()))
}

/// The `flint.*` keys that were not read yet.
struct Keys<'a> {
    file: &'a Path,
    left: BTreeMap<&'a str, &'a Value>,
}

impl<'a> Keys<'a> {
    fn new(gguf: &'a Gguf) -> Self {
        let all = gguf.metadata.iter().map(|(key, value)| (key.as_str(), value));
        Self { file: &gguf.path, left: all.filter(|(key, _)| key.starts_with(PREFIX)).collect() }
    }

    fn error(&self, key: &str, expected: impl Into<String>, found: impl Into<String>) -> Error {
        Error::format(self.file, key, expected, found)
    }

    fn wrong<T>(&self, key: &str, expected: impl Into<String>, found: &Value) -> Result<T> {
        Err(self.error(key, expected, found.describe()))
    }

    fn take(&mut self, key: &str, expected: &str) -> Result<&'a Value> {
        self.left.remove(key).ok_or_else(|| self.error(key, expected, "no such key"))
    }

    fn size(&mut self, key: &str) -> Result<usize> {
        let expected = "an integer from 0";
        let value = self.take(key, expected)?;
        as_size(value).map_or_else(|| self.wrong(key, expected, value), Ok)
    }

    /// One number for all layers, or a list with the same number for each.
    fn size_of_all(&mut self, key: &str, n_layers: usize) -> Result<usize> {
        let Some(Value::Array(list)) = self.left.get(key) else { return self.size(key) };
        self.left.remove(key);
        if list.len() != n_layers {
            let expected = format!("{n_layers} entries, as {} says", NAMES.layers);
            return Err(self.error(key, expected, list.len().to_string()));
        }
        let same = as_size(&list[0]).filter(|_| list.iter().all(|value| *value == list[0]));
        same.ok_or_else(|| self.error(key, "the same integer for every layer", "several, or no integers"))
    }

    /// One bool a layer.
    fn pattern(&mut self, key: &str, n_layers: usize) -> Result<Vec<bool>> {
        let expected = "a list of one bool a layer";
        let value = self.take(key, expected)?;
        let Value::Array(list) = value else { return self.wrong(key, expected, value) };
        if list.len() != n_layers {
            let expected = format!("{n_layers} entries, as {} says", NAMES.layers);
            return Err(self.error(key, expected, list.len().to_string()));
        }
        let bools = list.iter().map(|entry| match entry {
            Value::Bool(entry) => Ok(*entry),
            other => self.wrong(key, expected, other),
        });
        bools.collect()
    }

    fn float(&mut self, key: &str, default: Option<f32>) -> Result<f32> {
        match (self.left.remove(key), default) {
            (Some(Value::Float(value)), _) => Ok(*value as f32),
            (None, Some(default)) => Ok(default),
            (Some(other), _) => self.wrong(key, "a number in floating point", other),
            (None, None) => Err(self.error(key, "a number in floating point", "no such key")),
        }
    }

    /// A key that may be absent and else has one accepted value.
    fn only(&mut self, key: &str, accepted: &Value) -> Result<()> {
        match self.left.remove(key) {
            Some(value) if !same(value, accepted) => self.wrong(key, accepted.describe(), value),
            _ => Ok(()),
        }
    }

    fn required_only(&mut self, key: &str, accepted: &Value) -> Result<()> {
        if !self.left.contains_key(key) {
            return Err(self.error(key, accepted.describe(), "no such key"));
        }
        self.only(key, accepted)
    }

    fn finish(&self) -> Result<()> {
        match self.left.first_key_value() {
            Some((key, value)) => self.wrong(key, "only keys that this version knows", value),
            None => Ok(()),
        }
    }
}

fn as_size(value: &Value) -> Option<usize> {
    usize::try_from(value.as_u64()?).ok()
}

/// Equality that does not mind the sign type of an integer.
fn same(a: &Value, b: &Value) -> bool {
    a == b || a.as_u64().is_some_and(|value| b.as_u64() == Some(value))
}
