//! Writes GGUF version 3: the header first, then tensor bytes as they come, so that a model never has to fit in memory.

use std::{
    collections::{BTreeMap, VecDeque},
    fs::File,
    io::{self, BufWriter, Write},
};

use super::{DType, gguf::Value};

/// Tensors start at multiples of this; the format's default.
pub const ALIGNMENT: u64 = 32;

/// A tensor that will be written.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    /// At most 64 bytes, or llama.cpp refuses the file.
    pub name: String,
    /// A type that GGUF has: not U8 or F8.
    pub dtype: DType,
    /// Outermost dimension first.
    pub shape: Vec<usize>,
}

impl TensorInfo {
    /// Bytes of the tensor without padding.
    ///
    /// # Panics
    /// When the shape is no whole number of blocks.
    pub fn bytes(&self) -> u64 {
        self.dtype.bytes_of(&self.shape).expect("a shape of whole blocks") as u64
    }
}

/// A GGUF on its way to a file.
pub struct GgufWriter {
    out: BufWriter<File>,
    /// Bytes still to come, tensor by tensor.
    missing: VecDeque<u64>,
    /// Bytes written after the header.
    written: u64,
}

impl GgufWriter {
    /// Writes the header to `file`, which is empty. `general.alignment` is added. Integers become 32 bits wide where they
    /// fit, floats always: Flint's keys have no others.
    pub fn new(file: File, metadata: &BTreeMap<String, Value>, tensors: &[TensorInfo]) -> io::Result<Self> {
        let mut header = Vec::new();
        header.extend(b"GGUF");
        header.extend(3_u32.to_le_bytes());
        header.extend((tensors.len() as u64).to_le_bytes());
        let alignment = ("general.alignment".to_string(), Value::Unsigned(ALIGNMENT));
        let others = metadata.iter().filter(|(key, _)| **key != alignment.0);
        // The architecture and its like first, where people look for them.
        let (mut keys, rest): (Vec<_>, Vec<_>) = others.partition(|(key, _)| key.starts_with("general."));
        keys.push((&alignment.0, &alignment.1));
        keys.extend(rest);
        header.extend((keys.len() as u64).to_le_bytes());
        for (key, value) in keys {
            put_string(&mut header, key);
            header.extend(value_type(value).to_le_bytes());
            put_value(&mut header, value, value_type(value));
        }
        let mut offset = 0_u64;
        for tensor in tensors {
            put_string(&mut header, &tensor.name);
            header.extend((tensor.shape.len() as u32).to_le_bytes());
            header.extend(tensor.shape.iter().rev().flat_map(|dim| (*dim as u64).to_le_bytes()));
            header.extend(tensor_type(tensor.dtype).to_le_bytes());
            header.extend(offset.to_le_bytes());
            offset += tensor.bytes().next_multiple_of(ALIGNMENT);
        }
        header.resize(header.len().next_multiple_of(ALIGNMENT as usize), 0);
        let mut out = BufWriter::new(file);
        out.write_all(&header)?;
        Ok(Self { out, missing: tensors.iter().map(TensorInfo::bytes).collect(), written: 0 })
    }

    /// Writes the next bytes of the next tensor, or all of it.
    ///
    /// # Panics
    /// When they reach past the end of that tensor.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        let missing = self.missing.front_mut().expect("a tensor that was announced");
        *missing = missing.checked_sub(bytes.len() as u64).expect("bytes of one tensor");
        self.out.write_all(bytes)?;
        self.written += bytes.len() as u64;
        if *missing == 0 {
            self.missing.pop_front();
            let padding = self.written.next_multiple_of(ALIGNMENT) - self.written;
            self.out.write_all(&[0; ALIGNMENT as usize][..padding as usize])?;
            self.written += padding;
        }
        Ok(())
    }

    /// Flushes to the disk and returns the file.
    ///
    /// # Panics
    /// When bytes of a tensor are missing.
    pub fn finish(self) -> io::Result<File> {
        assert!(self.missing.is_empty(), "{} tensors were not written", self.missing.len());
        let file = self.out.into_inner().map_err(io::IntoInnerError::into_error)?;
        file.sync_all()?;
        Ok(file)
    }
}

