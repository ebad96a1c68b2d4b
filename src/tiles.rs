//! The packed weights of the fast GPU path: `cuda/layout.cuh` draws the layout, this packs it. Lossless: a tile
//! holds the same numbers, and everything but the codes under a zero scale can be read back bit for bit.

use half::bf16;

use crate::nvfp4::{BLOCK_BYTES, BLOCK_LEN, BLOCK_SCALES, GROUP_LEN};

/// Rows of a strip.
pub const TILE_ROWS: usize = 16;
/// Inputs of a tile.
pub const TILE_COLS: usize = 512;

const LANE_BYTES: usize = 16;
const LINE_BYTES: usize = 32 * LANE_BYTES;
const CHUNKS: usize = TILE_COLS / BLOCK_LEN;

/// What a tile holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TileFormat {
    /// Permuted e2m1 codes and E5M3 scales.
    Nvfp4,
    /// BF16 values.
    Bf16,
}

impl TileFormat {
    /// Bytes of a tile.
    pub const fn tile_bytes(self) -> usize {
        match self {
            Self::Nvfp4 => LINE_BYTES * (1 + CHUNKS),
            Self::Bf16 => LINE_BYTES * 4 * CHUNKS,
        }
    }

    /// Bytes of a row of `cols` inputs in a file.
    pub const fn row_bytes(self, cols: usize) -> usize {
        match self {
            Self::Nvfp4 => cols / BLOCK_LEN * BLOCK_BYTES,
            Self::Bf16 => cols * 2,
        }
    }

    /// Bytes of the tiles of a matrix `[rows, cols]`; `None` when it is not a whole number of tiles.
    pub fn matrix_bytes(self, rows: usize, cols: usize) -> Option<usize> {
        let whole = rows.is_multiple_of(TILE_ROWS) && cols.is_multiple_of(TILE_COLS) && rows > 0 && cols > 0;
        whole.then(|| rows / TILE_ROWS * (cols / TILE_COLS) * self.tile_bytes())
    }

    /// Packs a strip: `rows` are the file's bytes of its 16 rows, rows 8 apart sharing a lane; `tiles` receives
    /// `cols / 512` tiles.
    ///
    /// # Panics
    /// When the lengths do not fit each other.
    pub fn pack_strip(self, rows: &[&[u8]; TILE_ROWS], tiles: &mut [u8]) {
        let (tiles, rest) = tiles.as_chunks_mut::<LANE_BYTES>();
        assert!(rest.is_empty() && rows.iter().all(|row| row.len() == rows[0].len()), "a strip of equal rows");
        let tile_lanes = self.tile_bytes() / LANE_BYTES;
        assert!(tiles.len().is_multiple_of(tile_lanes), "whole tiles");
        assert_eq!(self.row_bytes(tiles.len() / tile_lanes * TILE_COLS), rows[0].len(), "rows against tiles");
        for (kt, tile) in tiles.chunks_exact_mut(tile_lanes).enumerate() {
            for chunk in 0..CHUNKS {
                for lane in 0..32 {
                    let (g, t) = (lane / 4, lane % 4);
                    match self {
                        Self::Nvfp4 => {
                            let at = (kt * CHUNKS + chunk) * BLOCK_BYTES;
                            let blocks = [&rows[g][at..at + BLOCK_BYTES], &rows[g + 8][at..at + BLOCK_BYTES]];
                            for (half, block) in blocks.into_iter().enumerate() {
                                tile[lane][2 * chunk + half] = SCALES[usize::from(block[t])];
                            }
                            tile[(1 + chunk) * 32 + lane] = pack_codes(blocks, t);
                        }
                        Self::Bf16 => {
                            for mma in 0..4 {
                                let at = 2 * (kt * TILE_COLS + chunk * BLOCK_LEN + GROUP_LEN * t + 4 * mma);
                                let (low, high) = (&rows[g][at..at + 8], &rows[g + 8][at..at + 8]);
                                let lane = &mut tile[(4 * chunk + mma) * 32 + lane];
                                lane[0..4].copy_from_slice(&low[0..4]);
                                lane[4..8].copy_from_slice(&high[0..4]);
                                lane[8..12].copy_from_slice(&low[4..8]);
                                lane[12..16].copy_from_slice(&high[4..8]);
                            }
                        }
                    }
                }
            }
        }
    }
}

/// Parts of an fp32 matrix in [`pack_parts`].
pub const PARTS: usize = 3;

/// An fp32 matrix of `cols` inputs as BF16 tiles of three matrices one after the other, `[3, rows / 16, cols / 512]`: the
/// values rounded, what that leaves rounded, and what is left then. They add up to the values up to 2^-24 of each, so the sum of
/// their products, in fp32, has the precision of one in fp32.
///
/// # Panics
/// When it is no whole number of tiles.
pub fn pack_parts(values: &[f32], cols: usize) -> Vec<u8> {
    let rows = values.len() / cols;
    let bytes = TileFormat::Bf16.matrix_bytes(PARTS * rows, cols).expect("whole tiles");
    let mut tiles = vec![0; bytes];
    let strips = tiles.chunks_exact_mut(bytes / (PARTS * rows / TILE_ROWS));
    let parts = parts(values);
    for (strip, rows) in strips.zip(parts.chunks_exact(TILE_ROWS * cols * 2)) {
        TileFormat::Bf16.pack_strip(&std::array::from_fn(|row| &rows[row * cols * 2..][..cols * 2]), strip);
    }
    tiles
}

