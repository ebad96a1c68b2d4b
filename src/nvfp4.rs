//! The NVFP4 number format: 4-bit codes, one 8-bit scale for 16 values, one fp32 scale for a tensor.
//!
//! A value is `code * block scale * tensor scale`. A code is e2m1: the sign in bit 3, then a magnitude of 0, 0.5, 1, 1.5,
//! 2, 3, 4 or 6. A block scale is an unsigned e4m3 of bias 7. The product of the two has 6 significant bits, so it is
//! exact in BF16 and fp32; the tensor scale is not part of what is decoded here.
//!
//! Two byte orders carry the same numbers:
//!
//! ```text
//! GGUF (ggml type 40), 64 values in 36 bytes:
//!     4 scales, then 32 bytes of codes; bytes 8s .. 8s+7 are group s: low nibbles its values 0-7, high nibbles 8-15
//! pairs (NVIDIA), codes and scales apart:
//!     codes [rows, cols/2], value 2i in the low and 2i+1 in the high nibble of byte i; scales [rows, cols/16]
//! ```
//!
//! A row is a whole number of blocks, so every function here takes one row, or many that follow each other.

mod quantize;

pub use quantize::{BadValue, amax, quantize, tensor_scale};

/// Values of a GGUF block.
pub const BLOCK_LEN: usize = 64;
/// Bytes of a GGUF block.
pub const BLOCK_BYTES: usize = 36;
/// Values that share a scale.
pub const GROUP_LEN: usize = 16;
/// Scales of a GGUF block; they are its first bytes.
pub const BLOCK_SCALES: usize = BLOCK_LEN / GROUP_LEN;
/// A scale byte that NVIDIA's format cannot hold: it decodes to NaN there and to 480 in ggml, so no file may use it.
pub const INVALID_SCALE: u8 = 0xFF;
/// The largest scale byte that means the same in both formats: 448.
pub const MAX_SCALE: u8 = 0x7E;

/// The values of the 16 codes.
pub const CODES: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// The values of the 256 scale bytes, as ggml reads them: the top bit is ignored and 0x7F is zero.
/// [`INVALID_SCALE`] has no value; its entry is NaN.
pub const SCALES: [f32; 256] = scales();

const fn scales() -> [f32; 256] {
    let mut table = [f32::NAN; 256];
    let mut byte = 0;
    while byte < INVALID_SCALE as usize {
        let (exponent, mantissa) = (byte >> 3 & 15, byte & 7);
        table[byte] = match (exponent, mantissa) {
            (15, 7) => 0.0,
            (0, _) => mantissa as f32 / 512.0,
            _ => (8 + mantissa) as f32 * (1 << exponent) as f32 / 1024.0,
        };
        byte += 1;
    }
    table
}

/// Writes `code * block scale` of each value: `out` has [`BLOCK_LEN`] values for each [`BLOCK_BYTES`] of `blocks`. Exact.
///
/// # Panics
/// When the lengths do not fit each other.
pub fn decode(blocks: &[u8], out: &mut [f32]) {
    let (blocks, out) = (exact::<BLOCK_BYTES, _>(blocks), exact_mut::<BLOCK_LEN, _>(out));
    assert_eq!(blocks.len(), out.len(), "NVFP4 blocks against values");
    for (block, values) in blocks.iter().zip(out) {
        let (scales, codes) = block.split_at(BLOCK_SCALES);
        for ((scale, codes), values) in scales.iter().zip(codes.chunks_exact(8)).zip(values.chunks_exact_mut(GROUP_LEN))
        {
            let scale = SCALES[usize::from(*scale)];
            for (i, byte) in codes.iter().enumerate() {
                values[i] = CODES[usize::from(byte & 15)] * scale;
                values[i + 8] = CODES[usize::from(byte >> 4)] * scale;
            }
        }
    }
}

/// The block that holds an [`INVALID_SCALE`], if one does.
///
/// # Panics
/// When `blocks` is not a whole number of blocks.
pub fn find_invalid_scale(blocks: &[u8]) -> Option<usize> {
    exact::<BLOCK_BYTES, _>(blocks).iter().position(|block| block[..BLOCK_SCALES].contains(&INVALID_SCALE))
}

