//! Every CUDA kernel once: symbol, argument struct, launch geometry, bytes moved. No driver, so all of it is tested
//! without a GPU.

mod attention;
pub mod decode;
mod general;
mod load;
pub mod prefill;
mod prefill_attention;
mod prefill_route;
mod prefill_rows;
mod sample;

use std::ffi::CStr;

pub use attention::*;
pub use general::*;
pub use load::*;
pub use prefill_attention::*;
pub use prefill_rows::*;
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
    /// Whether it wants all of a multiprocessor's memory as shared memory, so that two of its blocks fit if they are made for
    /// it. It does not start beside kernels that want less.
    pub all_shared: bool,
}

/// A kernel of a step, whose argument is an `A`.
const fn kernel<A>(symbol: &'static CStr) -> Kernel {
    Kernel { symbol, args_bytes: size_of::<A>(), pdl: true, all_shared: false }
}

/// A name that was put together, with a zero byte behind it.
const fn symbol(bytes: &'static [u8]) -> &'static CStr {
    match CStr::from_bytes_with_nul(bytes) {
        Ok(symbol) => symbol,
        Err(_) => panic!("a symbol ends with its only zero byte"),
    }
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

impl Launch {
    /// The same with one block on each of `processors` multiprocessors, should there be as many. Blocks behind the last only
    /// wait, and no two fit on one multiprocessor: each takes more than half of the shared memory that kernels of a chain
    /// want. Blocks start beside those of the kernel before; they would lie two or three on a multiprocessor that has none
    /// of those, and their kernel would end when the last of these does.
    #[must_use]
    fn on_each(self, processors: usize) -> Self {
        const MORE_THAN_HALF: u32 = 51 << 10;
        let [blocks, y, z] = self.grid;
        let blocks = blocks.max(u32::try_from(processors).unwrap_or(u32::MAX));
        Self { grid: [blocks, y, z], shared_bytes: self.shared_bytes.max(MORE_THAN_HALF), ..self }
    }
}

/// The argument of a kernel of a step. Addresses are the device's.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs, reason = "each holds the struct of its name")]
pub enum Args {
    DecodeAttention(DecodeAttentionArgs),
    DecodeDown(decode::DecodeDownArgs),
    DecodeEmbed(decode::DecodeEmbedArgs),
    DecodeExpertsUp(decode::DecodeExpertsUpArgs),
    DecodeLinear(decode::DecodeLinearArgs),
    DecodeRouter(decode::DecodeRouterArgs),
    DecodeSample(DecodeSampleArgs),
    GeneralAttention(GeneralAttentionArgs),
    GeneralEmbed(GeneralEmbedArgs),
    GeneralExpertsDown(GeneralExpertsDownArgs),
    GeneralNorm(GeneralNormArgs),
    GeneralProject(GeneralProjectArgs),
    GeneralQkvFinish(GeneralQkvFinishArgs),
    GeneralRouter(GeneralRouterArgs),
    GeneralSwiglu(GeneralSwigluArgs),
    PrefillAttention(PrefillAttentionArgs),
    PrefillCombine(prefill::PrefillCombineArgs),
    PrefillCombineNorm(prefill::PrefillCombineNormArgs),
    PrefillEmbed(PrefillEmbedArgs),
    PrefillExperts(prefill::PrefillExpertsArgs),
    PrefillGather(prefill::PrefillGatherArgs),
    PrefillGroup(prefill::PrefillGroupArgs),
    PrefillKv(PrefillKvArgs),
    PrefillLinear(prefill::PrefillLinearArgs),
    PrefillNorm(PrefillNormArgs),
    PrefillRoute(prefill::PrefillRouteArgs),
}
