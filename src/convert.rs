//! Any checkpoint to a GGUF of one weight type, tensor by tensor.
//!
//! What is written is laid out as the published file: the embedding BF16, every other matrix of the chosen type, router,
//! norms and sinks F32, and for each NVFP4 tensor an F32 companion `.scale` with one value an expert.

mod encode;

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::ErrorKind,
    path::{Path, PathBuf},
};

use rayon::ThreadPool;
use tempfile::NamedTempFile;

use self::encode::encode;
use crate::{
    cancel::Cancel,
    checkpoint::{
        Checkpoint, DType,
        gguf::Value,
        gguf_writer::{GgufWriter, TensorInfo},
    },
    config::FlintConfig,
    error::{Error, Result},
    nvfp4::BLOCK_LEN,
    threads,
    tokenizer::TokenizerData,
    weights::{self, Item, MatrixData, Shape, Source, Spec},
};

/// Bytes that are copied between two looks at the cancel flag.
const COPY_BYTES: usize = 16 << 20;

/// The type of projections, experts and LM head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightType {
    /// 4.5 bits a value.
    Nvfp4,
    /// 16 bits a value.
    Bf16,
}

/// How to convert.
#[derive(Clone, Copy, Debug)]
pub struct ConvertOptions {
    /// The type of projections, experts and LM head.
    pub weight_type: WeightType,
    /// Whether a file that has the destination's name is replaced or refused.
    pub overwrite: bool,
}

/// Writes the checkpoint `src` as the GGUF `dst`. NVFP4 that stays NVFP4 is copied bit for bit. The file takes its name
/// when it is complete and on the disk; until then it is a temporary one in the same folder, which an error or a cancel
/// removes. Memory: one matrix when the source is NVFP4 in another order than GGUF's, else some megabytes a thread.
///
/// `progress` gets (bytes written, bytes in all), from the calling thread.
///
/// Errors: what reading `src` can refuse; [`Error::Value`] for a `dst` that is there, is part of `src` or does not end in
/// `.gguf`, and for layers that a GGUF cannot describe; [`Error::Format`] naming a tensor with an infinity, a NaN, or rows
/// that are not whole NVFP4 blocks; [`Error::Cancelled`].
pub fn convert(
    src: &Path,
    dst: &Path,
    options: ConvertOptions,
    progress: &mut dyn FnMut(u64, u64),
    cancel: &Cancel,
) -> Result<()> {
    let checkpoint = Checkpoint::open(src)?;
    check_destination(&checkpoint, dst, options.overwrite)?;
    let config = FlintConfig::from_checkpoint(&checkpoint)?;
    let metadata = metadata(&checkpoint, &config, options.weight_type)?;
    let items = weights::resolve(&checkpoint, &config)?;
    for (spec, item) in &items {
        check_blocks(spec, item, options.weight_type)?;
    }
    let tensors = tensors(&config, options.weight_type);

    let pool = threads::pool(None)?;
    let folder = folder_of(dst);
    let partial = temporary_file(folder).map_err(Error::io(folder))?;
    let file = partial.as_file().try_clone().map_err(Error::io(partial.path()))?;
    let mut out = Output {
        writer: GgufWriter::new(file, &metadata, &tensors).map_err(Error::io(partial.path()))?,
        path: partial.path().to_path_buf(),
        done: 0,
        total: tensors.iter().map(TensorInfo::bytes).sum(),
        progress,
    };
    for (spec, item) in &items {
        write_item(&mut out, spec, item, options.weight_type, &pool, cancel)?;
    }
    out.writer.finish().map_err(Error::io(&out.path))?;
    cancel.check()?;
    let named = if options.overwrite { partial.persist(dst) } else { partial.persist_noclobber(dst) };
    named.map_err(|e| Error::io(dst)(e.error))?;
    // The new name is safe once the folder is on the disk too.
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(Error::io(folder))
}

