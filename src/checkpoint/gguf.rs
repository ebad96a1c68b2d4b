//! GGUF files.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use super::Tensor;
use crate::error::Result;

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
    /// Maps and checks `path` and, when it is split, its other parts.
    pub fn open(path: &Path) -> Result<Self> {
        let _ = path;
        unimplemented!()
    }
}
