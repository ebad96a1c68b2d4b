//! Checkpoint files as a checked table of named tensors. Trusts no byte: every length, offset, shape and type is
//! checked here, once; rooms after this one may rely on [`Tensor::data`] having exactly the bytes its shape needs.

pub mod gguf;
pub mod safetensors;

use std::{
    fmt,
    ops::Deref,
    path::{Path, PathBuf},
    sync::Arc,
};

use memmap2::Mmap;

use self::{gguf::Gguf, safetensors::SafetensorsDir};
use crate::error::Result;

/// How a tensor's elements are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// IEEE single, little-endian.
    F32,
    /// IEEE half.
    F16,
    /// Upper half of an IEEE single.
    Bf16,
    /// ggml Q8_0: blocks of 32 values, one F16 scale then 32 signed bytes.
    Q8_0,
    /// ggml NVFP4 (type 40): blocks of 64 values in 36 bytes, see [`crate::nvfp4`].
    Nvfp4,
    /// Bytes; in ModelOpt exports, two e2m1 codes each, the low nibble first.
    U8,
    /// One e4m3 value a byte (safetensors `F8_E4M3`); in ModelOpt exports, the block scales.
    F8E4m3,
}

impl DType {
    /// Values in the smallest unit that is stored whole.
    pub const fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 | Self::U8 | Self::F8E4m3 => 1,
            Self::Q8_0 => 32,
            Self::Nvfp4 => 64,
        }
    }

    /// Bytes of that unit.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::U8 | Self::F8E4m3 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
            Self::Q8_0 => 34,
            Self::Nvfp4 => 36,
        }
    }

    /// The field's name for it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Q8_0 => "Q8_0",
            Self::Nvfp4 => "NVFP4",
            Self::U8 => "U8",
            Self::F8E4m3 => "F8_E4M3",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A range of bytes that keeps its owner alive: part of a mapped file, or memory of our own.
#[derive(Clone)]
pub struct Bytes {
    owner: Owner,
    start: usize,
    len: usize,
}

#[derive(Clone)]
enum Owner {
    Map(Arc<Mmap>),
    Heap(Arc<[u8]>),
}

impl Bytes {
    /// The bytes `start .. start + len` of a mapped file; `None` when they are not all inside it.
    pub fn map(map: &Arc<Mmap>, start: usize, len: usize) -> Option<Self> {
        let end = start.checked_add(len)?;
        (end <= map.len()).then(|| Self { owner: Owner::Map(Arc::clone(map)), start, len })
    }

    /// The bytes `start .. start + len` of this range; `None` when they are not all inside it.
    pub fn slice(&self, start: usize, len: usize) -> Option<Self> {
        let end = start.checked_add(len)?;
        (end <= self.len).then(|| Self { owner: self.owner.clone(), start: self.start + start, len })
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self { start: 0, len: bytes.len(), owner: Owner::Heap(bytes.into()) }
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        let all: &[u8] = match &self.owner {
            Owner::Map(map) => map,
            Owner::Heap(heap) => heap,
        };
        &all[self.start..self.start + self.len]
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bytes({})", self.len)
    }
}

/// One tensor of a checkpoint.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Its name in the file.
    pub name: String,
    /// How the elements are stored.
    pub dtype: DType,
    /// Dimensions, outermost first (row-major); the last one is contiguous. Never zero.
    pub shape: Vec<usize>,
    /// Exactly the bytes that `dtype` and `shape` need.
    pub data: Bytes,
    /// The file that holds it, for error messages.
    pub file: Arc<PathBuf>,
}

/// A checkpoint of either kind.
#[derive(Debug)]
pub enum Checkpoint {
    /// A GGUF file, or the first file of a split one.
    Gguf(Gguf),
    /// A folder of safetensors shards.
    Safetensors(SafetensorsDir),
}

impl Checkpoint {
    /// Opens a `.gguf` file, a folder with a config.json, or a folder that holds one GGUF. Reads headers only.
    pub fn open(path: &Path) -> Result<Self> {
        let _ = path;
        unimplemented!()
    }
}
