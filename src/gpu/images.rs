//! The compiled kernels of this build.

use crate::kernels::{
    self, Kernel, decode,
    decode::Family,
    prefill::{self, Product},
};

/// A compiled `.cu`, aligned as the driver wants it.
#[repr(C, align(16))]
pub struct Fatbin<B: ?Sized = [u8]>(B);

/// A compiled `.cu` and the kernels in it.
pub struct Image {
    pub(super) fatbin: &'static Fatbin,
    kernels: &'static [Kernel],
    families: &'static [&'static Family],
    products: &'static [&'static Product],
}

impl Image {
    fn all(&self) -> impl Iterator<Item = Kernel> {
        let families = self.families.iter().flat_map(|family| family.all());
        let products = self.products.iter().flat_map(|product| product.all());
        self.kernels.iter().copied().chain(families).chain(products)
    }

    pub(super) fn has(&self, kernel: Kernel) -> bool {
        self.all().any(|other| other == kernel)
    }
}

macro_rules! image {
    ($name:literal, [$($kernel:path),* $(,)?], [$($family:path),* $(,)?]) => {
        image!($name, [$($kernel),*], [$($family),*], [])
    };
    ($name:literal, [$($kernel:path),*], [$($family:path),*], [$($product:path),* $(,)?]) => {
        Image {
            fatbin: &Fatbin(*include_bytes!(concat!(env!("OUT_DIR"), "/", $name, ".fatbin"))),
            kernels: &[$($kernel),*],
            families: &[$(&$family),*],
            products: &[$(&$product),*],
        }
    };
}

/// Every `.cu` of this build.
pub static IMAGES: &[Image] = &[
    image!("decode_attention", [kernels::DECODE_ATTENTION, kernels::DECODE_ATTENTION_WINDOW], []),
    image!("decode_attention_many", [kernels::DECODE_ATTENTION_MANY, kernels::DECODE_ATTENTION_MANY_WINDOW], []),
    image!("decode_down", [], [decode::DECODE_DOWN]),
    image!("decode_embed", [decode::DECODE_EMBED], []),
    image!("decode_experts_up", [], [decode::DECODE_EXPERTS_UP]),
    image!(
        "decode_linear",
        [],
        [
            decode::DECODE_QKV,
            decode::DECODE_O,
            decode::DECODE_DENSE_UP,
            decode::DECODE_DENSE_DOWN,
            decode::DECODE_LM_HEAD,
        ]
    ),
    image!("decode_router", [], [decode::DECODE_ROUTER]),
    image!("decode_sample", [kernels::DECODE_SAMPLE], []),
    image!("general_attention", [kernels::GENERAL_QKV_FINISH, kernels::GENERAL_ATTENTION], []),
    image!("general_moe", [kernels::GENERAL_ROUTER, kernels::GENERAL_SWIGLU, kernels::GENERAL_EXPERTS_DOWN], []),
    image!("general_norm", [kernels::GENERAL_NORM], []),
    image!("general_project", [kernels::GENERAL_EMBED, kernels::GENERAL_PROJECT], []),
    image!("prefill_attention", [kernels::PREFILL_ATTENTION], []),
    image!("prefill_attention_hopper", [kernels::PREFILL_ATTENTION_HOPPER], []),
    image!("prefill_embed", [kernels::PREFILL_EMBED], []),
    image!("prefill_experts", [], [], [prefill::PREFILL_EXPERTS_UP, prefill::PREFILL_EXPERTS_DOWN]),
    image!("prefill_kv", [kernels::PREFILL_KV], []),
    image!("prefill_linear", [], [], [prefill::PREFILL_LINEAR, prefill::PREFILL_LOGITS, prefill::PREFILL_SWIGLU]),
    image!("prefill_norm", [kernels::PREFILL_NORM, kernels::PREFILL_NORM_FEW], []),
    image!(
        "prefill_route",
        [
            prefill::PREFILL_ROUTE,
            prefill::PREFILL_GROUP,
            prefill::PREFILL_GATHER,
            prefill::PREFILL_GATHER_FEW,
            prefill::PREFILL_COMBINE,
            prefill::PREFILL_COMBINE_NORM,
        ],
        []
    ),
    image!("repack", [kernels::REPACK_NVFP4, kernels::REPACK_BF16], []),
    image!("synthetic", [kernels::SYNTHETIC_F32, kernels::SYNTHETIC_BF16, kernels::SYNTHETIC_NVFP4], []),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_kernel_is_listed_twice() {
        let mut symbols: Vec<_> = IMAGES.iter().flat_map(Image::all).map(|kernel| kernel.symbol).collect();
        let all = symbols.len();
        symbols.sort_unstable();
        symbols.dedup();
        assert_eq!(symbols.len(), all);
        assert!(all > 0);
    }
}
