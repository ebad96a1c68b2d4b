//! Folders of safetensors shards with a config.json.
//! Format: <https://github.com/huggingface/safetensors#format>.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Component, Path, PathBuf},
    sync::Arc,
};

use safetensors::tensor::{Dtype, TensorInfo};
use serde::de::{self, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value as Json;

use super::{Bytes, DType, ShardName, Tensor, add_tensors, files_of};
use crate::error::{Error, Result};

/// Longest header, as in the reference reader.
const MAX_HEADER_BYTES: u64 = 100_000_000;
/// Longest config.json.
const MAX_CONFIG_BYTES: u64 = 1 << 20;
/// Longest index: room for Flint with every expert's matrices and scales on their own, 150 thousand tensors.
const MAX_INDEX_BYTES: u64 = 1 << 25;
const MAX_DIMENSIONS: usize = 4;

/// A checkpoint folder.
#[derive(Debug)]
pub struct SafetensorsDir {
    /// The folder.
    pub path: PathBuf,
    /// config.json, parsed.
    pub config: Json,
    /// Tensors of all shards, by name.
    pub tensors: BTreeMap<String, Tensor>,
}

impl SafetensorsDir {
    /// Maps and checks every shard of `path`: model.safetensors, else what model.safetensors.index.json lists, else all
    /// `.safetensors` files. Reads the headers and touches no tensor bytes.
    pub fn open(path: &Path) -> Result<Self> {
        let config = read_json(&path.join("config.json"), MAX_CONFIG_BYTES)?;
        let mut dir = Self { path: path.to_path_buf(), config, tensors: BTreeMap::new() };
        let files = files_of(path)?;
        if files.iter().any(|file| file == "model.safetensors") {
            dir.add_shard("model.safetensors")?;
        } else if files.iter().any(|file| file == "model.safetensors.index.json") {
            dir.add_indexed()?;
        } else {
            for shard in whole_set(path, &files)? {
                dir.add_shard(shard)?;
            }
        }
        Ok(dir)
    }

    fn add_indexed(&mut self) -> Result<()> {
        let path = self.path.join("model.safetensors.index.json");
        let index = read_json(&path, MAX_INDEX_BYTES)?;
        let Some(Json::Object(map)) = index.get("weight_map") else {
            let found = index.get("weight_map").map_or("no such key", json_kind);
            return Err(Error::format(&path, "weight_map", "an object of tensor names and file names", found));
        };
        let mut shards = BTreeSet::new();
        for (name, shard) in map {
            // A plain name, so that no index reaches outside its folder.
            let plain = shard.as_str().filter(|shard| {
                let mut parts = Path::new(shard).components();
                matches!((parts.next(), parts.next()), (Some(Component::Normal(part)), None) if part == *shard)
            });
            let Some(shard) = plain else {
                return Err(Error::format(&path, name, "the name of a file in this folder", shard.to_string()));
            };
            shards.insert(shard);
        }
        for shard in shards {
            self.add_shard(shard)?;
        }
        for (name, shard) in map {
            let found = match self.tensors.get(name) {
                None => "no such tensor in it".to_owned(),
                Some(tensor) if tensor.file.file_name().and_then(|file| file.to_str()) != shard.as_str() => {
                    format!("it in {}", tensor.file.display())
                }
                Some(_) => continue,
            };
            return Err(Error::format(&path, name, format!("the tensor in {shard}"), found));
        }
        Ok(())
    }

    fn add_shard(&mut self, shard: &str) -> Result<()> {
        let path = self.path.join(shard);
        add_tensors(&mut self.tensors, read_shard(&path, &Bytes::open(&path)?)?)
    }
}

/// The shards of a folder without an index; of a numbered set, all of them.
fn whole_set<'a>(folder: &Path, files: &'a [String]) -> Result<Vec<&'a str>> {
    let suffix = ".safetensors";
    let shards: Vec<&str> = files.iter().map(String::as_str).filter(|file| file.ends_with(suffix)).collect();
    if shards.is_empty() {
        let expected = "model.safetensors, its index, or shards";
        return Err(Error::format(folder, "safetensors", expected, format!("{} other files", files.len())));
    }
    let mut sets: BTreeMap<_, BTreeSet<u64>> = BTreeMap::new();
    for ShardName { stem, number, count } in shards.iter().filter_map(|shard| ShardName::parse(shard, suffix)) {
        sets.entry((stem, count)).or_default().insert(number);
    }
    for ((stem, count), numbers) in sets {
        if let Some(number) = (1..=count).find(|number| !numbers.contains(number)) {
            let missing = ShardName { stem, number, count }.file(suffix);
            let found = format!("{} of {count} shards", numbers.len());
            return Err(Error::format(folder, missing, "every shard of the set", found));
        }
    }
    Ok(shards)
}