/// The folder that a file of this name is in.
fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn check_destination(checkpoint: &Checkpoint, dst: &Path, overwrite: bool) -> Result<()> {
    let refuse = |accepted: &str| Err(Error::value("dst", dst.display().to_string(), accepted));
    if dst.extension().is_none_or(|extension| extension != "gguf") {
        return refuse("a name that ends in .gguf");
    }
    // All that is known beforehand is said now, and not when the work is done.
    match fs::symlink_metadata(dst) {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let folder = folder_of(dst);
            let is_dir = fs::metadata(folder).map_err(Error::io(folder))?.is_dir();
            return if is_dir { Ok(()) } else { refuse("a name in a folder") };
        }
        Err(error) => return Err(Error::io(dst)(error)),
        Ok(found) if found.is_dir() => return refuse("the name of a file, not of a folder"),
        Ok(_) => {}
    }
    if !overwrite {
        return refuse("a file that does not exist yet, or overwrite");
    }
    let target = dst.canonicalize().map_err(Error::io(dst))?;
    let tensors = match checkpoint {
        Checkpoint::Gguf(gguf) => &gguf.tensors,
        Checkpoint::Safetensors(dir) => &dir.tensors,
    };
    for tensor in tensors.values() {
        if tensor.file.canonicalize().map_err(Error::io(&tensor.file))? == target {
            return refuse("a file other than the source");
        }
    }
    Ok(())
}

/// A file that is removed when it is dropped, with the permissions that new files have.
fn temporary_file(folder: &Path) -> std::io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".flint-convert-").suffix(".partial");
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder.tempfile_in(folder)
}

fn metadata(checkpoint: &Checkpoint, config: &FlintConfig, to: WeightType) -> Result<BTreeMap<String, Value>> {
    let mut metadata = config.to_gguf_metadata()?;
    metadata.extend(tokenizer(checkpoint, config)?);
    match checkpoint {
        Checkpoint::Gguf(gguf) => {
            // Name, author, licence and the like; not what describes the tensors of the source.
            let general = gguf.metadata.iter().filter(|(key, _)| {
                key.starts_with("general.") && !key.starts_with("general.tensor_extra.") && *key != "general.alignment"
            });
            metadata.extend(general.map(|(key, value)| (key.clone(), value.clone())));
        }
        Checkpoint::Safetensors(dir) => {
            let folder = dir.path.canonicalize().map_err(Error::io(&dir.path))?;
            let name = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
            metadata.insert("general.name".into(), Value::String(name));
        }
    }
    // As llama.cpp numbers files that are mostly of one type.
    let file_type = match to {
        WeightType::Nvfp4 => 39,
        WeightType::Bf16 => 32,
    };
    metadata.extend([
        ("general.architecture".into(), Value::String("flint".into())),
        ("general.file_type".into(), Value::Unsigned(file_type)),
        ("general.quantization_version".into(), Value::Unsigned(2)),
    ]);
    Ok(metadata)
}

/// The tokenizer's keys, filled up to the rows of the embedding: llama.cpp takes its vocabulary size from the list.
fn tokenizer(checkpoint: &Checkpoint, config: &FlintConfig) -> Result<BTreeMap<String, Value>> {
    const UNUSED: i64 = 5;
    let data = TokenizerData::from_checkpoint(checkpoint)?;
    let (have, rows) = (data.vocab_size(), config.vocab_size);
    if have > rows {
        let path = match checkpoint {
            Checkpoint::Gguf(gguf) => &gguf.path,
            Checkpoint::Safetensors(dir) => &dir.path,
        };
        let expected = format!("at most {rows} tokens, the rows of the embedding");
        return Err(Error::format(path, "tokenizer", expected, format!("{have} tokens")));
    }
    let mut metadata = data.to_gguf_metadata()?;
    for (key, filler) in [
        ("tokenizer.ggml.tokens", (|id| Value::String(format!("[PAD{id}]"))) as fn(usize) -> Value),
        ("tokenizer.ggml.token_type", |_| Value::Signed(UNUSED)),
    ] {
        if let Some(Value::Array(list)) = metadata.get_mut(key) {
            list.extend((have..rows).map(filler));
        }
    }
    Ok(metadata)
}