/// From GGUF order to pairs: 32 bytes of `codes` and 4 of `scales` for each block. Moves every bit and changes none.
///
/// # Panics
/// When the lengths do not fit each other.
pub fn to_pairs(blocks: &[u8], codes: &mut [u8], scales: &mut [u8]) {
    let (blocks, codes, scales) =
        (exact::<BLOCK_BYTES, _>(blocks), exact_mut::<32, _>(codes), exact_mut::<BLOCK_SCALES, _>(scales));
    assert_eq!((blocks.len(), blocks.len()), (codes.len(), scales.len()), "NVFP4 blocks against codes and scales");
    for ((block, codes), scales) in blocks.iter().zip(codes).zip(scales) {
        scales.copy_from_slice(&block[..BLOCK_SCALES]);
        for (from, to) in exact::<8, _>(&block[BLOCK_SCALES..]).iter().zip(exact_mut::<8, _>(codes)) {
            *to = halves_to_pairs(u64::from_le_bytes(*from)).to_le_bytes();
        }
    }
}

/// From pairs to GGUF order, the inverse of [`to_pairs`].
///
/// # Panics
/// When the lengths do not fit each other.
pub fn from_pairs(codes: &[u8], scales: &[u8], blocks: &mut [u8]) {
    let (codes, scales, blocks) =
        (exact::<32, _>(codes), exact::<BLOCK_SCALES, _>(scales), exact_mut::<BLOCK_BYTES, _>(blocks));
    assert_eq!((blocks.len(), blocks.len()), (codes.len(), scales.len()), "NVFP4 blocks against codes and scales");
    for ((block, codes), scales) in blocks.iter_mut().zip(codes).zip(scales) {
        block[..BLOCK_SCALES].copy_from_slice(scales);
        for (from, to) in exact::<8, _>(codes).iter().zip(exact_mut::<8, _>(&mut block[BLOCK_SCALES..])) {
            *to = pairs_to_halves(u64::from_le_bytes(*from)).to_le_bytes();
        }
    }
}

/// The 16 nibbles of a group from GGUF order (0 8 1 9 2 10 ... from the lowest) to ascending order.
const fn halves_to_pairs(x: u64) -> u64 {
    even_nibbles(x) | even_nibbles(x >> 4) << 32
}

/// The inverse of [`halves_to_pairs`].
const fn pairs_to_halves(x: u64) -> u64 {
    spread_nibbles(x & 0xFFFF_FFFF) | spread_nibbles(x >> 32) << 4
}

/// Nibbles 0, 2, 4, ... 14 side by side in the lower half.
const fn even_nibbles(x: u64) -> u64 {
    let x = x & 0x0F0F_0F0F_0F0F_0F0F;
    let x = (x | x >> 4) & 0x00FF_00FF_00FF_00FF;
    let x = (x | x >> 8) & 0x0000_FFFF_0000_FFFF;
    (x | x >> 16) & 0x0000_0000_FFFF_FFFF
}

/// The inverse of [`even_nibbles`].
const fn spread_nibbles(x: u64) -> u64 {
    let x = (x | x << 16) & 0x0000_FFFF_0000_FFFF;
    let x = (x | x << 8) & 0x00FF_00FF_00FF_00FF;
    (x | x << 4) & 0x0F0F_0F0F_0F0F_0F0F
}

/// `items` as arrays of N; panics when a part would be left over.
fn exact<const N: usize, T>(items: &[T]) -> &[[T; N]] {
    let (arrays, rest) = items.as_chunks();
    assert!(rest.is_empty(), "a length of {} is no multiple of {N}", items.len());
    arrays
}

/// [`exact`] for writing.
fn exact_mut<const N: usize, T>(items: &mut [T]) -> &mut [[T; N]] {
    let len = items.len();
    let (arrays, rest) = items.as_chunks_mut();
    assert!(rest.is_empty(), "a length of {len} is no multiple of {N}");
    arrays
}