/// The JSON object of a file of at most `limit` bytes.
fn read_json(path: &Path, limit: u64) -> Result<Json> {
    let text = Bytes::open(path)?;
    if text.len() as u64 > limit {
        return Err(Error::format(path, "file", format!("at most {limit} bytes"), format!("{} bytes", text.len())));
    }
    parse_json(path, &text)
}

/// The JSON object of a configuration or index; `path` is used in error messages only.
pub fn parse_json(path: &Path, text: &[u8]) -> Result<Json> {
    let json: Json =
        serde_json::from_slice(text).map_err(|error| Error::format(path, "file", "JSON", error.to_string()))?;
    if !json.is_object() {
        return Err(Error::format(path, "file", "a JSON object", json_kind(&json)));
    }
    Ok(json)
}

/// The type of a JSON value, for errors.
fn json_kind(json: &Json) -> &'static str {
    match json {
        Json::Null => "null",
        Json::Bool(_) => "a bool",
        Json::Number(_) => "a number",
        Json::String(_) => "a string",
        Json::Array(_) => "a list",
        Json::Object(_) => "an object",
    }
}

/// Checks the header of the shard `file` and cuts out its tensors, which must cover the data without a gap or overlap.
///
/// The `safetensors` crate supplies the types of the header. Its own reader is not used because it names no tensor in
/// its errors and lets the last of two tensors of one name win.
pub fn read_shard(path: &Path, file: &Bytes) -> Result<Vec<Tensor>> {
    let refuse = |name: &str, expected: String, found: String| Err(Error::format(path, name, expected, found));
    let Some((len, rest)) = file.split_first_chunk().map(|(len, rest)| (u64::from_le_bytes(*len), rest)) else {
        return refuse("header length", "8 bytes".into(), format!("a file of {} bytes", file.len()));
    };
    let header = usize::try_from(len).ok().filter(|_| len <= MAX_HEADER_BYTES).and_then(|len| rest.get(..len));
    let Some(header) = header else {
        let expected = format!("at most {MAX_HEADER_BYTES} and no more than the file has, {}", rest.len());
        return refuse("header length", expected, len.to_string());
    };
    let mut infos = Vec::from_iter(parse_header(path, header)?);
    infos.sort_unstable_by_key(|(_, info)| info.data_offsets);
    let data = rest.len() - header.len();
    let path = Arc::new(path.to_path_buf());
    let mut tensors = Vec::with_capacity(infos.len());
    let mut next = 0;
    for (name, TensorInfo { dtype, shape, data_offsets: (start, end) }) in infos {
        let refuse = |expected: String, found: String| Err(Error::format(&path, &name, expected, found));
        let Some(dtype) = supported(dtype) else {
            return refuse("F32, F16, BF16, U8 or F8_E4M3".into(), dtype.to_string());
        };
        if shape.len() > MAX_DIMENSIONS {
            return refuse(format!("at most {MAX_DIMENSIONS}"), format!("{} dimensions", shape.len()));
        }
        if shape.contains(&0) {
            return refuse("dimensions from 1".into(), format!("shape {shape:?}"));
        }
        let Some(bytes) = dtype.bytes_of(&shape) else {
            return refuse("a size in 64 bits".into(), format!("shape {shape:?}"));
        };
        if start != next || end.checked_sub(start) != Some(bytes) {
            let expected = format!("{bytes} bytes of data right after the tensor before, at {next}");
            return refuse(expected, format!("data_offsets [{start}, {end}]"));
        }
        let Some(data) = file.slice(file.len() - data + start, bytes) else {
            return refuse(format!("data up to {end}"), format!("{data} bytes of data"));
        };
        next = end;
        tensors.push(Tensor { name, dtype, shape, data, file: Arc::clone(&path) });
    }
    if next != data {
        return refuse("data", format!("{next} bytes, as the tensors take"), format!("{data} bytes"));
    }
    Ok(tensors)
}

fn supported(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::Bf16,
        Dtype::U8 => DType::U8,
        Dtype::F8_E4M3 => DType::F8E4m3,
        _ => return None,
    })
}

/// The tensors of a header by name.
fn parse_header(path: &Path, header: &[u8]) -> Result<BTreeMap<String, TensorInfo>> {
    let mut at = "header".to_owned();
    let mut json = serde_json::Deserializer::from_slice(header);
    let parsed = json.deserialize_map(Header { at: &mut at }).and_then(|infos| json.end().map(|()| infos));
    parsed.map_err(|error| Error::format(path, at, "a tensor's dtype, shape and data_offsets", error.to_string()))
}

struct Header<'a> {
    /// The entry that is being read, for errors.
    at: &'a mut String,
}

impl<'de> Visitor<'de> for Header<'_> {
    type Value = BTreeMap<String, TensorInfo>;

    fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
        let mut infos = BTreeMap::new();
        while let Some(name) = map.next_key::<String>()? {
            self.at.clone_from(&name);
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
            } else if infos.insert(name, map.next_value()?).is_some() {
                return Err(de::Error::custom("a second tensor of this name"));
            }
        }
        "header".clone_into(self.at);
        Ok(infos)
    }
}
