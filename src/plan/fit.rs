//! What a card's memory holds: how long a context, and how large chunks of prompts.

use super::{Card, Limits, Plan, Types, chunk};
use crate::{
    config::FlintConfig,
    error::{Error, Result},
    kv::BLOCK_POSITIONS,
};

/// The part of the memory beside the weights that a chunk may take, one in so many: the rest is for the context.
const CHUNK_SHARE: u64 = 8;

/// `wanted` with the longest context, `least` or more, of which all sequences fit `free_bytes` of device memory beside weights and
/// workspace: whole KV blocks, or all that was wanted. A chunk has the most tokens, up to those wanted, that suit the card
/// and leave its memory for the context.
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
    let plan = |limits| Plan::new(config, types, limits, card).map(|plan| plan.memory());
    let total = |limits| Ok(plan(limits)?.total_bytes() as u64);
    // What a plan would refuse is refused as it was wanted.
    plan(wanted)?;
    let choices = chunk::choices(card, wanted.chunk_tokens).into_iter();
    let choices: Vec<_> = choices.map(|chunk_tokens| Limits { chunk_tokens, ..wanted }).collect();
    let (largest, smallest) = (choices[0], choices[choices.len() - 1]);
    if total(largest)? <= free_bytes {
        return Ok(largest);
    }
    let least_memory = plan(smallest)?;
    let beside = free_bytes.saturating_sub(least_memory.weights_bytes as u64);
    let mut chosen = smallest;
    for limits in choices {
        let extra = total(limits)? - least_memory.total_bytes() as u64;
        let at_least = total(Limits { context_tokens: least, ..limits })?;
        if extra <= beside / CHUNK_SHARE && at_least <= free_bytes {
            chosen = limits;
            break;
        }
    }
    let limits = |context_tokens| Limits { context_tokens, ..chosen };
    let memory = |context_tokens| plan(limits(context_tokens));
    let fits = |context_tokens| Ok(memory(context_tokens)?.total_bytes() as u64 <= free_bytes);
    if fits(wanted.context_tokens)? {
        return Ok(chosen);
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
        assert_eq!(fit(bytes(1000)).unwrap().chunk_tokens, 512);
        let error = fit(bytes(1000) - 1).unwrap_err().to_string();
        for word in ["enough GPU memory", "are free", "are needed", "8 x 1000 tokens"] {
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn chunks_suit_the_card_and_leave_its_memory_for_the_context() {
        let config = FlintConfig::flint(49, 150_144);
        let fit = |dtype, sequences, least, processors, free_gib: f64| {
            let types = Types::of_synthetic(&config, dtype).unwrap();
            let wanted = Limits { sequences, context_tokens: 262_144, vocab_tokens: 150_000, chunk_tokens: 8192 };
            let free = (free_gib * (1_u64 << 30) as f64) as u64;
            fit(&config, &types, wanted, least, Card { processors, ..Card::H200 }, free)
        };
        for (dtype, sequences, processors, free_gib, chunk) in [
            (DType::Nvfp4, 8, 132, 139.0, 8192),
            (DType::Bf16, 8, 132, 139.0, 8192),
            // 32 GB, 80 GB, and 24 GB, which leaves 1.5 GB beside the weights.
            (DType::Nvfp4, 8, 170, 31.0, 8192),
            (DType::Bf16, 8, 132, 78.5, 4096),
            (DType::Nvfp4, 8, 128, 23.0, 2048),
            (DType::Nvfp4, 1, 128, 23.0, 2048),
            (DType::Nvfp4, 8, 128, 22.4, 1024),
            // Much memory and few multiprocessors.
            (DType::Nvfp4, 8, 48, 110.0, 4096),
        ] {
            let limits = fit(dtype, sequences, 1024, processors, free_gib).unwrap();
            assert_eq!(limits.chunk_tokens, chunk, "{dtype}, {processors} multiprocessors, {free_gib} GiB: {limits:?}");
            assert!(limits.context_tokens >= 1024);
        }
        // A context that was asked for has its memory before chunks have theirs.
        let long = |least| fit(DType::Nvfp4, 1, least, 128, 23.0).unwrap();
        assert_eq!(long(40_000).chunk_tokens, 2048);
        assert_eq!((long(48_000).chunk_tokens, long(48_000).context_tokens >= 48_000), (512, true));
    }
}
