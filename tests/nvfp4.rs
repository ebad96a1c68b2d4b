//! NVFP4 against independent expectations: the format's definition spelled out slowly, and values of the `gguf` package.
#![allow(clippy::float_cmp, reason = "values are equal to the bit, or wrong")]

mod formats;

use flint_rs::nvfp4::{
    self, BLOCK_BYTES, BLOCK_LEN, BLOCK_SCALES, GROUP_LEN, amax, decode, find_invalid_scale, from_pairs, quantize,
    tensor_scale, to_pairs,
};
use proptest::prelude::*;

use self::formats::{e2m1, e4m3, nearest_error, squared_error};

/// Value `i` of a row of GGUF blocks, without the tensor scale.
fn value(row: &[u8], i: usize) -> f64 {
    let block = &row[i / 64 * 36..][..36];
    let (group, lane) = (i % 64 / 16, i % 16);
    let byte = block[4 + 8 * group + lane % 8];
    let code = if lane < 8 { byte & 15 } else { byte >> 4 };
    if block[group] & 0x7F == 0x7F { 0.0 } else { e4m3(block[group]) * e2m1(code) }
}

/// Pseudo-random bytes; splitmix64 of a seed that the test names.
fn random_bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (state ^ state >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z >> 40) as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

/// Blocks in which every scale byte meets every code byte: all (scale, code byte) pairs, in every place of a block.
fn every_block() -> Vec<u8> {
    let mut blocks = Vec::new();
    for scale in 0..=255_u8 {
        for start in 0..=255_u8 {
            blocks.extend((0..4).map(|group| scale.wrapping_add(67 * group)));
            blocks.extend((0..32_u8).map(|i| start.wrapping_add(i.wrapping_mul(37))));
        }
    }
    blocks
}

#[test]
fn decodes_every_scale_with_every_code() {
    let blocks = every_block();
    let mut out = vec![f32::NAN; blocks.len() / BLOCK_BYTES * BLOCK_LEN];
    decode(&blocks, &mut out);
    for (i, got) in out.iter().enumerate() {
        let scale = blocks[i / 64 * 36 + i % 64 / 16];
        if scale == nvfp4::INVALID_SCALE {
            assert!(got.is_nan(), "value {i}");
        } else {
            let want = value(&blocks, i);
            assert_eq!(f64::from(*got), want, "value {i}, scale byte {scale:#04x}");
            assert_eq!(half::bf16::from_f32(*got).to_f32(), *got, "{got} is not exact in BF16");
        }
    }
}

#[test]
fn equals_the_gguf_package() {
    // Made with gguf 0.19.0 and NumPy: 24 blocks of default_rng(7).integers(256), scale bytes 0xFF replaced by 0x7F, the
    // first two blocks with the scales 0x00 0x01 0x07 0x08 0x7E 0x7F 0x80 0xFE; then
    // gguf.quants.dequantize(blocks, GGMLQuantizationType.NVFP4) as little-endian singles.
    let file = include_bytes!("data/nvfp4_gguf.bin");
    let (blocks, values) = file.split_at(24 * BLOCK_BYTES);
    let values: Vec<f32> = values.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    let mut out = vec![f32::NAN; values.len()];
    decode(blocks, &mut out);
    assert_eq!(out, values);
}

#[test]
fn round_trips_every_byte_through_pairs() {
    let mut blocks = every_block();
    blocks.extend(random_bytes(11, 1000 * BLOCK_BYTES));
    let n = blocks.len() / BLOCK_BYTES;
    let (mut codes, mut scales, mut back) = (vec![0; n * 32], vec![0; n * BLOCK_SCALES], vec![0; blocks.len()]);
    to_pairs(&blocks, &mut codes, &mut scales);
    from_pairs(&codes, &scales, &mut back);
    assert!(back == blocks, "GGUF -> pairs -> GGUF changed a byte");

    let codes = random_bytes(12, n * 32);
    let scales = random_bytes(13, n * BLOCK_SCALES);
    let (mut codes_back, mut scales_back) = (vec![0; codes.len()], vec![0; scales.len()]);
    from_pairs(&codes, &scales, &mut back);
    to_pairs(&back, &mut codes_back, &mut scales_back);
    assert!(codes_back == codes && scales_back == scales, "pairs -> GGUF -> pairs changed a byte");
}

#[test]
fn pairs_hold_consecutive_values() {
    let blocks = random_bytes(21, 50 * BLOCK_BYTES);
    let (mut codes, mut scales) = (vec![0; 50 * 32], vec![0; 50 * BLOCK_SCALES]);
    to_pairs(&blocks, &mut codes, &mut scales);
    for i in (0..50 * BLOCK_LEN).filter(|i| scales[i / 16] & 0x7F != 0x7F) {
        let code = if i % 2 == 0 { codes[i / 2] & 15 } else { codes[i / 2] >> 4 };
        assert_eq!(e2m1(code) * e4m3(scales[i / 16]), value(&blocks, i), "value {i}");
    }
}

#[test]
fn finds_the_invalid_scale_and_no_other() {
    for at in 0..BLOCK_SCALES {
        let mut blocks = vec![0xFF; 3 * BLOCK_BYTES];
        for block in blocks.chunks_mut(BLOCK_BYTES) {
            block[..BLOCK_SCALES].copy_from_slice(&[0x7F, 0xFE, 0x80, 0x00]);
        }
        assert_eq!(find_invalid_scale(&blocks), None);
        blocks[2 * BLOCK_BYTES + at] = 0xFF;
        assert_eq!(find_invalid_scale(&blocks), Some(2));
    }
}

