//! Rotary angles.

use std::ops::Range;

use crate::config::FlintConfig;

/// Inverse frequencies of a model: theta^(-2i/d), all in fp32 as in transformers.
#[derive(Clone, Debug)]
pub struct Rope {
    inv_freq: Vec<f32>,
}

/// cos and sin for a run of positions, `[T, head_dim / 2]` each.
#[derive(Clone, Debug)]
pub struct RopeTable {
    half: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Rope {
    /// Frequencies for the model's `head_dim` and `rope_theta`.
    pub fn new(config: &FlintConfig) -> Self {
        let d = config.head_dim as f32;
        let inv_freq = (0..config.head_dim / 2).map(|i| 1.0 / config.rope_theta.powf((2 * i) as f32 / d)).collect();
        Self { inv_freq }
    }

    /// `[head_dim / 2]`.
    pub fn inv_freq(&self) -> &[f32] {
        &self.inv_freq
    }

    /// The table of `positions`: angle = position * inverse frequency, in fp32.
    pub fn table(&self, positions: Range<usize>) -> RopeTable {
        let half = self.inv_freq.len();
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for position in positions {
            for inv_freq in &self.inv_freq {
                let angle = position as f32 * inv_freq;
                cos.push(angle.cos());
                sin.push(angle.sin());
            }
        }
        RopeTable { half, cos, sin }
    }
}

impl RopeTable {
    /// cos and sin of the `t`-th position of the run, `[head_dim / 2]` each.
    pub fn at(&self, t: usize) -> (&[f32], &[f32]) {
        let range = t * self.half..(t + 1) * self.half;
        (&self.cos[range.clone()], &self.sin[range])
    }
}
