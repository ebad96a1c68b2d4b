//! The kernels of decode's attention against the CPU's reference, in the form for few rows and in that for many. They need a
//! GPU, so `cargo test` counts these as ignored; `make test-gpu` runs them.

#![cfg(feature = "cuda")]

mod cpu_support;
mod kernel_support;

use cpu_support::Random;
use kernel_support::{
    Gpu,
    attention::{Path, Shape, check, check_keys},
};

/// Of a sliding layer of Flint, but for the window.
const FLINT: Shape = Shape { n_heads: 32, n_kv_heads: 4, head_dim: 128, window: Some(513), rope: true, sharpness: 1.0 };
const FLINT_FULL: Shape = Shape { window: None, rope: false, ..FLINT };
/// The small model's.
const SMALL: Shape = Shape { n_heads: 8, n_kv_heads: 1, window: Some(65), ..FLINT };

/// Around the borders of tiles (16 and 32), blocks (64) and the window.
const SHORT: [usize; 8] = [0, 1, 31, 62, 63, 64, 65, 66];
const MIDDLE: [usize; 8] = [511, 512, 513, 514, 127, 128, 96, 33];
/// Many parts, divided evenly and not.
const LONG: [usize; 3] = [8191, 4100, 2047];

/// Both forms of decode.
const FORMS: [Path; 2] = [Path::Few, Path::Many];

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn full_attention() {
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    for path in FORMS {
        for positions in [&SHORT[..], &MIDDLE, &LONG] {
            check(&gpu, &mut random, path, FLINT_FULL, positions);
            check(&gpu, &mut random, path, Shape { sharpness: 3.0, ..FLINT_FULL }, positions);
        }
        check(&gpu, &mut random, path, Shape { window: None, ..SMALL }, &MIDDLE);
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn borders_of_rounds_and_parts() {
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    let shape = Shape { window: None, rope: false, ..SMALL };
    // A round is eight tiles of 32 positions, and there are at most 33 parts: one round each up to 33, then two, then
    // three.
    for rounds in [1, 2, 32, 33, 34, 66] {
        // A tile less, all tiles but the last whole, all whole, and a tile more.
        let end = rounds * 8 * 32;
        let positions = [end - 32, end - 31, end - 16, end - 15, end, end + 1];
        check(&gpu, &mut random, Path::Few, shape, &positions);
    }
    // With many rows a part is up to 16 tiles of 64 positions, and more where 33 would not be enough.
    for tiles in [1, 2, 8, 16, 17, 32, 33, 33 * 8, 33 * 16, 33 * 17] {
        let end = tiles * 64;
        check(&gpu, &mut random, Path::Many, shape, &[end - 64, end - 63, end - 32, end - 31, end, end + 1, end + 33]);
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn sliding_attention() {
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    for path in FORMS {
        for positions in [&SHORT[..], &MIDDLE, &LONG] {
            check(&gpu, &mut random, path, FLINT, positions);
            check(&gpu, &mut random, path, Shape { rope: false, sharpness: 3.0, ..FLINT }, positions);
            // Windows of one position, and of few that lie in up to three blocks.
            for window in [1, 2, 65, 66, 129] {
                check(&gpu, &mut random, path, Shape { window: Some(window), ..SMALL }, positions);
            }
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn as_many_rows_as_a_launch_takes() {
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    let positions: Vec<_> = (0..256).map(|row| row * 7919 % 1300).collect();
    for path in FORMS {
        check(&gpu, &mut random, path, Shape { window: None, rope: false, ..SMALL }, &positions);
        check(&gpu, &mut random, path, SMALL, &positions);
    }
    // Some blocks take a second item. Then each takes several, of short rows and of long ones.
    let few: Vec<_> = (0..45).map(|row| row * 7919 % 100).collect();
    let positions: Vec<_> = (0..100).map(|row| if row % 9 == 4 { 20 * row } else { row * 7919 % 140 }).collect();
    for shape in [FLINT, FLINT_FULL] {
        check(&gpu, &mut random, Path::Many, shape, &few);
        check(&gpu, &mut random, Path::Many, shape, &positions);
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn long_contexts() {
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    for path in FORMS {
        check(&gpu, &mut random, path, FLINT_FULL, &[100_001, 513]);
        check(&gpu, &mut random, path, FLINT, &[262_143, 100_001, 513, 262_142, 7]);
        check(&gpu, &mut random, path, Shape { n_heads: 8, n_kv_heads: 1, ..FLINT_FULL }, &[262_143]);
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn keys_have_the_same_bits_whoever_writes_them() {
    let (gpu, mut random) = (Gpu::open(), Random::fresh());
    let positions = [0, 1, 15, 63, 64, 513, 4095, 100_001, 262_143];
    check_keys(&gpu, &mut random, FLINT, &positions);
    check_keys(&gpu, &mut random, FLINT_FULL, &positions);
}
