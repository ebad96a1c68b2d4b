//! Chunks: tokens of prompts that go through the prefill kernels in one step. What a chunk reads beside weights and cache,
//! and its launches on either path.

use super::{
    Bases, CHUNK_TOKENS, Card, Limits, Operation, Path, Plan, PrefillBuffers, Space, Step, WeightPlan, general,
    prefill, window,
};
use crate::{
    config::FlintConfig,
    kernels::{Args, PrefillTile},
};

/// Most tokens of a chunk on the general path, whose kernels read every matrix once for 4 rows or fewer.
const GENERAL_TOKENS: usize = 64;
/// Words of a tile of attention.
const TILE_WORDS: usize = size_of::<PrefillTile>() / 4;
/// Most rows of a chunk whose logits are made at a time.
const LOGITS_ROWS: usize = 256;

// What a chunk takes on an H200 with NVFP4: 512 tokens, whose experts take the kernels of 16 columns, 13.6 ms; 2,048 28.2 ms,
// 8,192 95.4 ms. That is about 12 ms at most, to read the weights and to start kernels, and 10.3 us a token. So chunks
// of 1,165 tokens run at half the speed of endless ones, of 8,192 at 88 %, of twice that at 93 % for twice the memory. The
// ratio of both parts is that of a card's bandwidth to its arithmetic, which differs less between cards than either: so the
// largest is right for all that can hold it, but where it would keep other sequences waiting.
/// Microseconds of every chunk on an H200.
const H200_CHUNK_US: usize = 12_000;
/// Nanoseconds of each of its tokens.
const H200_TOKEN_NS: usize = 10_300;
/// Longest that a chunk should take, since steps of other sequences wait for it: one of 8,192 takes half of this on an H200.
const LONGEST_US: usize = 200_000;
/// Fewest tokens of a chunk that is chosen: fewer would read the weights for too little.
const LEAST_TOKENS: usize = 512;

/// Tokens of one sequence in a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Row of the block tables that its sequence has.
    pub slot: usize,
    /// Position of the first.
    pub first: usize,
    /// How many, at least one.
    pub tokens: usize,
}

/// What a plan has for chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Most tokens of one.
    pub tokens: usize,
    /// Most of them whose logits are made at a time.
    pub logits_rows: usize,
    /// What the host writes before each.
    pub inputs: ChunkInputs,
    /// Of the fast path.
    pub(super) prefill: Option<PrefillBuffers>,
}

/// Offsets, or addresses, of what the host writes before each chunk: one run of u32, whose parts lie behind each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkInputs {
    /// `[T]`.
    pub tokens: u64,
    /// `[T]`, of the general path.
    pub positions: u64,
    /// `[T]`, the row of the block tables of each token; of the general path.
    pub slots: u64,
    /// Tiles of attention; of the fast path.
    pub tiles: u64,
    /// All of it.
    pub words: usize,
}

impl ChunkInputs {
    /// The same as addresses, in an allocation at `base`.
    #[must_use]
    pub fn at(&self, base: u64) -> Self {
        let [tokens, positions, slots, tiles] =
            [self.tokens, self.positions, self.slots, self.tiles].map(|offset| base + offset);
        Self { tokens, positions, slots, tiles, words: self.words }
    }
}

/// What may be chosen for a card, largest first, if a chunk is to have no more than `most` tokens. How long a chunk takes is
/// taken to grow as multiprocessors get fewer.
pub(super) fn choices(card: Card, most: usize) -> Vec<usize> {
    let us = |tokens| (H200_CHUNK_US + H200_TOKEN_NS * tokens / 1000) * Card::H200.processors / card.processors.max(1);
    let halves = |tokens: &usize| (*tokens > LEAST_TOKENS).then(|| tokens / 2);
    let all = std::iter::successors(Some(CHUNK_TOKENS), halves);
    let quick = all.filter(|&tokens| tokens == LEAST_TOKENS || us(tokens) <= LONGEST_US);
    let mut choices: Vec<usize> = quick.map(|tokens| tokens.min(most)).collect();
    choices.dedup();
    choices
}

