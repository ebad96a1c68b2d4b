//! The header of one GGUF file: keys, then tensor descriptions, then the tensors' bytes at aligned offsets.

use std::{
    collections::{BTreeMap, HashSet, btree_map::Entry},
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{Value, reader::Reader};
use crate::{
    checkpoint::{Bytes, DType, Tensor},
    error::{Error, Result},
};

/// The least bytes that a key can take: a name of one byte, a type and a value of one byte.
const MIN_KEY_BYTES: usize = 8 + 1 + 4 + 1;
/// The least bytes that a tensor's description can take: a name of one byte, one dimension, a type and an offset.
const MIN_TENSOR_BYTES: usize = 8 + 1 + 4 + 8 + 4 + 8;
/// Most tensors and most keys of one file. Flint has 1,264 tensors with their scales.
const MAX_ITEMS: usize = 1 << 16;
const MAX_KEY_BYTES: usize = 65535;
const MAX_TENSOR_NAME_BYTES: usize = 64;
const MAX_DIMENSIONS: u32 = 4;
const DEFAULT_ALIGNMENT: u64 = 32;
/// Types that people share and this version does not read, so that an error can say what the file is.
const GGML_NAMES: [(u32, &str); 12] = [
    (2, "Q4_0"),
    (3, "Q4_1"),
    (6, "Q5_0"),
    (7, "Q5_1"),
    (10, "Q2_K"),
    (11, "Q3_K"),
    (12, "Q4_K"),
    (13, "Q5_K"),
    (14, "Q6_K"),
    (20, "IQ4_NL"),
    (23, "IQ4_XS"),
    (39, "MXFP4"),
];
/// The largest page size in common use; nothing gains from a larger alignment.
const MAX_ALIGNMENT: u64 = 65536;

/// One checked file, whole or a part of a split set.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) metadata: BTreeMap<String, Value>,
    /// In the order of the file; no name twice.
    pub(super) tensors: Vec<Tensor>,
}

/// What the `split.*` keys of a part say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Split {
    /// `split.no`, from 0.
    pub(super) number: u64,
    /// `split.count`, at least 2.
    pub(super) count: u64,
    /// `split.tensors.count`, over all parts.
    pub(super) tensors: u64,
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "split.no {} of split.count {} with {} tensors", self.number, self.count, self.tensors)
    }
}

/// A tensor as the header describes it; its offset counts from the start of the data.
struct Description<'a> {
    name: &'a str,
    dtype: DType,
    shape: Vec<usize>,
    bytes: usize,
    offset: u64,
}

impl Part {
    /// Checks everything that the header of `bytes` says and reads no byte after it.
    pub(super) fn parse(path: &Path, bytes: &Bytes) -> Result<Self> {
        let mut reader = Reader::new(path, bytes);
        let magic = reader.u32("magic")?.to_le_bytes();
        if &magic != b"GGUF" {
            return Err(reader.error("magic", "\"GGUF\"", format!("\"{}\"", magic.escape_ascii())));
        }
        let version = reader.u32("version")?;
        if !matches!(version, 2 | 3) {
            let big_endian = if matches!(version.swap_bytes(), 1..=3) { " (big-endian)" } else { "" };
            return Err(reader.error("version", "2 or 3, little-endian", format!("{version}{big_endian}")));
        }
        let tensor_count = reader.count("tensor count", MIN_TENSOR_BYTES, MAX_ITEMS)?;
        let key_count = reader.count("key count", MIN_KEY_BYTES, MAX_ITEMS)?;
        let metadata = keys(&mut reader, key_count)?;
        let alignment = alignment(path, &metadata)?;
        let mut descriptions = Vec::with_capacity(tensor_count);
        let mut names = HashSet::with_capacity(tensor_count);
        for index in 0..tensor_count {
            let description = describe(&mut reader, index, alignment)?;
            if !names.insert(description.name) {
                return Err(reader.error(description.name, "one tensor of this name", "two"));
            }
            descriptions.push(description);
        }
        let tensors = place(path, bytes, reader.at() as u64, alignment, descriptions)?;
        Ok(Self { metadata, tensors })
    }

    /// The split keys; `None` for a file that is whole.
    pub(super) fn split(&self, path: &Path) -> Result<Option<Split>> {
        let Some(count) = self.metadata.get("split.count") else { return Ok(None) };
        let integer = |key: &str, value: Option<&Value>| {
            let found = value.map_or("no such key".into(), Value::describe);
            value.and_then(Value::as_u64).ok_or_else(|| Error::format(path, key, "an integer from 0", found))
        };
        let count = integer("split.count", Some(count))?;
        if count == 0 {
            return Err(Error::format(path, "split.count", "at least 1", "0"));
        }
        if count == 1 {
            return Ok(None);
        }
        let number = integer("split.no", self.metadata.get("split.no"))?;
        if number >= count {
            let expected = format!("less than split.count, {count}");
            return Err(Error::format(path, "split.no", expected, number.to_string()));
        }
        let tensors = integer("split.tensors.count", self.metadata.get("split.tensors.count"))?;
        Ok(Some(Split { number, count, tensors }))
    }
}

