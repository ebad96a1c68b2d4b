//! GGUF files, versions 2 and 3, little-endian, one file or split into several.
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>.

mod header;
mod reader;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use self::header::{Part, Split};
use super::{Bytes, ShardName, Tensor, add_tensors};
use crate::error::{Error, Result};

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Any unsigned integer type.
    Unsigned(u64),
    /// Any signed integer type.
    Signed(i64),
    /// `f32` or `f64`.
    Float(f64),
    /// A byte that is 0 or 1.
    Bool(bool),
    /// UTF-8.
    String(String),
    /// Values of one type; never nested.
    Array(Vec<Value>),
}

impl Value {
    /// The number when this is an integer of either sign type that is not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Self::Unsigned(value) => Some(*value),
            Self::Signed(value) => u64::try_from(*value).ok(),
            _ => None,
        }
    }

    /// What an error says about the value; long ones are named by their size only.
    pub fn describe(&self) -> String {
        match self {
            Self::Unsigned(value) => value.to_string(),
            Self::Signed(value) => value.to_string(),
            Self::Float(value) => format!("{value:?}"),
            Self::Bool(value) => value.to_string(),
            Self::String(value) if value.len() <= 100 => format!("{value:?}"),
            Self::String(value) => format!("a string of {} bytes", value.len()),
            Self::Array(values) => format!("a list of {}", values.len()),
        }
    }
}

/// A parsed GGUF, of one file or split into several.
#[derive(Debug)]
pub struct Gguf {
    /// The file, or the first part.
    pub path: PathBuf,
    /// Keys of the first part.
    pub metadata: BTreeMap<String, Value>,
    /// Tensors of all parts, by name.
    pub tensors: BTreeMap<String, Tensor>,
}

impl Gguf {
    /// Maps and checks `path` and, when it is split, its other parts, which stand beside it under the names that
    /// llama.cpp's splitter gives. Reads the headers and touches no tensor bytes.
    pub fn open(path: &Path) -> Result<Self> {
        let first = Part::parse(path, &Bytes::open(path)?)?;
        let Some(split) = first.split(path)? else { return Self::new(path, first) };
        let file = path.file_name().unwrap_or_default().to_string_lossy();
        let name = ShardName::parse(&file, ".gguf").filter(|name| name.count == split.count);
        let Some(name) = name else {
            let expected = format!("a name ending in -00001-of-{:05}.gguf, because split.count says so", split.count);
            return Err(Error::format(path, "file name", expected, file));
        };
        if split.number != 0 {
            let found = format!("part {}", split.number + 1);
            return Err(Error::format(
                path,
                "split.no",
                format!("the first part, {}", ShardName { number: 1, ..name }.file(".gguf")),
                found,
            ));
        }
        let mut gguf = Self::new(path, first)?;
        for number in 1..split.count {
            let path = path.with_file_name(ShardName { number: number + 1, ..name }.file(".gguf"));
            let part = Part::parse(&path, &Bytes::open(&path)?)?;
            let (expected, found) = (Split { number, ..split }, part.split(&path)?);
            if found.as_ref() != Some(&expected) {
                let found = found.map_or("no split keys".into(), |found| found.to_string());
                return Err(Error::format(&path, "split keys", expected.to_string(), found));
            }
            add_tensors(&mut gguf.tensors, part.tensors)?;
        }
        if gguf.tensors.len() as u64 != split.tensors {
            let found = format!("{} in the {} parts", gguf.tensors.len(), split.count);
            return Err(Error::format(path, "split.tensors.count", format!("{} tensors", split.tensors), found));
        }
        Ok(gguf)
    }

    /// Checks the bytes of one file that is not split; `path` is used in error messages only.
    pub fn from_bytes(path: &Path, bytes: &Bytes) -> Result<Self> {
        let part = Part::parse(path, bytes)?;
        match part.split(path)? {
            Some(split) => Err(Error::format(path, "split.count", "a file that is not split", split.to_string())),
            None => Self::new(path, part),
        }
    }

    fn new(path: &Path, part: Part) -> Result<Self> {
        let mut gguf = Self { path: path.to_path_buf(), metadata: part.metadata, tensors: BTreeMap::new() };
        add_tensors(&mut gguf.tensors, part.tensors)?;
        Ok(gguf)
    }
}