/// Tokens of the largest chunk.
pub(super) fn tokens(path: &Path, limits: Limits) -> usize {
    let most = limits.chunk_tokens.min(limits.sequences * limits.context_tokens);
    if matches!(path, Path::Fast(_)) { most } else { most.min(GENERAL_TOKENS) }
}

impl Chunk {
    pub(super) fn new(space: &mut Space, config: &FlintConfig, path: &Path, limits: Limits, tokens: usize) -> Self {
        let fast = matches!(path, Path::Fast(_));
        let logits_rows = if fast { tokens.min(LOGITS_ROWS) } else { tokens };
        let line = tokens.next_multiple_of(4);
        let words = if fast { line + TILE_WORDS * prefill::most_tiles(tokens, limits) } else { 3 * line };
        let first = space.take(4 * words);
        let behind = |lines: usize| first + (4 * lines * line) as u64;
        Self {
            tokens,
            logits_rows,
            inputs: ChunkInputs { tokens: first, positions: behind(1), slots: behind(2), tiles: behind(1), words },
            // A step of many sequences has these too: it and chunks run one after the other.
            prefill: fast.then(|| PrefillBuffers::new(space, config, tokens.max(limits.sequences), logits_rows)),
        }
    }
}

impl Plan {
    /// The words at [`ChunkInputs::tokens`] for a chunk of `parts` with their tokens; what is behind them is not read.
    ///
    /// # Panics
    /// Without tokens, or with more than the plan holds.
    pub fn chunk_inputs(&self, parts: &[(Part, &[u32])]) -> Vec<u32> {
        let chunk = &self.chunk;
        let all = parts.iter().map(|(part, _)| *part).collect::<Vec<_>>();
        self.check_chunk(&all);
        let mut words = vec![0; ((chunk.inputs.positions - chunk.inputs.tokens) / 4) as usize];
        let line = words.len();
        let mut row = 0;
        for (part, tokens) in parts {
            assert_eq!(part.tokens, tokens.len(), "a part and its tokens");
            words[row..row + tokens.len()].copy_from_slice(tokens);
            row += tokens.len();
        }
        match self.weights {
            WeightPlan::Fast(..) => words.extend(prefill::tiles(&all).into_iter().flat_map(PrefillTile::words)),
            WeightPlan::General(_) => {
                words.resize(3 * line, 0);
                let (positions, slots) = words[line..].split_at_mut(line);
                let rows = all.iter().flat_map(|part| (0..part.tokens).map(move |i| (part.first + i, part.slot)));
                for (row, (position, slot)) in rows.enumerate() {
                    (positions[row], slots[row]) = (position as u32, slot as u32);
                }
            }
        }
        words
    }

    /// The launches of a chunk, in order: the KV cache then has its keys and values. A token's results do not depend on what
    /// else is in the chunk, nor on where chunks begin. Without `logits`, no [`Self::logits_steps`] follow: then nothing needs
    /// what the last layer does behind its keys and values.
    ///
    /// # Panics
    /// As [`Self::chunk_inputs`].
    pub fn chunk_steps(&self, bases: &Bases, parts: &[Part], logits: bool) -> Vec<Step> {
        self.check_chunk(parts);
        match &self.weights {
            WeightPlan::Fast(format, weights) => prefill::steps(self, *format, weights, bases, parts, logits),
            WeightPlan::General(weights) => {
                let positions = |part: &Part| part.first as u32..(part.first + part.tokens) as u32;
                let positions: Vec<u32> = parts.iter().flat_map(positions).collect();
                general::chunk_steps(self, weights, bases, &positions, logits)
            }
        }
    }

    /// The launches that make logits of `rows` tokens of the chunk that ran last, from its `first` on; `[rows, V]` f32 at
    /// [`Self::chunk_logits`].
    ///
    /// # Panics
    /// Without rows, or with more than [`Chunk::logits_rows`].
    pub fn logits_steps(&self, bases: &Bases, first: usize, rows: usize) -> Vec<Step> {
        assert!((1..=self.chunk.logits_rows).contains(&rows) && first + rows <= self.chunk.tokens, "{rows} at {first}");
        match &self.weights {
            WeightPlan::Fast(format, weights) => prefill::logits_steps(self, *format, weights, bases, first, rows),
            WeightPlan::General(weights) => general::logits_steps(self, weights, bases, first, rows),
        }
    }

