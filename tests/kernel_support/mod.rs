//! The GPU and its buffers for tests of single kernels, and bounds.
#![allow(dead_code, reason = "each test binary uses its part")]

pub mod attention;
pub mod packed;

use flint_rs::{
    gpu::{Buffer, Device, IMAGES, Kernels},
    kernels::{Kernel, Launch},
};
use half::bf16;

/// Behind and around outputs, and in workspaces: NaN as bf16 and as f32.
pub const POISON: u8 = 0xFF;
const GUARD_BYTES: usize = 256;

pub struct Gpu {
    pub device: Device,
    kernels: Kernels,
}

impl Gpu {
    pub fn open() -> Self {
        let device = Device::open().expect("make test-gpu runs on a machine with a GPU");
        println!("device: {}", device.name().unwrap());
        Self { kernels: device.kernels(IMAGES), device }
    }

    /// Its compute capability before the point, and its multiprocessors.
    pub fn card(&self) -> (i32, u32) {
        let card = self.device.card().unwrap();
        (card.major, card.processors as u32)
    }

    pub fn upload(&self, bytes: &[u8]) -> Buffer {
        self.device.upload(bytes).unwrap()
    }

    pub fn bf16s(&self, values: &[f32]) -> Buffer {
        self.upload(&bf16_bytes(values))
    }

    pub fn f32s(&self, values: &[f32]) -> Buffer {
        self.upload(&values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())
    }

    pub fn u32s(&self, values: &[u32]) -> Buffer {
        self.upload(&values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())
    }

    /// `len` poisoned bytes for an output or a workspace, with a guard behind them.
    pub fn poisoned(&self, len: usize) -> Buffer {
        self.upload(&vec![POISON; len + GUARD_BYTES])
    }

    /// Queues `kernel`.
    ///
    /// # Safety
    /// As `Function::launch`; the buffers live until the next download.
    pub unsafe fn launch<A: Copy>(&self, kernel: Kernel, launch: Launch, pdl: bool, args: &A) {
        // SAFETY: the caller's promise.
        unsafe { self.kernels.get(kernel).unwrap().launch(launch, pdl, args) }.unwrap();
    }
}

/// The output in a [`Gpu::poisoned`] buffer of `len` bytes, once its guard was seen to be whole.
pub fn output(buffer: &Buffer, len: usize) -> Vec<u8> {
    let mut bytes = buffer.download().unwrap();
    let guard = bytes.split_off(len);
    assert_eq!(guard.len(), GUARD_BYTES);
    assert!(guard.iter().all(|&byte| byte == POISON), "written past the end");
    bytes
}

pub fn bf16_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect()
}

pub fn to_bf16s(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<2>().0.iter().map(|&b| bf16::from_le_bytes(b).to_f32()).collect()
}

pub fn to_f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect()
}

pub fn to_u32s(bytes: &[u8]) -> Vec<u32> {
    bytes.as_chunks::<4>().0.iter().map(|&b| u32::from_le_bytes(b)).collect()
}

/// One step of BF16 at `x` is at most this: another order of additions may round to the neighbour.
pub fn bf16_step(x: f32) -> f32 {
    x.abs() / 128.0
}

/// How far a key may be from the reference's `key`, whose other half of the rotation is `partner`, if it was rotated: both were
/// rounded after the norm, where either may be a step aside, and a rotation brings that step to the smaller of the two as well.
pub fn key_bound(key: f32, partner: Option<f32>) -> f32 {
    partner.map_or(bf16_step(key), |partner| 2.0 * bf16_step(key.hypot(partner)))
}

/// Every value of `found` is within `bound(i)` of `expected`; NaN never is.
pub fn assert_close(what: &str, found: &[f32], expected: &[f32], bound: impl Fn(usize) -> f32) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let bound = bound(i);
        let close = (found - expected).abs() <= bound;
        assert!(close, "{what}: value {i} is {found}, expected {expected} within {bound}");
    }
}

pub fn norm(x: &[f32]) -> f64 {
    x.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>().sqrt()
}

pub fn rms(x: &[f32]) -> f32 {
    (norm(x) / (x.len() as f64).sqrt()) as f32
}
