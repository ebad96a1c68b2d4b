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
                let (cosine, sine) = cos_sin(position as f32 * inv_freq);
                cos.push(cosine);
                sin.push(sine);
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

/// cos and sin of an angle of at most 2^24, each within 1.3e-7, and the same bits on every machine: no two libraries round theirs
/// alike, and `cuda/rope.cuh` repeats this one.
///
/// A double holds the angle's multiple of pi to 1e-9 and, less its whole quarters, in fp32 to 2^-27.
fn cos_sin(angle: f32) -> (f32, f32) {
    // Of cos and sin of pi times x, in powers of x^2, fitted for the least error up to a quarter.
    const COS: [f32; 5] = [0.231_429_55, -1.335_058_5, 4.058_707_7, -4.934_802, 1.0];
    const SIN: [f32; 4] = [-0.589_479_7, 2.549_810_6, -5.167_709_4, std::f32::consts::PI];

    let half_turns = f64::from(angle) * std::f64::consts::FRAC_1_PI;
    let quarters = (2.0 * half_turns).round_ties_even();
    let x = (half_turns - 0.5 * quarters) as f32;
    let sum = |powers: &[f32]| powers[1..].iter().fold(powers[0], |sum, c| sum * (x * x) + c);
    let (cos, sin) = (sum(&COS), x * sum(&SIN));
    match quarters as i32 & 3 {
        0 => (cos, sin),
        1 => (-sin, cos),
        2 => (-cos, -sin),
        _ => (sin, -cos),
    }
}

#[cfg(test)]
mod tests {
    use super::cos_sin;
    use crate::cpu::spread_words;

    #[test]
    fn cos_and_sin_are_close() {
        for (i, bits) in spread_words().take(1_000_000).enumerate() {
            let angle = (bits >> 8) as f32 / (1 << 24) as f32 * [1.0, 100.0, 16_777_216.0][i % 3];
            let (cos, sin) = cos_sin(angle);
            let (cos_error, sin_error) =
                (f64::from(cos) - f64::from(angle).cos(), f64::from(sin) - f64::from(angle).sin());
            assert!(cos_error.abs() <= 1.3e-7 && sin_error.abs() <= 1.3e-7, "{angle}: {cos_error:e}, {sin_error:e}");
        }
        assert_eq!(cos_sin(0.0), (1.0, 0.0));
    }
}
