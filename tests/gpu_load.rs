//! What fills weights on the device, against the host's code for the same. It needs a GPU, so `cargo test` counts these as
//! ignored; `make test-gpu` runs them.

#![cfg(feature = "cuda")]

mod cpu_support;
mod kernel_support;

use cpu_support::Random;
use flint_rs::{
    kernels::{RepackArgs, repack_kernel, repack_launch},
    tiles::{TILE_COLS, TileFormat},
};
use kernel_support::{Gpu, output};

/// Rows as a file has them: every byte is possible but the scale 0xFF.
fn rows(random: &mut Random, format: TileFormat, n: usize, cols: usize) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..n * format.row_bytes(cols)).map(|_| random.bits() as u8).collect();
    if format == TileFormat::Nvfp4 {
        for block in bytes.chunks_exact_mut(36) {
            for scale in &mut block[..4] {
                // Subnormals and both zeros come often.
                match random.below(8) {
                    0 => *scale &= 7,
                    1 => *scale |= 0x7F,
                    _ => {}
                }
                *scale -= u8::from(*scale == 0xFF);
            }
        }
    }
    bytes
}

/// `pair` packs two matrices into the halves of each strip, else one matrix is cut into strips.
fn repack(gpu: &Gpu, random: &mut Random, format: TileFormat, strips: usize, k_tiles: usize, pair: bool) {
    let cols = k_tiles * TILE_COLS;
    let row_bytes = format.row_bytes(cols);
    let step = if pair { 8 } else { 16 };
    let matrices = [rows(random, format, strips * step, cols), rows(random, format, strips * step, cols)];
    let row = |strip: usize, i: usize| {
        let (matrix, row) = if pair { (i / 8, strip * 8 + i % 8) } else { (0, strip * 16 + i) };
        &matrices[matrix][row * row_bytes..][..row_bytes]
    };
    let mut expected = vec![0; format.matrix_bytes(strips * 16, cols).unwrap()];
    let strip_bytes = expected.len() / strips;
    for (strip, tiles) in expected.chunks_exact_mut(strip_bytes).enumerate() {
        format.pack_strip(&std::array::from_fn(|i| row(strip, i)), tiles);
    }

    let buffers = matrices.each_ref().map(|matrix| gpu.upload(matrix));
    let tiles = gpu.poisoned(expected.len());
    let high = if pair { buffers[1].address() } else { buffers[0].address() + 8 * row_bytes as u64 };
    let args = RepackArgs {
        low: buffers[0].address(),
        high,
        tiles: tiles.address(),
        strips: strips as u32,
        k_tiles: k_tiles as u32,
        row_step: step as u32,
        reserved: 0,
    };
    let launch = repack_launch(strips as u32, k_tiles as u32, format).unwrap();
    // SAFETY: the argument is of this kernel, and the buffers hold the rows and tiles that it counts.
    unsafe { gpu.launch(repack_kernel(format), launch, false, &args) };
    assert!(output(&tiles, expected.len()) == expected, "{format:?}, {strips} x {k_tiles} tiles, pair {pair}");
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn tiles_are_those_of_the_host() {
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    for format in [TileFormat::Nvfp4, TileFormat::Bf16] {
        for (strips, k_tiles) in [(1, 1), (3, 2), (17, 8), (64, 12)] {
            for pair in [false, true] {
                repack(&gpu, &mut random, format, strips, k_tiles, pair);
            }
        }
    }
}