fn put_string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// The format's number of the type that a value is written as.
fn value_type(value: &Value) -> u32 {
    match value {
        Value::Unsigned(value) if u32::try_from(*value).is_ok() => 4,
        Value::Signed(value) if i32::try_from(*value).is_ok() => 5,
        Value::Float(_) => 6,
        Value::Bool(_) => 7,
        Value::String(_) => 8,
        Value::Array(_) => 9,
        Value::Unsigned(_) => 10,
        Value::Signed(_) => 11,
    }
}

/// `kind` is the value's type, or in a list the widest of all.
fn put_value(out: &mut Vec<u8>, value: &Value, kind: u32) {
    match value {
        Value::Unsigned(v) if kind == 4 => out.extend((*v as u32).to_le_bytes()),
        Value::Unsigned(v) => out.extend(v.to_le_bytes()),
        Value::Signed(v) if kind == 5 => out.extend((*v as i32).to_le_bytes()),
        Value::Signed(v) => out.extend(v.to_le_bytes()),
        Value::Float(v) => out.extend((*v as f32).to_le_bytes()),
        Value::Bool(v) => out.push(u8::from(*v)),
        Value::String(v) => put_string(out, v),
        Value::Array(values) => {
            // An empty list is one of strings.
            let kind = values.iter().map(value_type).max().unwrap_or(8);
            out.extend(kind.to_le_bytes());
            out.extend((values.len() as u64).to_le_bytes());
            for value in values {
                put_value(out, value, kind);
            }
        }
    }
}

/// ggml's number of a type.
fn tensor_type(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::Q8_0 => 8,
        DType::Bf16 => 30,
        DType::Nvfp4 => 40,
        DType::U8 | DType::F8E4m3 => panic!("GGUF has no {dtype}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::gguf::Gguf;

    #[test]
    fn the_reader_finds_what_was_written() {
        let list = |values: &[Value]| Value::Array(values.to_vec());
        let mut metadata: BTreeMap<String, Value> = [
            ("general.architecture", Value::String("flint".into())),
            ("a", Value::Unsigned(u32::MAX.into())),
            ("b", Value::Unsigned(u64::MAX)),
            ("c", Value::Signed(i32::MIN.into())),
            ("d", Value::Signed(i64::MIN)),
            ("e", Value::Float(0.1_f32.into())),
            ("f", Value::Bool(true)),
            ("g", list(&[])),
            ("h", list(&[Value::Unsigned(1), Value::Unsigned(1 << 40), Value::Unsigned(2)])),
            ("i", list(&[Value::Signed(-1), Value::Signed(-(1 << 40))])),
            ("j", list(&[Value::String("ä".into()), Value::String(String::new())])),
        ]
        .map(|(key, value)| (key.to_owned(), value))
        .into();
        let tensors: Vec<TensorInfo> = [
            ("one", DType::F32, vec![1]),
            ("two", DType::Nvfp4, vec![3, 128]),
            ("three", DType::Bf16, vec![2, 3, 5]),
            ("four", DType::F16, vec![16]),
            ("five", DType::Q8_0, vec![1, 32]),
        ]
        .map(|(name, dtype, shape)| TensorInfo { name: name.into(), dtype, shape })
        .into();
        let path = tempfile::Builder::new().suffix(".gguf").tempfile().unwrap();
        let mut writer = GgufWriter::new(path.reopen().unwrap(), &metadata, &tensors).unwrap();
        let data: Vec<Vec<u8>> = (1..).zip(&tensors).map(|(n, t)| vec![n; t.bytes() as usize]).collect();
        for bytes in &data {
            // In pieces of any size.
            bytes.chunks(7).for_each(|piece| writer.write(piece).unwrap());
        }
        writer.finish().unwrap();

        let gguf = Gguf::open(path.path()).unwrap();
        metadata.insert("general.alignment".into(), Value::Unsigned(32));
        assert_eq!(gguf.metadata, metadata);
        assert_eq!(gguf.tensors.len(), tensors.len());
        for (info, bytes) in tensors.iter().zip(&data) {
            let tensor = &gguf.tensors[&info.name];
            assert_eq!((tensor.dtype, &tensor.shape, &*tensor.data), (info.dtype, &info.shape, bytes.as_slice()));
        }
    }
}
