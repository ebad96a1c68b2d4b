//! Every CUDA kernel once: symbol, argument struct, launch geometry, bytes moved. No driver, so all of it is tested
//! without a GPU.

pub mod decode;
mod expand;
mod load;
mod sample;

use std::ffi::CStr;

pub use expand::*;
pub use load::*;
pub use sample::*;

/// What a loaded kernel must match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernel {
    /// Its `extern "C"` name.
    pub symbol: &'static CStr,
    /// Bytes of its one argument, a struct passed by value.
    pub args_bytes: usize,
    /// Whether it waits for the kernels before it, and so may be launched before they end.
    pub pdl: bool,
}

/// The shape and the price of one launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Thread blocks along x, y and z.
    pub grid: [u32; 3],
    /// Threads of each, along x.
    pub block: u32,
    /// Dynamic shared memory of each.
    pub shared_bytes: u32,
    /// Bytes that it has to read and write.
    pub bytes: u64,
}
