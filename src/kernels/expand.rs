//! `cuda/nvfp4_expand.cu`.

use std::mem::offset_of;

use super::{Kernel, Launch};

/// NVFP4 blocks in GGUF order to BF16.
pub const NVFP4_EXPAND_BF16: Kernel =
    Kernel { symbol: c"nvfp4_expand_bf16", args_bytes: size_of::<Nvfp4ExpandArgs>(), pdl: true };

/// NVFP4 blocks in GGUF order to fp32.
pub const NVFP4_EXPAND_F32: Kernel = Kernel { symbol: c"nvfp4_expand_f32", ..NVFP4_EXPAND_BF16 };

/// The argument of both `nvfp4_expand` kernels, as in `cuda/args_expand.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Nvfp4ExpandArgs {
    /// Device address of `[n_blocks, 36]` bytes; a multiple of 4.
    pub blocks: u64,
    /// Device address of `[n_blocks, 64]` values; a multiple of 16.
    pub out: u64,
    /// Blocks of 64 values.
    pub n_blocks: u64,
    /// Scale of the tensor.
    pub scale: f32,
    /// Fills the struct.
    pub reserved: u32,
}

const _: () = assert!(
    size_of::<Nvfp4ExpandArgs>() == 32
        && offset_of!(Nvfp4ExpandArgs, out) == 8
        && offset_of!(Nvfp4ExpandArgs, n_blocks) == 16
        && offset_of!(Nvfp4ExpandArgs, scale) == 24
);

/// How to launch an `nvfp4_expand` kernel over `n_blocks` blocks into values of `out_bytes` bytes each: 8 threads a
/// block. `None` when there are no blocks, or more than a grid can hold.
pub fn nvfp4_expand_launch(n_blocks: u64, out_bytes: u64) -> Option<Launch> {
    const THREADS: u32 = 256;
    const BLOCKS_EACH: u64 = THREADS as u64 / 8;
    let grid = i32::try_from(n_blocks.div_ceil(BLOCKS_EACH)).ok().filter(|&grid| grid > 0)?;
    let bytes = n_blocks * (36 + 64 * out_bytes);
    Some(Launch { grid: [grid as u32, 1, 1], block: THREADS, shared_bytes: 0, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nvfp4_expand_covers_every_block_once() {
        for (n_blocks, grid) in [(1, 1), (31, 1), (32, 1), (33, 2), (3 * 32 * 1000 + 1, 3001)] {
            let launch = nvfp4_expand_launch(n_blocks, 2).unwrap();
            assert_eq!((launch.grid, launch.block), ([grid, 1, 1], 256));
            assert_eq!(launch.bytes, n_blocks * 164);
        }
        let most = i32::MAX as u64 * 32;
        assert_eq!(nvfp4_expand_launch(most, 4).unwrap().grid[0], i32::MAX as u32);
        assert_eq!(nvfp4_expand_launch(most + 1, 4), None);
        assert_eq!(nvfp4_expand_launch(0, 4), None);
    }
}
