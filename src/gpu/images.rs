//! The compiled kernels of this build.

use crate::kernels::{self, Kernel};

/// A compiled `.cu`, aligned as the driver wants it.
#[repr(C, align(16))]
pub struct Fatbin<B: ?Sized = [u8]>(B);

/// A compiled `.cu` and the kernels in it.
pub struct Image {
    pub(super) fatbin: &'static Fatbin,
    pub(super) kernels: &'static [Kernel],
}

macro_rules! image {
    ($name:literal, [$($kernel:ident),* $(,)?]) => {
        Image {
            fatbin: &Fatbin(*include_bytes!(concat!(env!("OUT_DIR"), "/", $name, ".fatbin"))),
            kernels: &[$(kernels::$kernel),*],
        }
    };
}

/// Every `.cu` of this build.
pub static IMAGES: &[Image] = &[
    image!("decode_sample", [DECODE_SAMPLE]),
    image!("nvfp4_expand", [NVFP4_EXPAND_BF16, NVFP4_EXPAND_F32]),
    image!("repack", [REPACK_NVFP4, REPACK_BF16]),
    image!("synthetic", [SYNTHETIC_F32, SYNTHETIC_BF16, SYNTHETIC_NVFP4]),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_kernel_is_listed_twice() {
        let mut symbols: Vec<_> = IMAGES.iter().flat_map(|image| image.kernels).map(|kernel| kernel.symbol).collect();
        let all = symbols.len();
        symbols.sort_unstable();
        symbols.dedup();
        assert_eq!(symbols.len(), all);
        assert!(all > 0);
    }
}
