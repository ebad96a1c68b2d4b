//! The CUDA driver: the only place that names cudarc. It opens a device, loads the embedded kernels, and launches them;
//! no toolkit and no driver is needed to build or to start a process that has it.

mod driver;

pub use driver::{Buffer, Device, Function};

/// A compiled `.cu` of this build, aligned as the driver wants it.
#[repr(C, align(16))]
pub struct Fatbin<B: ?Sized = [u8]>(B);

macro_rules! fatbin {
    ($name:literal) => {
        &Fatbin(*include_bytes!(concat!(env!("OUT_DIR"), "/", $name, ".fatbin")))
    };
}

/// `cuda/nvfp4_expand.cu`.
pub static NVFP4_EXPAND: &Fatbin = fatbin!("nvfp4_expand");

/// `cuda/decode_linear.cu`.
pub static DECODE_LINEAR: &Fatbin = fatbin!("decode_linear");
/// `cuda/decode_router.cu`.
pub static DECODE_ROUTER: &Fatbin = fatbin!("decode_router");
/// `cuda/decode_experts_up.cu`.
pub static DECODE_EXPERTS_UP: &Fatbin = fatbin!("decode_experts_up");
/// `cuda/decode_down.cu`.
pub static DECODE_DOWN: &Fatbin = fatbin!("decode_down");
/// `cuda/decode_embed.cu`.
pub static DECODE_EMBED: &Fatbin = fatbin!("decode_embed");