#[test]
fn amax_names_what_is_not_finite() {
    assert_eq!(amax(&[]), Ok(0.0));
    assert_eq!(amax(&[0.5, -3.0, 1.0]), Ok(3.0));
    for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
        let error = amax(&[1.0, bad, 2.0]).unwrap_err();
        assert_eq!((error.index, error.value.to_bits()), (1, bad.to_bits()));
    }
}

/// `values` quantised and decoded again, with the tensor scale.
fn requantized(values: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let scale = tensor_scale(amax(values).unwrap());
    let mut blocks = vec![0; values.len() / BLOCK_LEN * BLOCK_BYTES];
    quantize(values, scale, &mut blocks);
    assert_eq!(find_invalid_scale(&blocks), None);
    assert!(blocks.chunks(BLOCK_BYTES).all(|block| block[..BLOCK_SCALES].iter().all(|s| *s <= nvfp4::MAX_SCALE)));
    let mut out = vec![f32::NAN; values.len()];
    decode(&blocks, &mut out);
    for value in &mut out {
        *value *= scale;
    }
    (blocks, out)
}

/// Mostly of one size, some far off, some zero: what a row of weights can look like at worst.
fn any_values() -> impl Strategy<Value = Vec<f32>> {
    let value = prop_oneof![
        6 => -1.0_f32..1.0,
        1 => (-1.0_f32..1.0, -30_i32..10).prop_map(|(m, e)| m * 2f32.powi(e)),
        1 => Just(0.0_f32),
        1 => (0_u8..16).prop_map(|code| e2m1(code) as f32),
    ];
    (proptest::collection::vec(value, 3 * BLOCK_LEN), -100_i32..100)
        .prop_map(|(values, e)| values.into_iter().map(|v| v * 2f32.powi(e)).collect())
}

proptest! {
    #[test]
    fn is_at_least_as_good_as_nearest_rounding(values in any_values()) {
        let (_, out) = requantized(&values);
        let (ours, nearest) = (squared_error(&values, &out), nearest_error(&values));
        // The search itself computes in fp32.
        prop_assert!(ours <= nearest * (1.0 + 1e-4), "{} against {}", ours, nearest);
    }

    #[test]
    fn survives_any_finite_value(bits in proptest::collection::vec(any::<u32>(), BLOCK_LEN)) {
        let values: Vec<f32> = bits.into_iter().map(f32::from_bits).map(|v| if v.is_finite() { v } else { 0.0 }).collect();
        let (_, out) = requantized(&values);
        let largest = amax(&values).unwrap();
        for (value, got) in values.iter().zip(&out) {
            prop_assert!(got.is_finite() && (value - got).abs() <= largest / 2.0, "{} became {}", value, got);
        }
    }
}

#[test]
fn keeps_zero_tiny_and_huge_values() {
    let (blocks, out) = requantized(&[0.0; BLOCK_LEN]);
    assert!(blocks.iter().all(|byte| *byte == 0) && out.iter().all(|value| *value == 0.0));
    for largest in [f32::MAX, 1e30, 1.0, 1e-30, 4e-35] {
        let values: Vec<f32> = (0..BLOCK_LEN).map(|i| if i % 2 == 0 { largest } else { -largest / 2.0 }).collect();
        let (_, out) = requantized(&values);
        for (value, got) in values.iter().zip(&out) {
            assert!((value - got).abs() <= value.abs() * 1e-6, "{value:e} became {got:e}");
        }
    }
    // The tensor scale stops at the smallest normal number: precision is lost rather than its reciprocal overflowed.
    let (_, out) = requantized(&[1e-42; BLOCK_LEN]);
    assert!(out.iter().all(|value| value.abs() <= 2e-42));
}

#[test]
fn beats_nearest_rounding_on_normal_weights() {
    // Sums of 12 uniform numbers, near enough to normal.
    let bytes = random_bytes(31, 12 * 256 * BLOCK_LEN);
    let values: Vec<f32> = bytes.chunks(12).map(|c| c.iter().map(|b| f32::from(*b) / 256.0 - 0.498).sum()).collect();
    let (_, out) = requantized(&values);
    let (ours, nearest) = (squared_error(&values, &out), nearest_error(&values));
    println!("squared error {ours:.2} against {nearest:.2} of nearest rounding");
    assert!(ours < 0.85 * nearest, "{ours} against {nearest}");
}

#[test]
fn ties_go_to_the_even_code() {
    // Powers of two as scales make every step exact: 2688 in the last group for the tensor scale 1; and the group of the
    // tie has the scale 256 (byte 0x78), the only one under which all its other values are codes.
    let ties = [(0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0)];
    for (tie, even) in ties.into_iter().flat_map(|(tie, even)| [(tie, even), (-tie, -even)]) {
        for at in 0..GROUP_LEN {
            let mut values: Vec<f32> = [6.0 * 256.0, -4.0 * 256.0, 3.0 * 256.0, 6.0 * 256.0].repeat(BLOCK_LEN / 4);
            values[at] = tie * 256.0;
            values[BLOCK_LEN - 1] = 2688.0;
            let (blocks, out) = requantized(&values);
            assert_eq!((blocks[0], out[at]), (0x78, even * 256.0), "{tie} in place {at}");
        }
    }
}
