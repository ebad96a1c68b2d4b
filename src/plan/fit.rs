//! How long a context a card's memory holds.

use super::{Card, Limits, Plan, Types};
use crate::{
    config::FlintConfig,
    error::{Error, Result},
    kv::BLOCK_POSITIONS,
};

/// `wanted` with the longest context, `least` or more, of which all sequences fit `free_bytes` of device memory beside weights and
/// workspace: whole KV blocks, or all that was wanted.
///
/// Errors: as [`Plan::new`]; [`Error::Unavailable`] when not even `least` fits, with what is needed and free.
pub fn fit(
    config: &FlintConfig,
    types: &Types,
    wanted: Limits,
    least: usize,
    card: Card,
    free_bytes: u64,
) -> Result<Limits> {
    let limits = |context_tokens| Limits { context_tokens, ..wanted };
    let memory = |context_tokens| Plan::new(config, types, limits(context_tokens), card).map(|plan| plan.memory());
    let fits = |context_tokens| Ok(memory(context_tokens)?.total_bytes() as u64 <= free_bytes);
    if fits(wanted.context_tokens)? {
        return Ok(wanted);
    }
    if !fits(least)? {
        let gb = |bytes: u64| format!("{:.1} GB", bytes as f64 / 1e9);
        let need = memory(least)?;
        let (total, weights) = (need.total_bytes() as u64, need.weights_bytes as u64);
        let why = format!(
            "{} are free, {} are needed: weights {}, and a KV cache and workspace for {} x {least} tokens; fewer sequences \
             or a shorter context need less",
            gb(free_bytes),
            gb(total),
            gb(weights),
            wanted.sequences,
        );
        return Err(Error::Unavailable { what: "enough GPU memory".into(), why });
    }
    // Blocks: the first number is known to fit and the second not to.
    let (mut low, mut high) = (least / BLOCK_POSITIONS, wanted.context_tokens.div_ceil(BLOCK_POSITIONS));
    while high - low > 1 {
        let middle = low.midpoint(high);
        if fits(middle * BLOCK_POSITIONS)? {
            low = middle;
        } else {
            high = middle;
        }
    }
    Ok(limits((low * BLOCK_POSITIONS).max(least)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::DType;

    #[test]
    fn the_longest_context_that_fits_is_taken() {
        let config = FlintConfig::flint(49, 150_144);
        let types = Types::of_synthetic(&config, DType::Nvfp4).unwrap();
        let wanted = Limits { sequences: 8, context_tokens: 262_144, vocab_tokens: 150_000, chunk_tokens: 512 };
        let bytes = |context_tokens| {
            let limits = Limits { context_tokens, ..wanted };
            Plan::new(&config, &types, limits, Card::H200).unwrap().memory().total_bytes() as u64
        };
        let fit = |free| fit(&config, &types, wanted, 1000, Card::H200, free);
        assert_eq!(fit(bytes(262_144)).unwrap(), wanted);
        assert_eq!(fit(u64::MAX).unwrap(), wanted);
        for context in [1024, 4096, 100_032, 262_080] {
            assert_eq!(fit(bytes(context)).unwrap(), Limits { context_tokens: context, ..wanted });
            assert_eq!(fit(bytes(context + 64) - 1).unwrap().context_tokens, context);
        }
        // The blocks of 1000 tokens hold 1024.
        assert_eq!(fit(bytes(1000)).unwrap().context_tokens, 1024);
        let error = fit(bytes(1000) - 1).unwrap_err().to_string();
        for word in ["enough GPU memory", "are free", "are needed", "8 x 1000 tokens"] {
            assert!(error.contains(word), "{error}");
        }
    }
}