/// The parts of some values, one after the other.
fn parts(values: &[f32]) -> Vec<u8> {
    let mut rest = values.to_vec();
    let mut bytes = Vec::with_capacity(PARTS * 2 * values.len());
    for _ in 0..PARTS {
        for value in &mut rest {
            let part = bf16::from_f32(*value);
            *value -= part.to_f32();
            bytes.extend(part.to_le_bytes());
        }
    }
    bytes
}

/// Where a code stands in a word, by register, half and code: `SIGN` and `MAG` of `layout.cuh`.
static PLACES: [[[u32; 16]; 2]; 4] = places();

const fn places() -> [[[u32; 16]; 2]; 4] {
    const SIGN: [u32; 4] = [15, 12, 14, 13];
    const MAGNITUDE: [u32; 4] = [6, 3, 0, 9];
    let mut places = [[[0; 16]; 2]; 4];
    let mut i = 0;
    while i < 4 * 2 * 16 {
        let (register, half, code) = (i / 32, i / 16 % 2, i % 16);
        places[register][half][code] =
            ((code as u32 >> 3 << SIGN[register]) | ((code as u32 & 7) << MAGNITUDE[register])) << (16 * half);
        i += 1;
    }
    places
}

/// The two scale bytes that mean zero, whatever their top bit.
const fn is_zero(scale: u8) -> bool {
    matches!(scale & 0x7F, 0 | 0x7F)
}

/// The E5M3 byte of an e4m3 scale: subnormals normalised, the bias moved from 7 to -2. Zero has none; its byte is 0, the
/// smallest scale, and its codes are cleared.
static SCALES: [u8; 256] = scales();

const fn scales() -> [u8; 256] {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let (mut exponent, mut mantissa) = ((byte >> 3 & 15) as i32, (byte & 7) as i32);
        if exponent == 0 && mantissa > 0 {
            exponent = 1;
            while mantissa < 8 {
                mantissa <<= 1;
                exponent -= 1;
            }
            mantissa &= 7;
        }
        if !is_zero(byte as u8) {
            table[byte] = ((exponent + 2) << 3 | mantissa) as u8;
        }
        byte += 1;
    }
    table
}

