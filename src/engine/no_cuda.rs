//! What stands for the GPU in a build without it: nothing that could exist.

use super::{LoadOptions, Memory, Origin, scheduler::Request};
use crate::{
    cancel::Cancel,
    config::FlintConfig,
    error::{Error, Result},
    sampling::TokenLogprobs,
};

pub(super) enum Cuda {}

pub(super) struct Facts {
    pub text: String,
    pub context_tokens: usize,
    pub memory: Memory,
}

/// Logits in a GPU's memory.
pub enum DeviceLogits {}

impl Cuda {
    pub fn start(
        _: &Origin,
        _: &FlintConfig,
        _: usize,
        _: LoadOptions,
        _: &mut dyn FnMut(u64, u64),
        _: &Cancel,
    ) -> Result<Self> {
        let why = "this build has no CUDA kernels, it was made without the feature cuda".into();
        Err(Error::Unavailable { what: "device cuda".into(), why })
    }

    pub fn facts(&self) -> &Facts {
        match *self {}
    }

    pub fn generate(&self, _: Request) -> Result<()> {
        match *self {}
    }

    pub fn logits(&self, _: &[u32], _: &Cancel) -> Result<Vec<f32>> {
        match *self {}
    }

    pub fn logits_on_device(&self, _: &[u32], _: &Cancel) -> Result<DeviceLogits> {
        match *self {}
    }

    pub fn score(&self, _: &[u32], _: usize, _: &Cancel) -> Result<Vec<TokenLogprobs>> {
        match *self {}
    }
}

impl DeviceLogits {
    /// Tokens, and logits of each.
    pub fn shape(&self) -> [usize; 2] {
        match *self {}
    }

    /// Where they lie.
    pub fn address(&self) -> u64 {
        match *self {}
    }
}
