//! From fp32 to NVFP4.

use super::{BLOCK_BYTES, BLOCK_LEN, BLOCK_SCALES, GROUP_LEN, MAX_SCALE, SCALES, exact, exact_mut};

/// The largest code.
const MAX_CODE: f32 = 6.0;
/// The largest product of code and block scale.
const MAX_PRODUCT: f32 = MAX_CODE * SCALES[MAX_SCALE as usize];

/// The code of a magnitude by its double: 0, 1, 2, 3, 4, 6, 8 or 12.
const CODE_OF_DOUBLED: [u8; 13] = [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7];

/// A value that NVFP4 cannot hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BadValue {
    /// Its index.
    pub index: usize,
    /// An infinity or a NaN.
    pub value: f32,
}

/// The largest magnitude of `values`; 0 for none. Infinities and NaNs are refused.
pub fn amax(values: &[f32]) -> Result<f32, BadValue> {
    // Magnitudes order as their bits do, and NaN above infinity above the rest, so one maximum finds both.
    let bits = values.iter().fold(0, |bits, value| bits.max(value.to_bits() & 0x7FFF_FFFF));
    let largest = f32::from_bits(bits);
    let bad = if largest.is_finite() { None } else { values.iter().position(|value| !value.is_finite()) };
    bad.map_or(Ok(largest), |index| Err(BadValue { index, value: values[index] }))
}

/// The scale for a tensor whose largest magnitude is `amax`: the largest block scale and the largest code then reach it.
/// Always positive and normal, and no product of scale, block scale and code overflows.
pub fn tensor_scale(amax: f32) -> f32 {
    let scale = (amax / MAX_PRODUCT).max(f32::MIN_POSITIVE);
    if (scale * MAX_PRODUCT).is_finite() { scale } else { scale.next_down() }
}

/// Writes `values` as GGUF blocks under the tensor scale `scale`, which [`tensor_scale`] gave. A block scale is the one of
/// the smallest squared error among those near `largest magnitude / 6`: a smaller one clips the largest value to gain
/// precision for the rest, a larger one puts it on the code 4, where neighbours are closer. Codes are the nearest, ties to
/// the even code, as the hardware conversion has it.
///
/// # Panics
/// When the lengths do not fit each other. Values must be finite: see [`amax`].
pub fn quantize(values: &[f32], scale: f32, blocks: &mut [u8]) {
    let (values, blocks) = (exact::<BLOCK_LEN, _>(values), exact_mut::<BLOCK_BYTES, _>(blocks));
    assert_eq!(values.len(), blocks.len(), "values against NVFP4 blocks");
    let reciprocal = scale.recip();
    for (values, block) in values.iter().zip(blocks) {
        let (scales, codes) = block.split_at_mut(BLOCK_SCALES);
        let groups = exact::<GROUP_LEN, _>(values).iter().zip(exact_mut::<8, _>(codes));
        for ((values, codes), scale) in groups.zip(scales) {
            *scale = quantize_group(&values.map(|value| value * reciprocal), codes);
        }
    }
}

/// Writes the codes of a group and returns its scale byte.
fn quantize_group(values: &[f32; GROUP_LEN], codes: &mut [u8; 8]) -> u8 {
    let magnitudes = values.map(f32::abs);
    let largest = magnitudes.iter().fold(0.0_f32, |largest, value| largest.max(*value));
    let nearest = scale_byte(largest / MAX_CODE);
    // From 3/4 of the nearest scale to past 3/2, where the largest value falls on the code 4: a wider range changes the
    // error of normal weights by less than a millionth.
    let candidates = nearest.saturating_sub(2)..=(nearest + 6).min(MAX_SCALE);
    let mut best = (f32::INFINITY, 0);
    for byte in candidates {
        let error = squared_error(&magnitudes, SCALES[usize::from(byte)]);
        if error < best.0 {
            best = (error, byte);
        }
    }
    let reciprocal = reciprocal(SCALES[usize::from(best.1)]);
    let doubled = magnitudes.map(|value| 2.0 * round_magnitude(value * reciprocal));
    let code = |i: usize| CODE_OF_DOUBLED[doubled[i] as usize] | u8::from(values[i].is_sign_negative()) << 3;
    for (i, byte) in codes.iter_mut().enumerate() {
        *byte = code(i) | code(i + 8) << 4;
    }
    best.1
}

fn squared_error(magnitudes: &[f32; GROUP_LEN], scale: f32) -> f32 {
    let reciprocal = reciprocal(scale);
    let errors = magnitudes.map(|value| round_magnitude(value * reciprocal) * scale - value);
    // Four sums, which are one vector.
    let mut sums = [0.0; 4];
    for four in exact::<4, _>(&errors) {
        for (sum, error) in sums.iter_mut().zip(four) {
            *sum += error * error;
        }
    }
    sums[0] + sums[1] + (sums[2] + sums[3])
}

/// 1 / scale, and 0 for the scale 0, under which every code is 0.
fn reciprocal(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { scale.recip() }
}

/// The nearest magnitude of a code, ties to the even code. `x` is not negative.
fn round_magnitude(x: f32) -> f32 {
    // Magnitudes are 0.5 apart below 2, 1 apart from 2 to 4, and 2 apart above. Adding and taking away 1.5 * 2^23 steps
    // rounds to a multiple of the step, ties to even, and even multiples are even codes. No branch, so loops use vectors.
    let power_of_two = f32::from_bits(x.to_bits() & 0x7F80_0000);
    let step = if power_of_two > 1.0 { 0.5 * power_of_two } else { 0.5 };
    let magic = 1.5 * 8_388_608.0 * step;
    let rounded = (x + magic) - magic;
    if rounded < MAX_CODE { rounded } else { MAX_CODE }
}

/// The scale byte nearest to `x`, ties to even, at most [`MAX_SCALE`]. `x` is not negative.
fn scale_byte(x: f32) -> u8 {
    const SMALLEST_NORMAL: f32 = 1.0 / 64.0;
    if x < SMALLEST_NORMAL {
        return (x * 512.0).round_ties_even() as u8;
    }
    // Drops 20 of the 23 mantissa bits and moves the exponent's bias from 127 to 7.
    let bits = x.to_bits();
    let rounded = bits + 0x0007_FFFF + (bits >> 20 & 1);
    ((rounded >> 20) - (120 << 3)).min(u32::from(MAX_SCALE)) as u8
}