/// The four words of a lane: group `t` of the blocks of rows g and g + 8.
fn pack_codes(blocks: [&[u8]; 2], t: usize) -> [u8; LANE_BYTES] {
    let mut words = [0u32; 4];
    for (half_of_rows, block) in blocks.into_iter().enumerate() {
        if is_zero(block[t]) {
            continue;
        }
        let codes = &block[BLOCK_SCALES + 8 * t..][..8];
        for (mma, word) in words.iter_mut().enumerate() {
            for i in 0..4 {
                let value = 4 * mma + i;
                let code = if value < 8 { codes[value] & 15 } else { codes[value - 8] >> 4 };
                *word |= PLACES[2 * (i / 2) + half_of_rows][i % 2][usize::from(code)];
            }
        }
    }
    let mut bytes = [0; LANE_BYTES];
    for (bytes, word) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(words) {
        *bytes = word.to_le_bytes();
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nvfp4::decode;

    /// Random bytes that are the same on every run.
    fn bytes(seed: u64, len: usize) -> Vec<u8> {
        let mut x = seed;
        let mut next = || {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (x >> 33) as u8
        };
        (0..len).map(|_| next()).collect()
    }

    /// What the kernel's operations make of register `p` of a word: two codes' values times 2^-126, as BF16.
    fn expand(word: u32, p: usize) -> [f32; 2] {
        const MASK: u32 = 0x81C0_81C0;
        let bits = match p {
            0 => word & MASK,
            1 => (word << 3) & MASK,
            2 => (word & 0x4007_4007).wrapping_mul(66) & MASK,
            _ => (word >> 3 & 0x01C0_01C0) | (word << 2 & 0x8000_8000),
        };
        [bf16::from_bits(bits as u16).to_f32(), bf16::from_bits((bits >> 16) as u16).to_f32()]
    }

    #[test]
    fn nvfp4_tiles_hold_the_values_of_the_blocks() {
        let cols = 2 * TILE_COLS;
        let row_bytes = TileFormat::Nvfp4.row_bytes(cols);
        let mut rows: Vec<Vec<u8>> = (0..16).map(|row| bytes(row + 1, row_bytes)).collect();
        for (row, data) in rows.iter_mut().enumerate() {
            for (i, block) in data.chunks_exact_mut(BLOCK_BYTES).enumerate() {
                for (s, scale) in block[..BLOCK_SCALES].iter_mut().enumerate() {
                    // Every scale byte but 0xFF, over rows, blocks and groups.
                    *scale = ((row * 16 + i) * 4 + s) as u8;
                    *scale -= u8::from(*scale == 0xFF);
                }
            }
        }
        let mut tiles = vec![0xA5; TileFormat::Nvfp4.matrix_bytes(16, cols).unwrap()];
        TileFormat::Nvfp4.pack_strip(&std::array::from_fn(|row| rows[row].as_slice()), &mut tiles);

        let values: Vec<Vec<f32>> = rows
            .iter()
            .map(|row| {
                let mut values = vec![0.0; cols];
                decode(row, &mut values);
                values
            })
            .collect();
        for (kt, tile) in tiles.chunks_exact(TileFormat::Nvfp4.tile_bytes()).enumerate() {
            for (chunk, lane, mma, p) in (0..8)
                .flat_map(|c| (0..32).map(move |l| (c, l)))
                .flat_map(|(c, l)| (0..16).map(move |i| (c, l, i / 4, i % 4)))
            {
                let (g, t) = (lane / 4, lane % 4);
                let row = g + 8 * (p % 2);
                let scale_byte = u32::from(tile[lane * 16 + 2 * chunk + p % 2]);
                let scale = bf16::from_bits((scale_byte * 16 + 0x7600) as u16);
                let word = &tile[512 * (1 + chunk) + 16 * lane + 4 * mma..][..4];
                let pair = expand(u32::from_le_bytes(word.try_into().unwrap()), p);
                for (i, code) in pair.into_iter().enumerate() {
                    // In f64, so that 2^-126 times 2^118 is no subnormal on the way; a zero may have either sign.
                    let value = f64::from(code) * f64::from(scale.to_f32()) * 256.0;
                    let col = kt * TILE_COLS + chunk * 64 + 16 * t + 4 * mma + 2 * (p / 2) + i;
                    assert_eq!(
                        (value as f32).to_bits() << 1,
                        values[row][col].to_bits() << 1,
                        "row {row}, column {col}"
                    );
                }
            }
        }
    }

    #[test]
    fn bf16_tiles_move_every_value_once() {
        let cols = TILE_COLS;
        let rows: Vec<Vec<u8>> =
            (0..16u16).map(|row| (0..512u16).flat_map(|col| (row * 512 + col).to_le_bytes()).collect()).collect();
        let mut tile = vec![0xA5; TileFormat::Bf16.matrix_bytes(16, cols).unwrap()];
        TileFormat::Bf16.pack_strip(&std::array::from_fn(|row| rows[row].as_slice()), &mut tile);
        let values: Vec<u16> = tile.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]])).collect();
        for (i, &value) in values.iter().enumerate() {
            let (line, lane, register, half) = (i / 256, i / 8 % 32, i / 2 % 4, i % 2);
            let (chunk, mma, g, t) = (line / 4, line % 4, lane / 4, lane % 4);
            let row = g + 8 * (register % 2);
            let col = 64 * chunk + 16 * t + 4 * mma + 2 * (register / 2) + half;
            assert_eq!(usize::from(value), row * 512 + col);
        }
    }

    #[test]
    fn parts_add_up_to_fp32() {
        let values: Vec<f32> = bytes(7, 16 * 512 * 4)
            .as_chunks::<4>()
            .0
            .iter()
            .map(|b| f32::from_bits(u32::from_le_bytes(*b) & 0x83FF_FFFF | 0x3C00_0000))
            .collect();
        let parts: Vec<f32> =
            parts(&values).chunks_exact(2).map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32()).collect();
        for (i, &value) in values.iter().enumerate() {
            let sum: f64 = (0..PARTS).map(|part| f64::from(parts[part * values.len() + i])).sum();
            assert!((sum - f64::from(value)).abs() <= f64::from(value.abs()) * 2f64.powi(-24), "{value} is {sum}");
        }
        // Their tiles are those of matrices one after the other.
        let packed = pack_parts(&values, 512);
        let bytes: Vec<u8> = parts.iter().flat_map(|&part| bf16::from_f32(part).to_le_bytes()).collect();
        let strips = packed.chunks_exact(packed.len() / PARTS);
        assert_eq!(packed.len(), PARTS * TileFormat::Bf16.matrix_bytes(16, 512).unwrap());
        for (strip, rows) in strips.zip(bytes.chunks_exact(16 * 512 * 2)) {
            let mut expected = vec![0; strip.len()];
            TileFormat::Bf16.pack_strip(&std::array::from_fn(|row| &rows[row * 1024..][..1024]), &mut expected);
            assert_eq!(strip, expected);
        }
    }

    #[test]
    fn only_whole_tiles_have_a_size() {
        assert_eq!(TileFormat::Nvfp4.matrix_bytes(5120, 2048), Some(320 * 4 * 4608));
        assert_eq!(TileFormat::Bf16.matrix_bytes(16, 512), Some(16384));
        for (rows, cols) in [(8, 512), (24, 512), (16, 320), (0, 512), (16, 0)] {
            assert_eq!(TileFormat::Nvfp4.matrix_bytes(rows, cols), None);
        }
    }
}