/// The type that a matrix is written as.
fn dtype_of(spec: &Spec, to: WeightType) -> DType {
    match (spec.shape, to) {
        (Shape::Router(..), _) => DType::F32,
        _ if spec.gguf == "token_embd.weight" => DType::Bf16,
        (_, WeightType::Nvfp4) => DType::Nvfp4,
        (_, WeightType::Bf16) => DType::Bf16,
    }
}

/// The tensors of a GGUF of these dimensions, in the order in which [`convert`] writes them.
pub fn tensors(config: &FlintConfig, to: WeightType) -> Vec<TensorInfo> {
    weights::list(config).iter().flat_map(|spec| tensors_of(spec, to)).collect()
}

/// What `spec` becomes in the file.
fn tensors_of(spec: &Spec, to: WeightType) -> Vec<TensorInfo> {
    let info = |name: &str, dtype, shape: &[usize]| TensorInfo { name: name.to_owned(), dtype, shape: shape.to_vec() };
    let dtype = dtype_of(spec, to);
    let (n, matrices) = match spec.shape {
        Shape::Vector(len) => return vec![info(&spec.gguf, DType::F32, &[len])],
        Shape::Matrix(rows, cols) | Shape::Router(rows, cols) => (1, info(&spec.gguf, dtype, &[rows, cols])),
        Shape::Experts(n, rows, cols) => (n, info(&spec.gguf, dtype, &[n, rows, cols])),
    };
    let scale = (dtype == DType::Nvfp4).then(|| info(&spec.gguf.replace(".weight", ".scale"), DType::F32, &[n]));
    [matrices].into_iter().chain(scale).collect()
}

/// Rows of NVFP4 are whole blocks.
fn check_blocks(spec: &Spec, item: &Item, to: WeightType) -> Result<()> {
    let cols = match spec.shape {
        Shape::Vector(_) => return Ok(()),
        Shape::Matrix(_, cols) | Shape::Router(_, cols) | Shape::Experts(_, _, cols) => cols,
    };
    match item {
        Item::Matrices(sources) if dtype_of(spec, to) == DType::Nvfp4 && !cols.is_multiple_of(BLOCK_LEN) => {
            let (source, expected) = (&sources[0], format!("rows in multiples of {BLOCK_LEN} values for NVFP4"));
            Err(Error::format(&source.file, &source.tensor, expected, format!("rows of {cols}")))
        }
        _ => Ok(()),
    }
}

/// Writes the tensors that [`tensors_of`] announced for `spec`.
fn write_item(
    out: &mut Output,
    spec: &Spec,
    item: &Item,
    to: WeightType,
    pool: &ThreadPool,
    cancel: &Cancel,
) -> Result<()> {
    let sources = match item {
        Item::Vector(values) => return out.write_floats(values),
        Item::Matrices(sources) => sources,
    };
    let dtype = dtype_of(spec, to);
    let mut scales = Vec::with_capacity(sources.len());
    for source in sources {
        cancel.check()?;
        scales.push(write_matrix(out, source, dtype, pool, cancel)?);
    }
    if dtype == DType::Nvfp4 { out.write_floats(&scales) } else { Ok(()) }
}

/// Returns the tensor scale.
fn write_matrix(out: &mut Output, source: &Source, dtype: DType, pool: &ThreadPool, cancel: &Cancel) -> Result<f32> {
    let matrix = pool.install(|| source.load(cancel))?;
    match &matrix.data {
        MatrixData::Nvfp4 { blocks, scale } if dtype == DType::Nvfp4 => {
            for bytes in blocks.chunks(COPY_BYTES) {
                cancel.check()?;
                out.write(bytes)?;
            }
            Ok(*scale)
        }
        _ => encode(&matrix, source, dtype, pool, cancel, &mut |bytes| out.write(bytes)),
    }
}

/// The file that is being written.
struct Output<'a> {
    writer: GgufWriter,
    path: PathBuf,
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(u64, u64),
}

impl Output<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.writer.write(bytes).map_err(Error::io(&self.path))?;
        self.done += bytes.len() as u64;
        (self.progress)(self.done, self.total);
        Ok(())
    }

    fn write_floats(&mut self, values: &[f32]) -> Result<()> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.write(&bytes)
    }
}
