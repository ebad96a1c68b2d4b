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
