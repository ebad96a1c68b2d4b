//! The tensors of a checkpoint while names are bound to them: each is checked as it is taken, and none may be left over.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use super::matrix::decode_floats;
use crate::{
    checkpoint::{DType, Tensor},
    error::{Error, Result},
};

pub(super) struct Table<'a> {
    path: &'a Path,
    tensors: &'a BTreeMap<String, Tensor>,
    taken: BTreeSet<&'a str>,
}

impl<'a> Table<'a> {
    pub fn new(path: &'a Path, tensors: &'a BTreeMap<String, Tensor>) -> Self {
        Self { path, tensors, taken: BTreeSet::new() }
    }

    /// The tensor `name`, if the checkpoint has it.
    pub fn find(&mut self, name: &str) -> Option<&'a Tensor> {
        let (name, tensor) = self.tensors.get_key_value(name)?;
        self.taken.insert(name);
        Some(tensor)
    }

    /// The tensor `name`.
    pub fn get(&mut self, name: &str) -> Result<&'a Tensor> {
        self.find(name).ok_or_else(|| Error::format(self.path, name, "a tensor of this name", "none"))
    }

    /// Refuses tensors that nothing took: a Flint with more weights than this one knows would answer wrongly in silence.
    pub fn finish(self) -> Result<()> {
        match self.tensors.values().find(|tensor| !self.taken.contains(tensor.name.as_str())) {
            None => Ok(()),
            Some(extra) => Err(Error::format(
                &extra.file,
                &extra.name,
                "only tensors that a Flint of these dimensions has",
                format!("{} {:?}", extra.dtype, extra.shape),
            )),
        }
    }
}

pub(super) fn check_shape(tensor: &Tensor, shape: &[usize]) -> Result<()> {
    if tensor.shape == shape {
        return Ok(());
    }
    let (expected, found) = (format!("shape {shape:?}"), format!("shape {:?}", tensor.shape));
    Err(Error::format(&tensor.file, &tensor.name, expected, found))
}

pub(super) fn check_dtype(tensor: &Tensor, accepted: &[DType]) -> Result<()> {
    if accepted.contains(&tensor.dtype) {
        return Ok(());
    }
    let names: Vec<_> = accepted.iter().map(|dtype| dtype.name()).collect();
    Err(Error::format(
        &tensor.file,
        &tensor.name,
        format!("type {}", names.join(", ")),
        format!("type {}", tensor.dtype),
    ))
}

/// The values of a float tensor of `len` values, all finite.
pub(super) fn vector(tensor: &Tensor, len: usize) -> Result<Vec<f32>> {
    check_dtype(tensor, &[DType::F32, DType::F16, DType::Bf16])?;
    check_shape(tensor, &[len])?;
    finite(tensor, len)
}

/// The scales of `len` NVFP4 matrices, finite and not negative: the sign of a value is in its code. Zero is accepted; it
/// is the scale of a matrix of zeros.
pub(super) fn scales(tensor: &Tensor, len: usize) -> Result<Vec<f32>> {
    check_dtype(tensor, &[DType::F32])?;
    if !(len == 1 && tensor.shape.is_empty()) {
        check_shape(tensor, &[len])?;
    }
    let scales = finite(tensor, len)?;
    match scales.iter().find(|scale| **scale < 0.0) {
        None => Ok(scales),
        Some(scale) => Err(Error::format(&tensor.file, &tensor.name, "scales of 0 or more", format!("{scale:?}"))),
    }
}

fn finite(tensor: &Tensor, len: usize) -> Result<Vec<f32>> {
    let mut values = vec![0.0; len];
    decode_floats(tensor.dtype, &tensor.data, &mut values);
    match values.iter().find(|value| !value.is_finite()) {
        None => Ok(values),
        Some(value) => Err(Error::format(&tensor.file, &tensor.name, "finite values", format!("{value:?}"))),
    }
}
