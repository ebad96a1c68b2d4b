//! Chunks on the fast path: their buffers and launches.

use super::{Bases, FastWeights, Limits, Part, Plan, Space, Step};
use crate::{config::FlintConfig, tiles::TileFormat};

/// Words of a tile.
pub(super) const TILE_WORDS: usize = 4;
const TILE_TOKENS: usize = 16;

/// Most tiles of a chunk: a part may begin and end inside of one.
pub(super) fn most_tiles(tokens: usize, limits: Limits) -> usize {
    tokens / TILE_TOKENS + 2 * limits.sequences
}

/// Attention's tiles as words, the highest positions first, so that the longest work starts first.
pub(super) fn tile_words(parts: &[Part]) -> Vec<u32> {
    let mut tiles = Vec::new();
    let mut row = 0;
    for part in parts {
        let end = part.first + part.tokens;
        let mut position = part.first;
        while position < end {
            let next = (position / TILE_TOKENS * TILE_TOKENS + TILE_TOKENS).min(end);
            tiles.push([row, next - position, position, part.slot].map(|value| value as u32));
            row += next - position;
            position = next;
        }
    }
    tiles.sort_by_key(|tile| std::cmp::Reverse(tile[2]));
    tiles.concat()
}

/// Offsets of the buffers of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PrefillBuffers {
    pub logits: u64,
}

impl PrefillBuffers {
    pub fn new(space: &mut Space, config: &FlintConfig, tokens: usize) -> Self {
        let _ = (config, tokens);
        Self { logits: space.take(0) }
    }
}

pub(super) fn steps(
    plan: &Plan,
    format: TileFormat,
    weights: &FastWeights,
    bases: &Bases,
    parts: &[Part],
) -> Vec<Step> {
    let _ = (plan, format, weights, bases, parts);
    Vec::new()
}

pub(super) fn logits_steps(
    plan: &Plan,
    format: TileFormat,
    weights: &FastWeights,
    bases: &Bases,
    first: usize,
    rows: usize,
) -> Vec<Step> {
    let _ = (plan, format, weights, bases, first, rows);
    Vec::new()
}
