//! `cuda/synthetic.cu`: kernels that fill weights.

use std::mem::offset_of;

use super::{Kernel, Launch};
use crate::checkpoint::DType;

/// Random values in fp32.
pub const SYNTHETIC_F32: Kernel =
    Kernel { symbol: c"synthetic_f32", args_bytes: size_of::<SyntheticArgs>(), pdl: false };

/// Random values in BF16.
pub const SYNTHETIC_BF16: Kernel = Kernel { symbol: c"synthetic_bf16", ..SYNTHETIC_F32 };

/// Random NVFP4 blocks in GGUF order.
pub const SYNTHETIC_NVFP4: Kernel = Kernel { symbol: c"synthetic_nvfp4", ..SYNTHETIC_F32 };

/// The argument of the `synthetic` kernels, as in `cuda/args_load.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SyntheticArgs {
    /// Device address of the elements; a multiple of 4.
    pub out: u64,
    /// Values, or NVFP4 blocks.
    pub n_elements: u64,
    /// Elements that continue one sequence of random numbers.
    pub chunk_len: u64,
    /// Where the sequences start.
    pub seed: u64,
    /// Standard deviation of values; blocks take it as their scale instead.
    pub spread: f32,
    /// Fills the struct.
    pub reserved: u32,
}

const _: () = assert!(
    size_of::<SyntheticArgs>() == 40
        && offset_of!(SyntheticArgs, n_elements) == 8
        && offset_of!(SyntheticArgs, seed) == 24
        && offset_of!(SyntheticArgs, spread) == 32
);

/// The kernel that makes elements of `dtype`, if there is one.
pub fn synthetic_kernel(dtype: DType) -> Option<Kernel> {
    match dtype {
        DType::F32 => Some(SYNTHETIC_F32),
        DType::Bf16 => Some(SYNTHETIC_BF16),
        DType::Nvfp4 => Some(SYNTHETIC_NVFP4),
        _ => None,
    }
}

/// How to launch a `synthetic` kernel: a thread an element. `None` when there are none, or more than a grid can hold.
pub fn synthetic_launch(n_elements: u64, dtype: DType) -> Option<Launch> {
    const THREADS: u32 = 256;
    let grid = i32::try_from(n_elements.div_ceil(THREADS.into())).ok().filter(|&grid| grid > 0)?;
    let bytes = n_elements * dtype.block_bytes() as u64;
    Some(Launch { grid: [grid as u32, 1, 1], block: THREADS, shared_bytes: 0, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn synthetic_covers_every_element_once() {
        for (n_elements, grid) in [(1, 1), (256, 1), (257, 2), (2048 * 150_144, 2048 * 150_144 / 256)] {
            let launch = synthetic_launch(n_elements, DType::Nvfp4).unwrap();
            assert_eq!((launch.grid, launch.block, launch.bytes), ([grid, 1, 1], 256, 36 * n_elements));
        }
        assert_eq!(synthetic_launch(0, DType::F32), None);
        assert_eq!(synthetic_launch(256 * (i32::MAX as u64 + 1), DType::F32), None);
    }
}
