//! `cuda/synthetic.cu` and `cuda/repack.cu`: kernels that fill weights.

use std::mem::offset_of;

use super::{Kernel, Launch, kernel};
use crate::{checkpoint::DType, tiles::TileFormat};

/// Random values in fp32.
pub const SYNTHETIC_F32: Kernel = Kernel { pdl: false, ..kernel::<SyntheticArgs>(c"synthetic_f32") };

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

/// NVFP4 blocks in GGUF order to tiles.
pub const REPACK_NVFP4: Kernel = Kernel { pdl: false, ..kernel::<RepackArgs>(c"repack_nvfp4") };

/// BF16 rows to tiles.
pub const REPACK_BF16: Kernel = Kernel { symbol: c"repack_bf16", ..REPACK_NVFP4 };

/// The argument of the `repack` kernels, as in `cuda/args_load.h`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RepackArgs {
    /// Device address of rows; row g (0 to 7) of strip s is row `s * row_step + g`. A multiple of 16.
    pub low: u64,
    /// The same for rows g + 8.
    pub high: u64,
    /// Device address of `[strips, k_tiles]` tiles; a multiple of 16.
    pub tiles: u64,
    /// Groups of 16 outputs.
    pub strips: u32,
    /// Inputs / 512.
    pub k_tiles: u32,
    /// 16, or 8 where `low` and `high` are two matrices.
    pub row_step: u32,
    /// Fills the struct.
    pub reserved: u32,
}

const _: () = assert!(
    size_of::<RepackArgs>() == 40
        && offset_of!(RepackArgs, tiles) == 16
        && offset_of!(RepackArgs, strips) == 24
        && offset_of!(RepackArgs, row_step) == 32
);

/// The kernel that packs tiles of `format`.
pub fn repack_kernel(format: TileFormat) -> Kernel {
    match format {
        TileFormat::Nvfp4 => REPACK_NVFP4,
        TileFormat::Bf16 => REPACK_BF16,
    }
}

/// How to launch a `repack` kernel: a thread block a tile. `None` for no tiles, or more than a grid can hold.
pub fn repack_launch(strips: u32, k_tiles: u32, format: TileFormat) -> Option<Launch> {
    let fits = (1..=i32::MAX as u32).contains(&strips) && (1..=65_535).contains(&k_tiles);
    let bytes = 2 * u64::from(strips) * u64::from(k_tiles) * format.tile_bytes() as u64;
    fits.then_some(Launch { grid: [strips, k_tiles, 1], block: 256, shared_bytes: 0, bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repack_makes_every_tile_once() {
        let launch = repack_launch(320, 4, TileFormat::Nvfp4).unwrap();
        assert_eq!((launch.grid, launch.block, launch.bytes), ([320, 4, 1], 256, 2 * 320 * 4 * 4608));
        assert_eq!(repack_launch(0, 4, TileFormat::Bf16), None);
        assert_eq!(repack_launch(1, 65_536, TileFormat::Bf16), None);
    }

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