fn keys(reader: &mut Reader, count: usize) -> Result<BTreeMap<String, Value>> {
    let mut metadata = BTreeMap::new();
    for index in 0..count {
        let what = format!("name of key {index}");
        let key = reader.string(&what)?;
        if !(1..=MAX_KEY_BYTES).contains(&key.len()) {
            return Err(reader.error(&what, format!("1 to {MAX_KEY_BYTES} bytes"), format!("{} bytes", key.len())));
        }
        match metadata.entry(key.to_owned()) {
            Entry::Vacant(entry) => entry.insert(reader.value(key)?),
            Entry::Occupied(_) => return Err(reader.error(key, "one key of this name", "two")),
        };
    }
    Ok(metadata)
}

fn alignment(path: &Path, metadata: &BTreeMap<String, Value>) -> Result<u64> {
    let key = "general.alignment";
    let Some(value) = metadata.get(key) else { return Ok(DEFAULT_ALIGNMENT) };
    let accepted = value.as_u64().filter(|value| value.is_power_of_two() && (8..=MAX_ALIGNMENT).contains(value));
    let expected = format!("a power of two from 8 to {MAX_ALIGNMENT}");
    accepted.ok_or_else(|| Error::format(path, key, expected, value.describe()))
}

fn describe<'a>(reader: &mut Reader<'a>, index: usize, alignment: u64) -> Result<Description<'a>> {
    let what = format!("name of tensor {index}");
    let name = reader.string(&what)?;
    if !(1..=MAX_TENSOR_NAME_BYTES).contains(&name.len()) {
        let expected = format!("1 to {MAX_TENSOR_NAME_BYTES} bytes");
        return Err(reader.error(&what, expected, format!("{} bytes", name.len())));
    }
    let dimensions = reader.u32(name)?;
    if !(1..=MAX_DIMENSIONS).contains(&dimensions) {
        return Err(reader.error(name, format!("1 to {MAX_DIMENSIONS} dimensions"), dimensions.to_string()));
    }
    let mut shape = Vec::with_capacity(MAX_DIMENSIONS as usize);
    for _ in 0..dimensions {
        let dim = reader.u64(name)?;
        let positive = usize::try_from(dim).ok().filter(|&dim| dim != 0);
        shape.push(positive.ok_or_else(|| reader.error(name, "dimensions from 1", dim.to_string()))?);
    }
    // The file names the contiguous dimension first.
    shape.reverse();
    let dtype = tensor_type(reader.u32(name)?).map_err(|(expected, found)| reader.error(name, expected, found))?;
    let bytes = dtype.bytes_of(&shape).ok_or_else(|| {
        let expected = format!("rows of whole {dtype} blocks of {} and a size in 64 bits", dtype.block_len());
        reader.error(name, expected, format!("shape {shape:?}"))
    })?;
    let offset = reader.u64(name)?;
    if offset % alignment != 0 {
        return Err(reader.error(name, format!("an offset that is a multiple of {alignment}"), offset.to_string()));
    }
    Ok(Description { name, dtype, shape, bytes, offset })
}

/// The type of a ggml type number, or what to say about it.
fn tensor_type(number: u32) -> Result<DType, (&'static str, String)> {
    Ok(match number {
        0 => DType::F32,
        1 => DType::F16,
        8 => DType::Q8_0,
        30 => DType::Bf16,
        40 => DType::Nvfp4,
        other => {
            let known = "tensor type 0 (F32), 1 (F16), 8 (Q8_0), 30 (BF16) or 40 (NVFP4)";
            let name = GGML_NAMES.iter().find(|(number, _)| *number == other).map(|(_, name)| format!(" ({name})"));
            return Err((known, format!("tensor type {other}{}", name.unwrap_or_default())));
        }
    })
}

/// Cuts the tensors out of the file. They lie inside it and share no byte.
fn place(
    path: &Path,
    file: &Bytes,
    header: u64,
    alignment: u64,
    descriptions: Vec<Description>,
) -> Result<Vec<Tensor>> {
    let data_start = header.next_multiple_of(alignment);
    let path = Arc::new(PathBuf::from(path));
    let mut tensors = Vec::with_capacity(descriptions.len());
    let mut ranges = Vec::with_capacity(descriptions.len());
    for Description { name, dtype, shape, bytes, offset } in descriptions {
        let data = data_start
            .checked_add(offset)
            .and_then(|start| usize::try_from(start).ok())
            .and_then(|start| file.slice(start, bytes));
        let Some(data) = data else {
            let expected = format!("{bytes} bytes at offset {offset} of the data");
            let found = format!("{} bytes of data", (file.len() as u64).saturating_sub(data_start));
            return Err(Error::format(&path, name, expected, found));
        };
        ranges.push((offset, offset + bytes as u64, name));
        tensors.push(Tensor { name: name.to_owned(), dtype, shape, data, file: Arc::clone(&path) });
    }
    ranges.sort_unstable();
    for pair in ranges.windows(2) {
        let [(_, end, before), (start, _, name)] = [pair[0], pair[1]];
        if start < end {
            let found = format!("an offset of {start}, inside {before}");
            return Err(Error::format(&path, name, "a tensor that overlaps no other", found));
        }
    }
    Ok(tensors)
}
