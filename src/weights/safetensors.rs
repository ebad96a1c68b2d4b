//! Names of a safetensors folder.

use super::{
    Item,
    list::{Shape, Spec},
    source::Source,
    table::{Table, check_dtype, check_shape, scales, vector},
};
use crate::{
    checkpoint::{DType, Tensor, safetensors::SafetensorsDir},
    error::{Error, Result},
    nvfp4::{BLOCK_LEN, GROUP_LEN},
};

const FLOATS: [DType; 3] = [DType::Bf16, DType::F16, DType::F32];

/// Finds what `list` asks for, in its order.
pub(super) fn resolve(dir: &SafetensorsDir, list: &[Spec]) -> Result<Vec<Item>> {
    let table = Table::new(&dir.path, &dir.tensors);
    // The bare model is saved without the prefix.
    let prefix = if dir.tensors.contains_key("embed_tokens.weight") { "" } else { "model." };
    let mut names = Names { table, prefix };
    let items = list.iter().map(|spec| names.item(spec)).collect::<Result<_>>()?;
    names.table.finish()?;
    Ok(items)
}

struct Names<'a> {
    table: Table<'a>,
    prefix: &'static str,
}

impl<'a> Names<'a> {
    fn item(&mut self, spec: &Spec) -> Result<Item> {
        let name = match spec.safetensors.as_str() {
            // Not a part of the bare model.
            head @ "lm_head.weight" => head.to_string(),
            rest => format!("{}{rest}", self.prefix),
        };
        match spec.shape {
            Shape::Vector(len) => vector(self.vector_tensor(&name)?, len).map(Item::Vector),
            Shape::Router(rows, cols) => {
                let tensor = self.table.get(&name)?;
                Ok(Item::Matrices(vec![floats(tensor, rows, cols)?]))
            }
            Shape::Matrix(rows, cols) => Ok(Item::Matrices(vec![self.matrix(&name, rows, cols)?])),
            Shape::Experts(n, rows, cols) => self.experts(&name, n, rows, cols).map(Item::Matrices),
        }
    }

    /// The sinks have one name in the published checkpoint and another in transformers.
    fn vector_tensor(&mut self, name: &str) -> Result<&'a Tensor> {
        match name.strip_suffix("softmax_offset").and_then(|base| self.table.find(&format!("{base}sinks"))) {
            Some(sinks) => Ok(sinks),
            None => self.table.get(name),
        }
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize) -> Result<Source> {
        let tensor = self.table.get(name)?;
        let base = name.trim_end_matches("weight");
        // Scales that a `ModelOpt` export holds for quantised activations and KV caches, which stay BF16 here.
        for unused in ["input_scale", "k_scale", "v_scale"] {
            self.table.find(&format!("{base}{unused}"));
        }
        if tensor.dtype != DType::U8 {
            return floats(tensor, rows, cols);
        }
        if !cols.is_multiple_of(BLOCK_LEN) {
            let expected = format!("NVFP4 rows in multiples of {BLOCK_LEN} values");
            return Err(Error::format(&tensor.file, name, expected, format!("rows of {cols}")));
        }
        check_shape(tensor, &[rows, cols / 2])?;
        let block_scales = self.table.get(&format!("{name}_scale"))?;
        check_dtype(block_scales, &[DType::F8E4m3])?;
        check_shape(block_scales, &[rows, cols / GROUP_LEN])?;
        let scale = scales(self.table.get(&format!("{name}_scale_2"))?, 1)?[0];
        Ok(Source::pairs(tensor, block_scales, rows, cols, scale))
    }

    /// Experts one by one, or stacked: `gate_up_proj` `[E, 2F, D]` with the gate first, `down_proj` `[E, D, F]`.
    fn experts(&mut self, name: &str, n: usize, rows: usize, cols: usize) -> Result<Vec<Source>> {
        let (base, projection) = name.split_once("{}.").unwrap_or((name, ""));
        let (stack, parts, part) = match projection {
            "gate_proj.weight" => ("gate_up_proj", 2, 0),
            "up_proj.weight" => ("gate_up_proj", 2, 1),
            _ => ("down_proj", 1, 0),
        };
        let Some(tensor) = self.table.find(&format!("{base}{stack}")) else {
            return (0..n).map(|expert| self.matrix(&name.replace("{}", &expert.to_string()), rows, cols)).collect();
        };
        check_dtype(tensor, &FLOATS)?;
        check_shape(tensor, &[n, parts * rows, cols])?;
        let first = |expert| (expert * parts + part) * rows * cols;
        (0..n).map(|expert| slice(tensor, first(expert), rows, cols)).collect()
    }
}

fn floats(tensor: &Tensor, rows: usize, cols: usize) -> Result<Source> {
    check_dtype(tensor, &FLOATS)?;
    check_shape(tensor, &[rows, cols])?;
    slice(tensor, 0, rows, cols)
}

fn slice(tensor: &Tensor, first: usize, rows: usize, cols: usize) -> Result<Source> {
    Source::stored(tensor, first, rows, cols, 1.0).ok_or_else(|| {
        let expected = format!("{rows} x {cols} values after the first {first}");
        Error::format(&tensor.file, &tensor.name, expected, format!("{} bytes", tensor.data.len()))
    })
}