    /// Offset of what [`Self::logits_steps`] make.
    pub fn chunk_logits(&self) -> u64 {
        self.chunk.prefill.map_or(self.buffers.logits, |buffers| buffers.logits)
    }

    fn check_chunk(&self, parts: &[Part]) {
        let tokens: usize = parts.iter().map(|part| part.tokens).sum();
        assert!((1..=self.chunk.tokens).contains(&tokens), "{tokens} tokens");
        assert!(parts.len() <= self.limits.sequences && parts.iter().all(|part| part.tokens > 0), "{parts:?}");
    }

    /// Floating-point operations of the products of a launch in a chunk of `parts`; 0 for what has none. A product of the
    /// router in three parts counts as one.
    pub fn chunk_flops(&self, step: &Step, parts: &[Part]) -> u64 {
        let c = &self.config;
        let (d, heads, q) = (c.hidden_size, c.n_heads + 2 * c.n_kv_heads, c.n_heads * c.head_dim);
        let tokens: usize = parts.iter().map(|part| part.tokens).sum();
        // The kernels for few rows have the shared expert beside the others.
        let shared = match step.args {
            Args::PrefillExperts(args) if args.shared_rows > 0 => c.shared_intermediate_size,
            _ => 0,
        };
        let experts = c.n_experts_per_token * c.expert_intermediate_size + shared;
        let values = match step.operation {
            Operation::Qkv => d * heads * c.head_dim,
            Operation::Output => q * d,
            Operation::DenseUp => 2 * d * c.dense_intermediate_size,
            Operation::DenseDown => c.dense_intermediate_size * d,
            Operation::Router => d * c.n_experts,
            Operation::SharedUp => 2 * d * c.shared_intermediate_size,
            Operation::SharedDown => c.shared_intermediate_size * d,
            Operation::ExpertsUp => 2 * d * experts,
            Operation::ExpertsDown => experts * d,
            Operation::LmHead => d * c.vocab_size,
            Operation::Attention => {
                let kind = c.layers[step.layer];
                let seen = |part: &Part| seen(part, window(c, kind).map(|window| window as usize));
                return (4 * q * parts.iter().map(seen).sum::<usize>()) as u64;
            }
            _ => 0,
        };
        (2 * tokens * values) as u64
    }
}

/// Positions that the tokens of a part see, summed.
fn seen(part: &Part, window: Option<usize>) -> usize {
    // Tokens before position `full` see all before them and themselves, the others a whole window.
    let (first, end) = (part.first, part.first + part.tokens);
    let full = window.map_or(end, |window| window.clamp(first, end));
    let growing = (full * (full + 1) - first * (first + 1)) / 2;
    growing + (end - full) * window.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_card_keeps_others_waiting_no_longer_than_a_fast_one_may() {
        let choices = |processors, most| choices(Card { processors, ..Card::H200 }, most);
        assert_eq!(choices(132, 65_536), [8192, 4096, 2048, 1024, 512]);
        assert_eq!(choices(170, 8192)[0], 8192);
        // 96.4 ms on 132 are 200 on 64.
        assert_eq!(choices(64, 8192), [8192, 4096, 2048, 1024, 512]);
        assert_eq!(choices(48, 8192), [4096, 2048, 1024, 512]);
        assert_eq!(choices(1, 8192), [512]);
        assert_eq!(choices(132, 3000), [3000, 2048, 1024, 512]);
        assert_eq!(choices(132, 10), [10]);
    }

    #[test]
    fn positions_seen_are_those_counted_one_by_one() {
        for window in [None, Some(1), Some(5), Some(17)] {
            for (first, tokens) in [(0, 1), (0, 4), (0, 5), (0, 30), (3, 2), (4, 1), (5, 9), (40, 3)] {
                let one_by_one: usize =
                    (first..first + tokens).map(|p| window.map_or(p + 1, |w: usize| w.min(p + 1))).sum();
                let part = Part { slot: 0, first, tokens };
                assert_eq!(seen(&part, window), one_by_one, "{part:?}, {window:?}");
            }
        }
    }
}
