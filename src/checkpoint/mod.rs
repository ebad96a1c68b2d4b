//! Checkpoint files as a checked table of named tensors. Trusts no byte: every length, offset, shape and type is
//! checked here, once; rooms after this one may rely on [`Tensor::data`] having exactly the bytes its shape needs.

mod bytes;
pub mod gguf;
pub mod gguf_writer;
pub mod safetensors;

use std::{
    collections::{BTreeMap, btree_map::Entry},
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

pub use self::bytes::Bytes;
use self::{gguf::Gguf, safetensors::SafetensorsDir};
use crate::error::{Error, Result};

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
    /// ggml `Q8_0`: blocks of 32 values, one F16 scale then 32 signed bytes.
    Q8_0,
    /// ggml NVFP4 (type 40): blocks of 64 values in 36 bytes, see [`crate::nvfp4`].
    Nvfp4,
    /// Bytes; in `ModelOpt` exports, two e2m1 codes each, the low nibble first.
    U8,
    /// One e4m3 value a byte (safetensors `F8_E4M3`); in `ModelOpt` exports, the block scales.
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

    /// Bytes of a row-major tensor of `shape`; `None` when its last dimension is no multiple of the block or the size
    /// overflows. No dimension at all is one value.
    pub fn bytes_of(self, shape: &[usize]) -> Option<usize> {
        let row = shape.last().copied().unwrap_or(1);
        if row % self.block_len() != 0 {
            return None;
        }
        let values = shape.iter().try_fold(1_usize, |product, &dim| product.checked_mul(dim))?;
        (values / self.block_len()).checked_mul(self.block_bytes())
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

/// One tensor of a checkpoint.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Its name in the file.
    pub name: String,
    /// How the elements are stored.
    pub dtype: DType,
    /// Dimensions, outermost first (row-major); the last one is contiguous. None for a single value, and none of
    /// them zero.
    pub shape: Vec<usize>,
    /// Exactly the bytes that `dtype` and `shape` need.
    pub data: Bytes,
    /// The file that holds it, for error messages.
    pub file: Arc<PathBuf>,
}

/// Adds the tensors of one more file to those of a checkpoint. No name may come twice.
fn add_tensors(all: &mut BTreeMap<String, Tensor>, tensors: Vec<Tensor>) -> Result<()> {
    for tensor in tensors {
        match all.entry(tensor.name.clone()) {
            Entry::Vacant(entry) => entry.insert(tensor),
            Entry::Occupied(entry) => {
                let found = format!("another one in {}", entry.get().file.display());
                return Err(Error::format(&tensor.file, tensor.name, "one tensor of this name", found));
            }
        };
    }
    Ok(())
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
    /// Opens a `.gguf` file (the first one of a split set), a folder with a config.json and safetensors, or a folder
    /// that holds one GGUF. Reads headers only. A folder with both kinds is read as safetensors.
    pub fn open(path: &Path) -> Result<Self> {
        let refuse = |found: String| {
            let expected = "a .gguf file, a folder with config.json and safetensors, or a folder with one GGUF";
            Err(Error::format(path, "checkpoint", expected, found))
        };
        if !path.metadata().map_err(Error::io(path))?.is_dir() {
            return match extension(path).as_str() {
                "gguf" => Gguf::open(path).map(Self::Gguf),
                "safetensors" => refuse("a single .safetensors file; give the folder that holds it".into()),
                other => refuse(format!("a file whose extension is {other:?}")),
            };
        }
        let files = files_of(path)?;
        let has_config = files.iter().any(|file| file == "config.json");
        let has_safetensors = files.iter().any(|file| file.contains(".safetensors"));
        if has_config && has_safetensors {
            return SafetensorsDir::open(path).map(Self::Safetensors);
        }
        let ggufs = files.iter().filter(|file| extension(Path::new(file)) == "gguf");
        // A split set counts once, by its first part.
        let (first, later): (Vec<_>, Vec<_>) =
            ggufs.partition(|file| ShardName::parse(file, ".gguf").is_none_or(|name| name.number == 1));
        match (first.as_slice(), later.first()) {
            ([one], _) => Gguf::open(&path.join(one)).map(Self::Gguf),
            (all @ [one, other, ..], _) => refuse(format!("{} GGUF models, {one} and {other} among them", all.len())),
            ([], Some(later)) => refuse(format!("{later} without the first part of its set")),
            ([], None) if has_safetensors => refuse("safetensors without a config.json".into()),
            ([], None) if has_config => refuse("a config.json without safetensors or GGUF".into()),
            ([], None) => refuse(format!("a folder of {} files, none of them a GGUF or config.json", files.len())),
        }
    }
}

/// The lower-case extension of `path`; empty without one.
fn extension(path: &Path) -> String {
    path.extension().unwrap_or_default().to_string_lossy().to_lowercase()
}

/// The names of the entries of a folder, sorted. Names that are not UTF-8 belong to no checkpoint.
fn files_of(folder: &Path) -> Result<Vec<String>> {
    let mut files = Vec::new();
    for entry in folder.read_dir().map_err(Error::io(folder))? {
        files.extend(entry.map_err(Error::io(folder))?.file_name().into_string().ok());
    }
    files.sort_unstable();
    Ok(files)
}

/// A name such as `flint-00002-of-00003.gguf`, which both kinds of checkpoint use for the parts of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ShardName<'a> {
    stem: &'a str,
    /// From 1.
    number: u64,
    count: u64,
}

impl<'a> ShardName<'a> {
    fn parse(file: &'a str, suffix: &str) -> Option<Self> {
        let (rest, count) = file.strip_suffix(suffix)?.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let five_digits =
            |text: &str| (text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit())).then(|| text.parse().ok());
        Some(Self { stem, number: five_digits(number)??, count: five_digits(count)?? })
    }

    fn file(&self, suffix: &str) -> String {
        format!("{}-{:05}-of-{:05}{suffix}", self.stem, self.number, self.count)
    }
}
