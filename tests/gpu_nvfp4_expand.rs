//! The `nvfp4_expand` kernels against the CPU's decoder, bit for bit. They need a GPU, so `cargo test` counts them as
//! ignored; `make test-gpu` runs them.

#![cfg(feature = "cuda")]

use flint_rs::{
    gpu::{Device, Function, IMAGES},
    kernels::{self, Nvfp4ExpandArgs, nvfp4_expand_launch},
    nvfp4::{self, BLOCK_BYTES, BLOCK_LEN},
};
use half::bf16;

/// Written to memory before a launch, and expected behind the output after it.
const POISON: u8 = 0xA5;
const GUARD_BYTES: usize = 256;

struct Kernels {
    device: Device,
    to_bf16: Function,
    to_f32: Function,
}

impl Kernels {
    fn load() -> Self {
        let device = Device::open().expect("make test-gpu runs on a machine with a GPU");
        println!("device: {}", device.name().unwrap());
        let images = device.kernels(IMAGES);
        let to_bf16 = images.get(kernels::NVFP4_EXPAND_BF16).unwrap();
        let to_f32 = images.get(kernels::NVFP4_EXPAND_F32).unwrap();
        Self { device, to_bf16, to_f32 }
    }

    fn run(&self, function: &Function, blocks: &[u8], scale: f32, value_bytes: usize, pdl: bool) -> Vec<u8> {
        let n_blocks = blocks.len() / BLOCK_BYTES;
        let out_bytes = n_blocks * BLOCK_LEN * value_bytes;
        let input = self.device.upload(blocks).unwrap();
        let output = self.device.upload(&vec![POISON; out_bytes + GUARD_BYTES]).unwrap();
        let args = Nvfp4ExpandArgs {
            blocks: input.address(),
            out: output.address(),
            n_blocks: n_blocks as u64,
            scale,
            reserved: 0,
        };
        let launch = nvfp4_expand_launch(n_blocks as u64, value_bytes as u64).unwrap();
        // SAFETY: both buffers have the extents that `args` states, and live until the download has waited.
        unsafe { function.launch(launch, pdl, &args) }.unwrap();
        let mut bytes = output.download().unwrap();
        let guard = bytes.split_off(out_bytes);
        assert!(guard.iter().all(|&byte| byte == POISON), "written past the end of {n_blocks} blocks");
        bytes
    }

    fn check(&self, blocks: &[u8], scale: f32) {
        let mut expected = vec![0.0; blocks.len() / BLOCK_BYTES * BLOCK_LEN];
        nvfp4::decode(blocks, &mut expected);
        for value in &mut expected {
            *value *= scale;
        }
        let as_f32: Vec<u8> = expected.iter().flat_map(|value| value.to_le_bytes()).collect();
        let as_bf16: Vec<u8> = expected.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()).collect();
        for pdl in [false, true] {
            assert!(self.run(&self.to_f32, blocks, scale, 4, pdl) == as_f32, "f32, scale {scale}, PDL {pdl}");
            assert!(self.run(&self.to_bf16, blocks, scale, 2, pdl) == as_bf16, "bf16, scale {scale}, PDL {pdl}");
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn every_scale_byte_with_every_code_byte() {
    let mut blocks = Vec::new();
    for scale in 0..nvfp4::INVALID_SCALE {
        for codes in (0..=u8::MAX).collect::<Vec<_>>().chunks(BLOCK_BYTES - nvfp4::BLOCK_SCALES) {
            blocks.extend([scale; nvfp4::BLOCK_SCALES]);
            blocks.extend(codes);
        }
    }
    let kernels = Kernels::load();
    // The last one makes products that are subnormal in f32.
    for scale in [1.0, -0.37, 3.0e-5, 1.0e-38] {
        kernels.check(&blocks, scale);
    }
}

#[test]
#[ignore = "needs a CUDA GPU: make test-gpu"]
fn odd_counts_of_random_blocks() {
    let mut state = std::time::UNIX_EPOCH.elapsed().unwrap().as_nanos() as u64;
    println!("seed: {state}");
    let mut random_byte = || {
        // splitmix64
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (state ^ state >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z >> 40) as u8
    };
    let kernels = Kernels::load();
    for n_blocks in [1, 2, 31, 32, 33, 1000, 4097, 65_537] {
        let mut blocks: Vec<u8> = (0..n_blocks * BLOCK_BYTES).map(|_| random_byte()).collect();
        for block in blocks.chunks_exact_mut(BLOCK_BYTES) {
            for scale in &mut block[..nvfp4::BLOCK_SCALES] {
                *scale = (*scale).min(nvfp4::INVALID_SCALE - 1);
            }
        }
        kernels.check(&blocks, 0.0123);
    }
}
