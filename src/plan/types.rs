//! How the matrices of a checkpoint are stored.

use crate::{
    checkpoint::{Checkpoint, DType},
    config::FlintConfig,
    error::Result,
    weights::{self, Held, Item, Recipe, Weights},
};

/// One matrix, or the stack of a layer's experts, which all have one type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MatrixType {
    /// Its name in a GGUF.
    pub name: String,
    /// Its type; `None` for experts of different types.
    pub dtype: Option<DType>,
}

/// The types of all matrices of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Types(pub Vec<MatrixType>);

impl Types {
    /// Of a checkpoint, from its header. Errors as [`Weights::bind`], but for values inside matrices.
    pub fn of_checkpoint(checkpoint: &Checkpoint, config: &FlintConfig) -> Result<Self> {
        let tensors = weights::resolve(checkpoint, config)?;
        Ok(Self::new(tensors.into_iter().filter_map(|(spec, item)| match item {
            Item::Vector(_) => None,
            Item::Matrices(sources) => Some((spec.gguf, sources.iter().map(weights::Source::dtype).collect())),
        })))
    }

    /// Of loaded weights.
    pub fn of_weights(weights: &Weights) -> Self {
        Self::new(weights.tensors().into_iter().filter_map(|(spec, held)| match held {
            Held::Vector(_) => None,
            Held::Matrices(matrices) => Some((spec.gguf, matrices.iter().map(|m| m.data.dtype()).collect())),
        }))
    }

    /// Of [`Weights::synthetic`] with `dtype`.
    pub fn of_synthetic(config: &FlintConfig, dtype: DType) -> Result<Self> {
        let recipes = weights::recipes(config, 0, dtype)?;
        Ok(Self::new(recipes.into_iter().filter_map(|(spec, recipe)| match recipe {
            Recipe::Vector(_) => None,
            Recipe::Matrices(matrices) => Some((spec.gguf, matrices.iter().map(|m| m.dtype).collect())),
        })))
    }

    /// The type of the matrix or stack `name`; `None` without it, or when its experts differ.
    pub fn get(&self, name: &str) -> Option<DType> {
        self.0.iter().find(|matrix| matrix.name == name)?.dtype
    }

    fn new(matrices: impl Iterator<Item = (String, Vec<DType>)>) -> Self {
        let uniform = |dtypes: Vec<DType>| dtypes.first().copied().filter(|first| dtypes.iter().all(|d| d == first));
        Self(matrices.map(|(name, dtypes)| MatrixType { name, dtype: uniform(dtypes) }).collect())
    }
}
