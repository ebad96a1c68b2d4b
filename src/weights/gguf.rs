//! Names of a GGUF.

use super::{
    Item,
    list::{Shape, Spec},
    source::Source,
    table::{Table, check_dtype, check_shape, scales, vector},
};
use crate::{
    checkpoint::{DType, Tensor, gguf::Gguf},
    error::{Error, Result},
};

const FLOATS: [DType; 3] = [DType::F32, DType::F16, DType::Bf16];
const ANY: [DType; 5] = [DType::Nvfp4, DType::Bf16, DType::F16, DType::F32, DType::Q8_0];

/// Finds what `list` asks for, in its order.
pub(super) fn resolve(gguf: &Gguf, list: &[Spec]) -> Result<Vec<Item>> {
    let mut table = Table::new(&gguf.path, &gguf.tensors);
    let items = list.iter().map(|spec| item(&mut table, spec)).collect::<Result<_>>()?;
    table.finish()?;
    Ok(items)
}

fn item(table: &mut Table, spec: &Spec) -> Result<Item> {
    let tensor = table.get(&spec.gguf)?;
    match spec.shape {
        Shape::Vector(len) => vector(tensor, len).map(Item::Vector),
        Shape::Matrix(rows, cols) => {
            check_dtype(tensor, &ANY)?;
            check_shape(tensor, &[rows, cols])?;
            stack(table, tensor, 1, rows, cols)
        }
        Shape::Router(rows, cols) => {
            check_dtype(tensor, &FLOATS)?;
            check_shape(tensor, &[rows, cols])?;
            check_router_bias(table, &spec.gguf, rows)?;
            stack(table, tensor, 1, rows, cols)
        }
        Shape::Experts(n, rows, cols) => {
            check_dtype(tensor, &ANY)?;
            check_shape(tensor, &[n, rows, cols])?;
            stack(table, tensor, n, rows, cols)
        }
    }
}

/// The matrices of a stack with their companion scales.
fn stack(table: &mut Table, tensor: &Tensor, n: usize, rows: usize, cols: usize) -> Result<Item> {
    let mut factors = vec![1.0; n];
    if tensor.dtype == DType::Nvfp4 {
        let base = tensor.name.trim_end_matches("weight");
        if let Some(companion) = table.find(&format!("{base}scale")) {
            factors = scales(companion, n)?;
        }
        // The scale of 4-bit activations, which stay BF16 here.
        table.find(&format!("{base}input_scale"));
    }
    let source = |(expert, &factor)| {
        Source::stored(tensor, expert * rows * cols, rows, cols, factor).ok_or_else(|| {
            Error::format(
                &tensor.file,
                &tensor.name,
                format!("{n} x {rows} x {cols} values"),
                format!("{} bytes", tensor.data.len()),
            )
        })
    };
    factors.iter().enumerate().map(source).collect::<Result<_>>().map(Item::Matrices)
}

/// The bias that other models add when they choose experts. Flint has none, so a file may only say zero.
fn check_router_bias(table: &mut Table, router: &str, n_experts: usize) -> Result<()> {
    let name = router.replace("ffn_gate_inp.weight", "exp_probs_b.bias");
    let Some(tensor) = table.find(&name) else { return Ok(()) };
    match vector(tensor, n_experts)?.iter().find(|bias| **bias != 0.0) {
        None => Ok(()),
        Some(bias) => Err(Error::format(&tensor.file, name, "zeros: Flint's router has no bias", format!("{bias:?}"))),
    }
}
